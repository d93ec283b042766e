"""The script that measures what the grouped core costs, on work that costs nothing."""

import sys
from pathlib import Path

import torch

from mmrl.core.registry import load_built_in

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_core

from tests.fixtures.records import make_rollout
from tests.train.test_trainer import make_trainer

load_built_in()


def test_a_part_inside_another_counts_once():
    parts = bench_core.Parts()

    class Work:
        def outer(self):
            return self.inner() + 1

        def inner(self):
            return sum(range(100_000))

    work = Work()
    parts.watch(work, "inner", "inside")
    parts.watch(work, "outer", "all")
    assert work.outer() == work.inner() + 1
    assert set(parts.seconds) == {"all", "inside"} and not parts.inside


def test_what_is_not_the_cores_is_watched():
    trainer = make_trainer("flow", train_batch_size=64, prompts_per_iteration=8)
    plain = torch.Tensor.backward, torch.autograd.backward
    try:
        parts = bench_core.watched(trainer)
        trainer.iterate()
    finally:
        torch.Tensor.backward, torch.autograd.backward = plain
    assert set(parts.seconds) == {"sampling", "network", "rewards", "gradient", "optimizer"}


def test_every_surrogate_and_most_advantages_are_measured():
    torch.manual_seed(0)
    group = torch.arange(4).repeat_interleave(4)
    rows = make_rollout(
        group=group,
        row_id=torch.arange(16),
        sample=torch.zeros(16, 3),
        logprob=torch.randn(16, 3),
        mask=torch.ones(16, 3, dtype=torch.bool),
        advantage=torch.randn(16, 1),
    )
    surrogates = bench_core.of_surrogates(rows, 1)
    assert set(surrogates) == set(bench_core.SURROGATES)
    one = {
        "seconds": 2.0,
        "core": 0.01,
        "parts": {"sampling": 1.5},
        "surrogates": surrogates,
        "advantages": {"grpo": 0.001, "branch": "not on these rows: no tree"},
    }
    about = {"cpu": "a", "commit": "b", "time": "c"}
    page = bench_core.page({"machine": about, "workloads": {"flow": one}})
    assert "| flow | 2.0 | 1.50 | 0.00 | 0.00 | 0.00 | 0.00 | 0.01 | 0.50 |" in page
    assert "| `branch` | - |" in page and "| `grpo` | 1.00 |" in page
