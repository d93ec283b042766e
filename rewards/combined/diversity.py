"""Measures the diversity of the answers to one prompt, as a reward or as a factor of another.

Pictures and videos are compared by the CLIP embedding of their frames (mean), or by coarse pixels
without a model; texts by their unigrams and bigrams. s is the cosine of two samples, clipped at 0,
d = 1 - s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Annotated

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.base.clip import load_named
from rewards.base.groups import groups_of
from rewards.base.media import frames
from rewards.card import Card, card
from rewards.combined.members import merged, scores_of

COARSE = 8  # side in pixels of pictures compared without a model


class Similarity:
    """Computes cosines [B, B] of samples in 0..1; ``clip`` is ``name/tag``, a folder or hub id,
    None compares coarse pixels."""

    def __init__(self, clip: str | None):
        self.clip = None if clip is None else load_named(clip)

    def __call__(self, media: Media) -> Tensor:
        if not isinstance(media, Tensor):
            return self.cosines(words(media))
        stack = frames(media, "diversity")  # [B, F, 3, H, W]
        if self.clip is not None:
            features = (
                self.clip.embed_images(stack.flatten(0, 1)).view(*stack.shape[:2], -1).mean(1).cpu()
            )
        else:
            small = nnf.adaptive_avg_pool2d(stack.flatten(0, 1).float().cpu(), COARSE)
            features = small.view(*stack.shape[:2], -1).mean(1) - 0.5  # grey is the origin
        return self.cosines(features)

    def cosines(self, vectors: Tensor) -> Tensor:
        unit = nnf.normalize(vectors.double(), dim=-1)
        return (unit @ unit.T).clamp(0, 1)


def words(texts: list[str]) -> Tensor:
    """Count unigrams and bigrams, [B, V]."""
    each = [text.lower().split() for text in texts]
    bags = [Counter([*tokens, *zip(tokens, tokens[1:], strict=False)]) for tokens in each]
    place = {word: i for i, word in enumerate(dict.fromkeys(word for bag in bags for word in bag))}
    counts = torch.zeros(len(texts), max(1, len(place)))
    for row, bag in enumerate(bags):
        for word, count in bag.items():
            counts[row, place[word]] = count
    return counts


def mean_of_others(values: Tensor) -> Tensor:
    """Return the mean [n] over the other members of the group; 0 for a group of one."""
    n = len(values)
    return (values.sum(1) - values.diagonal()) / max(1, n - 1)


class Grouped(ABC):
    """Rewards from the similarities inside every group; ``of`` is the reward to modify, or None."""

    def __init__(self, of: Reward | None, clip: str | None):
        self.of = of
        self.similarity = Similarity(clip)
        self.card = Card(of="group") if of is None else merged([of], "group")

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Return [B], for any number of groups."""
        values = (
            torch.ones(len(prompts)) if self.of is None else scores_of([self.of], media, prompts)[0]
        )
        scores = torch.zeros(len(prompts))
        for rows in groups_of(prompts):
            part = media[rows] if isinstance(media, Tensor) else [media[row] for row in rows]
            scores[rows] = self.changed(values[rows], self.similarity(part)).float()
        return scores

    @abstractmethod
    def changed(self, values: Tensor, similar: Tensor) -> Tensor:
        """Return [n] from the rewards [n] and the cosines [n, n] of a group."""


@REWARDS.register("pairwise_distance")
@card(of="group", low=0, high=1, scaling="1 - cosine")
class PairwiseDistance(Grouped):
    """Measure diversity: the mean distance of a sample to the other samples of its prompt.

    ``clip``: the model that pictures are compared by, as in ``aesthetic``; null compares coarse
    pixels.
    """

    def __init__(self, clip: str | None = None):
        super().__init__(None, clip)

    def changed(self, values: Tensor, similar: Tensor) -> Tensor:
        return mean_of_others(1 - similar) if len(values) > 1 else torch.zeros(1)


@REWARDS.register("dra")
@card(
    of="group",
    source="[DRA-GRPO](https://arxiv.org/abs/2505.09655)",
    scaling="at most that of its part",
)
class DRA(Grouped):
    """Divide a reward by 1 + the sample's summed similarity to the others of its prompt (DRA-GRPO).

    Diversity-aware reward adjustment (Chen et al. 2025): r_i / (1 + sum over j != i of s_ij), the
    submodular mutual information of the graph cut. For non-negative rewards.
    """

    def __init__(self, of: Annotated[Reward, REWARDS], clip: str | None = None):
        super().__init__(of, clip)

    def changed(self, values: Tensor, similar: Tensor) -> Tensor:
        return values / (1 + similar.sum(1) - similar.diagonal())


@REWARDS.register("darling")
@card(
    of="group",
    source="[DARLING](https://arxiv.org/abs/2509.02534)",
    scaling="at most that of its part",
)
class Darling(Grouped):
    """Multiply a reward by the sample's mean distance to the others of its prompt: quality and
    diversity.

    DARLING (Li et al. 2025) multiplies the reward with diversity in 0..1; theirs is the share of
    answers with another meaning, by a trained classifier; here it is the mean of 1 - cosine. For
    non-negative rewards.
    """

    def __init__(self, of: Annotated[Reward, REWARDS], clip: str | None = None):
        super().__init__(of, clip)

    def changed(self, values: Tensor, similar: Tensor) -> Tensor:
        return values * mean_of_others(1 - similar) if len(values) > 1 else values
