"""Attention over packed images, prompts and answers by xformers is that of SDPA."""

import pytest
import torch

from mmrl.policies.vlm.packing import Layout, continued
from mmrl.policies.vlm.vision import by_length, by_xformers


@pytest.mark.parametrize("lengths", [[64, 64], [16, 100, 16, 4, 100]])
def test_xformers_packs_images_of_all_sizes(lengths):
    pytest.importorskip("xformers.ops")
    torch.manual_seed(0)
    shape = (sum(lengths), 4, 32)
    given = [
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    found, wanted = (attend(*given, lengths, 0.2) for attend in (by_xformers, by_length))
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(found)
    for one, two in zip(
        *(torch.autograd.grad((x * weights).sum(), given) for x in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, two, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("which", ["prompts", "answers"])
def test_xformers_attends_inside_packed_rows_as_sdpa_does(which):
    pytest.importorskip("xformers.ops")
    torch.manual_seed(0)
    lengths = torch.tensor([30, 70], device="cuda")
    rows, answers = (torch.tensor(x, device="cuda") for x in ([0, 0, 1, 1], [20, 0, 64, 1]))
    if which == "prompts":
        made = [Layout(lengths, lengths, xformers=fused) for fused in (True, False)]
    else:
        made = [continued(lengths, rows, answers, fused) for fused in (True, False)]
    asked = int(made[0].queries.sum())
    seen = asked if which == "prompts" else asked + 100
    shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    given = [torch.randn(4, size, 32, **shape) for size in (asked, seen, seen)]
    found, wanted = (layout.attend(*given, 0.2, None) for layout in made)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(found)
    for one, two in zip(
        *(torch.autograd.grad((x * weights).sum(), given) for x in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, two, atol=5e-2, rtol=5e-2)
