"""Baselines from outside the group: rewards of a reference on the prompt, or earlier rewards.

A file of reference rewards is JSON lines, one prompt each: {"text": the prompt, "reward": a number,
or one for each rollout of the reference}, as ``mmrl.apps.prepare.reference_rewards`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mmrl.advantages.groups import Groups, finished, in_range, measured
from mmrl.advantages.normalise import moments
from mmrl.advantages.presets import grpo
from mmrl.advantages.select import ranks
from mmrl.core.distributed import all_gather_json, all_max
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import surprisal
from mmrl.zoo.advantages.shaping import Underneath
from mmrl.zoo.curricula.statistics import Forgetting

# where no stage has recorded them
NO_VALUE = "no value of a prompt is predicted; add prompt_value to train.stages"
NO_DRIFT = (
    "how far the policy has moved since it last met a prompt is not measured; add "
    "policy_drift to train.stages"
)


def read_references(path: Path, key: str) -> dict[str, list[float]]:
    """Read the reference rewards of every prompt; raise UserError with file and line."""
    rewards: dict[str, list[float]] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            value = entry["reward"]
            values = [float(x) for x in value] if isinstance(value, list) else [float(value)]
            prompt = str(entry[key])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f'{path}:{number}: expected {{"{key}": the prompt, "reward": a number or a list '
                f"of numbers}}: {error!r}"
            ) from error
        rewards.setdefault(prompt, []).extend(values)
    if not rewards or not all(rewards.values()):
        raise UserError(
            f"{path}: a reward of a reference is missing; write at least one for every prompt"
        )
    return rewards


def prompt_names(rollout: Rollout, key: str, advantage: str) -> list[str]:
    """Return what identifies the prompt of every row, B of them; raise UserError without it."""
    names = {}
    for group in rollout.group.unique().tolist():
        prompt = rollout.prompts[group]
        if key not in prompt:
            raise UserError(
                f"{advantage} identifies prompts by {key!r}, a prompt has only {sorted(prompt)}; "
                "set its key"
            )
        names[group] = str(prompt[key])
    return [names[group] for group in rollout.group.tolist()]


def gathered(
    names: list[str], values: Tensor, present: Tensor, row: Tensor
) -> Iterator[tuple[str, list[float]]]:
    """Yield the values of every prompt over all processes, in the order of the rows."""
    rows = zip(row.tolist(), names, values.tolist(), present.tolist(), strict=True)
    scored_rows = all_gather_json(
        [(place, name, value) for place, name, value, scored in rows if scored], values.device
    )
    by_name: dict[str, list[float]] = {}
    for _, name, value in sorted(scored_rows):
        by_name.setdefault(name, []).append(value)
    yield from by_name.items()


def mean_of(values: list[float]) -> float:
    """Return the mean; of equal numbers, whose sum may round, the number."""
    return values[0] if min(values) == max(values) else fmean(values)


class References:
    """Holds the rewards of a reference on every prompt, and their mean.

    They come from a file, from a field of the prompts, or else from the policy itself in the
    iteration in which it first meets the prompt. Those stay, or are measured again after
    ``refresh`` iterations, or with ``rate`` move towards the rewards of every iteration.
    """

    rate: float | None = None

    def __init__(self, file: Path | None, field: str | None, key: str, refresh: int, name: str):
        if file is not None and field is not None:
            raise UserError(f"advantage {name}: give file or field, not both")
        self.file = file
        self.field = field
        self.key = key
        self.refresh = refresh
        self.name = name
        self.read = read_references(file, key) if file else {}
        # rewards in the order of the answers, iteration they are from
        self.values: dict[str, tuple[list[float], int]] = {}
        self.iteration = 0

    def of(self, total: Tensor, groups: Groups, rollout: Rollout) -> Tensor:
        """Return the reference's mean reward [B]; count the iteration."""
        known = self._known(total, groups, rollout)
        different = {id(values): values for values in known}  # prompts may repeat a text
        means = {name: mean_of(values) for name, values in different.items()}
        return total.new_tensor([means[id(values)] for values in known])

    def paired(self, total: Tensor, groups: Groups, rollout: Rollout) -> Tensor:
        """Return the reward [B] of one of the reference's answers for each of the policy's that
        has one, in turn; count the iteration."""
        place = ranks(torch.zeros_like(total), groups, rollout.row_id).tolist()
        known = self._known(total, groups, rollout)
        return total.new_tensor(
            [values[n % len(values)] for values, n in zip(known, place, strict=True)]
        )

    def _known(self, total: Tensor, groups: Groups, rollout: Rollout) -> list[list[float]]:
        """List for every row the rewards of the reference on its prompt; count the iteration."""
        if self.field is not None:
            return self._field(rollout)
        names = prompt_names(rollout, self.key, f"advantage {self.name}")
        if self.file is not None:
            if missing := [prompt for prompt in names if prompt not in self.read]:
                raise UserError(
                    f"advantage {self.name}: {self.file} has no reward for the prompt "
                    f"{missing[0]!r}; add it, or leave file out to measure at first sight"
                )
            return [self.read[prompt] for prompt in names]
        for prompt, values in gathered(names, total, groups.present, rollout.row_id):
            since = self.values[prompt][1] if prompt in self.values else None
            if since is None or (self.refresh and self.iteration - since >= self.refresh):
                self.values[prompt] = (values, self.iteration)
        self.iteration += 1
        known = [self.values.get(prompt, ([0.0], 0))[0] for prompt in names]
        if self.rate is not None:
            self._move(names, total, groups, rollout, self.rate)
        return known

    def _move(
        self, names: list[str], total: Tensor, groups: Groups, rollout: Rollout, rate: float
    ) -> None:
        """Move the means towards those of what the policy sampled just now."""
        old = rollout.provenance.is_replayed
        fresh = groups.present if old is None else groups.present & ~old.to(groups.present.device)
        for prompt, values in gathered(names, total, fresh, rollout.row_id):
            level = mean_of(self.values[prompt][0])
            self.values[prompt] = ([level + rate * (mean_of(values) - level)], self.iteration)

    def _field(self, rollout: Rollout) -> list[list[float]]:
        known: dict[int, list[float]] = {}
        try:
            for group in rollout.group.unique().tolist():
                value = rollout.prompts[group][self.field or ""]
                known[group] = [float(x) for x in (value if isinstance(value, list) else [value])]
            if not all(known.values()):
                raise ValueError("an empty list")
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"advantage {self.name}: every prompt needs a number {self.field!r}, or a list of "
                f"them, the reference's rewards: {error!r}"
            ) from error
        return [known[group] for group in rollout.group.tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "values": {prompt: list(pair) for prompt, pair in self.values.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])
        for prompt, (rewards, since) in state["values"].items():
            values = rewards if isinstance(rewards, list) else [rewards]
            self.values[prompt] = ([float(x) for x in values], int(since))


@ADVANTAGES.register("pvpo")
class PVPO:
    """Subtract the mean reward of a reference on the prompt (PVPO), or a moving mean (AVATAR).

    Feng et al. 2025, "PVPO: Pre-estimated value-based policy optimization": r - V(prompt). V is
    read from ``file`` (JSON lines {"text": ..., "reward": number or list}, from
    mmrl.apps.prepare.reference_rewards) or from the ``field`` of the prompts; with neither it is
    the policy's mean reward when it first meets the prompt (mmrl's reading of a frozen initial
    policy), measured again after ``refresh`` iterations (0: never). rate: V <- V + rate (mean - V)
    after every iteration, with the mean of that iteration's samples (Kulkarni and Fazli 2025,
    AVATAR; V starts as the first mean). key: the field that identifies a prompt. scale: with
    "batch", divided by the std of all advantages of the iteration + 1e-4. learned: V is predicted
    by the value model of the stage ``prompt_value``, as in A-LoL (Baheti et al. 2024). offline:
    train only on demonstrations (the stage demonstrations), as in A-LoL.

    file: JSON lines with the reference's rewards. field: of the prompts, with a number. refresh:
    iterations after which it is measured again; 0: never.
    """

    def __init__(
        self,
        file: Path | None = None,
        field: str | None = None,
        key: str = "text",
        refresh: Annotated[int, Ge(0)] = 0,
        scale: Literal["none", "batch"] = "none",
        rate: Annotated[float, Gt(0), Le(1)] | None = None,
        learned: bool = False,
        offline: bool = False,
    ):
        if learned and (file is not None or field is not None):
            raise UserError(
                "pvpo: learned takes V from the stage prompt_value; leave file and field out, and "
                "give the file to prompt_value as path"
            )
        self.references = References(file, field, key, refresh, "pvpo")
        if rate is not None and (file is not None or field is not None or refresh):
            raise UserError(
                "advantage pvpo: rate moves the mean that the policy itself measures: leave out "
                "file, field and refresh, or rate"
            )
        self.references.rate = rate
        self.scale = scale
        self.learned = learned
        self.offline = offline

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return [B, 1] advantages, NaN for samples without a reward; advance the references."""
        double, groups = measured(rewards, rollout)
        total = double.total()
        present = self._trained(rollout, groups)
        if self.learned:
            value = rollout.record("value", NO_VALUE)
            advantage = total - value.to(total)
        else:
            advantage = total - self.references.of(total, groups, rollout)
        if self.scale == "batch":
            advantage = advantage / (moments(advantage, present)[1].sqrt() + 1e-4)
        return finished(advantage, rewards, present)

    def _trained(self, rollout: Rollout, groups: Groups) -> Tensor:
        written = rollout.provenance.is_ground_truth
        if self.offline and written is None:
            raise UserError(
                "pvpo: offline: true trains on demonstrations alone; add demonstrations to "
                "train.stages"
            )
        return groups.present & written if self.offline and written is not None else groups.present

    @staticmethod
    def asks_of_training(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the stages that make what is looked at."""
        by_option = {"learned": "prompt_value", "offline": "demonstrations"}
        return tuple(name for option, name in by_option.items() if options.get(option))


@ADVANTAGES.register("aapo")
class AAPO:
    """Add the clipped margin over a reference reward to the group advantage (AAPO).

    Xiong et al. 2025, "AAPO: Enhance the reasoning capabilities of LLMs with advantage momentum": A
    + clip(r - r_ref, low, high), so that groups of equal rewards have a gradient too. Its loss is
    the surrogate ``reinforce``. base: the advantage A. low, high: as in the published code, in
    units of reward. r_ref: from ``file``, ``field`` (a number or a list), or measured, with ``key``
    and ``refresh``, as in ``pvpo``. compare: the n-th answer with the reference's n-th ("answers",
    as in the paper; if the reference has fewer, cycled), or all with its mean ("mean").

    file, field, key, refresh: the reference's rewards, as in ``pvpo``.
    """

    def __init__(
        self,
        base: Underneath = grpo,
        low: float = -0.2,
        high: float = 0.28,
        compare: Literal["answers", "mean"] = "answers",
        file: Path | None = None,
        field: str | None = None,
        key: str = "text",
        refresh: Annotated[int, Ge(0)] = 0,
    ):
        if low > high:
            raise UserError(f"aapo: low = {low} must not be above high = {high}")
        self.base = base
        self.low = low
        self.high = high
        self.compare = compare
        self.references = References(file, field, key, refresh, "aapo")

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the advantages, NaN for samples without a reward; advance the references."""
        double, groups = measured(rewards, rollout)
        total = double.total()
        known = self.references
        reference = known.paired if self.compare == "answers" else known.of
        lead = total - reference(total, groups, rollout)
        whole = self.base(rewards, rollout) + lead.clamp(self.low, self.high)[:, None]
        return finished(whole, rewards, groups.present[:, None])


@ADVANTAGES.register("single_stream")
class SingleStream:
    """Subtract a tracked value of the prompt and normalise over the batch, without groups (SPO).

    Xu and Ding 2025, "Single-stream policy optimization". v = alpha / (alpha + beta) before the
    update; A = r - v, standardised over the batch (sample std + 1e-8). Then alpha <- rho alpha + r,
    beta <- rho beta + 1 - r. Rewards are mapped from [low, high] to [0, 1]; several count by their
    weighted mean. A group may be one sample (train.group_size).

    rho: 2^(-D / half) within [forget_min, forget_max], where D measures how far the policy has
    moved since it last met the prompt. drift: D is the mean |log p_then - log p_now| over the
    decisions of the previous answers, scored again as in the published code ("kl", of the stage
    policy_drift); or, without that pass, the difference of the mean log-probs of the previous and
    the current answers ("surprisal", mmrl's reading); or 0, so that rho = forget_max ("none"; with
    forget_min = forget_max the published constant rho). half: the D, nats, at which half is
    forgotten. file: rewards of a reference, as in ``pvpo``: n of them set the initial alpha = N
    (sum + 1/2) / (n + 1), N = 1 / (1 - forget_min); otherwise alpha = beta = 1/2. key: the field
    that identifies a prompt. The data source ``single_stream`` draws prompts by the same tracker.

    low, high: bounds of a reward. forget_min, forget_max: bounds of rho.
    """

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        drift: Literal["kl", "surprisal", "none"] = "surprisal",
        half: Annotated[float, Gt(0)] = 0.06,
        forget_min: Annotated[float, Gt(0), Lt(1)] = 0.875,
        forget_max: Annotated[float, Gt(0), Lt(1)] = 0.96,
        file: Path | None = None,
        key: str = "text",
    ):
        if forget_min > forget_max:
            raise UserError(
                f"single_stream: forget_min = {forget_min} must not be above forget_max = "
                f"{forget_max}"
            )
        self.low = low
        self.high = high
        self.drift = drift
        self.forgetting = Forgetting(half, forget_min, forget_max)
        self.key = key
        self.references = read_references(file, key) if file else {}
        # alpha, beta, mean log-prob per decision when it was last met (NaN: never)
        self.trackers: dict[str, list[float]] = {}

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return [B, 1] advantages, NaN for samples without a reward; advance the trackers."""
        double, groups = measured(rewards, rollout)
        scaled = in_range(double, groups, self.low, self.high, "single_stream")
        weights = {name: double.weights[name] for name in scaled}
        if min(weights.values()) < 0:
            raise UserError(
                "advantage single_stream: a reward has a negative weight; give the reward itself "
                "the other sign, with low and high to match"
            )
        total = Rewards(scaled, weights).total() / sum(weights.values())
        names = prompt_names(rollout, self.key, "advantage single_stream")
        values = {name: self._tracker(name) for name in set(names)}
        value = total.new_tensor([values[n][0] / (values[n][0] + values[n][1]) for n in names])
        advantage = total - value
        self._track(names, total, groups, rollout)
        mean, variance = moments(advantage, groups.present, ddof=1)
        equal = _equal(advantage, groups.present)
        advantage = ((advantage - mean) / (variance.sqrt() + 1e-8)).masked_fill(equal, 0.0)
        return finished(advantage, rewards, groups.present)

    @staticmethod
    def asks_of_training(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the stages that make what is looked at."""
        return ("policy_drift",) if options.get("drift") == "kl" else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the trackers as values that JSON can hold."""
        return {"trackers": {name: list(values) for name, values in self.trackers.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trackers = {name: list(values) for name, values in state["trackers"].items()}

    def _tracker(self, name: str) -> list[float]:
        """Return alpha and beta of a prompt, and its last log-prob if it was met before."""
        if name in self.trackers:
            return self.trackers[name]
        rewards = [(r - self.low) / (self.high - self.low) for r in self.references.get(name, ())]
        return self.forgetting.begun(rewards)

    def _track(self, names: list[str], total: Tensor, groups: Groups, rollout: Rollout) -> None:
        row = rollout.row_id
        logprobs = dict(gathered(names, -surprisal(rollout), groups.present, row))
        drifts: dict[str, list[float]] = {}
        if self.drift == "kl":
            drift = rollout.record("drift", NO_DRIFT).double()
            drifts = dict(gathered(names, drift, groups.present, row))
        for name, rewards in gathered(names, total, groups.present, row):
            alpha, beta, *last = self._tracker(name)
            now = fmean(logprobs[name])
            moved = abs(now - last[0]) if last and self.drift == "surprisal" else 0.0
            moved = fmean(drifts[name]) if name in drifts else moved
            self.trackers[name] = [*self.forgetting.visited([alpha, beta], rewards, moved), now]


def _equal(x: Tensor, present: Tensor) -> Tensor:
    """Tell, as a bool, whether all present values of x [B] are equal over all processes."""
    least = x.new_full((1,), -torch.inf)
    high = torch.cat([x[present], least]).max()
    low = torch.cat([-x[present], least]).max()
    ends = all_max(torch.stack([high, low]))
    return ends.sum() <= 0
