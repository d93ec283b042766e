"""A stage with a state, in one file outside of the package: the one of docs/extending.md. What it
declares is refused and accepted where it must be, and nothing else has to know of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.config import effects
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES, import_file, load_built_in
from mmrl.experiment import changes, state
from mmrl.zoo.stages.answer_memory import remembered
from mmrl.zoo.stages.insertion import inserted
from samplers.noise import Rng
from tests.config.test_refusals import FLOW, SITUATIONS, SIZES, problems
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
KEY = "train.stages.best_so_far"
IDLE = "so it would do nothing: leave it out"
TREE = (
    "it exchanges single answers, and those of a tree share their beginnings; leave it out, or the "
    "policy's tree"
)
REFUSED = {
    "supervised": f"supervised fine-tuning samples and rewards nothing, {IDLE}",
    "preferences": f"nothing is sampled with train.preferences, {IDLE}",
    "trees of flows": TREE,
    "trees of texts": TREE,
    "partial rollouts": "it needs all answers of an iteration, of which "
    "train.stages.partial_rollout leaves some to the next: leave one of them out",
    "gradient of the reward": "this objective draws the noise of every path again, by the names "
    "that rows have now; leave it out, or choose policy_gradient",
    "Ray ahead": "it does not work with sampling ahead (ray.staleness): leave one of them out",
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    load_built_in()
    STAGES.pop("best_so_far", None)  # the test of the page may have run in this process
    (text,) = re.findall(r"```python\n(# my_stage.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("user") / "my_stage.py"
    file.write_text(text)
    yield import_file(file).BestSoFar
    del STAGES["best_so_far"]


def test_it_is_refused_by_what_it_declares(stage):
    for situation, plain in SITUATIONS.items():
        expected = {f"{KEY}: {REFUSED[situation]}"} if situation in REFUSED else set()
        named = [*plain["train"].get("stages", ()), {"best_so_far": {"margin": 0.1}}]
        train = plain["train"] | {"stages": named}
        assert problems(plain | {"train": train}) == expected, situation


def test_a_resume_and_a_dry_run_ask_what_it_declares(stage, monkeypatch):
    before, after = ([{"best_so_far": {"margin": margin}}] for margin in (0.0, 0.1))
    train = TrainOptions(**SIZES, stages=(stage(),))
    assert effects.in_dry_run(train).stages == ()
    for resumes in ("free", "warned", "refused"):
        declared = replace(stage.effects, resumes=resumes, in_dry_run=True)
        monkeypatch.setattr(stage, "effects", declared)
        for other in (after, []):
            assert changes.effect(("train", "stages"), before, other, {"train": {}}) == resumes
    assert effects.in_dry_run(train).stages == train.stages


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (
            {"stages": ["dynamic_sampling"]},
            "'dynamic_sampling' does not fit: train.dynamic_sampling_rounds asks for it; set that",
        ),
        (
            {"replay_buffer": {"share": 0.5}},
            "it is a stage: train.stages: [{replay_buffer: {'share': 0.5}}]",
        ),
    ],
)
def test_a_stage_that_an_option_asks_for_and_one_beside_the_list_are_refused(train, sentence):
    (why,) = problems(FLOW | {"train": SIZES | train})
    assert why.endswith(sentence)


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_it_grows_groups_records_and_goes_on_from_a_checkpoint(stage, family):
    """The reward falls from call to call, so that the first answers stay the best."""
    calls = [0]

    def falling(media, prompts):
        calls[0] += 1
        return torch.arange(len(media)).double() / 100 - calls[0]

    def trainer():
        sizes = {"prompts_per_iteration": 16, "group_size": 4, "micro_batch_size": None}
        return make_trainer(family, reward=falling, stages=(stage(),), **sizes)

    first = trainer()
    assert first.iterate()["best_so_far/rows"] == 0 and first.iterate()["best_so_far/rows"] == 16
    arrays, meta = state.capture(first)
    again = trainer()
    state.restore(again, arrays, meta)
    for batch in (first.collect(), again.collect()):
        assert batch.rollout.group.bincount().tolist() == [5] * 16 == [*batch.group_sizes]
        best = batch.rollout.record("best")  # of each prompt that of the first iteration
        wanted = [(4 * group + 3) / 100 - 1 for group in range(16) for _ in range(5)]
        assert sorted(best.tolist()) == pytest.approx(wanted)
        assert batch.rollout.provenance.is_replayed.sum() == 16
    with pytest.raises(UserError, match="no stage records 'surprise' of rows.*: best"):
        batch.rollout.record("surprise")


def test_rows_that_join_a_group_have_what_is_recorded_of_its_prompt():
    trainer = make_trainer()
    drawn = trainer.sample(toys.prompts(1), Rng.of("rows"), 3)
    rows = drawn.rollout.recorded("value", torch.full((3,), 0.5), of_prompts=True)
    drawn = replace(drawn, rollout=rows.recorded("age", torch.arange(3.0)))
    old = remembered(drawn, torch.tensor([0]), 0, 0)
    mixed = inserted(trainer.policy, drawn, [(0, old)], grows=True).rollout
    assert mixed.record("value").tolist() == [0.5] * 4
    assert mixed.record("age")[:3].tolist() == [0, 1, 2] and mixed.record("age")[3].isnan()
