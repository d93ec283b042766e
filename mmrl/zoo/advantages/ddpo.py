"""DDPO's advantage: compares a reward with the latest rewards of the same prompt."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmrl.advantages.groups import finished, measured
from mmrl.core.distributed import all_gather_json
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout


@ADVANTAGES.register("ddpo")
class DDPO:
    """Compare with mean and std (plus eps) of the prompt's last ``buffer`` rewards (DDPO).

    Black et al. 2023, "Training diffusion models with reinforcement learning", section 5. A prompt
    with fewer than ``min_count`` rewards in its buffer is compared with all rewards of the
    iteration. ``key`` names the field of a prompt that identifies it. Every process keeps the
    buffers of all prompts.

    buffer: rewards of a prompt that are kept. min_count: rewards from which on they are used. eps:
    added to the std. key: the field that identifies a prompt.
    """

    def __init__(self, buffer: int = 16, min_count: int = 16, eps: float = 1e-6, key: str = "text"):
        if not 1 <= min_count <= buffer:
            raise UserError(
                f"ddpo: min_count must lie between 1 and buffer = {buffer}, not {min_count}"
            )
        if eps <= 0:
            raise UserError(f"ddpo: eps must be greater than 0, it is {eps}")
        self.buffer = buffer
        self.min_count = min_count
        self.eps = eps
        self.key = key
        self.rewards: dict[str, deque[float]] = {}

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return [B, 1] advantages, NaN for samples without a finite reward; advance the
        buffers."""
        double, groups = measured(rewards, rollout)
        total = double.total()
        present = groups.present
        texts = [self._text(rollout, g) for g in rollout.group.tolist()]
        pairs = [
            (t, r)
            for t, r, scored in zip(texts, total.tolist(), present.tolist(), strict=True)
            if scored
        ]
        pairs = all_gather_json(pairs, total.device)
        for text, reward in pairs:
            self.rewards.setdefault(text, deque(maxlen=self.buffer)).append(reward)
        everything = [reward for _, reward in pairs]
        moments_by_text = {text: self._mean_and_std(text, everything) for text in set(texts)}
        # [B] each
        mean, std = total.new_tensor([moments_by_text[text] for text in texts]).unbind(1)
        return finished((total - mean) / (std + self.eps), rewards, present)

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers as values that JSON can hold."""
        return {"rewards": {text: list(values) for text, values in self.rewards.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards = {
            text: deque(values, maxlen=self.buffer) for text, values in state["rewards"].items()
        }

    def _text(self, rollout: Rollout, index: int) -> str:
        prompt = rollout.prompts[index]
        if self.key not in prompt:
            raise UserError(
                f"ddpo identifies prompts by {self.key!r}, a prompt has only "
                f"{sorted(prompt)}; set its key"
            )
        return str(prompt[self.key])

    def _mean_and_std(self, text: str, everything: list[float]) -> tuple[float, float]:
        buffer: Sequence[float] = self.rewards.get(text, ())
        values = buffer if len(buffer) >= self.min_count else everything
        # the mean of equal numbers may be rounded
        if not values or min(values) == max(values):
            return max(values, default=0.0), 0.0
        return statistics.fmean(values), statistics.pstdev(values)
