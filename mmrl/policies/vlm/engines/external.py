"""Defines the interface of external sampling engines.

The policy's own passes re-score their answers: ``Rollout.sampler_logprob`` keeps the engine's
log-probs, the log shows the gap, and the objective's ``importance_sampling`` corrects for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.metrics import Stopwatch
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.generate import Answers, Ending, blank
from mmrl.policies.vlm.media import Video
from samplers.noise import Rng
from samplers.warp import Warp

GREEDY = 0.0


@dataclass(frozen=True)
class EnginePrompt:
    """Holds a prompt in the form an engine takes."""

    name: str  # for messages
    ids: list[int]  # its tokens, one placeholder for each image or video
    read: list[int]  # its tokens as the policy reads them, a placeholder for every feature
    images: list[Any] = field(default_factory=list)  # PIL, within the budget
    videos: list[Video] = field(default_factory=list)

    def check(self, engine: str, ids: Sequence[int]) -> None:
        """Raise UserError unless the engine read the prompt as the tokens ``ids`` that the policy
        reads."""
        if list(ids) != self.read:
            raise UserError(
                f"{self.name}: policy option engine = {engine}: it reads this prompt as "
                f"{len(ids)} tokens where the policy reads {len(self.read)}, so its answers would "
                "be to something else; its processor has other settings than the model's folder, "
                "or the family is read in another way there"
            )


class EngineAnswer(NamedTuple):
    """Holds an engine's answer."""

    ids: Sequence[int]
    logprobs: Sequence[float]  # of these tokens, under the distribution they were drawn from


class Outside(Protocol):
    """Defines what an external engine offers. ``notes``: lines for the log. ``limits``: its limits
    on prompts."""

    notes: tuple[str, ...]
    limits: EngineLimits

    def suits(self, hf: nn.Module) -> None:
        """Raise UserError where the engine cannot receive what is trained of this model."""

    def refresh(self, hf: nn.Module) -> None:
        """Copy the current weights into the engine."""

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        """Return one answer for each prompt; ``seeds`` key their randomness, where the engine
        supports seeds."""


def ask(
    engine: Outside,
    hf: nn.Module,
    prompts: Sequence[EnginePrompt],
    names: Tensor,
    rng: Rng,
    warp: Warp,
    ending: Ending,
    clock: Stopwatch,
) -> Answers:
    """Sample B answers with an engine; ``names`` [B] as in ``generate``. ``logprob`` is the
    engine's own. The clock measures weight transfer as ``sync``."""
    if "self_certainty" in ending.quantities:
        raise UserError(
            "policy options engine and record_self_certainty: another engine does not say how "
            "sure the model was"
        )
    for prompt in {id(prompt): prompt for prompt in prompts}.values():
        limits = engine.limits
        media = limits.media(len(prompt.images), len(prompt.videos))
        if why := media or limits.length(len(prompt.read), ending.tokens):
            raise UserError(f"{prompt.name}: {why}")
    with clock.time("sync"):
        engine.refresh(hf)
    seeds = rng.bits(names, 1)[:, 0].tolist()
    answers = blank(names, ending, hf)
    for row, answer in enumerate(engine.answer(prompts, seeds, warp, ending)):
        ids = torch.tensor(list(answer.ids)[: ending.tokens], dtype=torch.long, device=names.device)
        length = _end(ids, ending)
        answers.ids[row, :length], answers.mask[row, :length] = ids[:length], True
        answers.logprob[row, :length] = torch.tensor(list(answer.logprobs)[:length]).to(
            answers.logprob
        )
    return answers


def _end(ids: Tensor, ending: Ending) -> int:
    """Count the tokens of ids [n] up to the one that ends the answer; tokens after a stop string
    that the engine does not know are dropped."""
    return next((i for i in range(1, len(ids) + 1) if ending.ended(ids[None, :i]).any()), len(ids))
