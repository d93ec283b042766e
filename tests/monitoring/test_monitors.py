"""Monitors see what the policy sampled, one after the other, before it is trained on."""

from mmrl.core.registry import MONITORS
from tests.train.test_trainer import make_trainer


def test_monitors_see_the_iteration_and_what_those_before_them_said():
    trainer = make_trainer()
    calls = []
    weights = trainer.policy.weights.full()

    def monitor(sampled):
        calls.append((sampled.iteration, dict(sampled.metrics)))
        live = trainer.policy.weights.full()
        assert sampled.iteration or all((live[name] == weights[name]).all() for name in weights)
        assert sampled.rollout.advantage is not None
        return {"mine": 10 + sampled.iteration}

    trainer.monitors.append(monitor)
    metrics = [trainer.iterate() for _ in range(2)]
    assert [iteration for iteration, _ in calls] == [0, 1]
    assert [line["mine"] for line in metrics] == [10, 11]
    for line, (_, before) in zip(metrics, calls):
        assert "mine" not in before and before["reward/mean"] == line["reward/mean"]
        assert set(before) <= set(line)


def test_every_trainer_has_the_registered_monitors():
    assert list(MONITORS) == ["reward_statistics", "completion_lengths", "diversity", "appearance"]
    assert make_trainer().monitors == list(MONITORS.values())
