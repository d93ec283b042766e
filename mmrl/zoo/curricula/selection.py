"""Data sources that choose an iteration's prompts by their rewards so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome, batch
from mmrl.zoo.curricula.drawing import Chosen, Portion, Share, Source, best, by_weight, uniform
from mmrl.zoo.curricula.features import Array, ValueModel, features_of
from mmrl.zoo.curricula.statistics import mean_advantage, successes
from samplers.noise import Rng


@DATA.register("vade")
@dataclass(eq=False)
class Vade(Chosen):
    """Draw prompts of uncertain success by Thompson sampling: VADE.

    Hu et al. 2025: every prompt's success rate has a Beta posterior, from ``prior`` and its
    answers; a rate theta is drawn from each, and the prompts of the largest theta (1 - theta) are
    asked (our reading of the information gain). Old answers are discounted towards the prior, on
    two scales: by ``decay`` at every visit of the prompt, by ``drift`` at every iteration without
    one.

    of: the data source. prior: a and b of the Beta distribution of a prompt without answers.
    decay, drift: factors on the weight of earlier answers. threshold: a reward above it is a
    success; null: the reward, in [0, 1], is the degree of success.
    """

    name = "vade"
    prior: Annotated[float, Gt(0)] = 1.0
    decay: Portion = 0.5
    drift: Portion = 0.99
    threshold: float | None = 0.5

    def graded(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return successes(rewards, self.threshold)

    def score(self, prompts: Sequence[Prompt], rng: Rng) -> Sequence[float]:
        theta = self.rates(prompts, rng)
        scores: list[float] = (theta * (1 - theta)).tolist()
        return scores

    def rates(self, prompts: Sequence[Prompt], rng: Rng) -> Tensor:
        """Draw a success rate of every prompt from its posterior, [n] float64."""
        from scipy.special import betaincinv

        known = self.statistics
        entries = [prompt["entry"] for prompt in prompts]
        weight = torch.tensor([known.weight(entry) for entry in entries], dtype=torch.float64)
        mean = torch.tensor([known[entry].mean for entry in entries], dtype=torch.float64)
        right = self.prior + weight * mean
        wrong = self.prior + weight * (1 - mean)
        u = uniform(prompts, rng)
        return torch.from_numpy(betaincinv(right.numpy(), wrong.numpy(), u.numpy()))


@DATA.register("vas")
@dataclass(eq=False)
class Vas(Chosen):
    """Draw a share of the prompts by reward variance and diversity of answers: VAS (MMR1).

    Leng et al. 2025: the Variance Promotion Score of a prompt is variance p (1 - p) + diversity d,
    p its success rate and d how much its answers differ; ``share`` of an iteration's prompts are
    drawn with these weights, without replacement, the rest as ``of`` draws them. With ``refresh``
    all prompts are sampled again for their scores, ``rollouts`` times each, as in the paper;
    training samples count too, and without ``refresh`` only they do (our reading, at no cost).
    Prompts not asked yet have the mean score. d: for tokens 1 - self-BLEU, the mean BLEU of every
    answer against the others of its group (n-grams of 1 to 4 tokens, brevity penalty, 1 added to
    the counts above 1-grams); for pictures the standard deviation of their latents inside the
    group, at most 1 (our reading).

    of: the data source. share: drawn by weights. variance, diversity: weights in the score. decay:
    factor on the weight of earlier answers at every visit. threshold: a reward above it is a
    success; null: the reward, in [0, 1], is the degree of success. refresh: iterations from one
    scoring of all prompts to the next, the first after the first iteration; 0: none. rollouts: of
    each prompt then.
    """

    name = "vas"
    share: Share = 0.5
    variance: Annotated[float, Ge(0)] = 0.8
    diversity: Annotated[float, Ge(0)] = 0.2
    decay: Portion = 0.5
    threshold: float | None = 0.5
    refresh: Natural = 0
    rollouts: Count = 8

    def __post_init__(self, of: Source) -> None:
        if not self.variance + self.diversity:
            raise UserError("vas: variance and diversity are both 0; give one a weight above 0")
        super().__post_init__(of)

    @property
    def measures(self) -> frozenset[str]:
        return super().measures | ({"diversity"} if self.diversity else set())

    def graded(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return successes(rewards, self.threshold)

    def rescoring(self, iteration: int) -> int:
        due = self.refresh and iteration % self.refresh == 0
        return self.rollouts if due else super().rescoring(iteration)

    def choose(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        weighted = int(self.share * count + 0.5)
        plain = batch(self.inner, count - weighted, iteration, seed) if weighted < count else []
        plain_entries = {prompt["entry"] for prompt in plain}
        left = [p for p in self.prompts if p["entry"] not in plain_entries] or self.prompts
        return [*best(left, self.score(left, self.rng(iteration, seed)), weighted), *plain]

    def score(self, prompts: Sequence[Prompt], rng: Rng) -> Sequence[float]:
        known = {entry: self.promotion(entry) for entry in self.statistics.records}
        usual = fmean(known.values()) if known else 1.0
        weights = [known.get(prompt["entry"], usual) for prompt in prompts]
        return by_weight(prompts, torch.tensor(weights, dtype=torch.float64), rng)

    def promotion(self, entry: int) -> float:
        """Compute the Variance Promotion Score of a prompt that was asked before."""
        record = self.statistics[entry]
        return self.variance * record.mean * (1 - record.mean) + self.diversity * record.diversity


@DATA.register("pcl")
@dataclass(eq=False)
class Pcl(Chosen):
    """Draw the candidates whose predicted reward is nearest to a target: Prompt Curriculum (PCL).

    Gao et al. 2025, Prompt Curriculum Learning: of ``candidates`` times as many prompts as are
    asked, those with the smallest |V - target| are taken, before any answers are sampled. V is by
    ``value``: ``network``, as in the paper, a value model of the policy's architecture that is
    trained alongside on the mean reward of every group, by squared error (``prompt_value`` with
    base: trained); ``model``, linear in features of the prompt, which needs no forward pass;
    ``mean``, the mean of the prompt's rewards so far, shrunk to the mean of all prompts as if by
    ``prior`` answers; ``both``, that mean shrunk to the linear model's prediction.

    of: the data source. target: reward; 0.5: prompts that are right half of the time. candidates:
    per prompt asked. prior: number of answers. decay, drift: factors on the weight of earlier
    answers at every visit, and at every iteration without one. value: network, model, mean or both.
    embeddings: the linear model's features, a .npy file with a row for every prompt; null: hashed
    words of its text. ridge: the weight of keeping that model unchanged in an iteration, relative
    to one prompt with features of length 1.
    """

    name = "pcl"
    target: float = 0.5
    candidates: Annotated[float, Ge(1)] = 4.0
    prior: Annotated[float, Gt(0)] = 1.0
    decay: Portion = 0.5
    drift: Portion = 0.99
    value: Literal["mean", "model", "both", "network"] = "mean"
    embeddings: Path | None = None
    ridge: Annotated[float, Gt(0)] = 1.0

    def __post_init__(self, of: Source) -> None:
        if self.embeddings is not None and self.value in ("mean", "network"):
            raise UserError("pcl: embeddings are of the value model; set value to model or both")
        self.size = len(of.train)
        super().__post_init__(of)
        if self.embeddings is not None:
            self.features(self.prompts[:1])  # a file that does not fit is refused now

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.model = ValueModel(self.ridge, self.target)
        self.network: Callable[[Sequence[Prompt]], list[float]] | None = None

    @staticmethod
    def asks_of_training(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the stages that are needed."""
        return ("prompt_value",) if options.get("value") == "network" else ()

    def features(self, prompts: Sequence[Prompt]) -> Array:
        return features_of(prompts, self.embeddings, self.size, self.name)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        scored = [o for o in outcomes if o.rewards and o.entry in self.by_entry]
        if self.value in ("model", "both") and scored:
            features = self.features([self.by_entry[outcome.entry] for outcome in scored])
            self.model.learn(features, np.array([fmean(o.rewards) for o in scored]))

    def predict_by(self, predict: Callable[[Sequence[Prompt]], list[float]]) -> None:
        super().predict_by(predict)
        self.network = predict

    def predicted(self, prompts: Sequence[Prompt]) -> list[float]:
        """Predict the rewards of prompts by the model or the network alone."""
        if self.value == "network":
            if self.network is None:
                raise UserError(
                    "pcl: value: network is that of the stage prompt_value: add it to train.stages"
                )
            return self.network(prompts)
        values: list[float] = self.model.predict(self.features(prompts)).tolist()
        return values

    def score(self, prompts: Sequence[Prompt], rng: Rng) -> Sequence[float]:
        means = [record.mean for record in self.statistics.records.values()]
        usual = fmean(means) if means else self.target
        known = [usual] * len(prompts) if self.value == "mean" else self.predicted(prompts)
        values = (self.expected(p["entry"], v) for p, v in zip(prompts, known, strict=True))
        return [-abs(value - self.target) for value in values]

    def expected(self, entry: int, usual: float) -> float:
        """Predict the reward of a prompt; ``usual`` is the prediction without answers."""
        weight = 0.0 if self.value in ("model", "network") else self.statistics.weight(entry)
        return (weight * self.statistics[entry].mean + self.prior * usual) / (weight + self.prior)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state.get("model", {}))


@DATA.register("sec")
@dataclass(eq=False)
class Sec(Chosen):
    """Draw prompts from the most instructive categories, by a bandit: Self-Evolving Curriculum.

    Chen et al. 2025: an arm, a category, has the value Q; after every iteration Q += rate (mean |A|
    - Q) for the arms drawn, A = (r - mean) / std within groups (TD(0)); the category of every
    prompt is drawn by softmax(Q / temperature), and a prompt of it at random, without replacement
    within an iteration.

    of: the data source. field: the prompt's field with its category. rate: of learning Q.
    temperature: of the softmax; small ones always choose the best category.
    """

    name = "sec"
    field: str = "category"
    rate: Portion = 0.5
    temperature: Annotated[float, Gt(0)] = 0.2

    def __post_init__(self, of: Source) -> None:
        if bare := sum(prompt.get(self.field) is None for prompt in of.train):
            raise UserError(
                f"sec: {bare} of {len(of.train)} prompts have no {self.field!r}; set the option "
                f"field to that of their category, such as source for those of a mixture"
            )
        super().__post_init__(of)

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.members: dict[str, list[Prompt]] = {}
        for prompt in inner:
            self.members.setdefault(self.category(prompt), []).append(prompt)
        self.values = dict.fromkeys(self.members, 0.0)

    def category(self, prompt: Prompt) -> str:
        return str(prompt[self.field])

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        earned: dict[str, list[float]] = {}
        for outcome in outcomes:
            if outcome.rewards:
                levels = earned.setdefault(self.category(self.by_entry[outcome.entry]), [])
                levels += [mean_advantage(outcome.rewards)] * len(outcome.rewards)
        for name, levels in earned.items():
            self.values[name] += self.rate * (fmean(levels) - self.values[name])

    def probabilities(self) -> dict[str, float]:
        """Return the probability of every category, exp(value / temperature) over their sum."""
        top = max(self.values.values())
        powers = {n: math.exp((v - top) / self.temperature) for n, v in self.values.items()}
        return {name: power / sum(powers.values()) for name, power in powers.items()}

    def pool(self, count: int, iteration: int, seed: int) -> Sequence[Prompt]:
        """Draw the categories, and a prompt of each."""
        chances = self.probabilities()
        names = list(chances)
        ends = torch.tensor(list(chances.values()), dtype=torch.float64).cumsum(0)
        rng = self.rng(iteration, seed)
        arms = torch.searchsorted(ends, rng.uniform(torch.arange(count))).clamp(max=len(names) - 1)
        queues: dict[str, list[int]] = {}
        prompts: list[Prompt] = []
        for name in (names[arm] for arm in arms.tolist()):
            member = self.members[name]
            if not queues.get(name):
                order = rng.fold(name, len(prompts)).permutation(len(member))
                queues[name] = order.tolist()
            prompts.append(member[queues[name].pop()])
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.values |= {n: v for n, v in state.get("values", {}).items() if n in self.values}
