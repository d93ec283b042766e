"""The part of gpu_check.py that compares the estimates of ``mmrl train --dry-run --devices`` with a
run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_iteration as bench
import random_models as models
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpu_parts.setting import Report, Setting, peak_of, trainer_of
from mmrl.apps.dry_run.estimate import Estimate, estimate, measure
from mmrl.core.cards import CARDS, Devices, card_of
from mmrl.core.registry import load_built_in
from mmrl.train.trainer import Trainer

WORDS = 333  # tokens of a prompt of Stable Diffusion 3, as the dry run counts them
STAND_IN = "H100"  # card of the prediction if this one is not in the table


def mfu(setting: Setting) -> Report:
    """Compare an iteration of the size of ``image`` with the dry run's prediction for this card:
    peak memory of its update (weights included), operations and seconds, each with predicted /
    measured, and the share of the card's published arithmetic that is used (MFU)."""
    load_built_in()
    scale = replace(setting.scale, tokens=WORDS)
    policy = models.sd3(scale)
    work = setting.work(copies=max(2, scale.copies // 2))
    trainer = trainer_of(policy, work)
    with FlopCounterMode(display=False) as counter:
        metrics = trainer.iterate()
    kind = card_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    card = kind or CARDS[STAND_IN]
    guess = predicted(policy, scale, work, Devices(1, card))
    seconds = min(setting.times(trainer.iterate))
    peak = peak_of(trainer.iterate)
    if not torch.cuda.is_available():  # there only new memory is counted
        peak += _held(policy.net) + _held(policy.vae) + optimizer_bytes(trainer)
    operations = counter.get_total_flops()
    pairs = {
        "peak bytes": (guess.moments["update"], float(peak)),
        "operations": (guess.flops, float(operations)),
        "seconds": (guess.whole, seconds),
        "MFU": (guess.mfu, operations / seconds / card.half),
    }
    return {
        "card": card.name if kind else f"none of the table: predicted for {card.name}",
        "ratio/max_deviation": metrics["ratio/max_deviation"],
        **{
            name: {"predicted": guessed, "measured": found, "predicted/measured": guessed / found}
            for name, (guessed, found) in pairs.items()
        },
        "predicted bytes of the update": guess.memory,
    }


def _held(net: torch.nn.Module) -> int:
    """Count the bytes of a network's parameters and buffers."""
    return sum(x.nbytes for x in (*net.parameters(), *net.buffers()))


def optimizer_bytes(trainer: Trainer) -> int:
    """Count the bytes of the optimizer's state."""
    states = trainer.update.optimizer.state.values()
    return sum(x.nbytes for state in states for x in state.values() if isinstance(x, torch.Tensor))


def predicted(policy: Any, scale: models.Scale, work: bench.Work, devices: Devices) -> Estimate:
    """Estimate the iteration from a folder with the model's config files, as the command does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save(policy, folder / "model")
        (folder / "prompts.txt").write_text("".join(f"{p['text']}\n" for p in bench.PROMPTS))
        file = folder / "run.yaml"
        file.write_text(json.dumps(_configuration(folder, policy, scale, work)))  # JSON is YAML
        return estimate(measure(file, [], devices.count), devices, sharded=False)


def _save(policy: Any, folder: Path) -> None:
    """Write the config files of the model, without its weights."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    policy.net.save_config(folder / "transformer")
    policy.vae.save_config(folder / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_config(folder / "scheduler")
    parts = {
        "_class_name": "StableDiffusion3Pipeline",
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(parts))


def _configuration(
    folder: Path, policy: Any, scale: models.Scale, work: bench.Work
) -> dict[str, Any]:
    """Describe the run of ``bench.mmrl_trainer`` as its configuration."""
    model = {
        "path": str(folder / "model"),
        "size": scale.size,
        "steps": policy.steps,
        "guidance_scale": policy.guidance_scale,
        "dtype": "bfloat16",
        "lora": 32,
        "text_encoder_placement": "cpu",
    }
    objective = {
        "clip_range": bench.CLIP,
        "advantage_clip": bench.ADVANTAGE_CLIP,
        "timestep_fraction": work.fraction,
    }
    return {
        "policy": {"sd3": model},
        "data": {"prompts": {"path": str(folder / "prompts.txt")}},
        "reward": "jpeg_incompressibility",
        "advantage": "flow_grpo",
        "objective": {"policy_gradient": objective},
        "optimizer": {"adamw": {"lr": work.lr}},
        "train": {
            "prompts_per_iteration": work.prompts,
            "group_size": work.copies,
            "train_batch_size": work.rows // work.updates,
            "micro_batch_size": work.micro_batch,
            "precision": work.precision,
            "iterations": 1,
        },
    }
