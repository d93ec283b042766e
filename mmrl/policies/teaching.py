"""Queries a remote teacher for its distributions at the policy's states: the question, the answer,
and whether both models are compatible.

A question holds a point as plain nests of tensors (``mmrl.core.messages``), with the conditions of
its own prompts only; the answer holds what a divergence needs of the teacher's distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from mmrl.core.distributions import Sendable
from mmrl.core.messages import halved
from mmrl.core.top_tokens import shortened
from mmrl.core.types import (
    MaskChoice,
    MaskPass,
    Point,
    Provenance,
    Renoised,
    SamplerState,
    Transition,
    tree_map,
)
from mmrl.policies.base import Policy, without_empty
from mmrl.policies.contracts import NamesSpaces, Remasks

STEPS: dict[str, type[SamplerState | MaskPass]] = {
    kind.__name__: kind for kind in (SamplerState, Transition, Renoised, MaskPass, MaskChoice)
}
# fields of a point that determine the distribution; the others concern the loss
SENT = ("row_id", "state", "target", "mask", "modality", "routes")
OPTIONAL = ("modality", "routes")


class BadQuestion(ValueError):
    """An invalid question."""


def signature(policy: Policy) -> dict[str, Any]:
    """Describe in plain data what a teacher and the policy must have in common."""
    can = policy.capabilities
    return {
        "family": type(policy).__name__,
        "decisions": [can.decisions, can.makes, isinstance(policy, Remasks)],
        "size": None if policy.media.size is None else list(policy.media.size),
        "frames": policy.media.frames,
        **(policy.spaces() if isinstance(policy, NamesSpaces) else {}),
    }


def misfits(policy: Policy, teacher: dict[str, Any]) -> Iterator[str]:
    """Yield why a teacher of this signature cannot score the policy's states, judged by shapes and
    vocabularies only."""
    student = signature(policy)
    if student["decisions"] != teacher.get("decisions"):
        yield (
            f"{teacher.get('family')} makes other decisions than {student['family']}: a teacher "
            f"has to be of the policy's family"
        )
        return
    sentences = {
        "size": "it makes pictures of (height, width) {its}, the policy {ours}",
        "frames": "its videos have {its} frames, the policy's {ours}",
        "latents": "its latent space is {its}, the policy's {ours}",
        "vocabulary": "its vocabulary is {its}, the policy's {ours}",
    }
    for name, sentence in sentences.items():
        ours, its = student.get(name), teacher.get(name)
        if ours != its and (name in ("size", "frames") or None not in (ours, its)):
            yield f"{sentence.format(its=its, ours=ours)}; both have to be the same"


# --------------------------------------------------------------------------------------------------
# asking


def question(point: Point, dist: Sendable, half: bool = False) -> dict[str, Any]:
    """Describe a point as a nest, for a remote teacher; ``dist`` is the policy's own there.
    ``half``: floats of the answer may be rounded to bfloat16."""
    used, group = point.group.unique(return_inverse=True)
    fields = {name: getattr(point, name) for name in SENT}
    step = point.step
    if step is not None and type(step).__name__ not in STEPS:
        raise TypeError(type(step).__name__)
    parts = {} if step is None else {n: v for n, v in vars(step).items() if v is not None}
    return {
        "fields": {name: value for name, value in fields.items() if value is not None},
        "group": group,
        "cond": _of_prompts(point.cond, used),
        "step": None if step is None else [type(step).__name__, parts],
        "guidance": point.guidance,
        "asks": dist.asks(),
        "half": half,
    }


def _of_prompts(cond: Any, used: Tensor) -> Any:
    """Take the conditions of some prompts; that of the empty prompt belongs to all."""
    if isinstance(cond, dict):
        taken = tree_map(lambda x: x[used], without_empty(cond))
        return taken | ({"uncond": cond["uncond"]} if "uncond" in cond else {})
    if isinstance(cond, list):
        return [cond[i] for i in used.tolist()]
    return cond


# --------------------------------------------------------------------------------------------------
# answering


@torch.no_grad()
def answer(policy: Policy, asked: Any) -> dict[str, Tensor]:
    """Answer a question from an untrusted sender. Raises BadQuestion where it is invalid, and
    whatever the model raises for values that do not fit it."""
    point, asks, half = _point(asked, policy.device)
    dist = cast(Sendable, policy.dist(point))
    try:
        shown = dist.shown(asks)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadQuestion(f"asks: {error}") from error
    if "top_k" in asked:
        shown = _shortened(shown, asked["top_k"], asked.get("widths"))
    return halved(shown) if half else shown


def _shortened(shown: dict[str, Tensor], top_k: Any, widths: Any) -> dict[str, Tensor]:
    """Keep only the likeliest tokens, where a question asks for a top-k."""
    numbers = [top_k, *widths.values()] if isinstance(widths, dict) else [None]
    if not all(type(number) is int and number > 0 for number in numbers):
        raise BadQuestion("top_k: expected a number above 0; widths: a number for each name")
    if not set(shown) <= set(widths):
        raise BadQuestion("widths: expected those of " + ", ".join(shown))
    return shortened(shown, top_k, widths)


def _point(asked: Any, device: torch.device) -> tuple[Point, list[Any], bool]:
    """Read the point of a question."""
    try:
        fields, group, step = asked["fields"], asked["group"], asked["step"]
        guidance, asks, half = asked["guidance"], asked["asks"], asked["half"]
        cond = asked["cond"]
        described = None if step is None else STEPS[step[0]](**step[1])
        rows = _rows(fields, group, described)
    except (KeyError, TypeError, IndexError) as error:
        raise BadQuestion(f"lacks a part, or has one too many: {error}") from error
    if not (guidance is None or isinstance(guidance, (int, float))) or not isinstance(asks, list):
        raise BadQuestion("guidance: expected a number or null; asks: expected a list")
    _check_cond(cond, group)
    point = Point(
        **fields,
        group=group,
        cond=cond,
        step=described,
        guidance=guidance,
        advantage=torch.zeros(rows, 1),
        num_decisions=torch.ones(rows, dtype=torch.long),
        provenance=Provenance(),
    )
    return point.to(device), asks, bool(half)


def _rows(fields: dict[str, Any], group: Any, step: Any) -> int:
    """Count the rows of a question. Raises BadQuestion where its tensors disagree."""
    if not set(SENT) - set(OPTIONAL) <= set(fields) <= set(SENT):
        raise BadQuestion(f"fields: expected {', '.join(SENT)}")
    parts = [*fields.values(), group, *({} if step is None else step.row_fields()).values()]
    if not all(isinstance(part, Tensor) and part.ndim for part in parts):
        raise BadQuestion("fields: expected tensors")
    rows = len(group)
    if group.dtype != torch.long or rows == 0 or any(len(part) != rows for part in parts):
        raise BadQuestion("fields: expected tensors of equally many rows")
    return rows


def _check_cond(cond: Any, group: Tensor) -> None:
    """Raise BadQuestion unless every row's prompt is in the conditions."""
    highest = int(group.max())
    if isinstance(cond, list):
        counts = {len(cond)}
    elif isinstance(cond, dict):
        counts = set()
        tree_map(lambda x: counts.add(len(x) if x.ndim else 0), without_empty(cond))
    else:
        raise BadQuestion("cond: expected those of a list of prompts")
    if int(group.min()) < 0 or any(count <= highest for count in counts):
        raise BadQuestion("group: names a prompt that is not there")
