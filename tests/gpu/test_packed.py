"""Attention over packed images by xformers is that of one batch a length."""

import pytest
import torch

from mmrl.policies.vlm.vision import by_length, by_xformers


@pytest.mark.parametrize("lengths", [[64, 64], [16, 100, 16, 4, 100]])
def test_xformers_packs_images_of_all_sizes(lengths):
    pytest.importorskip("xformers.ops")
    torch.manual_seed(0)
    shape = (sum(lengths), 4, 32)
    given = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found, wanted = (attend(*given, lengths, 0.2) for attend in (by_xformers, by_length))
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(found)
    for one, two in zip(*(torch.autograd.grad((x * weights).sum(), given) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, two, atol=5e-2, rtol=5e-2)
