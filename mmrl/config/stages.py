"""Reads ``stages``: several trainings in one configuration, each starting from the weights of the
previous one.

Everything outside ``stages`` applies to all of them. A stage's own values take precedence: options
of ``train``, ``evaluate``, ``log`` and ``alarms`` one by one, those of a plug-in one by one if the
stage names the same plug-in, and other sections as a whole.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.config import effects
from mmrl.config.overrides import PLUGGED, SECTIONS
from mmrl.config.values import Place, show
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import POLICIES

Marks = dict[tuple[Any, ...], str]
OPTIONS = ("train", "evaluate", "log", "alarms")
OF_ALL = ("stages", "stage", "start", "run", "plugins")  # belong to the whole configuration
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def names(plain: Mapping[Any, Any], marks: Marks) -> list[str]:
    """List the stages of a configuration in order, if any. UserError if they are malformed."""
    stages = plain.get("stages")
    if stages is None:
        return []
    place = Place(("stages",), marks)
    if not isinstance(stages, Mapping) or not stages:
        raise UserError(
            place.say(
                f"expected {{name: {{section: ...}}}}, such as {{sft: {{objective: sft}}, grpo: "
                f"{{advantage: grpo}}}}, got {show(stages)}"
            )
        )
    for name, sections in stages.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(
                (place / name).say("a stage's name is of letters, digits, - and _: a folder has it")
            )
        if not isinstance(sections, Mapping):
            raise UserError((place / name).say(f"expected sections, got {show(sections)}"))
        for section in sections:
            if section not in SECTIONS or section in OF_ALL:
                allowed = [known for known in SECTIONS if known not in OF_ALL]
                raise UserError(
                    (place / name / section).say(
                        f"is no section of a stage; {suggest(str(section), allowed)}"
                    )
                )
    return list(stages)


def narrowed(plain: Mapping[Any, Any], marks: Marks, name: str) -> tuple[dict[Any, Any], Marks]:
    """Return the configuration of one stage, and where its values were written."""
    known = names(plain, marks)
    if name not in known:
        raise UserError(f"stage={name}: no such stage; {suggest(name, known)}")
    shared = {key: copy.deepcopy(value) for key, value in plain.items() if key not in OF_ALL[:2]}
    for section, value in plain["stages"][name].items():
        shared[section] = _merged(section, shared.get(section), copy.deepcopy(value))
    inner = ("stages", name)
    stage_marks = {
        keys[2:]: mark for keys, mark in marks.items() if keys[:2] == inner and len(keys) > 2
    }
    outer = {keys: mark for keys, mark in marks.items() if not keys or keys[0] != "stages"}
    return shared, outer | stage_marks


def _merged(section: str, outer: Any, inner: Any) -> Any:
    if section in OPTIONS and isinstance(outer, Mapping) and isinstance(inner, Mapping):
        return {**outer, **inner}
    if section not in PLUGGED:
        return inner
    shared = _named(outer)
    stage = _named(inner)
    if shared is None or stage is None or shared[0] != stage[0]:
        return inner
    return {stage[0]: {**shared[1], **stage[1]}}


def _named(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return name and options of what looks like a plug-in; else None."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, options),) = value.items()
        if options is None or isinstance(options, Mapping):
            return name, dict(options or {})
    return None


def misfits(stages: Mapping[str, Mapping[Any, Any]]) -> Iterator[str]:
    """List sentences about stages that cannot load the weights of the previous one; ``stages`` are
    the configurations of all, in order."""
    before: tuple[str, dict[str, Any]] | None = None
    last = ""
    for name, plain in stages.items():
        policy = _named(plain.get("policy"))
        if before is not None and policy is not None:
            yield from _apart(last, before, name, policy)
        before = policy
        last = name


def _apart(
    last: str, before: tuple[str, dict[str, Any]], name: str, policy: tuple[str, dict[str, Any]]
) -> Iterator[str]:
    remedy = (
        f"a stage begins with the weights of the one before: write the same in both, or train "
        f"{last} by itself, export it, and give its folder as path to a run of its own"
    )
    if before[0] != policy[0]:
        yield f"stages.{name}.policy is {policy[0]}, but stage {last} trains {before[0]}; {remedy}"
        return
    for option in _choosing_weights(policy[0]):
        earlier = before[1].get(option)
        later = policy[1].get(option)
        if earlier != later:
            yield (
                f"stages.{name}.policy.{policy[0]}.{option} is {show(later)}, but "
                f"{show(earlier)} in stage {last}; {remedy}"
            )


def _choosing_weights(policy: str) -> list[str]:
    """List the options of a policy that decide which weights it trains."""
    return effects.options_that(POLICIES.find(policy), lambda does: does.chooses_weights)
