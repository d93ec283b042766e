"""Random streams and memory accounting on a CUDA device."""

import pytest
import torch

from samplers.batching import peak_bytes
from samplers.noise import Rng
from tests.gpu import DEVICE

MIB = 2**20


@pytest.mark.parametrize("step", [0, 7, 2**31])
def test_a_stream_is_the_same_integers_on_every_device(step):
    rng = Rng.of(5, "rollout", 3)
    rows = torch.tensor([0, 1, 17, 2**33 + 5])
    for draw in ("bits", "uniform"):
        shape = 1001 if draw == "bits" else (7, 11, 13)
        on_cpu, on_gpu = (
            getattr(rng, draw)(rows.to(device), shape, step) for device in ("cpu", DEVICE)
        )
        assert on_gpu.device.type == DEVICE and torch.equal(on_cpu, on_gpu.cpu())


def test_normals_agree_to_one_unit_in_the_last_place():
    rng = Rng.of(1)
    rows = torch.arange(64)
    on_cpu, on_gpu = (rng.normal(rows.to(device), (3, 32, 32)).cpu() for device in ("cpu", DEVICE))
    apart = (on_cpu.view(torch.int32).long() - on_gpu.view(torch.int32).long()).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).double().mean()) < 1e-3


def test_peak_bytes_is_the_most_that_was_alive_at_once():
    before = torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)  # there before, not counted

    def work():
        first = torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
        del first
        return [torch.empty(n * MIB, dtype=torch.uint8, device=DEVICE) for n in (3, 1)]

    assert peak_bytes(work, DEVICE) == 4 * MIB and before.device.type == DEVICE
