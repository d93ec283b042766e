"""Truncates a teacher's distribution to its most likely tokens and one category for the rest.

A divergence of such categories is a lower bound of that over all tokens (the data-processing
inequality), and equal to it if every token has its own category. To compare two models, the rest's
mass is distributed as in the student: then the ratio of the two is the same for each of these
tokens, and any divergence that sums a function of ratios (KL, forward KL, Jensen-Shannon) is that
of the categories, in value and in gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOKENS, SCORES, OTHERS, WIDTH = ("ids", "top", "others", "width")


def shortened(
    shown: Mapping[str, Tensor], top_k: int, widths: Mapping[str, int]
) -> dict[str, Tensor]:
    """Keep the ``top_k`` most likely tokens of a distribution's tensors, [*, V] each, among the
    first ``widths[name]`` of the vocabulary, which the student also has. If that is all of them it
    is unchanged."""
    short: dict[str, Tensor] = {}
    for name, scores in shown.items():
        width = min(widths.get(name, scores.shape[-1]), scores.shape[-1])
        if top_k >= width:
            short[name] = scores
            continue
        logprob = _log_softmax(scores[..., :width])
        top, ids = logprob.topk(top_k, -1)
        short |= {
            f"{name}.{TOKENS}": ids.int(),
            f"{name}.{SCORES}": top,
            f"{name}.{OTHERS}": logprob.scatter(-1, ids, -torch.inf).logsumexp(-1),
            f"{name}.{WIDTH}": torch.tensor([width]),
        }
    return short


def completed(answer: Mapping[str, Tensor], student: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Expand a truncated answer to log-probs [*, V]; ``student``: the student's tensors there.
    KeyError or ValueError if the two do not fit."""
    whole = {name: tensor for name, tensor in answer.items() if name in student}
    for name in student.keys() - whole.keys():
        ids = answer[f"{name}.{TOKENS}"].long()
        width = int(answer[f"{name}.{WIDTH}"].reshape(-1)[0])
        logprob = _log_softmax(student[name][..., :width])
        if (
            ids.shape[:-1] != logprob.shape[:-1]
            or not 0 <= int(ids.min()) <= int(ids.max()) < width
        ):
            raise ValueError(f"likeliest tokens {tuple(ids.shape)}, where {logprob.shape} fit")
        rest = logprob.scatter(-1, ids, -torch.inf)
        mass = rest.logsumexp(-1, keepdim=True)
        # tokens of student probability 0 have no share
        even = torch.full_like(mass, width - ids.shape[-1]).log()
        shares = torch.where(mass.isneginf(), -even, rest - mass)
        rest_mass = answer[f"{name}.{OTHERS}"].to(logprob)[..., None]
        whole[name] = (shares + rest_mass).scatter(-1, ids, answer[f"{name}.{SCORES}"].to(logprob))
    return whole


def _log_softmax(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
