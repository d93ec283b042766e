"""An error in the middle of a run loses nothing that whole iterations had learned."""

import pytest
import torch

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.experiment import checkpoint, lifecycle
from mmrl.experiment.emergency_checkpoint import rescued
from tests.experiment.test_budget import run_of


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(lifecycle.changes, "text_of", lambda configuration: "")
    run = run_of(tmp_path / "run", None)
    run.session.config = None
    return run


def failing(run, method, at, error, after=False):
    """Let a method of the trainer's policy or update raise in iteration ``at``."""
    owner, name = method
    original = getattr(owner, name)

    def call(*arguments, **options):
        if run.trainer.iteration == at and not after:
            raise error
        happened = original(*arguments, **options)
        if run.trainer.iteration == at:
            raise error
        return happened

    setattr(owner, name, call)


def test_any_error_saves_the_last_whole_iteration(run):
    failing(run, (run.trainer.policy, "decode"), 2, ZeroDivisionError("in the night"))
    with pytest.raises(ZeroDivisionError) as error, rescued(run):
        run.loop()
    path = checkpoint.latest(run.folder / "checkpoints")
    assert path.name == "iteration-000002"
    (note,) = error.value.__notes__
    assert f"saved {path}" in note and f"mmrl train --resume {run.folder}" in note
    saved, _ = checkpoint.load(path, checked=True)
    live = dict(run.trainer.policy.net.named_parameters())
    assert all(torch.equal(saved["weights"][name], live[name]) for name in live)
    assert "ZeroDivisionError: in the night" in (run.folder / "events.jsonl").read_text()


def test_a_mistake_of_the_user_stays_one_message(run):
    failing(run, (run.trainer.policy, "rollout"), 2, UserError("row 21: the picture is cut off"))
    with (
        pytest.raises(UserError, match="row 21: .*\nsaved .*iteration-000002; .*--resume"),
        rescued(run),
    ):
        run.loop()


def test_the_middle_of_an_update_belongs_to_no_iteration(run):
    failing(run, (run.trainer.update, "improve"), 2, RuntimeError("out of memory"), after=True)
    with pytest.raises(RuntimeError), rescued(run):
        run.loop()
    assert checkpoint.latest(run.folder / "checkpoints") is None


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_saved_alone_where_others_would_have_to_take_part(run, monkeypatch, processes):
    saved = []
    monkeypatch.setattr(run, "save", lambda: saved.append(1))
    monkeypatch.setattr(distributed, "process", lambda: (0, processes))
    with pytest.raises(ValueError), rescued(run):
        run.trainer.iteration += 1
        run.whole = (run.trainer.iteration, run.trainer.update.step)
        raise ValueError("of one process")
    assert len(saved) == (processes == 1)
