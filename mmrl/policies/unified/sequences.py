"""Joins prompts and sampled ids for a pass. Ids are never turned into text and back."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.policies.image_tokens.network import Inputs
from mmrl.policies.unified.net import Part
from mmrl.policies.unified.prompts import collated

Cond = list[dict[str, Tensor]]  # by prompt: ids, optional before, after and pixels


def body(text: Tensor, stops: tuple[int, ...]) -> Tensor:
    """Mark the tokens of text [B, W] after which an image is drawn, [B, W] bool, without the stop
    token."""
    return (text >= 0) & ~torch.isin(text, torch.tensor(stops, device=text.device))


def prompt_inputs(cond: Cond, groups: Tensor, pad: int) -> Inputs:
    """Collate the prompts ``groups`` [b], with their pictures."""
    inputs = collated([cond[i]["ids"][0] for i in groups.tolist()], pad)
    return inputs | shown(cond, groups)


def shown(cond: Cond, groups: Tensor) -> Inputs:
    """Collect ``pixels`` of the pictures of these rows, each once, and ``pictures``: their numbers,
    row by row."""
    numbers: dict[int, list[int]] = {}
    pixels = []
    order = []
    count = 0
    for i in groups.tolist():
        if "pixels" not in cond[i]:
            continue
        if i not in numbers:
            pixels.append(cond[i]["pixels"])
            numbers[i] = list(range(count, count + len(pixels[-1])))
            count += len(pixels[-1])
        order += numbers[i]
    if not pixels:
        return {}
    return {"pixels": torch.cat(pixels), "pictures": torch.tensor(order, device=groups.device)}


def leading(
    cond: Cond, groups: Tensor, text: Tensor, stops: tuple[int, ...], start: int, pad: int
) -> Inputs:
    """Build what stands before the images of b rows: the prompt, its plan in text [b, W], the
    image's start.

    In a new turn the plan stands inside another prompt, between the ids ``before`` and ``after``
    it.
    """
    in_body = body(text, stops)
    begin = text.new_tensor([start])
    rows = []
    for i, ids, keep in zip(groups.tolist(), text, in_body, strict=True):
        encoded = cond[i]
        parts = (
            [encoded["before"][0], ids[keep], encoded["after"][0]]
            if "before" in encoded
            else [encoded["ids"][0], ids[keep]]
        )
        rows.append(torch.cat([*parts, begin]))
    return collated(rows, pad)


def alone(cond: Cond, groups: Tensor, rows: Tensor, text: Tensor, pad: int) -> Part:
    """Build the inputs that score the texts [b, W] of ``rows`` [b] without an image: the prompt,
    and every token but the last."""
    count = (text >= 0).sum(1)
    ids = [
        torch.cat([cond[i]["ids"][0], tokens[: max(n - 1, 0)]])
        for i, tokens, n in zip(groups.tolist(), text, count.tolist())
    ]
    inputs = collated(ids, pad) | shown(cond, groups)
    return Part(rows, inputs, inputs["ids"].shape[1] - count)
