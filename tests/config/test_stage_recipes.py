"""Recipes of several stages: every stage is checked, and all are trained on a tiny model."""

import json
from pathlib import Path

import yaml

from mmrl import config
from mmrl.config.stages import misfits
from mmrl.core.registry import DATA, OBJECTIVES
from mmrl.experiment import lifecycle
from mmrl.experiment.build import check_needs, read
from tests.config.test_recipes import few
from tests.fixtures import tiny_vlms
from tests.fixtures.image_tokens import tiny_janus
from tests.policies.vlm.test_vlm_policy import policy_of

ROOT = Path(__file__).resolve().parents[2] / "configs"
STAGED = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.yaml")
    if "\nstages:" in path.read_text() and path.parent.name != "real"  # a script writes its rows
)
EACH = [(name, stage) for name in STAGED for stage in config.load_stages(ROOT / name)[1]]
TINY = [
    "policy.dtype=float32",
    "policy.lora=4",
    "train.prompts_per_iteration=2",
    "train.micro_batch_size=null",
    "train.iterations=2",
    "train.evaluate_every=1",
    "optimizer={adamw: {lr: 1.0e-2}}",
    "train.precision=fp32",
    "train.gradient_checkpointing=false",
    "train.save_every=0",
    "evaluate={prompts: 2, num_samples: 1}",
    "log.tensorboard=false",
]
THOUGHT = {"thought": "12 it is", "answer": "12"}


def test_every_stage_is_valid_and_its_rows_are_as_it_reads_them(subtests):
    assert {"vlm/ton.yaml", "vlm/vision_r1.yaml", "janus/reasongen_r1.yaml"} <= set(STAGED)
    policy = policy_of()
    for name, stage in EACH:
        with subtests.test(name, stage=stage):
            loaded = read(ROOT / name, [f"stage={stage}", *few(name)])
            source = loaded.build("data", DATA)
            check_needs(loaded, source, {})
            objective = loaded.build("objective", OBJECTIVES)
            if objective.requires.supervised and name.startswith("vlm"):
                objective.check(policy, [*source.train, *source.held_out])


def test_every_stage_can_follow_the_one_before(subtests):
    for name in STAGED:
        with subtests.test(name):
            stages = config.load_stages(ROOT / name)[1]
            assert len(stages) > 1 and max(map(len, (ROOT / name).read_text().splitlines())) <= 120
            plain = {s: config.load(ROOT / name, [f"stage={s}"]).plain for s in stages}
            assert not list(misfits(plain))


def rows_at(file, picture):
    lines = [{"text": f"question {i}?", "image": str(picture), **THOUGHT} for i in range(6)]
    file.write_text("\n".join(map(json.dumps, lines)))


def held_out_losses(part):
    lines = [json.loads(line) for line in (part / "metrics.jsonl").read_text().splitlines()]
    assert lifecycle.is_finished(part) and len(lines) == 2
    return [line.get("eval/loss") for line in lines]


def files(section):
    """Every path in data sections, also those of stages."""
    if not isinstance(section, dict):
        return []
    inner = [file for value in section.values() for file in files(value)]
    return [*inner, section["path"]] if str(section.get("path")).endswith("jsonl") else inner


def test_all_stages_learn_on_a_tiny_model(tmp_path, monkeypatch):
    name = "vlm/ton.yaml"
    picture = tmp_path / "picture.png"
    tiny_vlms.image(70, 60).save(picture)
    plain, stages = config.load_stages(ROOT / name)
    for file in files(plain):
        rows_at(tmp_path / file, picture)
    file = tmp_path / "run.yaml"
    file.write_text((ROOT / name).read_text())
    monkeypatch.chdir(tmp_path)
    overrides = [*TINY, f"policy.path={tiny_vlms.folder('qwen2_5_vl')}", "policy.max_new_tokens=48"]
    for stage in stages:
        size = 2 if config.load(file, [f"stage={stage}"])["reward"] else 1
        overrides.append(f"stages.{stage}.train.group_size={size}")
        overrides.append(f"stages.{stage}.train.train_batch_size={2 * size}")
    run = lifecycle.train(file, [*overrides, f"run={tmp_path / 'run'}"])
    losses = [held_out_losses(run / f"{n}-{stage}") for n, stage in enumerate(stages, start=1)]
    assert losses[0][1] < losses[0][0] and losses[-1] == [None, None]


def test_reasongen_learns_both_stages_on_a_tiny_janus(tmp_path):
    folder = tiny_janus(tmp_path / "janus", 3, embeddings=0.2)
    (tmp_path / "prompts.txt").write_text("a red seven\na blue two\na green nine")
    tiny_vlms.image(8, 8).save(tmp_path / "a.png")
    rows = [{"text": f"digit {i}", "plan": "red", "answer": "a.png"} for i in range(4)]
    (tmp_path / "rationales.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = (ROOT / "janus/reasongen_r1.yaml").read_text()
    whole = yaml.safe_load(text.replace("../sd3/prompts.txt", "prompts.txt"))
    whole["reward"] = {"tests.fixtures.demonstrations:reddish": 1.0}
    file = tmp_path / "run.yaml"
    for key, size in (("sft", 1), ("rl", 4)):
        whole["stages"][key]["train"] |= {"group_size": size, "train_batch_size": 2 * size}
    file.write_text(yaml.safe_dump(whole, sort_keys=False))
    plan = "policy.plan={max_new_tokens: 6, turn: same, instruction: '{prompt}'}"
    run = lifecycle.train(file, [*TINY, f"policy.path={folder}", plan, f"run={tmp_path / 'run'}"])
    first, second = held_out_losses(run / "1-sft")
    assert second < first and held_out_losses(run / "2-rl") == [None, None]
