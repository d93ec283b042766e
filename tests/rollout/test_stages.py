"""The contract of stages: the trainer calls every method of every registered stage."""

from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
import torch

from mmrl import config
from mmrl.advantages import dr_grpo
from mmrl.config.options import TrainOptions
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES
from mmrl.experiment import state
from mmrl.objectives import PolicyGradient
from mmrl.rollout.stages import Stage, by_question
from mmrl.scoring.scorer import Scorer
from mmrl.train.checks import whole_questions
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.advantages import GCPO
from mmrl.zoo.curricula.suggestions import Forms
from tests.fixtures import toys
from tests.fixtures.programs import ROOT
from tests.train.test_trainer import make_trainer

registry.load_built_in()

SIZES = {"prompts_per_iteration": 8, "group_size": 8, "train_batch_size": 32, "iterations": 1}


class Recorder(Stage):
    """Notes its calls; counts the iterations it has begun."""

    saved_as = "recorder"

    def __init__(self):
        self.calls = []
        self.begun = 0

    @classmethod
    def build(cls, setup):
        return cls()

    def begin(self, iteration):
        self.begun += 1
        self.calls.append(("begin", iteration))

    def context(self, context):
        self.calls.append(("context", context.iteration))
        return replace(context, ground_truth=lambda prompt: None)

    def observe(self, prompts, drawn):
        self.calls.append(("observe", len(prompts), len(drawn.rollout)))

    def groups(self, drawn, iteration, sample):
        self.calls.append(("groups", iteration))
        return drawn, {"recorder/rows": len(drawn.rollout)}

    def state_dict(self):
        return {"begun": torch.tensor(self.begun)}, {"calls": len(self.calls)}

    def load_state_dict(self, tensors, plain):
        self.begun = int(tensors["begun"]) if tensors else 0


@pytest.fixture
def registered():
    STAGES["recorder"] = Recorder
    yield
    del STAGES["recorder"]


def test_a_stage_takes_part_in_every_iteration(registered):
    trainer = make_trainer()
    (stage,) = trainer.stages
    contexts = []
    rollout = trainer.policy.rollout
    trainer.policy.rollout = lambda *call: contexts.append(call[3]) or rollout(*call)
    metrics = trainer.iterate()
    once = [("begin", 0), ("context", 0), ("observe", 8, 64), ("groups", 0)]
    assert stage.calls == once and metrics["recorder/rows"] == 64
    assert contexts[0].iteration == 0 and contexts[0].ground_truth is not None
    trainer.iterate()
    assert stage.calls[4:] == [("begin", 1), ("context", 1), once[2], ("groups", 1)]


def test_a_stage_sees_the_prompts_that_dynamic_sampling_draws(registered):
    trainer = make_trainer(
        reward=lambda media, prompts: torch.ones(len(media)), dynamic_sampling_rounds=2
    )
    assert [type(stage).__name__ for stage in trainer.stages] == ["DynamicSampling", "Recorder"]
    trainer.iterate()
    calls = trainer.stages[1].calls
    assert [call for call in calls if call[0] == "observe"] == [("observe", 8, 64)] * 3
    assert calls[-1] == ("groups", 0), "stages exchange groups in the order of their registration"


def test_the_state_of_a_stage_is_in_the_checkpoint(registered):
    trainer = make_trainer()
    trainer.iterate()
    arrays, meta = state.capture(trainer)
    assert meta["stages"]["recorder"] == {"calls": 4}
    again = make_trainer()
    state.restore(again, arrays, meta)
    assert again.stages[0].begun == 1
    del arrays["stage-recorder"], meta["stages"]["recorder"]  # a run that had no such stage
    state.restore(again, arrays, meta)
    assert again.stages[0].begun == 0


def test_a_checkpoint_that_cannot_tell_stages_apart_is_refused(registered):
    trainer = make_trainer()
    trainer.iterate()
    arrays, meta = state.capture(trainer)
    del meta["stages"]
    with pytest.raises(UserError, match="an earlier version, .* recorder .* start: FOLDER"):
        state.restore(make_trainer(), arrays, meta)
    with pytest.raises(UserError, match="2 stages .* in a checkpoint as 'recorder', .* name a"):
        make_trainer(stages=(Recorder(),))
    twice = ["train.stages=[replay_buffer, replay_buffer]"]
    with pytest.raises(UserError, match="train.stages: 2 stages of this run keep their state"):
        config.check(config.load(ROOT / "configs/digits/flow_grpo.yaml", twice))


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_gcpo_compares_both_forms_of_a_question_by_loop(family):
    """Asked with the behaviour and without, every group holds both kinds; any order of rows."""

    class Labels:
        train = toys.prompts(8)
        held_out: list = []

    forms = {"tool": "{text} with", "plain": "{text}"}
    data = Forms(Labels(), forms, together=True).train
    seen = []

    def tool(media, prompts):
        return torch.tensor([float(prompt["form"] == "tool") for prompt in prompts])

    def compare(rewards, rollout):
        seen.append((rewards, rollout))
        return GCPO(behaviour="tool", base=dr_grpo)(rewards, rollout)

    options = TrainOptions(prompts_per_iteration=4, group_size=3, train_batch_size=12, iterations=1)
    scorer = Scorer({"toy": toys.reward, "tool": tool})
    trainer = Trainer(
        toys.make(family), data, scorer, compare, PolicyGradient(), partial(adamw, lr=1e-3), options
    )
    batch = trainer.collect()
    ((rewards, compared),) = seen
    own = [prompt["question"] for prompt in batch.rollout.prompt_per_row()]
    right, shows = rewards["toy"].double().tolist(), rewards["tool"].tolist()
    assert batch.rollout.group.unique().tolist() == [0, 1, 2, 3], "each form keeps its condition"
    assert compared.group.unique().tolist() == [0, 2]
    for i, advantage in enumerate(batch.rollout.advantage[:, 0].double().tolist()):
        mates = [j for j in range(12) if own[j] == own[i]]
        assert len(mates) == 6 and sum(shows[j] for j in mates) == 3
        lead = fmean(right[j] for j in mates if shows[j])
        lead -= fmean(right[j] for j in mates if not shows[j])
        sign = (lead > 1e-9) - (lead < -1e-9)
        total = {j: right[j] + sign * shows[j] for j in mates}
        assert advantage == pytest.approx(total[i] - fmean(total.values()), abs=1e-6)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = by_question(batch.rollout[order])
    assert moved.group.tolist() == compared.group[order].tolist()
    with pytest.raises(UserError, match="asks every question in 2 forms on one process"):
        whole_questions(data, 3)


def test_stages_act_in_one_order_whichever_a_program_imported_first():
    registry.load_built_in()
    ours = [name for name in STAGES if STAGES[name].__module__.startswith("mmrl.zoo.stages")]
    backwards = list(STAGES.items())[::-1]
    STAGES.clear()
    STAGES.update(backwards)
    registry.load_built_in()
    assert [*STAGES][: len(ours)] == ours
    assert ours.index("dynamic_sampling") < ours.index("replay_buffer")
    assert ours.index("adaptive_sampling") < ours.index("response_reuse")
