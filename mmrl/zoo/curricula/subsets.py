"""Data sources that keep the prompts worth training on, by rewards recorded in a file.

``recorded`` writes the file while a run trains, or only measures with a learning rate of 0.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from statistics import fmean, pvariance
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt
from numpy.typing import NDArray

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.data.prompts import decoded
from mmrl.zoo.curricula.drawing import (
    Around,
    Chosen,
    Portion,
    Share,
    Source,
    best,
    keyed_by_entry,
    subset,
    uniform,
    with_entries,
)
from mmrl.zoo.curricula.features import features_of
from samplers.noise import Rng

Curves = Mapping[int, Sequence[Sequence[float]]]  # rewards of every visit, by entry
Array = NDArray[np.float64]
LETTERS = 80  # of a text, to recognise it by


@DATA.register("recorded")
@dataclass(eq=False)
class Recorded(Around):
    """Record every prompt's rewards in a file, which limr, depo and by_variance read.

    One JSON object a line: the prompt's index in the data, iteration, rewards. After a resume the
    later line of an iteration counts. With a learning rate of 0 the run only measures, like
    repeated inference.

    of: the data source. path: the file, .jsonl, to which lines are appended.
    """

    path: str

    memory = {"iteration": int}

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.iteration = 0

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        rewards: dict[int, list[float]] = {}
        for outcome in outcomes:
            rewards.setdefault(outcome.entry, []).extend(outcome.rewards)
        records = (
            {"entry": entry, "text": text_of(self.by_entry[entry])}
            | {"iteration": self.iteration, "rewards": values}
            for entry, values in rewards.items()
            if values
        )
        lines = [json.dumps(record) + "\n" for record in records]
        if distributed.is_main():
            path = Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        self.iteration += 1


def text_of(prompt: Prompt) -> str:
    """Return the beginning of a prompt's text, which identifies the data."""
    return str(prompt.get("text", ""))[:LETTERS]


def read_curves(path: Path, prompts: Sequence[Prompt]) -> dict[int, list[list[float]]]:
    """Read the rewards of every visit of every prompt, in the order of iterations. Raises UserError
    if the file is of other prompts."""
    texts = {prompt["entry"]: text_of(prompt) for prompt in prompts}
    named: dict[str, list[int]] = {}
    for prompt in prompts:
        named.setdefault(str(prompt.get("text", "")), []).append(prompt["entry"])
    visits: dict[int, dict[int, list[float]]] = {}
    for number, line in enumerate(decoded(path).splitlines(), start=1):
        try:
            record = json.loads(line)
            if (
                "entry" not in record and "reward" in record
            ):  # of mmrl.apps.prepare.reference_rewards
                value = record["reward"]
                rewards = [float(x) for x in (value if isinstance(value, list) else [value])]
                for place in named.get(str(record["text"]), []):
                    visits.setdefault(place, {}).setdefault(0, []).extend(rewards)
                continue
            entry, iteration = int(record["entry"]), int(record["iteration"])
            rewards = [float(reward) for reward in record["rewards"]]
            text = record["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: not a line that `recorded` wrote, or reference_rewards: {error}"
            ) from error
        if texts.get(entry) != text:
            raise UserError(
                f"{path}:{number}: prompt {entry} was {text!r} when it was recorded; use the same "
                f"data source, or record it again"
            )
        visits.setdefault(entry, {})[iteration] = rewards
    return {entry: [by[at] for at in sorted(by) if by[at]] for entry, by in visits.items()}


def restricted(
    inner: Sequence[Prompt], entries: set[int], name: str, path: Path
) -> Sequence[Prompt]:
    """Keep the prompts with these entries. Raises UserError if none is left."""
    prompts = [prompt for prompt in inner if prompt["entry"] in entries]
    if not prompts:
        raise UserError(f"{name}: no prompt of {path} is good enough; ask for less")
    return subset(inner, prompts)


def recorded_of(inner: Sequence[Prompt], path: Path, name: str) -> dict[int, list[list[float]]]:
    """Read the curves of the prompts that were recorded; warn of those that were not."""
    curves = {entry: curve for entry, curve in read_curves(path, inner).items() if curve}
    if missing := len(inner) - len(curves):
        warnings.warn(
            f"{name}: {missing} of {len(inner)} prompts are not in {path} and are left out",
            stacklevel=3,
        )
    return curves


def highest(scores: Mapping[int, float], share: float) -> set[int]:
    """Choose a share of the entries, at least one, by the highest scores."""
    order = sorted(scores, key=lambda entry: (-scores[entry], entry))
    return set(order[: max(1, int(share * len(order) + 0.5))])


@DATA.register("limr")
class Limr:
    """Keep the prompts whose reward curve follows the mean curve: LIMR's impact measurement.

    Li et al. 2025, "LIMR": with r_i^k the mean reward of prompt i at its k-th visit and r^k the
    mean of all prompts there, s_i = 1 - sum_k (r_i^k - r^k)^2 / sum_k (1 - r^k)^2; prompts with s_i
    above ``threshold`` are kept. Rewards reach up to 1.

    of: the data source. path: the file of a run with ``recorded``. threshold: of the score. share:
    keep this share of the prompts with the best scores instead; null: those above the threshold.
    """

    train: Sequence[Prompt]
    held_out: list[Prompt]

    def __init__(
        self, of: Source, path: Path, threshold: float = 0.6, share: Portion | None = None
    ):
        inner = with_entries(of.train)
        scores = alignment(recorded_of(inner, path, "limr"))
        above = {entry for entry, score in scores.items() if score > threshold}
        self.train = restricted(
            inner, above if share is None else highest(scores, share), "limr", path
        )
        self.held_out = list(of.held_out)


def alignment(curves: Curves) -> dict[int, float]:
    """Score how well the reward curve of every prompt follows the mean curve; 1: exactly."""
    means = {entry: [fmean(rewards) for rewards in curve] for entry, curve in curves.items()}
    visits = max(map(len, means.values()))
    usual = [fmean([curve[k] for curve in means.values() if k < len(curve)]) for k in range(visits)]
    scores = {}
    for entry, curve in means.items():
        gap = sum((reward - mean) ** 2 for reward, mean in zip(curve, usual, strict=False))
        room = sum((1 - mean) ** 2 for mean in usual[: len(curve)])
        scores[entry] = 1 - gap / room if room > 0 else 1.0 if gap == 0 else -1e30
    return scores


@DATA.register("by_variance")
class ByVariance:
    """Keep the prompts whose recorded rewards vary: Temporal-R1's selection of training data.

    Li et al. 2025, "Reinforcement Learning Tuning for VideoLLMs": prompts are answered several
    times, and those kept whose rewards vary, neither always right nor always wrong. The standard
    deviation (population) is over all of a prompt's rewards in the file (our reading).

    of: the data source. path: the file of a run with ``recorded``, or the reference rewards of
    ``mmrl.apps.prepare.reference_rewards``, which PVPO's baseline uses too. least: standard
    deviation; share: of the prompts that reach it, keep this share with the largest.
    """

    train: Sequence[Prompt]
    held_out: list[Prompt]

    def __init__(
        self, of: Source, path: Path, least: Annotated[float, Ge(0)] = 0.1, share: Portion = 1.0
    ):
        inner = with_entries(of.train)
        curves = recorded_of(inner, path, "by_variance")
        spreads = {entry: pvariance(sum(curve, [])) ** 0.5 for entry, curve in curves.items()}
        wide = {entry: std for entry, std in spreads.items() if std >= least and std > 0}
        self.train = restricted(inner, highest(wide, share) if wide else set(), "by_variance", path)
        self.held_out = list(of.held_out)


def explorability(answers: Sequence[Sequence[float]], noise: float) -> float:
    """Return sum |A| H of the [reward, H] of a group's answers, A = (r - mean) / (std + 1e-8).

    Worse answers whose H is above ``noise`` times the mean H of the better ones do not count.
    """
    rewards = [reward for reward, _ in answers]
    mean = fmean(rewards)
    std = pvariance(rewards) ** 0.5
    better = [entropy for reward, entropy in answers if reward > mean]
    limit = noise * fmean(better) if better else 0.0
    return fsum(
        abs(reward - mean) / (std + 1e-8) * entropy
        for reward, entropy in answers
        if reward > mean or entropy <= limit
    )


@DATA.register("depo")
@dataclass(eq=False)
class Depo(Chosen):
    """Keep diverse prompts of medium difficulty, ask those with most exploration: DEPO.

    Tang et al. 2025. Before training: prompts are nodes of a graph of similarities, weighted by
    PageRank; a determinantal point process keeps the ``diverse`` share of them greedily; of these
    ``share`` are drawn by a normal density of their mean recorded reward, ``difficulty`` its mean
    and ``spread`` its standard deviation. Without ``path`` all are kept. During training: of
    ``candidates`` times as many prompts as are asked, those of the highest explorability are taken,
    and the share ``replay`` are prompts of the fewest visits. Similarity is that of ``embeddings``,
    the policy's hidden states from ``mmrl.apps.prepare.prompt_states``; without a file, of the
    words (our reading). ``explore``: ``entropy``, as published: the mean over the last ``window``
    visits of sum |A| H, A = (r - mean) / std of an answer in its group and H the mean entropy of
    its decisions, without worse answers whose H is above ``noise`` times the mean H of the better
    ones; ``variance``, of a prompt's rewards, which needs no records (our reading). Both rank
    prompts that were never asked first.

    of: the data source. path: the file of a run with ``recorded``; null: no choice before training.
    embeddings: a .npy file with a row for every prompt; null: hashed words. damping: of PageRank.
    decay: factor on the weight of earlier answers at a visit. seed: of the choice before training.
    explore: entropy needs the policy's option record_entropy. window: visits. noise: a ratio.
    decline: as published, the share of candidates that is asked falls by it with every epoch, from
    1 to 1 / candidates; 0: it is that from the start.

    diverse: share of the prompts that the determinantal point process keeps. share: of these, those
    that are drawn. difficulty, spread: mean and standard deviation of that normal density. replay:
    share of an iteration's prompts that are those of the fewest visits.
    """

    name = "depo"
    path: Path | None = None
    diverse: Portion = 0.5
    share: Portion = 0.4
    difficulty: float = 0.5
    spread: Annotated[float, Gt(0)] = 0.2
    embeddings: Path | None = None
    damping: Annotated[float, Ge(0), Lt(1)] = 0.85
    candidates: Annotated[float, Ge(1)] = 2.0
    replay: Share = 0.1
    decay: Portion = 0.5
    seed: Natural = 0
    explore: Literal["variance", "entropy"] = "variance"
    window: Count = 5
    noise: Annotated[float, Gt(0)] = 1.5
    decline: Annotated[float, Ge(0)] = 0.0

    memory = {"traces": keyed_by_entry}

    def __post_init__(self, of: Source) -> None:
        super().__post_init__(of)
        if self.path is not None:
            self.begin(restricted(self.inner, self.kept(self.path), self.name, self.path))

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.traces: dict[int, list[float]] = {}  # explorability of the last visits, by entry

    def kept(self, path: Path) -> set[int]:
        """Choose the prompts to train on, by their recorded rewards and similarity."""
        curves = recorded_of(self.prompts, path, self.name)
        prompts = [prompt for prompt in self.prompts if prompt["entry"] in curves]
        features = features_of(prompts, self.embeddings, len(self), self.name)
        count = max(1, int(self.diverse * len(prompts) + 0.5))
        rows = spread_out(features, pagerank(features, self.damping), count)
        entries = [prompts[row]["entry"] for row in rows]
        means = {entry: fmean(sum(curves[entry], [])) for entry in entries}
        density = {
            entry: -0.5 * ((mean - self.difficulty) / self.spread) ** 2
            for entry, mean in means.items()
        }
        return by_density(density, self.share, self.seed)

    @property
    def measures(self) -> frozenset[str]:
        return super().measures | ({"entropy"} if self.explore == "entropy" else set())

    @staticmethod
    def records(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the policy's options that turn on the records needed."""
        return ("record_entropy",) if options.get("explore") == "entropy" else ()

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        super().see(name, values)
        if name == "entropy":
            for entry, answers in values.items():
                trace = [*self.traces.get(entry, []), explorability(answers, self.noise)]
                self.traces[entry] = trace[-self.window :]

    def choose(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        again = int(self.replay * count)
        rng = self.rng(iteration, seed)
        ties = uniform(self.prompts, rng).tolist()
        visits = (self.statistics[prompt["entry"]].visits for prompt in self.prompts)
        rare = [-(number + u) for number, u in zip(visits, ties, strict=True)]
        replayed = best(self.prompts, rare, again)
        entries = {prompt["entry"] for prompt in replayed}
        prompts = self.pool(count, iteration, seed)
        fresh = [prompt for prompt in prompts if prompt["entry"] not in entries] or prompts
        return [*best(fresh, self.score(fresh, rng), count - again), *replayed]

    def pool(self, count: int, iteration: int, seed: int) -> Sequence[Prompt]:
        multiple = self.candidates
        if self.decline:
            epochs = iteration * count // len(self.prompts)
            multiple = 1 / max(1 / multiple, 1 - self.decline * epochs)
        return self.drawn(int(multiple * count), iteration, seed)

    def score(self, prompts: Sequence[Prompt], rng: Rng) -> Sequence[float]:
        return [self.explorability(prompt["entry"]) for prompt in prompts]

    def explorability(self, entry: int) -> float:
        """Return the explorability of a prompt; infinite before its first visit."""
        record = self.statistics[entry]
        if self.explore == "variance":
            return record.variance if record.visits else float("inf")
        trace = self.traces.get(entry)
        return fmean(trace) if trace else float("inf")


def pagerank(features: Array, damping: float) -> Array:
    """Compute the PageRank [n], mean 1, of the graph whose edges weigh (1 + cosine) / 2."""
    count = len(features)

    def spread_over(x: Array) -> Array:
        alike: Array = (x.sum() + features @ (features.T @ x)) / 2
        itself: Array = x * (1 + (features**2).sum(1)) / 2
        return alike - itself

    degree = np.maximum(spread_over(np.ones(count)), 1e-12)
    rank = np.ones(count)
    for _ in range(100):
        rank = 1 - damping + damping * spread_over(rank / degree)
        rank = rank * count / rank.sum()
    return rank


def spread_out(features: Array, quality: Array, count: int, ridge: float = 1e-3) -> list[int]:
    """Choose rows greedily, each the one that raises log det of L most, L = q q' (S + ridge I), S
    their similarity (Chen et al. 2018, fast greedy MAP): [count] in order."""
    gain = quality**2 * ((features**2).sum(1) + ridge)
    basis = np.zeros((count, len(features)))
    rows: list[int] = []
    for number in range(count):
        row = int(np.argmax(gain))
        rows.append(row)
        column = quality * quality[row] * (features @ features[row])
        column[row] += quality[row] ** 2 * ridge
        column -= basis[:number].T @ basis[:number, row]
        basis[number] = column / np.sqrt(gain[row])
        gain = gain - basis[number] ** 2
        gain[rows] = -np.inf
    return rows


def by_density(logs: Mapping[int, float], share: float, seed: int) -> set[int]:
    """Draw a share of the entries without replacement by their log weights (Gumbel top-k)."""
    entries = list(logs)
    u = Rng.of(seed, "depo", "subset").uniform(torch.tensor(entries))
    keys = [
        log - float(gumbel) for log, gumbel in zip(logs.values(), (-u.log()).log(), strict=True)
    ]
    return highest(dict(zip(entries, keys, strict=True)), share)
