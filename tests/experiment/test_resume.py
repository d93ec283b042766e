import json
import os
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mmrl import __version__
from mmrl.advantages import dr_grpo, grpo, memory
from mmrl.core import tensor_files
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, OPTIMIZERS, load_built_in
from mmrl.experiment import checkpoint, lifecycle, state
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.zoo.advantages import DDPO, MaxMin, Running
from mmrl.zoo.objectives import AWM, CRD, NFT, Draft
from rewards.card import card
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

load_built_in()


def trainer_of(family):
    return make_trainer(
        family,
        kl=0.05,
        ema=0.9,
        advantage=DDPO(buffer=512),
        lr_schedule="cosine",
        warmup_steps=2,
        epochs=2,
    )


def same(a, b):
    assert a.keys() == b.keys()
    for part in a:
        assert a[part].keys() == b[part].keys()
        for name in a[part]:
            assert torch.equal(a[part][name], b[part][name]), (part, name)


def resumes(fresh, folder):
    """A trainer saved after one iteration and taken up by another does the second to the bit.
    ``fresh`` makes one."""
    whole = fresh()
    whole.iterate()
    path = checkpoint.save(folder, whole.iteration, *state.capture(whole))
    whole.iterate()
    second = fresh()
    state.restore(second, *checkpoint.load(path))
    second.iterate()
    same(state.capture(second)[0], state.capture(whole)[0])


@pytest.mark.parametrize("family", toys.POLICIES)
def test_2n_iterations_equal_n_stop_resume_n_to_the_bit(family, tmp_path):
    whole = trainer_of(family)
    for _ in range(4):
        whole.iterate()
    first = trainer_of(family)
    for _ in range(2):
        first.iterate()
    path = checkpoint.save(tmp_path, first.iteration, *state.capture(first))
    second = trainer_of(family)
    state.restore(second, *checkpoint.load(path))
    metrics = [second.iterate() for _ in range(2)]
    (arrays, meta), (whole_arrays, known) = state.capture(second), state.capture(whole)
    same(arrays, whole_arrays)
    assert (
        second.iteration == 4
        and meta["advantage"] == known["advantage"]
        and meta["step"] == known["step"]
    )
    assert all(m["ratio/max_deviation"] >= 0 for m in metrics)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_resumed_to_the_bit(name, tmp_path):
    package = getattr(OPTIMIZERS[name], "requires", None)
    if package is not None:
        pytest.importorskip(package)
    small = {"min_8bit_size": 16} if name == "adamw_8bit" else {}
    resumes(partial(make_trainer, "flow", optimizer=partial(OPTIMIZERS[name], **small)), tmp_path)


def test_resuming_before_the_first_step_changes_nothing(tmp_path):
    whole = trainer_of("flow")
    first = trainer_of("flow")
    path = checkpoint.save(tmp_path, 0, *state.capture(first))
    second = trainer_of("flow")
    state.restore(second, *checkpoint.load(path))
    for trainer in (whole, first, second):
        trainer.iterate()
    for resumed in (first, second):
        same(state.capture(whole)[0], state.capture(resumed)[0])


def test_global_generators_are_restored(tmp_path):
    trainer = make_trainer()
    path = checkpoint.save(tmp_path, 0, *state.capture(trainer))
    drawn = random.random(), np.random.standard_normal(), float(torch.rand(()))
    state.restore(make_trainer(), *checkpoint.load(path))
    again = random.random(), np.random.standard_normal(), float(torch.rand(()))
    assert again == drawn


def saved(folder, iteration, keep=3):
    arrays = {"weights": {"w": torch.full((3,), float(iteration))}}
    return checkpoint.save(folder, iteration, arrays, {"n": iteration}, keep)


def test_the_newest_are_kept_and_leftovers_of_a_crash_removed(tmp_path):
    (tmp_path / ".iteration-000001.999").mkdir()
    for iteration in range(5):
        saved(tmp_path, iteration, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration-000003", "iteration-000004"]
    arrays, meta = checkpoint.load(checkpoint.latest(tmp_path))
    assert meta == {"n": 4} and arrays["weights"]["w"].tolist() == [4.0] * 3


def test_what_the_user_puts_beside_checkpoints_is_none(tmp_path):
    """A file or folder that is called almost so neither counts nor is deleted."""
    saved(tmp_path, 1)
    (tmp_path / "iteration-notes").write_text("mine")
    (tmp_path / "iteration-000001-copy").mkdir()
    saved(tmp_path, 1_000_000, keep=2)
    saved(tmp_path, 999_999 + 2, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "iteration-000001-copy",
        "iteration-1000000",
        "iteration-1000001",
        "iteration-notes",
    ]
    assert checkpoint.choose(tmp_path)[0].name == "iteration-1000001"


def test_damaged_newer_checkpoints_do_not_push_out_the_one_just_written(tmp_path):
    for iteration in (1, 5, 6):
        saved(tmp_path, iteration)
    for iteration in (5, 6):
        truncate(tmp_path / f"iteration-{iteration:06d}")
    saved(tmp_path, 2, keep=2)
    path, problems = checkpoint.choose(tmp_path)
    assert path.name == "iteration-000002" and len(problems) == 2


def test_a_crash_while_writing_leaves_the_one_before(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(UserError, match="power cut"):
        saved(tmp_path, 2)
    assert checkpoint.choose(tmp_path) == (tmp_path / "iteration-000001", [])


def truncate(path):
    weights = path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


DAMAGE = {
    "weights.safetensors is not what was written": truncate,
    "weights.safetensors is missing": lambda path: (path / "weights.safetensors").unlink(),
    "it has no state.json": lambda path: (path / "state.json").unlink(),
    "state.json cannot be read": lambda path: (path / "state.json").write_text("{"),
    "not an mmrl checkpoint": lambda path: (path / "state.json").write_text(
        json.dumps({"format": "other"})
    ),
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


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 0, *state.capture(make_trainer("flow")))
    with pytest.raises(UserError, match="does not fit this configuration's model"):
        state.restore(make_trainer("causal"), *checkpoint.load(path))


def test_a_stateful_advantage_must_be_restored_to_continue(tmp_path):
    """The bit-equality above is no accident of an unused buffer: without it the numbers differ."""
    trainers = [trainer_of("flow") for _ in range(2)]
    for trainer in trainers:
        trainer.iterate()
    trainers[1].advantage = DDPO(buffer=512)
    outcomes = [[t.iterate() for _ in range(2)] and t.policy.weights.full() for t in trainers]
    assert any(not torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def bound(name, **options):
    return ADVANTAGES.build(name, **options)


class Doubled:
    """A third-party advantage on top of another, which knows nothing of checkpoints."""

    def __init__(self, base):
        self.base = base

    def __call__(self, rewards, rollout):
        return 2 * self.base(rewards, rollout)


NESTED = {  # makes one; places of what has a memory
    "alone": (lambda: Running(base=dr_grpo), {""}),
    "temporal": (lambda: bound("temporal", base=Running(base=dr_grpo)), {"base"}),
    "tree_mean": (lambda: bound("tree_mean", base=MaxMin(rate=0.5, base=dr_grpo)), {"base"}),
    "soft": (lambda: bound("soft", base=DDPO(buffer=64), threshold=-1.0), {"base"}),
    "deep": (
        lambda: bound(
            "focal",
            base=Doubled(
                Running(base=bound("temporal", base=MaxMin(base=DDPO(buffer=64), rate=0.5)))
            ),
        ),
        {"base.base", "base.base.base.base", "base.base.base.base.base"},
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_advantages_under_others_are_resumed_to_the_bit(name, tmp_path):
    make, places = NESTED[name]
    assert set(memory.capture(make())) == places

    def fresh():
        trainer = make_trainer("causal", advantage=make())
        trainer.scorer = Scorer(
            {"toy": toys.reward, "smooth": lambda *both: 3 * toys.reward(*both).square() - 1}
        )
        return trainer

    resumes(fresh, tmp_path)
    first = fresh()
    first.iterate()
    # continues without its memory: the equality above would see a memory that is lost
    resumed = fresh()
    resumed.policy.weights.load(first.policy.weights.full())
    resumed.iteration = first.iteration
    with torch.no_grad():
        advantages_of = [x.collect().rollout.advantage for x in (resumed, first)]
        assert not torch.equal(*advantages_of)


def test_a_checkpoint_without_the_memory_of_an_advantage_is_refused():
    written = memory.capture(bound("temporal", base=grpo))
    assert written == {}
    with pytest.raises(UserError, match=r"no memory of the advantage DDPO \(at base\)"):
        memory.restore(bound("temporal", base=DDPO()), written)


# snapshots and shards


def test_a_snapshot_that_is_asked_for_later_starts_from_the_trained_weights(tmp_path):
    """The moving average; the reference stays the base model."""
    first = make_trainer()
    base = first.policy.weights.full()
    first.iterate()
    path = checkpoint.save(tmp_path, 1, *state.capture(first))
    second = make_trainer(ema=0.9, kl=0.1)
    state.restore(second, *checkpoint.load(path))
    live, ema, ref = (second.policy.weights.full(name) for name in ("live", "ema", "ref"))
    for name in base:
        assert torch.equal(ema[name], live[name]) and torch.equal(
            live[name], first.policy.weights.full()[name]
        )
        assert torch.equal(ref[name], base[name]) and not torch.equal(ref[name], live[name])


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (PolicyGradient(clip_range=0.2), set()),
        (PolicyGradient(clip_range=0.2, kl=0.1), {"ref"}),
        (NFT(kl=0.0), {"old"}),
        (NFT(), {"old", "ref"}),
        (AWM(kl=0.0), {"old"}),
        (AWM(), {"old", "ref"}),
        (CRD(kl=0.0), {"old"}),
        (CRD(), {"old", "ref"}),
        (Draft(), set()),
        (Draft(kl=0.1), {"ref"}),
    ],
)
def test_the_reference_is_neither_kept_nor_written_where_nothing_looks_at_it(
    objective, expected, tmp_path
):
    toys_scorer = Scorer(
        {"toy": card(differentiable=True)(lambda media, prompts: media.flatten(1).mean(1))}
    )
    trainer = make_trainer(objective=objective)
    trainer.scorer = toys_scorer
    if hasattr(objective, "attach"):
        objective.attach(toys_scorer.differentiable)
    trainer.iterate()
    assert set(trainer.policy.weights.saved) == expected
    path = checkpoint.save(tmp_path, 1, *state.capture(trainer))
    names = {file.stem for file in path.glob("*.safetensors")}
    assert names == {"weights", "optimizer"} | {f"snapshot-{name}" for name in expected}


def test_a_checkpoint_of_the_first_format_is_read(tmp_path):
    """It held every snapshot; one that the run no longer keeps is left alone."""
    trainer = trainer_of("flow")
    trainer.iterate()
    arrays, meta = state.capture(trainer)
    extra = {"snapshot-old": trainer.policy.weights.full()}
    path = checkpoint.save(tmp_path, 1, arrays | extra, meta)
    written = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(written | {"format": "mmrl-checkpoint-1"}))
    second = trainer_of("flow")
    state.restore(second, *checkpoint.load(path))
    same(state.capture(second)[0], arrays)
    assert "old" not in second.policy.weights.saved
    assert written["mmrl"] == __version__
    later = written | {"format": "mmrl-checkpoint-3", "mmrl": "7.1"}
    (path / "state.json").write_text(json.dumps(later))
    with pytest.raises(UserError, match=r"by a newer mmrl \(7.1\), in format 3; .*pip install -U"):
        checkpoint.load(path)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_a_part_is_read_whole_and_block_by_block_whatever_wrote_it(processes, tmp_path):
    """Rows of 4, 1 and 0 dimensions shared out as FSDP2 does; the last processes may have none."""
    whole = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(7.0), "c": torch.tensor(3.0)}
    for rank in range(processes):
        parts = {}
        starts = {}
        for name, tensor in whole.items():
            rows = -(-len(tensor) // processes) if tensor.ndim else 0
            piece = tensor[rank * rows : (rank + 1) * rows] if tensor.ndim else tensor
            if piece.numel() and (tensor.ndim or rank == 0):
                parts[name] = piece
                starts[name] = {"saved_offsets": [rank * rows, 0][: tensor.ndim]}
        if parts:
            save_file(
                parts, tmp_path / f"{rank}.safetensors", {"DCP_SHARDING_INFO": json.dumps(starts)}
            )
    part = tensor_files.Part(sorted(tmp_path.iterdir()))
    assert set(part) == set(whole) and len(part) == 3
    for name, tensor in whole.items():
        assert part.shape(name) == tuple(tensor.shape) and torch.equal(part[name], tensor)
    for first in range(4):
        for rows in range(5 - first):
            block = part.block("a", (first, 1), (rows, 4))
            assert torch.equal(block, whole["a"][first : first + rows, 1:5])


def test_a_resume_reads_every_file_once_to_hash_it(tmp_path, monkeypatch):
    trainer = trainer_of("flow")
    hashed = []
    trainer.iterate()
    path = checkpoint.save(tmp_path / "checkpoints", 1, *state.capture(trainer))
    digest = checkpoint.sha256
    monkeypatch.setattr(checkpoint, "sha256", lambda file: hashed.append(file.name) or digest(file))
    lifecycle._resume(trainer_of("flow"), tmp_path)
    assert sorted(hashed) == sorted(file.name for file in path.glob("*.safetensors"))


def test_capturing_copies_no_weights():
    trainer = trainer_of("flow")
    arrays, _ = state.capture(trainer)
    for name, p in trainer.policy.weights.parameters().items():
        assert arrays["weights"][name].data_ptr() == p.data_ptr()
        assert (
            arrays["snapshot-ema"][name].data_ptr()
            == trainer.policy.weights.saved["ema"][name].data_ptr()
        )
