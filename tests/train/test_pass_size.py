"""``train.micro_batch_size: auto``: passes of the size that was fastest when it was measured."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch

from mmrl.config.compatibility import unmeasurable, unsupported_options
from mmrl.config.options import TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.core.errors import UserError
from mmrl.experiment import rerun, state
from mmrl.experiment.build import set_width
from mmrl.policies.contracts import Trial
from mmrl.policies.diffusion.flow_plan import planned
from mmrl.policies.diffusion.trees import Tree
from mmrl.policies.vlm.policy import VLM
from mmrl.train import pass_size
from samplers.windows import FIXED
from tests.fixtures import toys
from tests.train.test_fitting import trainer

SIZES = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16, "iterations": 3}


def seen_by(run):
    """The numbers of rows that pass through a trainer's network, as they come."""
    seen = []
    plain = run.policy.velocity

    def velocity(x, t, cond):
        seen.append(len(x))
        return plain(x, t, cond)

    run.policy.velocity = velocity
    run.policy.unseen = False  # no passes but those of the run
    return seen


def at_speeds(monkeypatch, speeds):
    """Pretend the speed, rows per second, of passes by their number of rows; they still run."""

    def timed(work, device):
        trial, rows = work.args[-2:]
        work()
        return rows / speeds[rows]

    monkeypatch.setattr(pass_size, "timed", timed)


@pytest.mark.parametrize(
    ("speeds", "wanted"),
    [
        ({16: 9.0, 8: 20.0, 4: 10.0, 2: 5.0}, 8),
        ({16: 20.1, 8: 20.0, 4: 10.0, 2: 5.0}, 8),  # as good as equal: the smaller
        ({16: 30.0, 8: 20.0, 4: 10.0, 2: 5.0}, 16),
    ],
)
def test_all_passes_have_the_size_that_was_fastest(monkeypatch, speeds, wanted):
    at_speeds(monkeypatch, speeds)
    run = trainer(micro_batch_size="auto")
    seen = seen_by(run)
    # of both branches of guidance
    run.measure_passes()
    assert sorted(set(seen)) == [4, 8, 16, 32]
    assert all(p.grad is None for p in run.policy.net.parameters())
    assert run.policy.report.forwards == 0
    seen.clear()
    run.iterate()
    assert set(seen) == {2 * wanted} and run.pass_rows == wanted
    (sentence,) = run.policy.report.warnings
    assert f"passes have {wanted} rows" in sentence
    assert f"train.micro_batch_size={wanted} makes it without measuring" in sentence


def test_what_does_not_fit_is_not_chosen_however_fast(monkeypatch):
    at_speeds(monkeypatch, {16: 90.0, 8: 80.0, 4: 10.0, 2: 5.0})
    run = trainer(rows=5, micro_batch_size="auto")
    run.iterate()
    assert run.pass_rows == 4
    assert (
        "16 rows do not fit, 8 rows do not fit, 4 rows 0.833, 2 rows 0.417"
        in run.policy.report.warnings[0]
    )
    with pytest.raises(UserError, match="not even passes of 2 rows fit; set train.micro_batch"):
        trainer(rows=0, micro_batch_size="auto").iterate()


def test_a_measured_run_is_that_of_the_number_to_the_bit_and_a_resume_does_not_measure(
    monkeypatch,
):
    at_speeds(monkeypatch, {16: 9.0, 8: 20.0, 4: 10.0, 2: 5.0})
    measured = trainer(micro_batch_size="auto")
    plain = trainer(micro_batch_size=8)
    for _ in range(2):
        measured.iterate()
        plain.iterate()
    for name, value in plain.policy.weights.full().items():
        assert torch.equal(value, measured.policy.weights.full()[name])
    arrays, meta = deepcopy(state.capture(measured))
    monkeypatch.setattr(pass_size, "timed", None)  # would fail if it were called
    resumed = trainer(micro_batch_size="auto")
    state.restore(resumed, arrays, meta)
    resumed.iterate()
    measured.iterate()
    for name, value in measured.policy.weights.full().items():
        assert torch.equal(value, resumed.policy.weights.full()[name])
    numbered = trainer(micro_batch_size=4)
    state.restore(numbered, arrays, meta)
    assert numbered.pass_rows is None and numbered.policy.pass_sizes.rows == 4
    # evaluation has the same width
    policy = toys.make("flow")
    set_width(policy, measured.options, meta)
    assert policy.pass_sizes.rows == 8


def test_a_repetition_takes_the_measured_size(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    monkeypatch.setattr(rerun.checkpoint, "latest", lambda folder: folder)
    monkeypatch.setattr(rerun.checkpoint, "load", lambda path: ({}, {"pass_rows": 8}))
    file.write_text("train: {micro_batch_size: auto}")
    assert rerun._sizes(tmp_path, file) == ["train.micro_batch_size=8"]
    file.write_text("train: {micro_batch_size: 4}")
    assert rerun._sizes(tmp_path, file) == []


def test_what_passes_through_the_network_is_counted():
    """Samples of a tree share their beginnings; one iteration of three steps of 16 rows to sample
    and 40 decisions, in two steps of two epochs, 8 rows a pass."""
    plan = arithmetic(TrainOptions(**SIZES | {"train_batch_size": 8}))
    trial = Trial(sample=None, train=None, sampled=(16, 16, 17), trained=40)
    each = pass_size.Measured(8, sampling=1.0, training=100.0)
    assert pass_size._iteration(each, trial, plan, epochs=2) == 7 + 2 * 2 * 3 * 100
    policy = toys.make("flow", tree=Tree(factor=2, splits=(1,)))
    trial = policy.trial(toys.prompts(2), 4, "decisions")
    spans = planned(policy, 4, FIXED).spans
    assert trial.sampled == tuple(8 // span for span in spans[:-1])
    assert trial.trained == sum(8 // span for span in spans[1:])
    finished = toys.make("flow", noise_level=0.0).trial(toys.prompts(2), 4, "sample")
    assert finished.trained == 8 and finished.sampled == (8,) * 6


def test_what_cannot_be_measured_is_refused():
    options = partial(TrainOptions, **SIZES)
    auto = options(micro_batch_size="auto")
    (line,) = unsupported_options(auto, VLM)
    assert "train.micro_batch_size: auto measures passes of flow and diffusion models" in line
    assert not [*unsupported_options(auto, toys.ToyFlow)]
    chosen = {"steps": 4, "fixed_batch_rows": 2, "sampling_memory_gib": None}
    (line,) = unmeasurable(auto, toys.ToyFlow, chosen)
    assert "policy.fixed_batch_rows: leave out one of them" in line
    assert not [*unmeasurable(options(micro_batch_size=4), toys.ToyFlow, chosen)]
