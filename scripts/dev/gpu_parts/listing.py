"""Lists the parts of gpu_check.py, by importance, with the seconds allowed for each on an H100."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpu_parts import answers, engines, iterations, kernels, prediction, savings, worlds
from gpu_parts.setting import NotInstalled, Report, Setting, free


@dataclass(frozen=True)
class Part:
    """Describes a part. run: returns its results, or yields them incrementally. alone: its process
    cannot be reused."""

    run: Callable[[Setting], Report | Iterator[Report]]
    seconds: int
    alone: bool = False


PARTS = {
    "gap": Part(iterations.gap, 120),
    "attention": Part(kernels.attention, 60),
    "answers": Part(answers.answers, 270),
    "world_of_one": Part(worlds.world_of_one, 120),
    "image": Part(iterations.image, 90),
    "mfu": Part(prediction.mfu, 60),
    "quantized": Part(savings.quantized, 60),
    "sampling": Part(kernels.sampling, 60),
    "sleep": Part(savings.sleep, 40),
    "context_parallel": Part(worlds.context_parallel, 60),
    "tests": Part(iterations.tests, 240),
    "backends": Part(kernels.backends, 40),
    "adamw_8bit": Part(savings.optimizer_8bit, 40),
    "vllm": Part(engines.vllm, 120, alone=True),
    "memory": Part(iterations.memory, 60),
    "compiled": Part(iterations.compiled, 120),
    "video": Part(iterations.video, 90),
    "tiny": Part(iterations.tiny, 60),
}


def run(name: str, seconds: float, setting: Setting) -> Iterator[Report]:
    """Run a part for at most ``seconds``, and yield its results so far; a missing package is not a
    failure."""
    free()
    alone = {"alone": True} if PARTS[name].alone else {}
    try:
        found = PARTS[name].run(replace(setting, seconds=seconds))
        for report in [found] if isinstance(found, dict) else found:
            yield report | alone
    except NotInstalled as missing:
        yield {"not installed": str(missing)} | alone


def described(name: str) -> Any:
    """Return the sentence that describes a part."""
    return PARTS[name].run.__doc__ or ""
