"""A data source that modifies prompts by their difficulty, so that their rewards differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.curriculum import pieces
from mmrl.zoo.curricula.drawing import Counted, Portion, Share, Source

PICTURES = ("images", "image", "video", "videos", "messages")  # fields of a prompt with pictures


@DATA.register("difficulty")
@dataclass(eq=False)
class Difficulty(Counted):
    """Add noise to pictures of easy prompts, hints to hard ones: DeepVideo-R1's augmentation.

    Park et al. 2025, "DeepVideo-R1: Video Reinforcement Fine-Tuning via Difficulty-aware Regressive
    GRPO". How easy a prompt is: g, its mean reward less that of the last ``window`` iterations. If
    g > ``margin``, its pictures and frames get Gaussian noise of std ``noise`` min(g / ``scale``,
    1), in units of the pixel range; if g < -``margin``, the first ``share`` min(-g / ``scale``, 1)
    of its reasoning is appended to its text, in whole steps, lines or words, at least one and never
    all. The defaults are mmrl's. A prompt without pictures or reasoning to do this with is asked as
    it is.

    of: the data source. field: the prompt's field with its reasoning, a text or a list of steps.
    between: separates question and reasoning. decay: factor on the weight of earlier answers to a
    prompt at every visit.

    window: iterations whose mean reward is compared with. margin: nothing changes within it. scale:
    difference at which the change is whole. noise: largest std, of the range of pixels. share:
    largest part of the reasoning.
    """

    field: str = "reasoning"
    window: Count = 16
    margin: Annotated[float, Ge(0)] = 0.1
    scale: Annotated[float, Gt(0)] = 1.0
    noise: Share = 0.5
    share: Annotated[float, Ge(0), Lt(1)] = 0.75
    between: str = "\nHint: "
    decay: Portion = 0.5

    memory = {"history": list}

    def __post_init__(self, of: Source) -> None:
        fields = (self.field, *PICTURES)
        if all(prompt.get(name) is None for prompt in of.train for name in fields):
            raise UserError(
                f"difficulty: no prompt has the field {self.field!r}, nor pictures: there is "
                f"nothing to change; set field to that of the reasoning"
            )
        super().__post_init__(of)

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.history: list[float] = []  # mean reward of each of the last iterations

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        rewards = [reward for outcome in outcomes for reward in outcome.rewards]
        if rewards:
            self.history = [*self.history, fmean(rewards)][-self.window :]

    def asked(self, prompt: Prompt, iteration: int) -> Prompt:
        record = self.statistics[prompt["entry"]]
        if not record.visits or not self.history:
            return prompt
        return self.changed(prompt, record.mean - fmean(self.history), iteration)

    def changed(self, prompt: Prompt, ease: float, iteration: int) -> Prompt:
        """Return the prompt as asked when its reward is ``ease`` above the mean."""
        strength = min(abs(ease) / self.scale, 1.0)
        if ease > self.margin and self.noise:
            noise = {"std": self.noise * strength, "key": f"{prompt['entry']} {iteration}"}
            return {**prompt, "pixel_noise": noise}
        steps = pieces(prompt.get(self.field)) if ease < -self.margin and self.share else []
        count = min(max(round(self.share * strength * len(steps)), 1), len(steps) - 1)
        if count < 1:
            return prompt
        return {**prompt, "text": prompt["text"] + self.between + "".join(steps[:count]).rstrip()}
