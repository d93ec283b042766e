"""A reward that is guided by evaluations: dynamic reward weighting by the hypervolume of
validation (Lu et al. 2025)."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.config import Config
from mmrl.config.options import EvaluateOptions
from mmrl.config.sections import LogOptions
from mmrl.core.errors import UserError
from mmrl.experiment import checkpoint, loop, state
from mmrl.experiment.build import read
from mmrl.monitoring.log import RunLog
from mmrl.scoring import Scorer
from rewards import hypervolume
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

ROOT = Path(__file__).parents[2]


def near(media, prompts):
    return -toys.reward(media, prompts).float().abs() / 4


def small(media, prompts):
    return 1 - media.float().flatten(1).square().mean(1) / 4


def run_of(folder, resumed=None):
    """A run of four iterations that evaluates after every second; its points by hand."""
    volume = hypervolume([near, small], measured="validation")
    trainer = make_trainer("flow", lr=0.05)
    trainer.scorer = Scorer({"volume": volume})
    trainer.options = replace(trainer.options, iterations=4, evaluate_every=2, save_every=2)
    session = SimpleNamespace(
        options=trainer.options,
        policy=trainer.policy,
        scorer=trainer.scorer,
        evaluation=EvaluateOptions(prompts=3, num_samples=2),
        prompts=lambda: toys.prompts(3),
        config=Config({"reward": {}}),
        summaries=(),
    )
    if resumed:
        state.restore(trainer, *checkpoint.load(resumed))
    log = RunLog(folder, False, start=trainer.iteration + 1, options=LogOptions(tensorboard=False))
    points = []
    kept = volume.validated
    volume.validated = lambda: (points.append(volume.latest), kept())[1]
    return loop.Run(session, trainer, log, folder), volume, points


def finish(run):
    """What follows an iteration: measure, then save."""
    run._measured(run.trainer.iteration)
    if loop.due(run.trainer.iteration, run.session.options.save_every):
        arrays, meta = state.capture(run.trainer)
        checkpoint.save(run.folder / "checkpoints", run.trainer.iteration, arrays, meta, 3)


def test_the_factor_is_that_of_the_last_evaluation_also_after_a_resume(tmp_path):
    run, volume, points = run_of(tmp_path / "whole")
    assert run.session.scorer.validates()
    run._evaluate()  # before training
    assert volume.factor() == 0.5 and volume.reference == points[0]
    factors = []
    for _ in range(4):
        run.trainer.iterate()
        factors.append(volume.factor())
        finish(run)
    assert len(points) == 3 and factors[0] == factors[1] == 0.5 and factors[2] == factors[3]
    gain = math.prod(max(a - b, 0.0) for a, b in zip(points[1], points[0], strict=True))
    assert factors[2] == pytest.approx(0.5 + 1.5 * math.tanh(gain), abs=1e-12)
    saved = sorted((tmp_path / "whole" / "checkpoints").iterdir())[0]
    again, resumed, later = run_of(tmp_path / "again", saved)
    assert again.trainer.iteration == 2 and resumed.factor() == factors[2]
    for _ in range(2):
        again.trainer.iterate()
        finish(again)
    assert later == points[2:] and resumed.state_dict() == volume.state_dict()
    left, right = (each.trainer.policy.weights.full() for each in (run, again))
    assert all(torch.equal(x, right[name]) for name, x in left.items())


def test_evaluations_that_are_not_made_are_refused():
    parts = "[jpeg_compressibility, jpeg_incompressibility]"
    chosen = [f"reward={{hypervolume: {{of: {parts}, measured: validation}}}}"]
    whole = ["train.evaluate_every=5", "evaluate.split=development"]
    path = ROOT / "configs" / "digits" / "flow_grpo.yaml"
    assert read(path, [*chosen, *whole])
    for missing in ("train.evaluate_every=0", "evaluate.split=all"):
        with pytest.raises(UserError, match="set train.evaluate_every, and evaluate.split=develop"):
            read(path, [*chosen, *whole, missing])
