"""Of two processes of a training one is killed: the other saves and says how to go on."""

import json
import signal
from pathlib import Path

import pytest

from mmrl.experiment import lifecycle
from tests.core.test_peers import free_port
from tests.fixtures import demonstrations, warm

CONFIG = f"""
policy: {{module: {{net: "{demonstrations.MODULE["net"]}", shape: [3, 4, 4], steps: 3}}}}
data: {{prompts: {{path: prompts.jsonl}}}}
reward: {{"judge.py:bright": 1.0}}
advantage: grpo
objective: {{policy_gradient: {{clip_range: 0.2}}}}
optimizer: {{adamw: {{lr: 1e-3}}}}
train: {{prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 9}}
run: mine
"""
JUDGE = """
import os, signal

calls = []


def bright(media, prompts):
    calls.append(len(media))
    if os.environ.get("RANK") == os.environ.get("VICTIM", "none") and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return media.flatten(1).mean(1)
"""


@pytest.mark.slow
def test_who_is_left_saves_and_says_how_to_go_on(tmp_path, monkeypatch):
    """Process 0 dies, where processes meet; tests/core/test_peers.py kills the other."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(CONFIG)
    Path("judge.py").write_text(JUDGE)
    rows = [{"text": "a", "label": i % 5} for i in range(8)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["-m", "mmrl", "train", "mine.yaml"]
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dead, left = [
        warm.start(words, tmp_path, **sizes, **place, VICTIM="0", RANK=rank, LOCAL_RANK=rank)
        for rank in "01"
    ]
    assert (dead.wait(), left.wait()) == (-signal.SIGKILL, 2), left.stderr
    assert left.stderr.count("error:") == 1 and "Traceback" not in left.stderr
    assert "error: process 0 of 2 has died" in left.stderr
    assert "saved mine/checkpoints/iteration-000002; go on with: mmrl train --resume mine" in (
        left.stderr
    )
    lifecycle.train(Path("mine"), ["train.iterations=3"], resume=True)
    assert Path("mine/checkpoints/iteration-000003").is_dir()
