"""Monitors see what the policy sampled, one after the other, before it is trained on."""

from mmrl.core.registry import MONITORS
from tests.train.test_trainer import make_trainer


def test_monitors_see_the_iteration_and_what_those_before_them_said():
    trainer = make_trainer()
    calls = []

    def monitor(sampled):
        calls.append(dict(sampled.metrics))
        assert sampled.rollout.advantage is not None
        return {"mine": 10 + sampled.iteration}

    trainer.monitors.append(monitor)
    metrics = [trainer.iterate() for _ in range(2)]
    assert [line["mine"] for line in metrics] == [10, 11]
    for line, before in zip(metrics, calls, strict=True):
        assert "mine" not in before and before["reward/mean"] == line["reward/mean"]


def test_every_trainer_has_the_registered_monitors():
    assert list(MONITORS) == ["reward_statistics", "completion_lengths", "diversity", "appearance"]
    assert make_trainer().monitors == list(MONITORS.values())
