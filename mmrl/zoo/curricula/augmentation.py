"""Makes a data source that changes prompts by how hard they are, so that their rewards differ."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.budget import Counted
from mmrl.zoo.curricula.curriculum import Source, over, pieces, with_entries
from mmrl.zoo.curricula.statistics import PromptStatistics

PICTURES = ("images", "image", "video", "videos", "messages")  # fields of a prompt with pictures


class Augmented(Counted):
    """Draws as ``inner`` does, easy prompts with noise on their pictures and hard ones with a part
    of their reasoning."""

    def __init__(self, inner: Sequence[Prompt], rule: Difficulty):
        super().__init__(inner, PromptStatistics(rule.decay))
        self.rule = rule
        self.history: list[float] = []  # mean reward of each of the last iterations

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        prompts = super().batch(count, iteration, seed)
        return [self._augmented(prompt, iteration) for prompt in prompts]

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        return self._augmented(super().presented(prompt, iteration), iteration)

    def over(self, prompts: Sequence[Prompt]) -> Augmented:
        return Augmented(over(self.inner, prompts), self.rule)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        rewards = [reward for outcome in outcomes for reward in outcome.rewards]
        if rewards:
            self.history = [*self.history, fmean(rewards)][-self.rule.window :]

    def _augmented(self, prompt: Prompt, iteration: int) -> Prompt:
        record = self.statistics[prompt["entry"]]
        if not record.visits or not self.history:
            return prompt
        return self.rule.on(prompt, record.mean - fmean(self.history), iteration)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.history = list(state.get("history", ()))


@DATA.register("difficulty")
class Difficulty:
    """Add noise to pictures of easy prompts, hints to hard ones: DeepVideo-R1's augmentation.

    Park et al. 2025, "DeepVideo-R1: Video Reinforcement Fine-Tuning via Difficulty-aware Regressive
    GRPO". The mean reward of a prompt less that of the last ``window`` iterations says how easy it
    is: g. If g > ``margin``, its pictures and frames get Gaussian noise of ``noise`` min(g /
    ``scale``, 1), in units of the range of pixels; if g < -``margin``, the first ``share`` min(-g /
    ``scale``, 1) of its reasoning, in whole steps, lines or words, at least one and never all,
    stands behind its text. The numbers are ours. What cannot be changed so, a prompt without
    pictures or without its reasoning, is asked as it is.

    of: the data source. field: of the prompt, that holds its reasoning, a text or a list of steps.
    between: stands between question and reasoning. decay: what is left of the weight of earlier
    answers to a prompt at a visit.
    """

    train: Augmented
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        field: str = "reasoning",
        window: Count = 16,
        margin: Annotated[float, Ge(0)] = 0.1,
        scale: Annotated[float, Gt(0)] = 1.0,
        noise: Annotated[float, Ge(0), Le(1)] = 0.5,
        share: Annotated[float, Ge(0), Lt(1)] = 0.75,
        between: str = "\nHint: ",
        decay: Annotated[float, Gt(0), Le(1)] = 0.5,
    ):
        if all(prompt.get(name) is None for prompt in of.train for name in (field, *PICTURES)):
            raise UserError(
                f"difficulty: no prompt has the field {field!r}, nor pictures: there is nothing to "
                f"change; set field to that of the reasoning"
            )
        self.field = field
        self.window = window
        self.margin = margin
        self.scale = scale
        self.noise = noise
        self.share = share
        self.between = between
        self.decay = decay
        self.train = Augmented(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def on(self, prompt: Prompt, ease: float, iteration: int) -> Prompt:
        """Return the prompt as it is asked if its reward is ``ease`` above the mean."""
        strength = min(abs(ease) / self.scale, 1.0)
        if ease > self.margin and self.noise:
            noise = {"std": self.noise * strength, "key": f"{prompt['entry']} {iteration}"}
            return {**prompt, "pixel_noise": noise}
        steps = pieces(prompt.get(self.field)) if ease < -self.margin and self.share else []
        count = min(max(round(self.share * strength * len(steps)), 1), len(steps) - 1)
        if count < 1:
            return prompt
        return {**prompt, "text": prompt["text"] + self.between + "".join(steps[:count]).rstrip()}
