import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from mmrl.advantages import memory
from mmrl.core import tensor_files
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, OPTIMIZERS, load_built_in
from mmrl.experiment import checkpoint, state
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.zoo.advantages import DDPO, MaxMin, Running
from mmrl.zoo.objectives import NFT
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

load_built_in()
SMALL = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 8, "micro_batch_size": 8}


def trainer_of(family):
    return make_trainer(
        family,
        kl=0.05,
        ema=0.9,
        advantage=DDPO(buffer=512),
        lr_schedule="cosine",
        warmup_steps=2,
        epochs=2,
        **SMALL,
    )


def same(a, b):
    assert a.keys() == b.keys()
    for part in a:
        assert a[part].keys() == b[part].keys()
        for name in a[part]:
            assert torch.equal(a[part][name], b[part][name]), (part, name)


def resumes(fresh, folder, count=1):
    """A trainer saved after ``count`` iterations and taken up by another does as many more to the
    bit. ``fresh`` makes one."""
    whole, second = fresh(), fresh()
    for _ in range(count):
        whole.iterate()
    state.restore(second, *checkpoint.load(checkpoint.save(folder, count, *state.capture(whole))))
    for _ in range(count):
        whole.iterate()
        second.iterate()
    (arrays, meta), (whole_arrays, known) = state.capture(second), state.capture(whole)
    same(arrays, whole_arrays)
    assert second.iteration == 2 * count and meta["advantage"] == known["advantage"]
    for name, p in second.policy.weights.parameters().items():
        assert arrays["weights"][name].data_ptr() == p.data_ptr(), "nothing is copied"


@pytest.mark.parametrize("family", ["flow", "masked", "causal"])
def test_2n_iterations_equal_n_stop_resume_n_to_the_bit(family, tmp_path):
    resumes(partial(trainer_of, family), tmp_path, 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_resumed_to_the_bit(name, tmp_path):
    package = getattr(OPTIMIZERS[name], "requires", None)
    if package is not None:
        pytest.importorskip(package)
    small = {"min_8bit_size": 16} if name == "adamw_8bit" else {}
    optimizer = partial(OPTIMIZERS[name], **small)
    resumes(partial(make_trainer, "flow", optimizer=optimizer, **SMALL), tmp_path)


def saved(folder, iteration, keep=3):
    arrays = {"weights": {"w": torch.full((3,), float(iteration))}}
    return checkpoint.save(folder, iteration, arrays, {"n": iteration}, keep)


def test_the_newest_are_kept_and_leftovers_of_a_crash_removed_but_nothing_of_the_user(tmp_path):
    (tmp_path / ".iteration-000001.999").mkdir()
    (tmp_path / "iteration-notes").write_text("mine")
    (tmp_path / "iteration-000001-copy").mkdir()
    for iteration in (1, 2, 999_999, 1_000_000):
        saved(tmp_path, iteration, keep=2)
    names = sorted(path.name.removeprefix("iteration-") for path in tmp_path.iterdir())
    assert names == ["000001-copy", "1000000", "999999", "notes"]
    arrays, meta = checkpoint.load(checkpoint.latest(tmp_path))
    assert meta == {"n": 1_000_000} and arrays["weights"]["w"].tolist() == [1e6] * 3


def test_damaged_newer_checkpoints_do_not_push_out_the_one_just_written(tmp_path, monkeypatch):
    for iteration in (1, 5, 6):
        saved(tmp_path, iteration)
    for iteration in (5, 6):
        truncate(tmp_path / f"iteration-{iteration:06d}")
    saved(tmp_path, 2, keep=2)
    path, problems = checkpoint.choose(tmp_path)
    assert path.name == "iteration-000002" and len(problems) == 2
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(UserError, match="power cut"):
        saved(tmp_path, 7)
    assert checkpoint.choose(tmp_path)[0] == path


def truncate(path):
    weights = path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


DAMAGE = {
    "weights.safetensors is not what was written": truncate,
    "weights.safetensors is missing": lambda path: (path / "weights.safetensors").unlink(),
    "it has no state.json": lambda path: (path / "state.json").unlink(),
    "state.json cannot be read": lambda path: (path / "state.json").write_text("{"),
    "not an mmrl checkpoint": lambda path: (path / "state.json").write_text('{"format": "other"}'),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_torn_or_foreign_checkpoint_is_named_and_the_one_before_offered(tmp_path, message):
    saved(tmp_path, 1)
    DAMAGE[message](saved(tmp_path, 2))
    path, problems = checkpoint.choose(tmp_path)
    assert path.name == "iteration-000001"
    assert len(problems) == 1 and message in problems[0] and "iteration-000002" in problems[0]
    shutil.rmtree(path)
    with pytest.raises(UserError, match="no usable checkpoint"):
        checkpoint.choose(tmp_path)


def bound(name, **options):
    return ADVANTAGES.build(name, **options)


class Doubled:
    """A third-party advantage on top of another, which knows nothing of checkpoints."""

    def __init__(self, base):
        self.base = base

    def __call__(self, rewards, rollout):
        return 2 * self.base(rewards, rollout)


NESTED = {  # makes one; places of what has a memory
    "soft": (lambda: bound("soft", base=DDPO(buffer=64), threshold=-1.0), {"base"}),
    "deep": (
        lambda: bound("focal", base=Doubled(Running(base=MaxMin(base=DDPO(buffer=64), rate=0.5)))),
        {"base.base", "base.base.base", "base.base.base.base"},
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_advantages_under_others_are_resumed_to_the_bit(name, tmp_path):
    make, places = NESTED[name]
    assert set(memory.capture(make())) == places
    with pytest.raises(UserError, match="no memory of the advantage"):
        memory.restore(make(), {})

    def fresh():
        trainer = make_trainer("causal", advantage=make(), **SMALL)
        other = lambda *both: 3 * toys.reward(*both).square() - 1  # noqa: E731
        trainer.scorer = Scorer({"toy": toys.reward, "smooth": other})
        return trainer

    resumes(fresh, tmp_path)


def test_a_snapshot_that_is_asked_for_later_starts_from_the_trained_weights(tmp_path):
    """The moving average; the reference stays the base model."""
    first = make_trainer(**SMALL)
    base = first.policy.weights.full()
    first.iterate()
    path = checkpoint.save(tmp_path, 1, *state.capture(first))
    second = make_trainer(ema=0.9, kl=0.1, **SMALL)
    state.restore(second, *checkpoint.load(path))
    live, ema, ref = (second.policy.weights.full(name) for name in ("live", "ema", "ref"))
    for name in base:
        assert torch.equal(ema[name], live[name])
        assert torch.equal(ref[name], base[name]) and not torch.equal(ref[name], live[name])


def test_the_reference_is_neither_kept_nor_written_where_nothing_looks_at_it(tmp_path):
    for objective, expected in (
        (PolicyGradient(clip_range=0.2), set()),
        (NFT(kl=0.0), {"old"}),
    ):
        trainer = make_trainer(objective=objective, **SMALL)
        trainer.iterate()
        path = checkpoint.save(tmp_path, 1, *state.capture(trainer))
        names = {file.stem for file in path.glob("*.safetensors")}
        assert names == {"weights", "optimizer"} | {f"snapshot-{name}" for name in expected}


def test_a_checkpoint_of_the_first_format_is_read_and_one_of_a_later_one_refused(tmp_path):
    path = saved(tmp_path, 1)
    written = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(written | {"format": "mmrl-checkpoint-1"}))
    assert checkpoint.load(path)[1] == {"n": 1}
    later = written | {"format": "mmrl-checkpoint-3", "mmrl": "7.1"}
    (path / "state.json").write_text(json.dumps(later))
    with pytest.raises(UserError, match=r"by a newer mmrl \(7.1\), in format 3; .*pip install -U"):
        checkpoint.load(path)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_a_part_is_read_whole_and_block_by_block_whatever_wrote_it(processes, tmp_path):
    """Rows of 4, 1 and 0 dimensions shared out as FSDP2 does; the last processes may have none."""
    whole = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(7.0), "c": torch.tensor(3.0)}
    for rank in range(processes):
        parts, starts = {}, {}
        for name, tensor in whole.items():
            rows = -(-len(tensor) // processes) if tensor.ndim else 0
            piece = tensor[rank * rows : (rank + 1) * rows] if tensor.ndim else tensor
            if piece.numel() and (tensor.ndim or rank == 0):
                parts[name] = piece
                starts[name] = {"saved_offsets": [rank * rows, 0][: tensor.ndim]}
        if parts:
            about = {"DCP_SHARDING_INFO": json.dumps(starts)}
            save_file(parts, tmp_path / f"{rank}.safetensors", about)
    part = tensor_files.Part(sorted(tmp_path.iterdir()))
    assert set(part) == set(whole)
    for name, tensor in whole.items():
        assert part.shape(name) == tuple(tensor.shape) and torch.equal(part[name], tensor)
    for first in range(4):
        for rows in range(5 - first):
            block = part.block("a", (first, 1), (rows, 4))
            assert torch.equal(block, whole["a"][first : first + rows, 1:5])
