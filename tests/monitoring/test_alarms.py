"""Alarms on simulated runs: they come when they should, and how often they come when they should
not."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
import yaml
from scipy.stats import kendalltau

from mmrl.config import build_rewards
from mmrl.config.sections import AlarmOptions, LogOptions
from mmrl.core.errors import UserError
from mmrl.experiment.lifecycle import train
from mmrl.monitoring.alarms import Alarms, trend
from mmrl.monitoring.appearance import of_pictures
from mmrl.monitoring.diversity import portrait
from mmrl.monitoring.log import RunLog
from mmrl.monitoring.report.page import render
from mmrl.monitoring.report.runs import read_run
from mmrl.scoring import Scorer
from rewards.card import card
from tests.fixtures.tiny_rewards import pictures
from tests.monitoring.test_nothing_to_learn import RUN


def simulated(seed, iterations=160, fall=0.0, correlation=0.0, every=1, **options):
    """Kinds of alarms of a run whose reward rises and whose monitor is noise of deviation 1 that
    falls by ``fall``."""
    rng = random.Random(seed)
    alarms = Alarms(AlarmOptions(**options), ["taste"])
    noise = 0.0
    raised = []
    for i in range(iterations):
        noise = correlation * noise + math.sqrt(1 - correlation**2) * rng.gauss(0, 1)
        metrics = {"reward/mean": 1 - math.exp(-i / 60) + 0.05 * rng.gauss(0, 1)}
        metrics["reward/taste/mean"] = noise - fall * i / iterations
        metrics["samples/diversity"] = 0.2 * math.exp(0.2 * rng.gauss(0, 1))
        metrics["samples/clipped"] = min(1.0, max(0.0, 0.3 + 0.05 * rng.gauss(0, 1)))
        metrics["samples/contrast"] = 0.2 * math.exp(0.2 * rng.gauss(0, 1))
        metrics["samples/dark"] = min(1.0, max(0.0, 0.4 + 0.1 * rng.gauss(0, 1)))
        for name, level in (("colour", 0.3), ("edges", 0.05), ("colour_entropy", 5.0)):
            metrics[f"samples/{name}"] = level * math.exp(0.2 * rng.gauss(0, 1))
        raised += [(i, alarm.kind) for alarm in alarms.judge(i, metrics)]
    return raised


def test_a_rising_reward_alone_raises_no_alarm_and_a_falling_monitor_does():
    """Wider simulation while writing: none in 60 runs of 300 iterations each at correlations 0, 0.5
    and 0.8."""
    for correlation in (0.0, 0.5):
        assert [simulated(seed, correlation=correlation) for seed in range(4)] == [[]] * 4
    for seed in range(4):
        raised = simulated(seed, fall=5.0)
        assert raised and {kind for _, kind in raised} == {"exploited/taste"} and raised[0][0] >= 39
        assert all(b - a >= 40 for (a, _), (b, _) in zip(raised, raised[1:]))
    assert simulated(0, fall=5.0, enabled=False) == []


def test_an_alarm_is_not_repeated_after_a_resume(tmp_path):
    """The run in one go raises it at iteration 40 and 80; resumed at 60 it is not raised before 80
    either, and that of iterations that come again does not count."""

    def line(i):
        # neighbours that lie on both sides of the trend are not correlated
        step = i + 0.4 * (-1) ** i
        return {"reward/mean": step / 100, "reward/taste/mean": 50 - step / 10}

    def logged(log, alarms, iterations):
        for i in iterations:
            log.metrics(i, line(i))
            for alarm in alarms.judge(i, line(i)):
                log.event("alarm", alarm.message, alarm.numbers, about=alarm.kind)
                yield i

    with RunLog(tmp_path, options=LogOptions(tensorboard=False)) as log:
        whole = list(logged(log, Alarms(AlarmOptions(), ["taste"]), range(1, 91)))
    assert whole == [40, 80]
    with RunLog(tmp_path, True, start=61, options=LogOptions(tensorboard=False)) as log:
        alarms = Alarms(AlarmOptions(), ["taste"])
        alarms.recall(log.past, log.past_alarms)
        assert list(logged(log, alarms, range(61, 91))) == [80]


@card(media="image", low=0.0, high=1.0)
def bounded(media, prompts):
    return media.flatten(1).mean(1)


def raised_by(name, start, end, level=0.5):
    """Alarms of a run whose samples change in the middle, while its reward is at ``level``."""
    alarms = Alarms(AlarmOptions(), rewards={"good": bounded})
    raised = []
    for i in range(60):
        metrics = {"reward/mean": level, "reward/good/mean": level if i > 20 else 0.3}
        metrics[f"samples/{name}"] = start if i < 30 else end
        raised += [(i, alarm.kind) for alarm in alarms.judge(i, metrics)]
    return raised


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("diversity", 0.2, 0.05),
        ("clipped", 0.1, 0.5),
        ("contrast", 0.2, 0.05),
        ("dark", 0.45, 0.93),  # the drifts that were reported
        ("edges", 0.1, 0.04),
        ("colour_entropy", 5.0, 2.3),
        ("dark", 0.6, 0.2),
        ("edges", 0.1, 0.3),
        ("colour", 0.3, 0.1),
        ("colour", 0.3, 0.7),
    ],
)
def test_samples_that_collapse_raise_an_alarm(name, start, end):
    ((iteration, kind),) = raised_by(name, start, end)
    assert kind == name and 30 <= iteration <= 40


def test_small_drifts_raise_none_nor_alike_samples_near_the_bound_of_the_reward():
    for name, start, end in [
        ("dark", 0.2, 0.45),
        ("edges", 0.0, 0.3),  # shares of next to nothing
        ("colour", 0.01, 0.3),
        ("colour_entropy", 2.0, 9.0),
    ]:
        assert not raised_by(name, start, end)
    # as NFT's do at 0.95: samples that are all right are alike
    raised = [len(raised_by("diversity", 0.2, 0.05, level)) for level in (0.95, 0.91, 0.85)]
    assert raised == [0, 0, 1]


def test_the_trend_is_mann_kendalls():
    """Against scipy's Kendall tau, whose normal approximation has the same statistic without the
    continuity step; correlation of neighbours only widens it."""

    def plain(values):
        n = len(values)
        score = kendalltau(range(n), values).statistic * n * (n - 1) / 2
        variance = n * (n - 1) * (2 * n + 5) / 18
        return (round(score) - math.copysign(1, score)) / math.sqrt(variance)

    rng = random.Random(3)
    values = [rng.gauss(0, 1) + i / 40 for i in range(50)]
    assert 0 < trend(values) <= plain(values) + 1e-9
    assert trend(values[::-1]) == pytest.approx(-trend(values), abs=1e-9)
    assert trend([1.0] * 30) == 0.0
    zigzag = [(-1) ** i + i * 0.01 for i in range(40)]  # neighbours against each other
    assert trend(zigzag) == pytest.approx(plain(zigzag), abs=1e-9)


def test_a_portrait_is_the_brute_force_one():
    media = pictures(6, 32, 32)
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    measured = portrait(media, group)
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    want = sum(float((media[i] - media[j]).square().mean().sqrt()) for i, j in pairs) / 4
    assert measured["samples/diversity"] == pytest.approx(want, rel=1e-5)
    grey = (media * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1)
    contrast = float(grey.flatten(1).std(1, correction=0).mean())
    assert measured["samples/contrast"] == pytest.approx(contrast, rel=1e-5)
    ends = torch.tensor([0.0, 1.0, 0.5]).view(3, 1, 1, 1).repeat(1, 3, 8, 8)
    of_ends = portrait(ends, torch.zeros(3, dtype=torch.long))
    assert of_ends["samples/clipped"] == pytest.approx(2 / 3)
    assert of_ends["samples/diversity"] == pytest.approx(2 / 3)
    ends[0, 0, 0, 0] = torch.nan
    broken = portrait(ends, torch.zeros(3, dtype=torch.long))
    assert broken["samples/clipped"] == pytest.approx(1 / 2)
    still = media[:, None].expand(-1, 9, -1, -1, -1)
    assert portrait(still, group) == pytest.approx(measured, rel=1e-5)
    texts = portrait(["ab", "ab", "cd", "x"], torch.tensor([0, 0, 0, 1]))
    assert texts == pytest.approx({"samples/diversity": 2 / 3})
    assert portrait(torch.zeros(4, 7), torch.zeros(4, dtype=torch.long)) == {}


def test_the_looks_of_pictures_by_hand():
    black, half = torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)
    half[0, :, 4:] = 1.0  # the right half is red: grey 0.299
    step = torch.tensor([0.0] * 3 + [0.299 / 2] * 2 + [0.0] * 3)  # Sobel beside the edge
    wanted = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, float(step.mean()), 1.0]]
    torch.testing.assert_close(of_pictures(torch.stack([black, half])), torch.tensor(wanted))
    noise = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert (of_pictures(noise)[:, 3] > 8.5).all()
    turned = of_pictures(noise.transpose(-1, -2))  # edges of both directions count alike
    torch.testing.assert_close(turned, of_pictures(noise))
    grey = noise[:, :1].expand(-1, 3, -1, -1)
    assert of_pictures(grey)[:, 3].max() <= 3.0 and of_pictures(grey)[:, 1].max() == 0


def test_monitor_is_weight_0_and_may_fail():
    named = {"use": "jpeg_compressibility", "monitor": True}
    built = build_rewards({"a": named, "jpeg_compressibility": 0.0})
    assert [weighted.weight for weighted in built.values()] == [0, 0]
    plain = build_rewards({"jpeg_compressibility": {"monitor": False}})
    assert plain["jpeg_compressibility"].weight == 1
    with pytest.raises(UserError, match="only measured; leave its weight away"):
        build_rewards({"jpeg_compressibility": {"monitor": True, "weight": 2}})
    with pytest.raises(UserError, match="monitor: expected true or false"):
        build_rewards({"jpeg_compressibility": {"monitor": 3}})

    def broken(media, prompts):
        raise RuntimeError("gone")

    scorer = Scorer({"good": lambda media, prompts: [1.0] * 4, "watch": broken}, {"watch": 0.0})
    rewards = scorer(pictures(4), [{"text": "a"}] * 4)
    assert rewards["watch"].isnan().all() and rewards.total().tolist() == [1.0] * 4
    assert scorer.failures["watch"].count == 4
    with pytest.raises(UserError, match="gone"):
        Scorer({"watch": broken})(pictures(4), [{"text": "a"}] * 4)


MINE = """
class Falling:
    calls = 0

    def __call__(self, media, prompts):
        self.calls += 1
        return [10.0 - self.calls] * len(prompts)

    def counters(self):
        return {"requests": float(self.calls)}


class Rising(Falling):
    def __call__(self, media, prompts):
        self.calls += 1
        return [float(self.calls + i % 2) for i in range(len(prompts))]
"""


def test_a_run_reports_the_alarm_and_what_rewards_count(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seesaw.py").write_text(MINE)
    spec = RUN | {
        "reward": {"seesaw.py:Rising": 1.0, "seesaw.py:Falling": {"monitor": True}},
        "train": RUN["train"] | {"iterations": 24},
        "alarms": {"window": 20},
        "run": "run",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    run = read_run(train(tmp_path / "run.yaml"))
    (alarm,) = [e for e in run.events if e["kind"] == "alarm" and "exploited" in e["message"]]
    assert alarm["numbers"]["window"] == 20 and "Falling falls" in capsys.readouterr().out
    assert run.optimised() == ["Rising"] and run.metrics[-1]["judged/Falling/requests"] == 24
    assert {"samples/diversity", "samples/clipped", "samples/contrast"} <= set(run.measured())
    page = render(run)
    assert "<h2>Alarms</h2>" in page and "Falling falls" in page
    json.dumps(run.events, allow_nan=False)
