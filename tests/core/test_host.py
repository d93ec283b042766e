"""Masks as indices without a wait each time give what torch's own indexing gives."""

import pytest
import torch

from mmrl.core.host import indices, on_host, placed, selected, spread

MASKS = {
    "some": torch.tensor([[True, False, True], [False, False, True]]),
    "none": torch.zeros(2, 3, dtype=torch.bool),
    "all": torch.ones(2, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_selected_is_indexing_with_its_gradient_and_spread_its_inverse(mask, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    chosen = selected(values, mask)
    assert torch.equal(chosen, values[mask])
    weight = torch.arange(1.0, 1 + chosen.numel()).view_as(chosen)
    expected, known = (
        torch.autograd.grad((x * weight).sum(), values)[0] for x in (values[mask], chosen)
    )
    assert torch.equal(known, expected)
    if shape == mask.shape:
        whole = spread(selected(values, mask), mask)
        assert torch.equal(whole, values * mask)
        (gradient,) = torch.autograd.grad((whole * torch.arange(6.0).view(2, 3)).sum(), values)
        assert torch.equal(gradient, torch.arange(6.0).view(2, 3) * mask)


def test_a_mask_that_was_changed_in_place_is_asked_again():
    mask = MASKS["none"].clone()
    assert len(indices(mask)) == 0
    mask[1, 0] = True
    assert indices(mask).tolist() == [3] and indices(mask) is indices(mask)


def test_a_tensor_sent_from_the_host_is_never_read_back():
    values = torch.arange(3)
    assert on_host(placed(values, "meta")) is values  # a meta tensor has no values to read
    assert placed(values, "cpu") is values
