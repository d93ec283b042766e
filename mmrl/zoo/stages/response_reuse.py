"""Replays answers of earlier iterations in the groups of their prompts: AR3PO's response reuse
(Zhang et al. 2025), RePO (Li et al. 2025), RLEP (Zhang et al. 2025), ReMix (Liang et al. 2025).

Every process remembers the answers of all processes, so training is the same on any number of them.
A reused answer keeps the log-probs recorded when it was sampled, as in the replay buffer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural, Positive
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rollout
from mmrl.core.weight_files import read_tensors
from mmrl.rollout.collect import rescored
from mmrl.rollout.stages import Drawn, Sample, Setup
from mmrl.zoo.stages.answer_memory import (
    AnswerMemory,
    OldAnswers,
    Remembered,
    fits,
    gathered,
    remembered,
)
from mmrl.zoo.stages.insertion import inserted
from samplers.noise import Rng

Chosen = list[tuple[int, Remembered]]  # groups, and answers to add to them


@STAGES.register("response_reuse")
@dataclass
class ReusedResponses(OldAnswers):
    """Replays answers of earlier iterations in their prompts' groups: AR3PO, RePO, RLEP, ReMix.

    ``threshold``: a total reward above it is right, and only right answers are remembered; null:
    all are. ``when``: in groups without a right answer, or always. ``number``: at most this many
    are added to a group. ``strategy``: which are chosen: the newest (recency), all (full_scope),
    the best (reward), those whose rewards differ most (variance), or random ones. ``place``: they
    replace the last samples of the group, of which one stays, or are appended to it.
    ``own_baseline``: they are compared among themselves, as in RePO, not with the new samples.
    ``logprob``: the ratio is to the sampling weights (recorded), or to the weights before the
    update (current), and then the objective's ``importance_sampling`` corrects between the two.
    ``per_prompt``: how many of a prompt's newest answers are remembered; ``size``: of how many
    prompts; ``age``: iterations after which an answer is forgotten; ``until``: the iteration from
    which on none is used; null: never. ``strata``: shares of ``size`` for easy, medium and hard
    prompts, by the moving average of their rewards among those of all prompts (AVATAR: 0.25, 0.35,
    0.4); each stratum forgets its oldest first; null: one memory for all. ``rate``: of that moving
    average. ``start``: a run, or a checkpoint, with the
    same prompts, whose answers of any age fill the memory at the start. ``learn``: also remember
    answers of this run.

    The default is AR3PO: the last right answer replaces the last sample of an all-wrong group
    (mmrl's reading). It keeps the reward it earned, so rewards must not depend on the iteration.
    RePO is ``{threshold: null, when: always, number: 8, per_prompt: 64, place: append,
    own_baseline: true}`` with a ``strategy``; RLEP ``{when: always, number: 2, strategy: random,
    place: append, logprob: current, start: runs/first, learn: false}``: the pool is the memory of a
    first run; ReMix's mixed policy gradient ``{threshold: null, when: always, place: append,
    logprob: current}`` with the objective's ``importance_sampling``.
    """

    threshold: float | None = 0.5
    when: Literal["all_wrong", "always"] = "all_wrong"
    number: Count = 1
    strategy: Literal["recency", "full_scope", "reward", "variance", "random"] = "recency"
    place: Literal["replace", "append"] = "replace"
    own_baseline: bool = False
    logprob: Literal["recorded", "current"] = "recorded"
    per_prompt: Count = 1
    size: Count = 4096
    age: Count = 64
    until: Natural | None = None
    strata: tuple[Positive, Positive, Positive] | None = None
    rate: Annotated[float, Gt(0), Le(1)] = 0.3
    start: Path | None = None
    learn: bool = True
    saved_as = "response_reuse"
    effects = Effects(returns_rows=True, in_dry_run=False)

    def __post_init__(self) -> None:
        if self.strata is not None and abs(sum(self.strata) - 1) > 1e-6:
            raise UserError(f"response_reuse: strata {list(self.strata)} must add up to 1")
        if self.threshold is None and self.when == "all_wrong":
            raise UserError(
                "response_reuse: when: all_wrong needs a threshold, above which a reward is right; "
                "set threshold, or when: always"
            )
        self.grows = self.place == "append"
        self.baseline_of = "is_replayed" if self.own_baseline else ""

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self.seed = setup.options.seed
        self.behavior = setup.behavior
        self.levels: dict[int, float] = {}  # moving mean rewards, with strata
        if self.start is not None:
            self._keep(stored(self.start, self.prompts))

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        rollout = drawn.rollout
        self.refuse_trees(rollout, "chosen")
        self.memory.forget(iteration - self.age)
        right = self._right(drawn)
        origins = self.indices(rollout)
        active = self.until is None or iteration < self.until
        chosen = self._chosen(rollout, right, origins, iteration) if active else []
        if self.strata is not None:
            self._follow(drawn, origins)
        if self.learn and active:
            self._remember(drawn, right, origins, iteration)
        ages = sum(max(iteration - entry.iteration, 0) for _, entry in chosen)
        groups = len({group for group, _ in chosen})
        sums = distributed.all_sum(
            torch.tensor([groups, ages, len(chosen)], device=rollout.group.device).double()
        ).tolist()
        mixed = inserted(self.policy, drawn, chosen, self.grows)
        if self.logprob == "current":
            mixed = replace(mixed, rollout=self._current(mixed.rollout))
        return mixed, {
            "response_reuse/groups": sums[0],
            "response_reuse/age": sums[1] / max(sums[2], 1),
            "response_reuse/remembered": len(self.memory.entries),
        }

    def _right(self, drawn: Drawn) -> Tensor:
        """Tell which rows are right, [B] bool on the CPU; without a threshold all scored ones."""
        double, groups = measured(drawn.rewards.per_row(), drawn.rollout)
        threshold = -torch.inf if self.threshold is None else self.threshold
        return ((double.total() > threshold) & groups.present).cpu()

    def _chosen(
        self, rollout: Rollout, right: Tensor, origins: Sequence[int], iteration: int
    ) -> Chosen:
        """Choose the answers to add to each group."""
        sizes = rollout.group.bincount(minlength=len(origins)).tolist()
        solved = set(rollout.group.cpu()[right].tolist())
        known = self.memory.by_prompt()
        chosen: Chosen = []
        for group, index in enumerate(origins):
            needed = self.when == "always" or group not in solved
            if not sizes[group] or not needed:
                continue
            most = self.number if self.grows else min(self.number, sizes[group] - 1)
            answers = [e for e in known.get(index, []) if fits(e, rollout)]
            rng = Rng.of(self.seed, iteration, "reuse", index)
            picked = PICKS[self.strategy](answers, most, rng)
            chosen += [(group, e) for e in (picked if self.grows else picked[:most])]
        return chosen

    def _remember(
        self, drawn: Drawn, right: Tensor, origins: Sequence[int], iteration: int
    ) -> None:
        """Remember the first right answers of this iteration to every prompt, of all processes."""
        rollout = drawn.rollout
        foreign = rollout.provenance.is_replayed
        fresh = right if foreign is None else right & ~foreign.cpu()
        rows: dict[int, list[int]] = {}
        group = rollout.group.tolist()
        for row in fresh.nonzero()[:, 0].tolist():
            of_prompt = rows.setdefault(origins[group[row]], [])
            if len(of_prompt) < self.per_prompt:
                of_prompt.append(row)
        device = rollout.group.device
        local = [
            remembered(drawn, torch.tensor([row], device=device), index, iteration)
            for index, of_prompt in rows.items()
            if index >= 0
            for row in of_prompt
        ]
        self._keep(gathered(local))

    def _keep(self, fresh: Sequence[Remembered]) -> None:
        self.memory.add(fresh, self.per_prompt, self._too_many)

    def _too_many(self, prompts: list[int]) -> list[int]:
        """List the prompts to forget: in every stratum those answered longest ago."""
        if self.strata is None:
            return prompts[: -self.size]
        strata = stratified(self.levels, self.strata)
        leaving = []
        for number, share in enumerate(self.strata):
            held = [index for index in prompts if strata.get(index, 1) == number]
            leaving += held[: max(len(held) - max(1, round(share * self.size)), 0)]
        return leaving

    def _follow(self, drawn: Drawn, origins: Sequence[int]) -> None:
        """Update the moving mean rewards of the prompts of all processes."""
        double, groups = measured(drawn.rewards.per_row(), drawn.rollout)
        names = drawn.rollout.group.unique().tolist()
        means = groups.mean(double.total()).tolist()
        rows = [(origins[g], mean) for g, mean in zip(names, means, strict=True) if mean == mean]
        for index, mean in distributed.all_gather_json(rows, drawn.rollout.group.device):
            before = self.levels.get(index, mean)
            self.levels[index] = before + self.rate * (mean - before)

    def _current(self, rollout: Rollout) -> Rollout:
        """Record the log-probs under the current weights, beside those of the sampling weights."""
        provenance = rollout.provenance
        assert provenance.is_replayed is not None
        with self.behavior():
            logprob = rescored(self.policy, rollout, provenance.is_replayed)
        sampler = rollout.logprob
        if provenance.sampler_logprob is not None:
            old = provenance.is_replayed[:, None]
            sampler = torch.where(old, sampler, provenance.sampler_logprob)
        return rollout.replace(
            logprob=logprob, provenance=provenance.replace(sampler_logprob=sampler)
        )

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        """Return the answers, which every process knows, and the mean rewards of prompts."""
        tensors, plain = super().state_dict()
        return tensors, {"entries": plain, "levels": list(self.levels.items())}

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        plain = plain or {"entries": (), "levels": ()}
        self.levels = {int(index): mean for index, mean in plain["levels"]}
        super().load_state_dict(tensors, plain["entries"])
        self._keep(())  # the options may have changed


def _varied(answers: Sequence[Remembered], most: int, rng: Rng) -> Sequence[Remembered]:
    """Take those whose rewards vary the most: some of the worst and of the best."""
    order = sorted(answers, key=lambda entry: float(entry.total()))
    most = min(most, len(order))
    rewards = torch.cat([entry.total() for entry in order]) if order else torch.zeros(0)
    worst = [torch.cat([rewards[:k], rewards[len(order) - most + k :]]) for k in range(most + 1)]
    k = max(range(most + 1), key=lambda n: float(worst[n].var(correction=0)) if most else 0.0)
    return [*order[:k], *order[len(order) - most + k :]]


def _best(answers: Sequence[Remembered], most: int, rng: Rng) -> Sequence[Remembered]:
    newest_first = list(reversed(answers))
    return sorted(newest_first, key=lambda entry: -float(entry.total()))[:most]


def _random(answers: Sequence[Remembered], most: int, rng: Rng) -> Sequence[Remembered]:
    return [answers[place] for place in rng.permutation(len(answers)).tolist()[:most]]


PICKS: dict[str, Callable[[Sequence[Remembered], int, Rng], Sequence[Remembered]]] = {
    "recency": lambda answers, most, rng: answers[max(len(answers) - most, 0) :],
    "full_scope": lambda answers, most, rng: answers,
    "reward": _best,
    "variance": _varied,
    "random": _random,
}


def stratified(levels: Mapping[int, float], shares: Sequence[float]) -> dict[int, int]:
    """Sort prompts by their mean rewards into easy 0, medium 1 and hard 2, with these shares."""
    order = sorted(levels, key=lambda index: (levels[index], index))
    hard = round(shares[2] * len(order))
    easy = len(order) - round(shares[0] * len(order))
    return {
        index: 2 if place < hard else 0 if place >= easy else 1 for place, index in enumerate(order)
    }


def stored(path: Path, prompts: Sequence[Prompt]) -> list[Remembered]:
    """Read the answers that a run, or one of its checkpoints, remembered; they never age."""
    folders = [
        path,
        *sorted(path.glob("iteration-*")),
        *sorted(path.glob("checkpoints/iteration-*")),
    ]
    tensors = "stage-response_reuse.safetensors"
    known = [folder for folder in folders if (folder / tensors).is_file()]
    if not known:
        raise UserError(
            f"train.stages.response_reuse.start: {path} has no checkpoint with remembered answers; "
            f"name the folder of a run that was trained with train.stages.response_reuse"
        )
    stages = json.loads((known[-1] / "state.json").read_text())["meta"]["stages"]
    memory = AnswerMemory(prompts)
    memory.load_state_dict(read_tensors(known[-1] / tensors), stages["response_reuse"]["entries"])
    return [replace(entry, iteration=-1) for entry in memory.entries]
