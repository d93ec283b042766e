"""What a run logs of its speed: rates of a device, shares of an iteration, MFU of known cards."""

from __future__ import annotations

import pytest

from mmrl.core.cards import CARDS
from mmrl.experiment.throughput import ThroughputMeter
from tests.train.test_trainer import make_trainer

SIZES = {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 8, "micro_batch_size": 8}


def test_the_first_iteration_is_counted_and_later_ones_follow_their_forwards():
    meter = ThroughputMeter(CARDS["H100"])
    work = make_trainer(**SIZES)
    first = meter.iterate(work)
    flops = meter.flops_per_forward * first["forwards"]
    assert flops > 0
    meter.iterate(work)
    rates = meter.rates(first | {"seconds": 2.0}, work)
    assert rates["throughput/mfu"] == pytest.approx(flops / 2.0 / CARDS["H100"].half)
    assert rates["throughput/samples"] == 4.0  # 8 rows in 2 seconds
    assert {"share/rollout", "share/reward", "share/update"} <= set(rates)
    assert rates["share/update"] == pytest.approx(first["time/update"] / 2.0)
