"""What custom rewards return: sub-scores, None, coroutines, state; and the notes on slow and loud
ones."""

from __future__ import annotations

import asyncio

import pytest
import torch

from mmrl.advantages import gdpo
from mmrl.advantages.group import group
from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.experiment.reward_notes import notes
from mmrl.scoring import Handling, Scorer
from tests.advantages.test_advantages import rollout
from tests.fixtures.tiny_rewards import asked, pictures

MEDIA = pictures(6)
MEANS = MEDIA.flatten(1).mean(1)
GROUPS = [0, 0, 0, 1, 1, 1]


def scored(reward, **handling):
    scorer = Scorer({"mine": reward}, handling={"mine": Handling(**handling)} if handling else {})
    return scorer, scorer(MEDIA, asked(6), GROUPS)["mine"]


def rows(media):
    return media.flatten(1).mean(1)


SHAPES = {
    "a dict": lambda media, prompts: {"score": rows(media), "dark": 1 - rows(media)},
    "values and a dict": lambda media, prompts: (rows(media), {"dark": 1 - rows(media)}),
    "a dict for each": lambda media, prompts: [
        {"score": float(m), "dark": 1 - float(m), "why": "so"} for m in rows(media)
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("handling", [{}, {"batch_size": 4}])
def test_sub_scores_are_averaged_and_the_score_is_the_reward(shape, handling):
    scorer, values = scored(SHAPES[shape], **handling)
    torch.testing.assert_close(values, MEANS)
    scorer.remember()
    total, count = scorer.sub_scores()["mine/dark"]
    assert set(scorer.sub_scores()) == {"mine/dark"}
    assert (total / count, count) == (pytest.approx(float((1 - MEANS).mean())), 6)
    scorer(MEDIA[:2], asked(2))
    scorer.remember()
    assert scorer.sub_scores()["mine/dark"][1] == 2, "those of the last call"
    _, alone = scored(lambda media, prompts: {"bright": rows(media)}, **handling)
    torch.testing.assert_close(alone, MEANS)


def test_none_is_no_failure_and_speaks_for_nobody():
    """Rows 1 and 3 to 5 are left out: the first group compares its others, the second is flat."""
    given = [1.0, None, 2.0, None, None, None]
    scorer, values = scored(lambda media, prompts: given)
    assert scorer.failures == {} and values.mean() == 1.5
    assert values[:3].tolist() == [1.0, 1.5, 2.0] and len(set(values[3:].tolist())) == 1
    advantage = group(Rewards({"mine": values}), rollout(GROUPS), std="none")
    assert advantage[:, 0].tolist() == [-0.5, 0.0, 0.5, 0.0, 0.0, 0.0]


def test_async_functions_are_awaited_together_within_bounds():
    """Six calls of which at most three may run: each waits until three are there, or never ends."""
    inside, most = 0, 0
    three = asyncio.Event()

    async def later(media, prompts):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 3:
            three.set()
        await asyncio.wait_for(three.wait(), 60)
        inside -= 1
        return rows(media)

    _, values = scored(later, batch_size=1, concurrency=3)
    torch.testing.assert_close(values, MEANS)
    assert most == 3


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, media, prompts):
        self.calls += 1
        return rows(media)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_the_state_of_any_reward_is_kept_and_weights_are_none():
    scorer, _ = scored(Counts())
    fresh = Scorer({"mine": Counts(), "net": torch.nn.Linear(2, 2)})
    fresh.load_state_dict(scorer.state_dict())
    assert fresh.state_dict() == {"mine": {"calls": 1}}
    broken = Counts()
    broken.calls = torch.zeros(2)
    with pytest.raises(UserError, match="returns what a checkpoint cannot hold"):
        Scorer({"mine": broken}).state_dict()
    with pytest.raises(UserError, match="has a state .*leave its `cache` out"):
        scored(Counts(), cache="memory")


def test_gdpo_of_a_sum_that_cancels_is_zero():
    up = MEANS.float()
    rewards = {"up": up, "down": -1000 * up}
    advantage = gdpo(Rewards(rewards), rollout(GROUPS))
    assert advantage.abs().max() == 0
    half = gdpo(Rewards(rewards, {"up": 1.0, "down": 0.5}), rollout(GROUPS))
    torch.testing.assert_close(half, gdpo(Rewards({"up": up}), rollout(GROUPS)), atol=1e-3, rtol=0)


def test_slow_and_loud_rewards_are_named_with_the_remedy():
    metrics = {"share/reward": 0.7, "reward/a/std": 0.001, "reward/b/std": 1.0, "reward/c/std": 0}
    weights = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}
    said = notes(metrics, weights, {"a": 9.0, "b": 1.0}, 1, group)
    assert "70% of an iteration, most of it a; train.reward_overlap_chunks=2" in said["slow reward"]
    assert "reward b has 1e+03 times the say of a" in said["scales"]
    assert set(notes(metrics, weights, {"a": 9.0}, 1, gdpo)) == {"slow reward"}
    near = metrics | {"reward/a/std": 0.02, "share/reward": 0.4}
    assert notes(near, weights, {"a": 9.0}, 1, group) == {}


OWN = """
def image_alone(image): return sum(image.resize((1, 1)).getpixel((0, 0)))
def image_and_prompt(image, prompt): return prompt["n"]
def batch(images): return images.flatten(1).mean(1)
def turned(prompts, images): return images.flatten(1).mean(1) * len(prompts)
def with_option(image, *, scale=1.0): return scale
async def later(image, prompt): return prompt["n"]
def media_prompts(media, prompts): return [p["n"] for p in prompts]
def three(a, b, c): return 0
"""


def test_parameters_are_known_by_name_and_number_in_a_file_as_in_python(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    prompts = [{"text": "", "n": n} for n in range(6)]

    def of_file(name, options=1.0):
        (weighted,) = build_rewards({f"{tmp_path}/own.py:{name}": options}).values()
        return Scorer({"x": weighted.reward})(MEDIA, prompts)["x"]

    assert of_file("image_alone").std() > 0
    for name in ("image_and_prompt", "later", "media_prompts"):
        assert of_file(name).tolist() == list(range(6))
    torch.testing.assert_close(of_file("batch"), MEANS)
    torch.testing.assert_close(of_file("turned"), MEANS * 6)
    assert of_file("with_option", {"weight": 1.0, "scale": 3.0}).tolist() == [3.0] * 6
    with pytest.raises(UserError, match=r"must be \(media, prompts\); this takes \(a, b, c\)"):
        of_file("three")
