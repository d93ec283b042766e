"""Rewards: ``(media, prompts) -> [B]``, one file each, usable without the trainer; see ``docs/rewards.md``.

Importing this package registers every reward under its name in a configuration; models are loaded when a reward is
constructed, never here.
"""

from rewards.aesthetic import Aesthetic
from rewards.clip_score import ClipScore
from rewards.digits import Digits, DigitsJudge
from rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from rewards.remote import Remote

__all__ = [
    "Aesthetic",
    "ClipScore",
    "Digits",
    "DigitsJudge",
    "Remote",
    "jpeg_compressibility",
    "jpeg_incompressibility",
]
