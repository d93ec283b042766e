"""Samples by transformers' own ``generate``: for families whose caches cannot be shared, and for
comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.policies.vlm.generate import Answers, Ending, blank, draw
from samplers.noise import Rng
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.prefix_sharing import SharedPrefix


@torch.no_grad()
def generate_plainly(
    net: SharedPrefix,
    inputs: dict[str, Tensor],
    names: Tensor,
    rng: Rng,
    warp: Warp,
    ending: Ending,
    busy: Callable[[bool], bool] | None = None,
) -> Answers:
    """Answer every row of the collated ``inputs``, each with its own copy of prompt and images;
    ``names`` [B] as in generate.

    The tokens are drawn by the same rule from the same random numbers as everywhere else, so the
    samples are those of mmrl's own sampling up to rounding. ``busy`` not None: all processes make
    the same number of passes.
    """
    recorder = _Recorder(blank(names, ending, net.hf), names, rng, warp, ending)
    net("generate", inputs, recorder, synced=busy is not None)
    return recorder.done


class _Recorder:
    """Draws the next token of every row, and forces transformers to take it."""

    def __init__(self, done: Answers, names: Tensor, rng: Rng, warp: Warp, ending: Ending):
        self.names = names
        self.rng = rng
        self.warp = warp
        self.ending = ending
        self.done = done
        self.step = 0
        self.going = torch.ones_like(names, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw a token as a logits processor: scores [B, V] -> the same with all other tokens at
        -inf. Prompts without an answer come after the rows."""
        uniform = (
            None
            if self.warp.temperature == 0
            else self.rng.uniform(self.names, (self.step + 1,))[:, -1]
        )
        rows = len(self.names)
        drawn = draw(scores[:rows], self.warp, uniform, self.step)
        at = torch.arange(rows, device=self.going.device)
        step = torch.full_like(at, self.step)
        self.going, _ = self.done.write(at, step, self.going, drawn, self.ending)
        self.step += 1
        token = F.pad(drawn.token, (0, len(scores) - rows), value=self.ending.pad)
        return torch.full_like(scores, -torch.inf).scatter_(-1, token[:, None], 0.0)

    def ended(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Tell which rows have ended, [B] bool, as the stopping criterion."""
        return F.pad(~self.going, (0, len(input_ids) - len(self.going)), value=True)
