"""A run that cannot learn says so: an alarm after two such iterations with the likely cause, an
optional stop, a red line in the report."""

from __future__ import annotations

import json
import re

import torch
import yaml

from mmrl.config.sections import AlarmOptions
from mmrl.core.types import Rollout
from mmrl.experiment.lifecycle import trained
from mmrl.experiment.stopping import NOTHING_TO_LEARN
from mmrl.monitoring.alarms import IN_A_ROW, STUCK, Alarms
from mmrl.monitoring.report.page import render
from mmrl.monitoring.report.runs import read_run
from mmrl.rollout.collect import Sampled
from rewards.answers.grounding import Grounding

GOOD = {"grad_norm": 0.1, "lr": 1e-3, "reward/mean": 0.3, "reward/std": 0.2, "skipped_steps": 0}
GOOD |= {"groups/total": 4, "groups/flat": 1, "samples/total": 16, "samples/diversity": 0.1}
FLAT = GOOD | {"reward/mean": 0.0, "reward/std": 0.0, "groups/flat": 4}


def raised(lines, **options):
    alarms = Alarms(AlarmOptions(**options), rewards={"taste": None}, alone=True)
    for iteration, line in enumerate(lines, 1):
        alarms.flat = line.get("groups/flat") == 4
        alarms.after_update(iteration, dict(line))
    return alarms


SKIPPED = {key: value for key, value in GOOD.items() if key != "grad_norm"} | {"skipped_steps": 1}
CAUSES = [
    (FLAT | {"grad_norm": 0.0}, "rewarded with 0 and the gradient is 0", "taste does not"),
    (FLAT | {"grad_norm": 0.0, "answer/cut": 0.9}, "gradient is 0", "90% .* max_new_tokens"),
    (FLAT, "every sample is rewarded with 0", "a larger train.group_size"),  # KL moves it
    (GOOD | {"groups/flat": 4}, "all samples of a prompt", "depends on the prompt alone"),
    (GOOD | {"grad_norm": 0.0}, "the gradient is 0", "The rewards differ, .* lora and train"),
    (GOOD | {"lr": 0.0}, "the learning rate is 0", "train.lr_schedule"),
    (FLAT | {"grad_norm": 0.0, "samples/diversity": 0.0}, "gradient", "are identical"),
    (SKIPPED, "no optimizer step", "masked"),
]


def test_two_iterations_raise_one_alarm_with_the_likely_cause(subtests):
    for line, why, cause in CAUSES:
        with subtests.test(line=line, why=why):
            alarms = raised([GOOD, line, line, line])
            (alarm,) = alarms.news
            assert alarm.kind == STUCK and re.search(f"last 2 iterations: .*{why}", alarm.message)
            assert re.search(cause, alarm.message) and not alarms.ended
            assert alarm.numbers["iterations"] == 2
            assert not raised([line, GOOD, line]).news
            assert not raised([line] * 3, enabled=False).news
            assert not raised([line] * 3, patience=4).news
            assert "nothing to learn from" in raised([line, line], stop=True).ended
            assert len(raised([line] * 90).news) == 3  # once in a window of 40 iterations


def test_a_resume_counts_on_from_what_was_logged():
    """Found by scripts/dev/soak kills: resumed after two such iterations, it came two late."""
    still, moving = GOOD | {"grad_norm": 0.0}, GOOD | {"grad_norm": 0.3}
    lines = [dict(moving), dict(still), dict(still)]
    first = Alarms(AlarmOptions(patience=3))
    for iteration, line in enumerate(lines, 1):
        first.after_update(iteration, line)
    assert not first.news and [line.get(IN_A_ROW) for line in lines] == [None, 1, 2]
    for logged, news in ((lines, 1), ([*lines, moving], 0)):
        resumed = Alarms(AlarmOptions(patience=3))
        resumed.recall(logged)
        resumed.after_update(len(logged) + 1, dict(still))
        assert len(resumed.news) == news


def test_a_run_that_learns_raises_none():
    """Flat groups are none where something else than these rewards moves the weights."""
    assert raised([GOOD] * 50, stop=True).news == []
    others = Alarms(AlarmOptions(stop=True), alone=False)
    for iteration in range(1, 5):
        others.flat = True
        others.after_update(iteration, dict(FLAT))
    assert others.news == [] and not others.ended
    alone = raised([GOOD | {"groups/total": 16, "groups/flat": 16}] * 3)  # groups of one
    assert alone.news == []
    supervised = raised([{"grad_norm": 0.5, "lr": 1e-3, "skipped_steps": 0, "loss": 1.0}] * 3)
    assert supervised.news == []


def test_answers_that_no_reward_can_read_are_an_alarm_though_another_reward_differs():
    prompts = ({"text": "where?", "boxes": [[0, 0, 5, 5]], "size": (10, 10)},)
    rollout = Rollout(
        group=torch.zeros(4, dtype=torch.long),
        row_id=torch.arange(4),
        sample=torch.zeros(4, 1),
        logprob=torch.zeros(4, 1),
        mask=torch.ones(4, 1, dtype=torch.bool),
        advantage=torch.tensor([[1.0], [-1.0], [0.0], [0.0]]),
        prompts=prompts,
    )
    alarms = Alarms(AlarmOptions(stop=True), rewards={"grounding": Grounding()}, alone=True)
    for iteration, texts in enumerate(
        (["[[0, 0, 5, 5]]"] * 4, ["no\n idea"] * 4, ["who knows"] * 4)
    ):
        sampled = Sampled(iteration, texts, rollout, {}, {}, (rollout, {}), {})
        assert alarms.see(sampled) == {} and not alarms.flat
        alarms.after_update(iteration + 1, dict(GOOD))
    (alarm,) = alarms.news
    assert "grounding could read none of the answers" in alarm.message and not alarms.ended
    assert "such as 'who knows'" in alarm.message and "sft" in alarm.message


RUN = {
    "data": {"digits": {"captions": 20}},
    "reward": {"flat.py:flat": 1.0},
    "policy": {"sd3": {"path": "world:digits/sd3-test", "size": 32, "steps": 2, "lora": 2}},
    "objective": {"policy_gradient": {"clip_range": 1.0}},
    "train": {"prompts_per_iteration": 1, "group_size": 2, "train_batch_size": 2, "iterations": 4}
    | {"save_every": 0},
    "log": {"tensorboard": False},
}


def test_a_constant_reward_ends_the_run_and_is_told_in_the_events_and_in_red(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    reward = "def flat(media, prompts):\n    return [1.0] * len(prompts)\n"
    (tmp_path / "flat.py").write_text(reward)
    spec = RUN | {"run": "run", "alarms": {"stop": True}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    ended = trained(tmp_path / "run.yaml")
    shown = capsys.readouterr().out
    assert "alarm: nothing to learn from in the last 2 iterations: every sample is rew" in shown
    assert ended.status == NOTHING_TO_LEARN
    run = read_run(ended.folder)
    assert len(run.metrics) == 2
    assert [e["about"] for e in run.events if e["kind"] == "alarm"] == [STUCK]
    assert "stopped: alarms.stop: nothing to learn from" in shown
    page = render(run)
    assert '<p class="stuck" role="alert">Iteration 2: nothing to learn from' in page
    assert "In 2 of 2 iterations the gradient was 0." in page
    json.dumps(run.events, allow_nan=False)
