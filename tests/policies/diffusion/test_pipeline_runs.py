"""Whole runs of ``policy: pipeline`` on what people brought: pictures, and pairs of them."""

import json

import numpy as np
import pytest
import yaml
from PIL import Image

from mmrl.experiment.build import Session, read
from mmrl.experiment.lifecycle import train
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers

LEARNT = {
    "sft": {
        "data": {"captions": {"path": "pictures.jsonl", "held_out": 0.4}},
        "objective": {"sft": {"num_noise_draws": 2}},
    },
    "preferences": {
        "data": {"preferences": {"path": "pairs.jsonl", "held_out": 0.4}},
        "objective": {"diffusion_dpo": {"beta": 100}},
    },
}
TRAIN = {"prompts_per_iteration": 2, "iterations": 1, "evaluate_every": 1, "micro_batch_size": 2}


@pytest.fixture
def written(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for i in range(8):
        pixels = draw.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    rows = [{"text": f"a red {i}", "file_name": f"{i}.png"} for i in range(6)]
    pairs = [
        {"prompt": row["text"], "chosen": row["file_name"], "rejected": f"{7 - i}.png"}
        for i, row in enumerate(rows)
    ]
    for name, lines in (("pictures", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)

    def write(kind):
        size = {"height": 16, "width": 16}
        place = str(tiny_diffusers.folder("sd"))
        policy = {"pipeline": {"path": place, "call": size, "steps": 2, "lora": 2, "check": False}}
        paired = kind == "preferences"
        sizes = {"group_size": 2, "train_batch_size": 4} if paired else {"train_batch_size": 2}
        options = TRAIN | {"group_size": 1} | sizes | ({"preferences": {}} if paired else {})
        whole = {"policy": policy, "train": options, "log": {"tensorboard": False}}
        file = tmp_path / f"{kind}.yaml"
        file.write_text(yaml.safe_dump(whole | LEARNT[kind]))
        return file

    return write


@pytest.mark.parametrize("kind", LEARNT)
def test_a_pipeline_learns_from_pictures_of_others(kind, written, tmp_path):
    file = written(kind)
    train(file, [f"run={tmp_path / 'run'}"])
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["grad_norm"] > 0 and logged["eval/loss"] > 0
    if kind == "preferences":  # sft resumes in test_supervised.py
        two = read(file, ["train.iterations=2"])
        resumes(lambda: Session.of(two).trainer(), tmp_path / "saved")
