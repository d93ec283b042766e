"""Replaces sampled answers by ground truths, scored by the policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.types import Prompt, Rollout
from mmrl.policies.vlm.completions import begun_by
from mmrl.policies.vlm.template import behind, check_thought

if TYPE_CHECKING:
    from mmrl.policies.vlm.scoring import Passes


@torch.no_grad()
def with_ground_truth(
    policy: Passes, rollout: Rollout, write: Callable[[Prompt], str | None], last: Tensor, size: int
) -> Rollout:
    """Replace the ``last`` answer [P] of every group by the ground truth, scored by the policy.

    Where there is none, or it exceeds the length limit, the group keeps its sampled answer.
    """
    ids = rollout.sample.clone()
    mask = rollout.mask.clone()
    written = torch.zeros_like(rollout.group, dtype=torch.bool)
    for row, prompt in zip(last.tolist(), rollout.prompts, strict=True):
        tokens = tokens_of(policy, prompt, write(prompt), ids.shape[1])
        if tokens is not None:
            ids[row], mask[row], written[row] = policy.inputs.pad, False, True
            ids[row, : len(tokens)] = torch.tensor(tokens, device=policy.device)
            mask[row, : len(tokens)] = True
    corrected = rollout.replace(sample=ids, mask=mask)
    logprob = rollout.logprob.clone()
    entropy = None if rollout.entropy is None else rollout.entropy.clone()
    for part, counts in policy.pass_sizes.chunks(len(last), size):
        scored = policy._scored(corrected[last[part]])
        new = written[last[part], None] & counts
        logprob[last[part]] = torch.where(new, scored.logprob, logprob[last[part]])
        if entropy is not None:
            entropy[last[part]] = torch.where(new, scored.entropies(), entropy[last[part]])
    # it belongs to the replaced sample, and is unknown for the ground truth
    order = rollout.tokens
    if order.self_certainty is not None:
        unknown = order.self_certainty.masked_fill(written[:, None], torch.nan)
        order = order.replace(self_certainty=unknown)
    provenance = rollout.provenance.replace(is_ground_truth=written)
    if provenance.sampler_logprob is not None:  # nor did an engine sample the ground truth
        sampler_logprob = torch.where(written[:, None], logprob, provenance.sampler_logprob)
        provenance = provenance.replace(sampler_logprob=sampler_logprob)
    return corrected.replace(
        logprob=logprob, entropy=entropy, trajectory=order, provenance=provenance
    )


def tokens_of(policy: Passes, prompt: Prompt, text: str | None, most: int) -> list[int] | None:
    """Return the tokens of a written answer; None where there is none of at most ``most``
    tokens."""
    if text is None:
        return None
    begun = begun_by(prompt)
    check_thought(prompt, begun, text)
    tokens = policy.inputs.tokens(behind(begun, text))
    return None if tokens is None or len(tokens) > most else tokens
