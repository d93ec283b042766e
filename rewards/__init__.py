"""Rewards map ``(media, prompts) -> [B]``, usable without the trainer; see ``docs/rewards.md``.

Every reward can be imported under its name in a configuration and under its class name: ``from
rewards import clip_score`` and ``from rewards import ClipScore`` are the same class. The modules
that register them are imported on first use; models are loaded when a reward is constructed.
"""

import importlib
from typing import Any

MODULES = (
    "answers.detection",
    "answers.grounding",
    "answers.masks",
    "answers.maths",
    "answers.maze",
    "answers.pointing",
    "answers.reference",
    "answers.routed",
    "answers.shaping",
    "answers.spans",
    "answers.steps",
    "answers.svg",
    "answers.tables",
    "answers.words",
    "answers.writing",
    "combined.appeals",
    "combined.by_task",
    "combined.calibrate",
    "combined.compose",
    "combined.diversity",
    "combined.hierarchical",
    "combined.votes",
    "combined.weights",
    "heads.aesthetic",
    "heads.fitted_head",
    "images.clip_iqa",
    "images.clip_score",
    "images.digits",
    "images.face_identity",
    "images.geneval",
    "images.hpsv2",
    "images.hpsv3",
    "images.image_reward",
    "images.iqa",
    "images.jpeg",
    "images.mps",
    "images.ocr",
    "images.ocr_layout",
    "images.pickscore",
    "images.picture_statistics",
    "images.preservation",
    "images.safety",
    "images.similarity",
    "images.vqa",
    "judges.checklist",
    "judges.edit",
    "judges.listener",
    "judges.local_vlm",
    "judges.pairwise",
    "judges.points",
    "judges.yes_no",
    "servers.chat_server",
    "servers.remote",
    "videos.action",
    "videos.av_align",
    "videos.clap",
    "videos.consistency",
    "videos.digits_motion",
    "videos.motion",
    "videos.pe_av",
    "videos.per_frame",
    "videos.video_align",
)


def _offered() -> dict[str, Any]:
    """Import every reward and return them by both their names."""
    from mmrl.core.registry import REWARDS

    for module in MODULES:
        importlib.import_module(f"{__name__}.{module}")
    ours = {n: e for n, e in REWARDS.items() if e.__module__.partition(".")[0] == __name__}
    return {entry.__name__: entry for entry in ours.values()} | ours


def __getattr__(name: str) -> Any:
    names = {} if name.startswith("_") else _offered()
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    globals().update(names)
    return names[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_offered()})
