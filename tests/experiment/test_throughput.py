"""What a run logs of its speed: rates of a device, shares of an iteration, MFU where the card is
known."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.cards import CARDS, card_of
from mmrl.experiment.throughput import ThroughputMeter
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from tests.fixtures import toys


def trainer() -> Trainer:
    return Trainer(
        toys.POLICIES["flow"](),
        toys.prompts(2),
        Scorer({"reward": toys.reward}),
        advantages.flow_grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-3),
        TrainOptions(2, 4, 8, 2),
    )


def test_the_first_iteration_is_counted_and_later_ones_follow_their_forwards():
    meter = ThroughputMeter(CARDS["H100"])
    work = trainer()
    first = meter.iterate(work)
    flops = meter.flops_per_forward * first["forwards"]
    assert flops > 0
    meter.iterate(work)
    rates = meter.rates(first | {"seconds": 2.0}, work)
    assert rates["throughput/mfu"] == pytest.approx(flops / 2.0 / CARDS["H100"].half)
    assert rates["throughput/samples"] == 4.0  # 8 rows in 2 seconds
    assert {"share/rollout", "share/reward", "share/update"} <= set(rates)
    assert rates["share/update"] == pytest.approx(first["time/update"] / 2.0)


def test_off_the_table_nothing_is_counted():
    meter = ThroughputMeter()
    meter.card = None
    meter.iterate(trainer())
    assert meter.flops_per_forward is None
    plan = SimpleNamespace(plan=SimpleNamespace(rows_per_process=6))
    metrics = {"seconds": 3.0, "answer/tokens": 50.0, "time/sync": 1.5}
    rates = meter.rates(metrics, plan)
    assert rates == {"throughput/samples": 2.0, "throughput/tokens": 100.0, "share/sync": 0.5}


def test_cards_are_known_by_what_drivers_call_them():
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA GeForce RTX 4090": "RTX4090",
        "NVIDIA L40S": "L40S",
        "NVIDIA H200": "H200",
        "Tesla T4": None,
    }
    names["NVIDIA A100-SXM4-80GB"] = "A100-80"
    for name, card in names.items():
        assert card_of(name) is (None if card is None else CARDS[card]), name
