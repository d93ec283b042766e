"""Checks the pictures of all prompts before sampling starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmrl.core.broken_rows import BrokenRows
from mmrl.core.media.scan import scan
from mmrl.core.types import Prompt
from mmrl.policies.vlm.media import images_of, where


def refuse_broken(prompts: Sequence[Prompt], unfit: Callable[[Prompt], str | None]) -> None:
    """Raise BrokenRows for prompts that are ``unfit`` (why, None: they are not), and for those with
    a picture that cannot be opened: all of them at once. Of files headers are read."""
    pictures = [images_of(prompt) for prompt in prompts]
    findings = iter(scan([source for several in pictures for source in several]))
    problems = {}
    for place, (prompt, several) in enumerate(zip(prompts, pictures)):
        looked = [(source, next(findings).problem) for source in several]
        broken = [f"{source}: {why}" for source, why in looked if why]
        if why := unfit(prompt) or next(iter(broken), None):
            problems[place] = f"{where(prompt)}: {why}"
    if problems:
        raise BrokenRows(problems, len(prompts))
