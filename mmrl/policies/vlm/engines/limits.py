"""Checks prompts against the limits of an engine, or of a model with learned positions, before
sampling, naming the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineLimits:
    """Holds limits on a prompt; None: no limit. ``by``: whose limits they are; ``tokens``: of
    prompt and answer together, which ``tokens_option`` raises, and ``images_option`` those of
    ``images`` and ``videos``."""

    by: str = ""
    tokens: int | None = None
    images: int | None = None
    videos: int | None = None
    tokens_option: str = ""
    images_option: str = ""

    def media(self, images: int, videos: int) -> str | None:
        """Return the error for that many images and clips; None: they fit."""
        for name, count, most in (
            ("images", images, self.images),
            ("videos", videos, self.videos),
        ):
            if most is not None and count > most:
                allowed = f"{most} {name} of a prompt" if most else f"no {name}"
                remedy = (
                    f" ({self.images_option} raises that)" if most and self.images_option else ""
                )
                return f"it has {count} {name}, and {self.by} takes {allowed}{remedy}"
        return None

    def length(self, tokens: int, answer: int) -> str | None:
        """Return the error for a prompt of ``tokens`` and an answer of ``answer``; None: they
        fit."""
        if self.tokens is None or tokens + answer <= self.tokens:
            return None
        raises = f", or raise {self.tokens_option}" if self.tokens_option else ""
        return (
            f"its {tokens} tokens and {answer} of an answer are more than the {self.tokens} that "
            f"{self.by} takes; shorten it, lower policy.vlm.max_new_tokens{raises}"
        )


def of_model(config: Any) -> EngineLimits:
    """Return the limits of the model itself: the number of its learned positions, if it has any."""
    text = config.get_text_config()
    places = getattr(text, "max_position_embeddings", None)
    turns = getattr(text, "rope_parameters", None) or getattr(text, "alibi", False)
    if places is None or turns:
        return EngineLimits()
    return EngineLimits("the model, which has learnt that many positions,", int(places))
