"""Equal to rounding: what different CPUs, thread counts and shapes of a matrix product may change,
and no more."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_to_rounding(found: Tensor, wanted: Tensor, ulps: float = 16, slope: float = 0.0) -> None:
    """Raise AssertionError unless the two differ by at most ``ulps`` units in the last place of the
    largest value.

    A product of matrices rounds a row by its place and by how many rows there are, on some CPUs: up
    to 5 units were seen in what a toy samples in six steps. ``slope``: how much such a unit of an
    input moves the value; a log-prob divides the error of the mean by the variance. Integers and
    booleans must be equal.
    """
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted)
        return
    allowed = ulps * torch.finfo(wanted.dtype).eps * (float(wanted.detach().abs().max()) + slope)
    torch.testing.assert_close(found, wanted, rtol=0, atol=allowed)
