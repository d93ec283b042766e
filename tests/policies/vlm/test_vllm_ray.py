"""vLLM inside a rollout worker of Ray: the real engine on another process than the one that trains,
which sends it weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fixtures import vllm_models

pytestmark = vllm_models.marks
ROOT = Path(__file__).resolve().parents[3]
EARLY = """
import torch

def early(texts, prompts):
    share = [sum(c in 'abcdefghijklm' for c in text) / max(len(text), 1) for text in texts]
    return torch.tensor(share)
"""


def test_a_rollout_worker_samples_by_vllm_with_the_trainers_weights(tmp_path):
    pytest.importorskip("ray", reason="Ray is not in this environment: pip install ray")
    engine = {"enforce_eager": True, "max_model_len": 1024, "gpu_memory_utilization": 0.1}
    plain = {
        "policy": {
            "vlm": {
                "path": str(vllm_models.folder()),
                "engine": "vllm",
                "max_new_tokens": 8,
                "vllm": engine,
            }
        },
        "data": {"prompts": {"path": "prompts.jsonl", "held_out": 0.2}},
        "reward": {"judge.py:early": 1.0},
        "objective": {"policy_gradient": {"importance_sampling": {"mode": "truncate", "cap": 2.0}}},
        "optimizer": {"adamw": {"lr": 3e-3}},
        "train": {
            "prompts_per_iteration": 4,
            "group_size": 8,
            "train_batch_size": 32,
            "iterations": 8,
        },
        "ray": {
            "rollout_workers": 1,
            "cpus_per_trainer": 0.5,
            "cpus_per_rollout_worker": 0.5,
            "timeout": 300,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(plain))
    (tmp_path / "judge.py").write_text(EARLY)
    words = "cat dog bird seven two red blue one".split()
    lines = [json.dumps({"text": f"say a {word}"}) for word in words]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mmrl", "train", "run.yaml", "--engine", "ray", "run=run"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    # weights that arrive late or not at all would show in both
    assert max(abs(line["importance"] - 1) for line in metrics) < 1e-4
    assert metrics[-1]["reward/mean"] > metrics[0]["reward/mean"] + 0.5
