"""The GAN of distribution matching distillation: a small head on the fake model's hidden states
distinguishes noised pictures of the data from noised samples of the student (DMD2)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt, Rollout
from mmrl.policies.base import Policy
from mmrl.policies.contracts import Demonstrates
from samplers.noise import Rng

PLACE = "objective.dmd.gan"
HELD = 4096  # encoded pictures that are remembered


@dataclass(frozen=True)
class Gan:
    """Options of the discriminator.

    weight: of the student's non-saturating loss, log(1 + exp(-D)) at its noised predictions.
    critic_weight: of the discriminator's loss, added to the fake model's. Both defaults are those
    of the published code. field: of the data's row, with a real picture or video.
    """

    weight: Annotated[float, Gt(0)] = 3e-3
    critic_weight: Annotated[float, Ge(0)] = 1e-2
    field: str = "answer"


class Discriminator(nn.Module):
    """Scores hidden states: the mean of a small network's output over the tokens.

    It has no weights before ``grow``, which needs the width of the states.
    """

    layers: nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()

    def grow(self, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Make the weights, the same on all processes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
            )
        self.layers = layers.to(device, dtype)

    @property
    def grown(self) -> bool:
        return len(self.layers) > 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Judge hidden states [B, tokens, width], [B, width] or [B, width, H, W] -> [B, 1]."""
        weight = next(self.layers.parameters())
        verdicts: Tensor = self.layers(by_token(hidden).to(weight.dtype))
        return verdicts.flatten(1).mean(1, keepdim=True)


def by_token(hidden: Tensor) -> Tensor:
    """Put the channels of hidden states last: those of a UNet come before height and width."""
    return hidden.flatten(2).transpose(1, 2) if hidden.ndim > 3 else hidden


def middle_block(net: nn.Module) -> nn.Module:
    """Return the middle block of a network: a UNet's mid block, or that of its longest list of
    blocks. Raises UserError where there is none."""
    middle = getattr(net, "mid_block", None)
    if isinstance(middle, nn.Module):
        return middle
    rows = [m for m in net.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    longest = max(rows, key=len, default=nn.ModuleList())
    if len(longest) < 2:
        raise UserError(f"{PLACE}: the network has no row of blocks whose middle could be read")
    return longest[len(longest) // 2]


@contextmanager
def reading(net: nn.Module, rows: int) -> Iterator[Callable[[], Tensor]]:
    """Capture the middle block's output in the next pass of ``rows`` rows; of several tensors the
    largest. Yields a function that returns it, [rows, ...], without the padding rows at the
    end."""
    caught: list[Tensor] = []

    def catch(_: nn.Module, __: Any, output: Any) -> None:
        parts = output if isinstance(output, (list, tuple)) else (output,)
        tensors = [x for x in parts if isinstance(x, Tensor)]
        if tensors:
            caught.append(max(tensors, key=Tensor.numel))

    def hidden() -> Tensor:
        if sum(map(len, caught)) < rows:
            raise UserError(
                f"{PLACE}: nothing came out of the network's middle block, {type(block).__name__}; "
                "it is for one network whose blocks are called in every pass"
            )
        return torch.cat(caught)[:rows] if len(caught) > 1 else caught[0][:rows]

    block = middle_block(net)
    handle = block.register_forward_hook(catch)
    try:
        yield hidden
    finally:
        handle.remove()


class Pictures:
    """Encodes the real pictures of prompts, and caches the latest on the CPU."""

    def __init__(self, field: str):
        self.field = field
        # by identity; the value is kept, so that its id is not reused
        self.known: OrderedDict[int, tuple[Any, Tensor]] = OrderedDict()

    def latents(self, policy: Policy, rollout: Rollout) -> Tensor:
        """Return the latents [B, *] of the picture that each row's prompt holds."""
        places, index = rollout.group.unique(return_inverse=True)
        each = [self._encoded(policy, rollout.prompts[place]) for place in places.tolist()]
        return torch.stack(each).to(rollout.sample)[index]

    def check(self, policy: Policy, prompt: Prompt) -> None:
        """Raise UserError, with file and line, if a row has no picture that can be opened."""
        value = prompt.get(self.field)
        place = prompt.get("origin") or repr(str(prompt.get("text", ""))[:60])
        if value is None:
            raise UserError(
                f"{place}: no {self.field!r}, which holds a real picture for the discriminator; "
                f"add it, or name another field with {PLACE}.field"
            )
        policy = Demonstrates.of(policy)
        if why := policy.unreadable(prompt, value):
            raise UserError(f"{place}: {why}")

    def _encoded(self, policy: Policy, prompt: Prompt) -> Tensor:
        self.check(policy, prompt)
        value = prompt[self.field]
        known = self.known.get(id(value))
        if known is None:
            policy = Demonstrates.of(policy)
            picture = policy.open_answer(prompt, value)
            encoded = policy.demonstrate([prompt], [picture], Rng.of("pictures"), score=False)
            known = (value, encoded.sample[0].cpu())
            self.known[id(value)] = known
        self.known.move_to_end(id(value))
        while len(self.known) > HELD:
            self.known.popitem(last=False)
        return known[1]
