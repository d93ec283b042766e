"""Attention over packed images, prompts and answers by xformers is that of SDPA."""

import pytest
import torch

from mmrl.policies.vlm.loading import xformers_runs
from mmrl.policies.vlm.packing import Layout, continued
from mmrl.policies.vlm.vision import by_length, by_xformers
from tests.gpu import DEVICE

pytestmark = pytest.mark.skipif(not xformers_runs(), reason="xformers' kernels do not run here")


def assert_same(fused, expected, tensors):
    """The same values, and the same gradients of a weighted sum."""
    torch.testing.assert_close(fused, expected, atol=2e-2, rtol=2e-2)
    weights = torch.randn_like(fused)
    grads = (torch.autograd.grad((x * weights).sum(), tensors) for x in (fused, expected))
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("lengths", [[64, 64], [16, 100, 16, 4, 100]])
def test_xformers_packs_images_of_all_sizes(lengths):
    torch.manual_seed(0)
    shape = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.randn(sum(lengths), 4, 32, **shape) for _ in range(3)]
    assert_same(by_xformers(*tensors, lengths, 0.2), by_length(*tensors, lengths, 0.2), tensors)


@pytest.mark.parametrize("which", ["prompts", "answers"])
def test_xformers_attends_inside_packed_rows_as_sdpa_does(which):
    torch.manual_seed(0)
    lengths = torch.tensor([30, 70], device=DEVICE)
    rows, answers = (torch.tensor(x, device=DEVICE) for x in ([0, 0, 1, 1], [20, 0, 64, 1]))
    if which == "prompts":
        layouts = [Layout(lengths, lengths, xformers=fused) for fused in (True, False)]
    else:
        layouts = [continued(lengths, rows, answers, fused) for fused in (True, False)]
    queries = int(layouts[0].queries.sum())
    keys = queries if which == "prompts" else queries + 100
    shape = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    tensors = [torch.randn(4, size, 32, **shape) for size in (queries, keys, keys)]
    assert_same(*(layout.attend(*tensors, 0.2, None) for layout in layouts), tensors)
