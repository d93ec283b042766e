"""What a resume may change, what it warns of, and what it refuses."""

import json
from pathlib import Path

import pytest
import yaml

from mmrl import config
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.experiment import changes, checkpoint, lifecycle
from scripts.dev.soak_parts import killing

load_built_in()
PLAIN = {
    "policy": {"sd3": {"path": "world:digits/sd3", "steps": 8, "noise_level": 0.7}},
    "data": "digits",
    "reward": {"jpeg_compressibility": 1.0},
    "objective": {"policy_gradient": {"clip_range": 1e-4}},
    "advantage": "dance_grpo",
    "optimizer": {"adamw": {"lr": 1e-3}},
    "train": {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 8, "iterations": 10},
}


def loaded(folder, plain, *overrides):
    file = folder / "plain.yaml"
    file.write_text(yaml.safe_dump(plain))
    return config.load(file, overrides)


def effects(folder, *overrides, plain=PLAIN):
    before = loaded(folder, plain)
    return {
        ".".join(change.path): change.effect
        for change in changes.changes(before, loaded(folder, plain, *overrides))
    }


def test_the_table_of_changes(tmp_path, subtests):
    for override, path, effect in [
        ("train.iterations=20", "train.iterations", "free"),
        ("train.micro_batch_size=4", "train.micro_batch_size", "free"),
        ("policy.sd3.fixed_batch_rows=4", "policy.sd3.fixed_batch_rows", "free"),
        ("optimizer.adamw.lr=1e-4", "optimizer.adamw.lr", "warned"),
        ("policy.sd3.steps=9", "policy.sd3.steps", "warned"),
        ("reward.jpeg_compressibility=2", "reward.jpeg_compressibility.weight", "warned"),
        ("train.seed=1", "train.seed", "refused"),
        ("train.ema=0.9", "train.ema", "refused"),
        ("policy.sd3.path=./other", "policy.sd3.path", "refused"),
        ("data={digits: {kind: pairs}}", "data.digits.kind", "refused"),
        ("objective=dgpo", "objective", "refused"),
        ("objective.policy_gradient.kl=0.1", "objective.policy_gradient.kl", "refused"),
        ("advantage=grpo", "advantage.group.eps", "refused"),
        ("reward={jpeg_incompressibility: 1.0}", "reward", "refused"),
    ]:
        with subtests.test(override=override, path=path):
            assert effects(tmp_path, override) == {path: effect}
    cosine = PLAIN | {"train": PLAIN["train"] | {"lr_schedule": "cosine"}}  # ends later: another
    assert effects(tmp_path, "train.iterations=20", plain=cosine) == {"train.iterations": "warned"}


def test_what_is_written_otherwise_and_means_the_same_is_no_change(tmp_path, subtests):
    for override in [
        "advantage={group: {ddof: 1, eps: 1e-8}}",
        "reward=[jpeg_compressibility]",
        "reward.jpeg_compressibility={weight: 1.0, quality: 95}",
    ]:
        with subtests.test(override=override):
            assert effects(tmp_path, override) == {}


def test_the_refusal_is_one_sentence_with_the_remedies(tmp_path):
    before = changes.text_of(loaded(tmp_path, PLAIN))
    now = loaded(tmp_path, PLAIN, "train.seed=1", "objective=dgpo", "optimizer.adamw.lr=1e-4")
    with pytest.raises(UserError) as error:
        changes.admit(before, now, Path("runs/a"))
    assert "train.seed was 0 and is now 1" in str(error.value)
    assert "objective was policy_gradient and is now dgpo" in str(error.value)
    assert "--accept-changes" in str(error.value) and "\n" not in str(error.value)
    warnings = changes.admit(before, now, Path("runs/a"), accept=True)
    assert len(warnings) == 3 and any("lr was 0.001 and is now 0.0001" in x for x in warnings)


@pytest.fixture
def toy(tmp_path):
    file = killing.configuration(tmp_path, "ToyFlow", 2)
    return lifecycle.train(file, [f"run={tmp_path / 'run'}"])


@pytest.mark.slow
def test_an_edited_configuration_is_seen_by_a_resume(toy):
    file = toy / "config.yaml"
    plain = yaml.safe_load(file.read_text())
    plain["train"]["seed"] = 5
    file.write_text(yaml.safe_dump(plain))
    with pytest.raises(UserError, match="train.seed was 0 and is now 5"):
        lifecycle.train(toy, ["train.iterations=3"], resume=True)
    lifecycle.train(toy, ["train.iterations=3"], resume=True, accept=True)
    assert "changed since the checkpoint" not in (toy / "events.jsonl").read_text()
    prompts = toy.parent / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("p15", "p16"))
    lifecycle.train(toy, ["train.iterations=4"], resume=True)  # accepted once, it is the run's
    assert "data prompts.jsonl: 16 rows, other ones" in (toy / "events.jsonl").read_text()
    lines = [json.loads(x) for x in (toy / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_state_that_does_not_fit_is_a_sentence(toy):
    """Of a state.json without its keys, and of an advantage that has a memory only now."""
    path = checkpoint.latest(toy / "checkpoints") / "state.json"
    whole = json.loads(path.read_text())
    with pytest.raises(UserError, match="no memory of the advantage|does not have the state"):
        lifecycle.train(toy, ["advantage={running: {base: {ddpo: {}}}}"], resume=True, accept=True)
    meta = {key: value for key, value in whole["meta"].items() if key != "step"}
    for changed, sentence in (
        (whole | {"meta": meta}, "does not have the state.*step"),
        ({"format": whole["format"], "files": whole["files"]}, "lacks its files or its state"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=sentence):
            lifecycle.train(toy, [], resume=True)
