"""Joins prompts and sampled ids for a pass. Ids are never turned into text and back."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.host import on_host, sent
from mmrl.policies.image_tokens.network import Inputs
from mmrl.zoo.models.unified.net import Part
from mmrl.zoo.models.unified.prompts import collated

Cond = list[dict[str, Tensor]]  # by prompt: ids, optional before, after and pixels


def body(text: Tensor, stops: tuple[int, ...]) -> Tensor:
    """Mark the tokens of text [B, W] after which an image is drawn, [B, W] bool on the CPU, without
    the stop token."""
    text = on_host(text)
    return (text >= 0) & ~torch.isin(text, torch.tensor(stops))


def prompt_inputs(cond: Cond, groups: Tensor, pad: int) -> Inputs:
    """Collate the prompts ``groups`` [b], with their pictures."""
    inputs = collated([cond[i]["ids"][0] for i in on_host(groups).tolist()], pad)
    return inputs | shown(cond, groups)


def shown(cond: Cond, groups: Tensor) -> Inputs:
    """Collect ``pixels`` of the pictures of these rows, each once, and ``pictures``: their numbers,
    row by row."""
    numbers: dict[int, list[int]] = {}
    pixels = []
    order = []
    count = 0
    for i in on_host(groups).tolist():
        if "pixels" not in cond[i]:
            continue
        if i not in numbers:
            pixels.append(cond[i]["pixels"])
            numbers[i] = list(range(count, count + len(pixels[-1])))
            count += len(pixels[-1])
        order += numbers[i]
    if not pixels:
        return {}
    return {"pixels": torch.cat(pixels), "pictures": sent(torch.tensor(order), pixels[0].device)}


def leading(
    cond: Cond, groups: Tensor, text: Tensor, stops: tuple[int, ...], start: int, pad: int
) -> Inputs:
    """Build what stands before the images of b rows: the prompt, its plan in text [b, W], the
    image's start.

    In a new turn the plan stands inside another prompt, between the ids ``before`` and ``after``
    it.
    """
    lengths = body(text, stops).sum(1).tolist()  # nothing but the stop token and NONE is behind
    begin = text.new_full((1,), start)
    rows = []
    for i, ids, length in zip(on_host(groups).tolist(), text, lengths, strict=True):
        encoded = cond[i]
        parts = (
            [encoded["before"][0], ids[:length], encoded["after"][0]]
            if "before" in encoded
            else [encoded["ids"][0], ids[:length]]
        )
        rows.append(torch.cat([*parts, begin]))
    return collated(rows, pad)


def alone(cond: Cond, groups: Tensor, rows: Tensor, text: Tensor, pad: int) -> Part:
    """Build the inputs that score the texts [b, W] of ``rows`` [b] without an image: the prompt,
    and every token but the last."""
    count = (on_host(text) >= 0).sum(1)
    ids = [
        torch.cat([cond[i]["ids"][0], tokens[: max(n - 1, 0)]])
        for i, tokens, n in zip(on_host(groups).tolist(), text, count.tolist())
    ]
    inputs = collated(ids, pad) | shown(cond, groups)
    return Part(rows, inputs, sent(inputs["ids"].shape[1] - count, text.device))
