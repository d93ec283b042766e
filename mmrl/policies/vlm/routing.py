"""Records the experts of every token while sampling, and routes it there again in training.

A token near the boundary between two experts may be routed to the other one in another batch, or
after an optimizer step: its log-prob then jumps. With the sampler's routes the experts are those
that sampled the answer, and their mixture weights are current (routing replay, Zheng et al. 2025,
"Stabilizing reinforcement learning with LLMs").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError

FREE = -1  # instead of an expert: the router's own choice
# endings of transformers' router names; Llama 4 and Gemma 4 use other names
ROUTERS = ("TopKRouter", "TopkRouter", "Llama4Router", "Gemma4TextRouter")


class Routing:
    """Hooks the routers of a transformers model; routes are [N, R], R = layers x experts per
    token."""

    def __init__(self, hf: nn.Module):
        modules: list[Any] = [*hf.modules()]
        self.routers = [m for m in modules if type(m).__name__.endswith(ROUTERS)]
        if not self.routers:
            raise UserError(
                f"policy option replay_routing: {type(hf).__name__} has no experts between which "
                "tokens are routed; leave it out"
            )
        self.checked = False
        self.taken: list[Tensor] = [torch.empty(0)] * len(self.routers)
        self.fixed: Tensor | None = None  # [N, layers, k] in this pass
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._routed, layer))

    @property
    def width(self) -> int:
        """Return R."""
        return sum(map(top_k, self.routers))

    def last(self) -> Tensor:
        """Return the routes [N, R] of the tokens of the last pass."""
        return torch.cat([taken.to(torch.int16) for taken in self.taken], -1)

    @contextmanager
    def replaying(self, routes: Tensor | None) -> Iterator[None]:
        """Send tokens along ``routes`` [*, R] within the block; None: the routers' own choice."""
        if routes is not None:
            self.fixed = routes.reshape(-1, len(self.routers), self.width // len(self.routers))
        try:
            yield
        finally:
            self.fixed = None

    def _routed(self, layer: int, router: Any, _: Any, output: Any) -> Any:
        best = chosen_by(router, output)
        if not self.checked:
            self._check(router, output, best)
        if self.fixed is None:
            self.taken[layer] = best.detach()
            return output
        fixed = self.fixed[:, layer].to(best)
        chosen = torch.where(fixed == FREE, best, fixed)
        self.taken[layer] = chosen
        return rerouted(router, output, chosen)

    def _check(self, router: Any, output: Any, best: Tensor) -> None:
        again = rerouted(router, output, best)
        for repeated, original in zip(again, output, strict=True):
            same_shape = repeated.shape == original.shape
            if not same_shape or not torch.allclose(repeated.to(original), original, atol=1e-3):
                raise UserError(
                    f"policy option replay_routing: {type(router).__name__} weighs its experts in "
                    "a way of its own, which cannot be repeated for other experts; leave it out"
                )
        self.checked = True


def top_k(router: Any) -> int:
    """Return the number of experts per token."""
    named = getattr(router, "top_k", None)
    count: int = router.config.top_k_experts if named is None else named
    return count


def chosen_by(router: Any, output: Any) -> Tensor:
    """Return the experts [N, k] that a router chose, from what it returned."""
    # Llama 4's returns scores and logits [N, E]
    chosen: Tensor = output[2] if len(output) == 3 else output[1].topk(top_k(router), -1).indices
    return chosen


def rerouted(router: Any, output: Any, chosen: Tensor) -> tuple[Tensor, ...]:
    """Return what a router that returned ``output`` would for the ``chosen`` experts [N, k]."""
    if len(output) == 3:
        return output[0], weights(router, output[0], chosen).to(output[1]), chosen
    scores, logits = output
    closed = torch.full_like(logits, -torch.inf)
    chosen_only = closed.scatter(1, chosen, logits.gather(1, chosen))
    return chosen_only.float().sigmoid().to(scores), logits


def weights(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Weigh the ``chosen`` experts [N, k] as a router does, from its first output [N, E]: logits,
    of a softmax or (DeepSeek, GLM) of sigmoids, or (Gemma 4) probabilities."""
    if hasattr(router, "per_expert_scale"):
        p = logits.gather(-1, chosen)
        scale: Tensor = router.per_expert_scale[chosen]
        return p / p.sum(-1, keepdim=True) * scale
    if hasattr(router, "e_score_correction_bias"):
        p = logits.float().sigmoid().gather(-1, chosen)
    else:
        p = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        p = p / p.sum(-1, keepdim=True)
    return (p * getattr(router, "routed_scaling_factor", 1.0)).to(logits)


def of_prompts(routes: Tensor, mask: Tensor) -> list[Tensor]:
    """Split the routes [P S, R] of a left-padded batch ``mask`` [P, S] by prompt, [S_p, R] each."""
    per_prompt = routes.view(*mask.shape, -1)
    return [rows[tokens.bool()] for rows, tokens in zip(per_prompt, mask, strict=True)]


def padded(routes: Sequence[Tensor | None], length: int, like: Tensor) -> Tensor | None:
    """Join the routes of prompts to [P, length, R], free where there are none; None without any."""
    known = [part for part in routes if part is not None]
    if not known:
        return None
    whole = known[0].new_full((len(routes), length, known[0].shape[-1]), FREE)
    for row, part in enumerate(routes):
        if part is not None:
            whole[row, length - len(part) :] = part
    return whole.to(like.device)
