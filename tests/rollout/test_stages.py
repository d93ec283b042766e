"""The contract of stages: the trainer calls every method of every registered stage."""

from dataclasses import replace
from functools import partial

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


def test_both_forms_of_a_question_are_compared_as_one_group():
    class Labels:
        train = toys.prompts(8)
        held_out: list = []

    data = Forms(Labels(), {"tool": "{text} with", "plain": "{text}"}, together=True).train
    seen = []

    def compare(rewards, rollout):
        seen.append(rollout)
        return dr_grpo(rewards, rollout)

    options = TrainOptions(4, 3, 12, 1)
    made, optimizer = toys.make("causal"), partial(adamw, lr=1e-3)
    scorer = Scorer({"toy": toys.reward})
    trainer = Trainer(made, data, scorer, compare, PolicyGradient(), optimizer, options)
    rollout = trainer.collect().rollout
    (compared,) = seen
    own = [prompt["question"] for prompt in rollout.prompt_per_row()]
    assert rollout.group.unique().tolist() == [0, 1, 2, 3], "each form keeps its condition"
    assert compared.group.tolist() == [2 * (own[i] != own[0]) for i in range(12)]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert by_question(rollout[order]).group.tolist() == compared.group[order].tolist()
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
