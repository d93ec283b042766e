"""Run by test_processes.py, alone and under ``accelerate launch``: a few iterations of every toy, results to a file."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from mmrl import checkpoint, distributed, state
from mmrl.advantages import DDPO
from mmrl.evaluation import evaluate
from mmrl.options import EvaluateOptions
from mmrl.scoring import Scorer

from . import toys
from .test_trainer import make_trainer


def partly_missing(media, prompts):
    """The samples of one label that are nearest to the goal cannot be scored; which does not depend on their order."""
    found = toys.reward(media, prompts).double()
    odd = torch.tensor([p["label"] == 1 for p in prompts])
    return torch.where(odd & (found > found.new_tensor(0.7)), torch.nan, found)


def results(family):
    trainer = make_trainer(
        family, policy=toys.make(family, double=True), kl=0.1, ema=0.9, advantage=DDPO(), reward=partly_missing,
        batch_size=16, micro_batch=5, epochs=2, reduction="row", max_failures=1.0,
    )  # fmt: skip
    found = {}
    for i in range(3):
        rollout, rewards = trainer.collect()
        columns = {
            "sample": rollout.sample,
            "reward": rewards["toy"],
            "advantage": rollout.advantage,
            "row": rollout.row,
        }
        found |= {f"{i}/{name}": distributed.all_gather_rows(value.contiguous()) for name, value in columns.items()}
        metrics = trainer.iterate()
        numbers = [metrics[k] for k in ("kl", "clip_fraction", "grad_norm", "reward/mean", "samples/excluded", "loss")]
        found[f"{i}/metrics"] = torch.tensor(numbers, dtype=torch.float64)
    held_out = evaluate(trainer.policy, toys.prompts(7), Scorer({"toy": toys.reward}), EvaluateOptions())["toy"]
    found["evaluation"] = torch.tensor([held_out.mean, held_out.low, held_out.n], dtype=torch.float64)
    arrays, _ = state.capture(trainer)
    return found | {f"{part}/{name}": v for part, tensors in arrays.items() for name, v in tensors.items()}, trainer


def main(target):
    torch.set_num_threads(1)
    for family in toys.POLICIES:
        found, trainer = results(family)
        if trainer.device.main:
            save_file(
                {name: value.contiguous().clone() for name, value in found.items()},
                Path(target) / f"{family}.safetensors",
            )
        trainer.device.wait()
    arrays, meta = state.capture(trainer)  # a checkpoint of many processes is one, and restores on any number
    if trainer.device.main:
        checkpoint.save(Path(target), 3, arrays, meta)
    trainer.device.wait()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
