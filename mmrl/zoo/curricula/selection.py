"""Makes data sources that choose an iteration's prompts by how they were rewarded so far.

Every choice is a function of iteration, seed and statistics: the same on all processes, and after a
resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome, batch
from mmrl.zoo.curricula.budget import Counted
from mmrl.zoo.curricula.curriculum import Share, Source, over, with_entries
from mmrl.zoo.curricula.features import Array, ValueModel, features_of
from mmrl.zoo.curricula.statistics import PromptStatistics, mean_advantage, successes
from samplers.noise import Rng

Portion = Annotated[float, Gt(0), Le(1)]


class Rule(Protocol):
    """Chooses prompts by their records."""

    measures: frozenset[str]

    def statistics(self) -> PromptStatistics: ...

    def rewards(self, rewards: Sequence[float]) -> tuple[float, ...]: ...

    def choose(self, data: Chosen, count: int, iteration: int, seed: int) -> list[Prompt]: ...

    def rescoring(self, iteration: int) -> int: ...


class Unrenewed:
    """Provides rules that live on training's own answers alone."""

    def rescoring(self, iteration: int) -> int:
        return 0


class Chosen(Counted):
    """Draws the prompts that a rule chooses by the statistics of all."""

    def __init__(self, inner: Sequence[Prompt], rule: Rule):
        super().__init__(inner, rule.statistics())
        self.rule = rule

    @property
    def measures(self) -> frozenset[str]:
        return self.rule.measures | super().measures

    def as_recorded(self, outcome: Outcome) -> Outcome:
        return outcome._replace(rewards=self.rule.rewards(outcome.rewards))

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        super().see(name, values)
        if name == "diversity":
            self.statistics.see_diversity(values)

    def rescoring(self, iteration: int) -> int:
        return self.rule.rescoring(iteration) or super().rescoring(iteration)

    def renew(self, outcomes: Sequence[Outcome], diversity: Mapping[int, float]) -> None:
        super().renew(outcomes, diversity)
        self.statistics.renew([self.as_recorded(outcome) for outcome in outcomes])
        self.statistics.see_diversity(diversity)

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        chosen = self.rule.choose(self, count, iteration, seed)
        if held := self.reserved(count, iteration):
            entries = {prompt["entry"] for prompt in held}
            rest = sorted(chosen, key=lambda prompt: prompt["entry"] in entries)
            chosen = [*rest[: count - len(held)], *held]
        return [self.presented(prompt, iteration) for prompt in chosen]

    def over(self, prompts: Sequence[Prompt]) -> Chosen:
        return type(self)(over(self.inner, prompts), self.rule)

    def candidates(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Draw ``count`` prompts as ``inner`` does, each once."""
        drawn = batch(self.inner, count, iteration, seed)
        return list({prompt["entry"]: prompt for prompt in drawn}.values())


def best(prompts: Sequence[Prompt], scores: Sequence[float], count: int) -> list[Prompt]:
    """Take the prompts of the highest scores, the first of equals first; all again and again where
    there are fewer than ``count``."""
    order = sorted(range(len(prompts)), key=lambda i: -scores[i])
    return [prompts[order[i % len(order)]] for i in range(count)]


def uniform(prompts: Sequence[Prompt], rng: Rng) -> Tensor:
    """Draw a number in (0, 1) for every prompt, by its entry: [n] float64."""
    return rng.uniform(torch.tensor([prompt["entry"] for prompt in prompts]))


class Fading(Unrenewed):
    """Keeps what rules share whose records fade, at visits of a prompt and between them."""

    held_out: list[Prompt]
    measures: frozenset[str] = frozenset()

    def __init__(self, of: Source, decay: float, drift: float):
        self.decay = decay
        self.drift = drift
        self.held_out = list(of.held_out)

    def statistics(self) -> PromptStatistics:
        return PromptStatistics(self.decay, drift=self.drift)


@DATA.register("vade")
class Vade(Fading):
    """Draw prompts that are likely to be answered now right, now wrong, by Thompson sampling: VADE.

    Hu et al. 2025: every prompt's success rate has a Beta posterior, from ``prior`` and its own
    answers; a rate theta is drawn from each, and the prompts of the largest theta (1 - theta) are
    asked (our reading of the information gain). Answers count less with time, so that the prior
    returns (two scales): ``decay`` at every visit of the prompt, ``drift`` at every iteration
    without one.

    of: the data source. prior: a and b of the Beta distribution of a prompt without answers.
    decay, drift: what is left of the weight of earlier answers. threshold: a reward above it is a
    success; null: the reward itself, in [0, 1], is how much of a success it is.
    """

    train: Chosen

    def __init__(
        self,
        of: Source,
        prior: Annotated[float, Gt(0)] = 1.0,
        decay: Portion = 0.5,
        drift: Portion = 0.99,
        threshold: float | None = 0.5,
    ):
        super().__init__(of, decay, drift)
        self.prior = prior
        self.threshold = threshold
        self.train = Chosen(with_entries(of.train), self)

    def rewards(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return successes(rewards, self.threshold)

    def choose(self, data: Chosen, count: int, iteration: int, seed: int) -> list[Prompt]:
        theta = self.rates(data, Rng.of(seed, "vade", iteration))
        return best(data.prompts, (theta * (1 - theta)).tolist(), count)

    def rates(self, data: Chosen, rng: Rng) -> Tensor:
        """Draw a success rate of every prompt from its posterior, [n] float64."""
        from scipy.special import betaincinv

        known = data.statistics
        entries = [prompt["entry"] for prompt in data.prompts]
        weight = torch.tensor([known.weight(entry) for entry in entries], dtype=torch.float64)
        mean = torch.tensor([known[entry].mean for entry in entries], dtype=torch.float64)
        right = self.prior + weight * mean
        wrong = self.prior + weight * (1 - mean)
        u = uniform(data.prompts, rng)
        return torch.from_numpy(betaincinv(right.numpy(), wrong.numpy(), u.numpy()))


@DATA.register("vas")
class Vas:
    """Draw a share of the prompts by reward variance and diversity of answers: VAS (MMR1).

    Leng et al. 2025: the Variance Promotion Score of a prompt is variance p (1 - p) + diversity d,
    p its success rate and d how much its answers differ; ``share`` of an iteration's prompts are
    drawn with these weights, without repeats, the rest as ``of`` draws them. With ``refresh`` all
    prompts are answered anew for their scores, ``rollouts`` times each, as in the paper; training's
    own answers count too, and without it alone (our reading, which costs nothing). Prompts not
    asked yet have the mean score. d: of tokens the inverse self-BLEU, 1 - the mean BLEU of every
    answer against the others of its group (n-grams of 1 to 4 tokens, brevity penalty, 1 added to
    the counts above 1-grams), of pictures the standard deviation of their latents inside the group,
    at most 1 (our reading).

    of: the data source. share: drawn by weights. variance, diversity: weights in the score. decay:
    what is left of the weight of earlier answers at every new visit. threshold: a reward above it
    is a success; null: the reward itself, in [0, 1], is how much of a success it is. refresh:
    iterations from one scoring of all prompts to the next, the first after the first iteration; 0:
    none. rollouts: of each prompt then.
    """

    train: Chosen
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        share: Share = 0.5,
        variance: Annotated[float, Ge(0)] = 0.8,
        diversity: Annotated[float, Ge(0)] = 0.2,
        decay: Portion = 0.5,
        threshold: float | None = 0.5,
        refresh: Natural = 0,
        rollouts: Count = 8,
    ):
        if not variance + diversity:
            raise UserError("vas: variance and diversity are both 0; give one a weight above 0")
        self.share = share
        self.variance = variance
        self.diversity = diversity
        self.decay = decay
        self.threshold = threshold
        self.refresh = refresh
        self.rollouts = rollouts
        self.measures = frozenset({"diversity"} if diversity else ())
        self.train = Chosen(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def statistics(self) -> PromptStatistics:
        return PromptStatistics(self.decay)

    def rewards(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return successes(rewards, self.threshold)

    def rescoring(self, iteration: int) -> int:
        return self.rollouts if self.refresh and iteration % self.refresh == 0 else 0

    def choose(self, data: Chosen, count: int, iteration: int, seed: int) -> list[Prompt]:
        weighted = int(self.share * count + 0.5)
        plain = batch(data.inner, count - weighted, iteration, seed) if weighted < count else []
        plain_entries = {prompt["entry"] for prompt in plain}
        left = [p for p in data.prompts if p["entry"] not in plain_entries] or data.prompts
        known = {entry: self.score(data, entry) for entry in data.statistics.records}
        usual = fmean(known.values()) if known else 1.0
        weights = torch.tensor([known.get(p["entry"], usual) for p in left], dtype=torch.float64)
        # the largest of u^(1 / w) are a sample by weights without repeats (Efraimidis, Spirakis)
        u = uniform(left, Rng.of(seed, "vas", iteration))
        keys = u.log() / weights.clamp_min(1e-9)
        return [*best(left, keys.tolist(), weighted), *plain]

    def score(self, data: Chosen, entry: int) -> float:
        """Compute the Variance Promotion Score of a prompt that was asked before."""
        record = data.statistics[entry]
        return self.variance * record.mean * (1 - record.mean) + self.diversity * record.diversity


class Valued(Chosen):
    """Draws by a value model that learns from every iteration; its weights are in checkpoints."""

    def __init__(self, inner: Sequence[Prompt], rule: Pcl):
        super().__init__(inner, rule)
        self.pcl = rule
        self.model = ValueModel(rule.ridge, rule.target)
        self.network: Callable[[Sequence[Prompt]], list[float]] | None = None
        self.by_entry = {prompt["entry"]: prompt for prompt in inner}

    def over(self, prompts: Sequence[Prompt]) -> Valued:
        return Valued(over(self.inner, prompts), self.pcl)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        scored = [o for o in outcomes if o.rewards and o.entry in self.by_entry]
        if self.pcl.uses in ("model", "both") and scored:
            features = self.pcl.features([self.by_entry[outcome.entry] for outcome in scored])
            self.model.learn(features, np.array([fmean(o.rewards) for o in scored]))

    def predict_by(self, predict: Callable[[Sequence[Prompt]], list[float]]) -> None:
        super().predict_by(predict)
        self.network = predict

    def predicted(self, prompts: Sequence[Prompt]) -> list[float]:
        """Predict the rewards of prompts."""
        if self.pcl.uses == "network":
            if self.network is None:
                raise UserError(
                    "pcl: value: network is that of the stage prompt_value: add it to train.stages"
                )
            return self.network(prompts)
        values: list[float] = self.model.predict(self.pcl.features(prompts)).tolist()
        return values

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state.get("model", {}))


@DATA.register("pcl")
class Pcl(Fading):
    """Draw the candidates whose predicted reward is nearest to a target: Prompt Curriculum (PCL).

    Gao et al. 2025, Prompt Curriculum Learning: of ``candidates`` times as many prompts as are
    asked, those with the smallest |V - target| are, without sampling answers of the others. V is
    by ``value``: ``network``, as in the paper, a value model of the policy's kind and size that
    learns beside it from the mean reward of every group, by squared error (``prompt_value`` with
    base: trained); ``model``, the same linear in features of the prompt, which costs no pass;
    ``mean``, the mean of the prompt's own rewards so far, drawn to the mean of all prompts as by
    ``prior`` answers; ``both``, that mean drawn to what the linear model predicts.

    of: the data source. target: reward, 0.5 of prompts that are right half of the time. candidates:
    of every prompt that is asked. prior: number of answers. decay, drift: what is left of the
    weight of earlier answers at every visit, and at every iteration without one. value: network,
    model, mean or both. embeddings: the linear model's features, a .npy file with a row for every
    prompt; null: hashed words of its text. ridge: how much that model stays as it is in an
    iteration, against one prompt of length 1.
    """

    train: Chosen

    def __init__(
        self,
        of: Source,
        target: float = 0.5,
        candidates: Annotated[float, Ge(1)] = 4.0,
        prior: Annotated[float, Gt(0)] = 1.0,
        decay: Portion = 0.5,
        drift: Portion = 0.99,
        value: Literal["mean", "model", "both", "network"] = "mean",
        embeddings: Path | None = None,
        ridge: Annotated[float, Gt(0)] = 1.0,
    ):
        super().__init__(of, decay, drift)
        if embeddings is not None and value in ("mean", "network"):
            raise UserError("pcl: embeddings are of the value model; set value to model or both")
        self.target = target
        self.multiple = candidates
        self.prior = prior
        self.uses = value
        self.embeddings = embeddings
        self.ridge = ridge
        inner = with_entries(of.train)
        self.size = len(inner)
        if embeddings is not None:
            self.features(inner[:1])  # a file that does not fit is refused now
        self.train = Valued(inner, self)

    @staticmethod
    def asks_of_training(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the stages that make what is looked at."""
        return ("prompt_value",) if options.get("value") == "network" else ()

    def features(self, prompts: Sequence[Prompt]) -> Array:
        return features_of(prompts, self.embeddings, self.size, "pcl")

    def rewards(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return tuple(rewards)

    def choose(self, data: Chosen, count: int, iteration: int, seed: int) -> list[Prompt]:
        assert isinstance(data, Valued)
        prompts = data.candidates(int(self.multiple * count), iteration, seed)
        means = [record.mean for record in data.statistics.records.values()]
        usual = fmean(means) if means else self.target
        expected = [usual] * len(prompts) if self.uses == "mean" else data.predicted(prompts)
        gaps = [
            abs(self.value(data, prompt["entry"], prediction) - self.target)
            for prompt, prediction in zip(prompts, expected, strict=True)
        ]
        return best(prompts, [-gap for gap in gaps], count)

    def value(self, data: Chosen, entry: int, usual: float) -> float:
        """Predict the reward of a prompt; ``usual`` is what is expected before its own answers."""
        weight = 0.0 if self.uses in ("model", "network") else data.statistics.weight(entry)
        return (weight * data.statistics[entry].mean + self.prior * usual) / (weight + self.prior)


class Categories(Chosen):
    """Draws prompts of categories that a bandit chooses; the bandit's values are in checkpoints."""

    def __init__(self, inner: Sequence[Prompt], rule: Sec):
        super().__init__(inner, rule)
        self.sec = rule
        self.members: dict[str, list[Prompt]] = {}
        for prompt in inner:
            self.members.setdefault(str(prompt[rule.field]), []).append(prompt)
        self.category = {p["entry"]: name for name, ps in self.members.items() for p in ps}
        self.values = dict.fromkeys(self.members, 0.0)

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        earned: dict[str, list[float]] = {}
        for outcome in outcomes:
            if outcome.rewards:
                level = mean_advantage(outcome.rewards)
                name = self.category[outcome.entry]
                earned.setdefault(name, []).extend([level] * len(outcome.rewards))
        for name, levels in earned.items():
            self.values[name] += self.sec.rate * (fmean(levels) - self.values[name])

    def shares(self) -> dict[str, float]:
        """Return the probability of every category, exp(value / temperature) over their sum."""
        top = max(self.values.values())
        powers = {n: math.exp((v - top) / self.sec.temperature) for n, v in self.values.items()}
        return {name: power / sum(powers.values()) for name, power in powers.items()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        values = state.get("values", {})
        self.values = {name: values.get(name, 0.0) for name in self.members}


@DATA.register("sec")
class Sec(Unrenewed):
    """Draw prompts of the categories that teach most, a bandit's arms: Self-Evolving Curriculum.

    Chen et al. 2025: an arm is worth Q; after every iteration Q += rate (mean |A| - Q) of the arms
    that were drawn, A = (r - mean) / std inside the groups (TD(0)); the category of every prompt is
    drawn with probability exp(Q / temperature) over their sum, and a prompt inside it at random,
    without repeats in an iteration.

    of: the data source. field: of the prompt, that names its category. rate: of learning Q.
    temperature: of the softmax; small ones choose the best category always.
    """

    train: Categories
    held_out: list[Prompt]
    measures: frozenset[str] = frozenset()

    def __init__(
        self,
        of: Source,
        field: str = "category",
        rate: Portion = 0.5,
        temperature: Annotated[float, Gt(0)] = 0.2,
    ):
        if bare := sum(prompt.get(field) is None for prompt in of.train):
            raise UserError(
                f"sec: {bare} of {len(of.train)} prompts have no {field!r}; set the option field "
                f"to that of their category, such as source for those of a mixture"
            )
        self.field = field
        self.rate = rate
        self.temperature = temperature
        self.train = Categories(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def statistics(self) -> PromptStatistics:
        return PromptStatistics()

    def rewards(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return tuple(rewards)

    def choose(self, data: Chosen, count: int, iteration: int, seed: int) -> list[Prompt]:
        assert isinstance(data, Categories)
        shares = data.shares()
        names = list(shares)
        ends = torch.tensor(list(shares.values()), dtype=torch.float64).cumsum(0)
        rng = Rng.of(seed, "sec", iteration)
        arms = torch.searchsorted(ends, rng.uniform(torch.arange(count))).clamp(max=len(names) - 1)
        queues: dict[str, list[int]] = {}
        prompts: list[Prompt] = []
        for name in (names[arm] for arm in arms.tolist()):
            member = data.members[name]
            if not queues.get(name):
                order = rng.fold(name, len(prompts)).permutation(len(member))
                queues[name] = order.tolist()
            prompts.append(member[queues[name].pop()])
        return prompts
