"""The part of gpu_check.py on vision-language models: sampling answers, and an update."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bench_vlm
import measuring
import torch
import vlm_models

from gpu_parts.setting import Report, Setting
from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.objectives import PolicyGradient
from mmrl.policies.vlm.policy import VLM
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from samplers.noise import Rng


def answers(setting: Setting) -> Iterator[Report]:
    """Sample with a Qwen2.5-VL of 3B and random weights, LoRA of rank 64 on its language model,
    bf16, 8 prompts of a picture of 504 x 504 each, 8 answers to a prompt, none of which ends early:
    milliseconds of a token (the slope between a quarter of the tokens and all), tokens a second of
    the sampling; then iterations: the first ratio, seconds, tokens a second, peak memory."""
    tokens = 16 if setting.small else 128
    work = bench_vlm.Work(
        prompts=2 if setting.small else 8,
        copies=2 if setting.small else 8,
        image_tokens=16 if setting.small else 324,
        tokens=tokens,
        micro_batch=4 if setting.small else 8,
        precision="bf16",
    )
    clock = measuring.Clock()
    trainer = _trainer(work, setting)
    report: Report = {"seconds to build and load": clock.seconds()}
    yield report
    prompts = trainer.prompts[: work.prompts]

    def sample(count: int) -> None:
        trainer.policy.set_max_new_tokens(count)
        with torch.no_grad():
            trainer.policy.rollout(prompts, work.copies, Rng.of(0))

    first = measuring.seconds(partial(sample, tokens // 8))  # warm-up: allocates, and loads kernels
    report["seconds of the first tokens"] = first
    yield report
    few, whole = (measuring.seconds(partial(sample, count)) for count in (tokens // 4, tokens))
    report |= {
        "rows": work.rows,
        "tokens of an answer": tokens,
        "ms of a token": 1000 * (whole - few) / (tokens - tokens // 4),
        "sampled tokens a second": work.rows * tokens / whole,
    }
    yield report
    for which in ("first iteration", "second iteration"):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        clock = measuring.Clock()
        metrics = trainer.iterate()
        seconds = clock.seconds()
        report[which] = {
            "ratio/max_deviation": metrics["ratio/max_deviation"],
            "grad_norm": metrics["grad_norm"],
            "seconds": seconds,
            "tokens a second": work.rows * tokens / seconds,
        }
        if torch.cuda.is_available():
            report[which]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        yield report


def _trainer(work: bench_vlm.Work, setting: Setting) -> Any:
    memory = Path("/dev/shm")  # 8 GB, which a disk takes a minute to write
    size = "tiny" if setting.small else "3b"
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = str(vlm_models.build(size, Path(folder)))
        policy = VLM(path, max_new_tokens=work.tokens, dtype="bfloat16", lora=64)
    bench_vlm.endless(policy)
    options = TrainOptions(
        prompts_per_iteration=work.prompts,
        group_size=work.copies,
        train_batch_size=work.rows,
        micro_batch_size=work.micro_batch,
        iterations=2,
        precision=work.precision,
        gradient_checkpointing=True,
        logprob_tolerance=None,
    )
    return Trainer(
        policy,
        bench_vlm.prompts(work, 2),
        Scorer({"share": lambda media, prompts: bench_vlm.share_of_a(media)}),
        advantages.grpo,
        PolicyGradient(clip_range=0.2),
        partial(adamw, lr=1e-5),
        options,
    )
