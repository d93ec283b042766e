"""Masks as indices without a wait each time give what torch's own indexing gives."""

import torch

from mmrl.core.host import indices, on_host, placed, selected, spread


def test_selected_is_indexing_and_spread_its_inverse():
    values = torch.arange(6.0).view(2, 3)
    for mask in (values > 2, values % 2 == 0, values < 0, values >= 0):
        assert torch.equal(selected(values, mask), values[mask])
        assert torch.equal(spread(values[mask], mask), values * mask)


def test_masks_and_tensors_from_the_host_are_remembered():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert len(indices(mask)) == 0
    mask[1, 0] = True  # in place
    assert indices(mask).tolist() == [3] and indices(mask) is indices(mask)
    values = torch.arange(3)
    assert on_host(placed(values, "meta")) is values  # a meta tensor has no values to read
