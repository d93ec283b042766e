"""Rewards answers that need the order of a video's frames: T-GRPO, of Video-R1 (Feng et al.
2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rewards
from mmrl.rollout.collect import evenly
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup
from samplers.noise import Rng

VIDEOS = ("video", "videos")


@STAGES.register("temporal_contrast")
@dataclass
class Contrasted(KnowsPrompts):
    """Gives right answers about a video a bonus where the order of frames matters: T-GRPO.

    ``reward``: decides whether an answer is right. ``share``: answers with shuffled frames, as a
    share of ``train.group_size``. ``ratio``: a group gets the bonus if its mean reward is at least
    ``ratio`` times that of the shuffled answers. ``bonus``: is added to the reward. ``threshold``:
    an answer whose reward is above it is right.

    The policy also answers with the frames shuffled; these answers are scored, not trained on.
    """

    reward: str
    share: Annotated[float, Gt(0)] = 0.5
    ratio: Annotated[float, Ge(0)] = 0.8
    bonus: float = 0.3
    threshold: float = 0.1
    effects = Effects(looks_at_samples=True)

    @classmethod
    def unfit(cls, options: Contrasted, policy: Any) -> Iterator[tuple[str, str]]:
        if policy.capabilities.makes != "text":
            yield (
                "",
                f"{called(policy)} sees no order of frames; it is for policies that write texts "
                f"about videos: leave it out",
            )

    def setup(self, setup: Setup) -> None:
        if self.reward not in setup.rewards:
            known = ", ".join(setup.rewards)
            raise UserError(
                f"train.stages.temporal_contrast.reward: {self.reward!r} is no reward of this run "
                f"that is trained on; name the one that says whether an answer is right: {known}"
            )
        if not any(has_video(prompt) for prompt in setup.prompts):
            raise UserError(
                "train.stages.temporal_contrast: no prompt of the data has a video, so there are "
                "no frames to shuffle: leave it out"
            )
        self.origins = {}
        self.seed = setup.options.seed
        self.copies = max(1, round(self.share * setup.options.group_size))

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        places = [
            place
            for place, prompt in enumerate(drawn.rollout.prompts)
            if has_video(self.origins.get(id(prompt), {}))
        ]
        shuffled = self._shuffled(drawn, places, iteration, sample)
        if shuffled is None:
            return drawn, {"temporal/groups": 0.0}
        means = self._means(drawn, len(drawn.rollout.prompts))
        # padding rows are left out
        contrast = torch.full_like(means, torch.nan)
        contrast[places] = self._means(shuffled, len(shuffled.rollout.prompts))[: len(places)]
        ordered = means >= self.ratio * contrast  # False where either has no reward
        value = drawn.rewards[self.reward]
        chosen = ordered.to(value.device)[drawn.rollout.group]
        right = value > self.threshold
        if value.ndim == 2:
            chosen = chosen[:, None]
        bonus = self.bonus * (chosen & right)
        values = {**drawn.rewards, self.reward: value + bonus}
        rewards = Rewards(values, drawn.rewards.weights)
        return replace(drawn, rewards=rewards), self._counts(places, ordered, means, contrast)

    def _shuffled(
        self, drawn: Drawn, places: list[int], iteration: int, sample: Sample
    ) -> Drawn | None:
        """Sample answers to these groups' prompts with their frames shuffled, padding at the end;
        None where no process has a video. All processes draw equally many, as sharded models
        need."""
        share = evenly(len(places), drawn.rollout.group.device)
        if not share.total:
            return None
        rng = Rng.of(self.seed, iteration, "shuffled frames")
        prompts = []
        for place in [*places, *[0] * share.idle]:
            prompt = self.origins[id(drawn.rollout.prompts[place])]
            question = prompt.get("text") or prompt.get("messages")
            prompts.append({**prompt, "frame_order": f"{iteration} {question}"})
        return sample(prompts, replace(rng, offset=share.offset), self.copies)

    def _means(self, drawn: Drawn, count: int) -> Tensor:
        """Return the mean of the reward over every group, [P]; NaN where none could be scored."""
        value = drawn.rewards.per_row()[self.reward]
        whole = drawn.rollout.group
        sums, counts = (
            torch.zeros(count, dtype=torch.float64, device=whole.device).index_add_(0, whole, x)
            for x in (value.nan_to_num(0.0).double(), (~value.isnan()).double())
        )
        return sums / counts

    def _counts(
        self, places: list[int], ordered: Tensor, means: Tensor, contrast: Tensor
    ) -> dict[str, float]:
        """Count over all processes the groups with a video and those with the bonus; average both
        kinds of answers."""
        known = ~(means + contrast).isnan()
        numbers = torch.stack(
            [
                torch.tensor(float(len(places)), device=means.device, dtype=torch.float64),
                ordered.sum().double(),
                known.sum().double(),
                means[known].sum(),
                contrast[known].sum(),
            ]
        )
        groups, ordered_groups, scored, right, shuffled = distributed.all_sum(numbers).tolist()
        if not scored:
            return {"temporal/groups": groups}
        return {
            "temporal/groups": groups,
            "temporal/ordered": ordered_groups / scored,
            "temporal/mean": right / scored,
            "temporal/shuffled_mean": shuffled / scored,
        }


def has_video(prompt: Prompt) -> bool:
    """Tell whether a prompt shows a video, also as a part of its messages."""
    if any(prompt.get(name) is not None for name in VIDEOS):
        return True
    parts = [m.get("content") for m in prompt.get("messages") or () if isinstance(m, dict)]
    lists = [content for content in parts if isinstance(content, list)]
    return any(part.get("type") == "video" for content in lists for part in content)
