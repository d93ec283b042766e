"""Lists what a family of policies can do, for checks before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Medium = Literal["image", "video", "text"]
# "mixed": tokens and steps of a picture in one sample
Decisions = Literal["gaussian", "categorical", "mixed"]


@dataclass(frozen=True)
class Capabilities:
    """States what a family of policies can do; the configuration is checked against it."""

    # what a decision is drawn from; objectives that need the one refuse the other
    decisions: Decisions
    # what ``decode`` returns; None: unknown, then no reward is refused for it
    makes: Medium | None = None
    sound: bool = False  # its videos may have one, ``mmrl.core.sound``
    one_pass: bool = True  # one forward pass scores all tokens of an answer
    remaskable: bool = False  # ``at`` hides any of a finished sample's tokens again
    replay: bool = False  # ``recall`` shows it answers of earlier iterations
    demonstrations: bool = False  # ``demonstrate`` takes answers that somebody else wrote
    ground_truth: bool = False  # a ground truth may take the place of one of a group
    drafts: bool = False  # a rollout may begin with what is kept of earlier answers
    max_new_tokens: bool = False  # ``set_max_new_tokens`` changes how long answers may be
