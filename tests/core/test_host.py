"""Masks as indices without a wait each time give what torch's own indexing gives."""

import pytest
import torch

from mmrl.core.host import indices, on_host, placed, selected, spread

MASKS = {
    "some": torch.tensor([[True, False, True], [False, False, True]]),
    "none": torch.zeros(2, 3, dtype=torch.bool),
    "all": torch.ones(2, 3, dtype=torch.bool),
}


def test_selected_is_indexing_with_its_gradient(subtests):
    for mask in MASKS.values():
        for shape in [(2, 3), (2, 3, 4)]:
            with subtests.test(mask=mask, shape=shape):
                values = torch.randn(
                    shape, generator=torch.Generator().manual_seed(0)
                ).requires_grad_()
                weight = torch.arange(1.0, 1 + selected(values, mask).numel()).view_as(
                    selected(values, mask)
                )
                (expected,) = torch.autograd.grad((values[mask] * weight).sum(), values)
                (known,) = torch.autograd.grad((selected(values, mask) * weight).sum(), values)
                assert torch.equal(selected(values, mask), values[mask]) and torch.equal(
                    known, expected
                )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_spread_is_the_inverse_of_selected(mask):
    values = torch.arange(1.0, 1 + int(mask.sum())).requires_grad_()
    whole = spread(values, mask)
    assert torch.equal(whole, torch.zeros(mask.shape).masked_scatter(mask, values))
    (gradient,) = torch.autograd.grad((whole * torch.arange(6.0).view(2, 3)).sum(), values)
    assert torch.equal(gradient, torch.arange(6.0).view(2, 3)[mask])


def test_a_mask_that_was_changed_in_place_is_asked_again():
    mask = MASKS["none"].clone()
    assert len(indices(mask)) == 0
    mask[1, 0] = True
    assert indices(mask).tolist() == [3] and indices(mask) is indices(mask)


def test_what_is_on_the_cpu_is_not_copied():
    values = torch.zeros(2)
    assert on_host(values) is values


def test_a_tensor_sent_from_the_host_is_never_read_back():
    values = torch.arange(3)
    assert on_host(placed(values, "meta")) is values  # a meta tensor has no values to read
    assert placed(values, "cpu") is values
