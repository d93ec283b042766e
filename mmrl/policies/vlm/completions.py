"""Decodes sampled tokens to whole answers, as rewards see them."""

from __future__ import annotations

from functools import partial

import torch

from mmrl.core.types import Completion, Prompt, Rollout
from mmrl.policies.vlm.generate import Ending
from mmrl.policies.vlm.processor import Inputs


def completions(inputs: Inputs, ending: Ending, rollout: Rollout) -> list[Completion]:
    """Return every row's answer, with the means of its recorded token quantities."""
    mask = rollout.path_mask()
    lengths = mask.sum(1)
    order = rollout.tokens
    by_name = {
        "logprob": rollout.logprob,
        "self_certainty": order.self_certainty,
        "question_gain": order.question_gain,
    }
    columns = {
        name: (values * mask).sum(1) / lengths.clamp_min(1)
        for name, values in by_name.items()
        if values is not None
    }
    if order.last_logprob is not None:
        columns["last_logprob"] = order.last_logprob
    names = list(columns)
    means = torch.stack([columns[name] for name in names], 1)
    begun = [begun_by(prompt) for prompt in rollout.prompt_per_row()]
    rows = zip(rollout.sample.tolist(), lengths.tolist(), means.tolist(), begun, strict=True)
    limit = rollout.sample.shape[1]
    return [
        _completion(inputs, ending, ids[:n], dict(zip(names, mean, strict=True)), start, limit)
        for ids, n, mean, start in rows
    ]


def begun_by(prompt: Prompt) -> str:
    """Return the start of the answer that a prompt contains: the thinking tag that the chat
    template opens, and its ``prefill``."""
    begun: str = prompt.get("view", {}).get("begun", prompt.get("prefill", ""))
    return begun


def _completion(
    inputs: Inputs,
    ending: Ending,
    ids: list[int],
    means: dict[str, float],
    begun: str,
    limit: int,
) -> Completion:
    """Return the whole answer: the start ``begun`` in the prompt, and the sampled text after it."""
    text = inputs.decode(ids)
    stopped = bool(ids) and ids[-1] in ending.stops or any(s in text for s in ending.strings)
    completion = Completion(
        begun + text,
        len(ids),
        stopped,
        means["logprob"],
        means.get("self_certainty"),
        limit,
        partial(_spelled, inputs, ids, begun),
    )
    completion.question_gain = means.get("question_gain")
    completion.last_logprob = means.get("last_logprob")
    return completion


def _spelled(inputs: Inputs, ids: list[int], begun: str) -> list[str]:
    """Return the answer up to each of its tokens."""
    return [begun + inputs.decode(ids[: n + 1]) for n in range(len(ids))]
