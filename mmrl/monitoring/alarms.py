"""Raises alarms during a run: no learning signal, reward hacking, mode collapse, saturated
pictures.

Each rule uses only curves of the run, is stated in ``docs/rewards.md``, and its false alarm rate
was measured on simulated runs (``tests/monitoring/test_alarms.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from mmrl.config.sections import AlarmOptions
from rewards.card import method_of

if TYPE_CHECKING:  # it imports torch, and this module is imported for its options
    from mmrl.core.types import Reward, Rollout
    from mmrl.rollout.collect import Sampled

SCALES = (1, 4, 16)  # windows of the trend tests, in units of ``window``
STUCK = "nothing_to_learn"  # kind of the alarm of a run that cannot learn
IN_A_ROW = "alarms/nothing_to_learn"  # metric: iterations in a row without a learning signal
LOOKED_AT = 8  # answers per iteration and process that are checked for readability
SHORT = 10  # iterations per median at a point of the run
NEAR = 0.1  # share of a reward's range: within it of the maximum counts as near the bound


class Drift(NamedTuple):
    """Describes what pictures lose or have too much of when a curve ``samples/NAME`` drifts from
    its first values; empty: no alarm on that side."""

    falls: str
    rises: str
    shown: str = ".3g"
    relative: bool = True  # the option is a share of the first value; otherwise a difference
    least: float = 0.0  # first values below this are too small for shares


DRIFTS = {
    "dark": Drift(
        "pictures become pale: the share of dark pixels fell",
        "pictures become dark: the share of dark pixels rose",
        shown=".0%",
        relative=False,
    ),
    "colour": Drift(
        "pictures become grey: the colour of a pixel fell",
        "colours become glaring: the colour of a pixel rose",
        least=0.02,
    ),
    "edges": Drift(
        "pictures lose their edges: the gradient of the grey picture fell",
        "pictures become restless: the gradient of the grey picture rose",
        least=0.002,
    ),
    "colour_entropy": Drift(
        "pictures come down to few colours: the entropy of their colours in bits fell",
        "",
        least=0.2,
    ),
}


class Alarm(NamedTuple):
    """Holds an alarm: ``kind`` is its topic, ``numbers`` are the evidence."""

    kind: str
    message: str
    numbers: dict[str, float]


@dataclass
class Alarms:
    """Judges the metrics of every iteration. ``monitors``: names of the rewards that are only
    measured. ``rewards``: those that are optimised. ``alone``: only these drive the update, no
    demonstrations, so that equal rewards in all groups give no gradient."""

    options: AlarmOptions
    monitors: Sequence[str] = ()
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    alone: bool = False
    stuck: int = 0  # iterations in a row without a learning signal so far
    ended: str = ""  # why the run should end, if it should
    # current iteration: no advantage differs from 0; rewards that could read no answer
    flat: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)
    news: list[Alarm] = field(default_factory=list)  # alarms that are not yet written
    # metric -> finite values, oldest first
    columns: dict[str, list[float]] = field(default_factory=dict)
    last_alarm: dict[str, int] = field(default_factory=dict)  # kind -> iteration of the last alarm

    def recall(self, lines: Sequence[Mapping[str, object]], alarms: Mapping[str, int] = {}) -> None:
        """Restore the metrics logged before a resume, without raising alarms again.

        ``alarms``: kind -> iteration of the last one, which does not come again before its time."""
        for line in lines:
            self._note(line)
        iterations = lines[-1].get(IN_A_ROW, 0) if lines else 0
        self.stuck = iterations if isinstance(iterations, int) else 0
        self.last_alarm |= alarms

    def see(self, sampled: Sampled) -> dict[str, float]:
        """Judge an iteration, as a monitor; its alarms wait in ``news``. A collective call."""
        self.news += self.judge(sampled.iteration + 1, sampled.metrics)
        if self.options.enabled:
            self.flat = not differs(sampled.rollout)
            self.unread = unread(sampled, self.rewards)
        return {}

    def after_update(self, iteration: int, metrics: dict[str, float]) -> None:
        """Check for a learning signal once the gradient is known; adds the number of iterations
        without one to the metrics, for a resume."""
        if not self.options.enabled:
            return
        why, learns = self._nothing(metrics)
        self.stuck = self.stuck + 1 if why else 0
        if self.stuck:
            metrics[IN_A_ROW] = self.stuck
        if self.stuck < self.options.patience:
            return
        if iteration - self.last_alarm.get(STUCK, -math.inf) >= self.options.window:
            self.last_alarm[STUCK] = iteration
            cause = likely_cause(metrics, self.unread, self.rewards)
            times = "this iteration" if self.stuck == 1 else f"the last {self.stuck} iterations"
            head = "almost no learning signal" if learns else "nothing to learn from"
            numbers = {name: metrics[name] for name in EVIDENCE if name in metrics}
            numbers |= {"iterations": self.stuck}
            self.news.append(Alarm(STUCK, f"{head} in {times}: {why}. {cause}", numbers))
        if self.options.stop and not learns:
            self.ended = f"alarms.stop: nothing to learn from in {self.stuck} iterations: {why}"

    def _nothing(self, metrics: Mapping[str, float]) -> tuple[str, bool]:
        """Say why an iteration had no learning signal, empty: it had one; and whether it had one
        only by a reward that reads no answers."""
        samples = metrics.get("samples/total", 0)
        groups = metrics.get("groups/total", 0)
        if groups and metrics.get("partial/untrained") == groups:
            return "", True  # their answers are still being written
        flat = bool(groups) and metrics.get("groups/flat") == groups < samples
        value = metrics.get("reward/mean", math.nan)
        constant = bool(samples > 1 and metrics.get("reward/std") == 0 and math.isfinite(value))
        gradient = metrics.get("grad_norm")
        if gradient == 0 or (gradient is None and metrics.get("skipped_steps")):
            zero = "the gradient is 0" if gradient == 0 else "no optimizer step was taken"
        elif metrics.get("lr") == 0:
            zero = "the learning rate is 0"
        else:
            zero = ""
        facts = [f"every sample is rewarded with {value:g}"] if constant else []
        facts += ["all samples of a prompt are rewarded alike"] if flat and not constant else []
        facts += [f"{name} could read none of the answers" for name in self.unread]
        equal = self.alone and flat and self.flat
        facts += [zero] if zero else []
        stuck = bool(zero or equal)
        return " and ".join(facts) if stuck or self.unread else "", not stuck

    def judge(self, iteration: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """Return the new alarms after this iteration; one on the same topic at most once in
        ``window`` iterations."""
        if not self.options.enabled:
            return []
        self._note(metrics)
        alarms = [
            alarm
            for alarm in [
                *self._exploited(),
                *self._alike(),
                *self._saturated(),
                *self._drifted(),
            ]
            if iteration - self.last_alarm.get(alarm.kind, -math.inf) >= self.options.window
        ]
        self.last_alarm |= {alarm.kind: iteration for alarm in alarms}
        return alarms

    def _note(self, metrics: Mapping[str, object]) -> None:
        watched = ["reward/mean", "samples/diversity", "samples/clipped", "samples/contrast"]
        watched += [f"samples/{name}" for name in DRIFTS]
        judged = map(curve, [*self.monitors, *self.rewards])
        values = {name: metrics.get(name) for name in [*watched, *judged]}
        for name, value in values.items():
            number = float(value) if isinstance(value, (int, float)) else math.nan
            self.columns.setdefault(name, []).append(number)

    def _exploited(self) -> Iterator[Alarm]:
        """Find a reward that rises while a monitor falls, both beyond ``z``, in one of the
        windows."""
        reward = self.columns.get("reward/mean", [])
        for name in self.monitors:
            monitor = self.columns[curve(name)]
            for size in [self.options.window * scale for scale in SCALES]:
                if len(reward) < size:
                    break
                rows = [
                    (r, m) for r, m in zip(reward[-size:], monitor[-size:]) if math.isfinite(r + m)
                ]
                if len(rows) < self.options.window // 2:
                    continue
                ups = trend([r for r, _ in rows])
                downs = trend([m for _, m in rows])
                if ups > self.options.z and downs < -self.options.z:
                    yield exploited(name, size, rows, ups, downs)
                    break

    def _alike(self) -> Iterator[Alarm]:
        first, now = ends(self.columns.get("samples/diversity", []))
        if now < self.options.diversity * first and not self._near_bound():
            yield Alarm(
                "diversity",
                f"samples of one prompt become alike: their mean distance fell from "
                f"{first:.3g} to {now:.3g}. Soon there is nothing left to compare. "
                "Raise objective.kl or the noise (policy.noise_level, temperature), "
                "lower the learning rate, or reward diversity",
                {"first": first, "now": now},
            )

    def _near_bound(self) -> bool:
        """Tell whether all rewards are near their maximum: samples that are all right may be
        similar for that reason."""
        from rewards.card import card_of

        near = []
        for name, reward in self.rewards.items():
            card = card_of(reward)
            _, now = ends(self.columns.get(curve(name), []))
            if card.high is None or card.low is None:
                return False
            near.append(now >= card.high - NEAR * (card.high - card.low))
        return bool(near) and all(near)

    def _saturated(self) -> Iterator[Alarm]:
        first, now = ends(self.columns.get("samples/clipped", []))
        if now > first + self.options.clipped:
            yield Alarm(
                "clipped",
                f"pictures saturate: {now:.0%} of the pixel values are 0 or 1, "
                f"{first:.0%} at the start. A reward may "
                "like glaring colours: watch one of another kind (monitor: true), raise "
                "objective.kl, lower the "
                "learning rate",
                {"first": first, "now": now},
            )
        first, now = ends(self.columns.get("samples/contrast", []))
        if now < self.options.contrast * first:
            yield Alarm(
                "contrast",
                f"pictures lose contrast: {now:.3g}, {first:.3g} at the start. Look at the samples "
                "(train.sample_every); raise objective.kl, lower the learning rate",
                {"first": first, "now": now},
            )

    def _drifted(self) -> Iterator[Alarm]:
        """Find appearance curves that have drifted from their first values."""
        for name, drift in DRIFTS.items():
            first, now = ends(self.columns.get(f"samples/{name}", []))
            bound = getattr(self.options, name)
            low, high = (
                (first * bound, first / bound) if drift.relative else (first - bound, first + bound)
            )
            what = drift.falls if now < low else drift.rises if now > high else ""
            if what and first >= drift.least:
                yield Alarm(
                    name,
                    f"{what} from {first:{drift.shown}} to {now:{drift.shown}}. A reward may like "
                    "that: inspect the samples (train.sample_every), watch a reward of another "
                    "kind (monitor: true), raise objective.kl, lower the learning rate",
                    {"first": first, "now": now},
                )


# metrics that an alarm of a run that cannot learn shows
EVIDENCE = (
    "reward/mean",
    "reward/std",
    "groups/flat",
    "groups/total",
    "grad_norm",
    "lr",
    "answer/cut",
    "samples/diversity",
)


def differs(rollout: Rollout) -> bool:
    """Tell whether an advantage that is trained on differs from 0, on any process; a collective
    call."""
    from mmrl.core import distributed

    advantage = rollout.advantages() if rollout.advantage_parts is None else rollout.advantage_parts
    rows = advantage.flatten(1).ne(0).any(1) & rollout.mask.any(1)
    return distributed.any_of(bool(rows.any()))


def unread(sampled: Sampled, rewards: Mapping[str, Reward]) -> dict[str, str]:
    """Find the rewards that could read no answer of an iteration: name -> one of this process's
    answers. A few answers of every process are checked; a collective call."""
    from mmrl.core import distributed

    methods = {name: method_of(reward, "status") for name, reward in rewards.items()}
    if not isinstance(sampled.media, list) or not any(methods.values()):
        return {}
    prompts = sampled.rollout.prompt_per_row()[:LOOKED_AT]
    pairs = [(text, p) for text, p in zip(sampled.media, prompts) if isinstance(text, str)]
    texts = [text for text, _ in pairs]
    unread_by = {}
    for name, status in ((n, s) for n, s in methods.items() if s):
        states = status(texts, [prompt for _, prompt in pairs])
        read = any(state != "unparseable" for state in states)
        if not distributed.any_of(read) and distributed.any_of(bool(states)):
            unread_by[name] = next(iter(texts), "")
    return unread_by


def likely_cause(
    metrics: Mapping[str, float], unread_by: Mapping[str, str], rewards: Mapping[str, Reward]
) -> str:
    """Suggest a cause of a missing learning signal, and a remedy."""
    names = ", ".join(rewards) or "the reward"
    if metrics.get("lr") == 0:
        return "Likely cause: optimizer.lr or train.lr_schedule"
    if (cut := metrics.get("answer/cut", 0.0)) >= 0.5:
        return (
            f"Likely cause: {cut:.0%} of the answers are cut off before they end: raise the "
            f"policy's max_new_tokens"
        )
    if unread_by:
        answer = " ".join(next(iter(unread_by.values())).split())[:80]
        return (
            f"Likely cause: the answers have another form than the reward reads, such as "
            f"{answer!r}: say the form in the prompt, or begin with supervised fine-tuning "
            f"(objective: sft); mmrl check-reward shows what is read"
        )
    if metrics.get("samples/diversity") == 0:
        return (
            "Likely cause: the samples of a prompt are identical: raise policy.noise_level or "
            "temperature"
        )
    if metrics.get("reward/std") == 0:
        return (
            f"Likely cause: {names} does not depend on the samples, or the task is too hard (or "
            f"too easy) for this model: mmrl check-reward shows what right and wrong samples "
            f"score; take easier prompts, a graded reward, a larger train.group_size or a stage of "
            f"supervised fine-tuning before"
        )
    if metrics.get("groups/flat") == metrics.get("groups/total"):
        return (
            f"Likely cause: {names} depends on the prompt alone, or the samples of a prompt are "
            f"too much alike: raise train.group_size, policy.noise_level or temperature"
        )
    return (
        "The rewards differ, so check what is trained: the policy's options lora and train, a "
        "clip_range or weight of 0 in the objective, and which answers are masked"
    )


def curve(reward: str) -> str:
    return f"reward/{reward}/mean"


def exploited(
    name: str, size: int, rows: Sequence[tuple[float, float]], ups: float, downs: float
) -> Alarm:
    tenth = max(1, len(rows) // 10)
    start, end = (
        [sum(column) / tenth for column in zip(*part)] for part in (rows[:tenth], rows[-tenth:])
    )
    message = (
        f"the reward rises and {name} falls: over the last {size} iterations from "
        f"{start[0]:.4g} to {end[0]:.4g} and "
        f"from {start[1]:.4g} to {end[1]:.4g} (trends {ups:+.1f} and {downs:+.1f} "
        f"standard errors). "
        "The reward may be exploited. Look at the samples; go back to a checkpoint before; "
        f"raise objective.kl, or give {name} a weight"
    )
    numbers = {
        "window": size,
        "z_reward": ups,
        "z_monitor": downs,
        "reward_first": start[0],
        "reward_now": end[0],
    }
    return Alarm(
        f"exploited/{name}", message, numbers | {"monitor_first": start[1], "monitor_now": end[1]}
    )


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and the last iterations; NaN, which raises no alarm, if there
    are too few."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * SHORT:
        return math.nan, math.nan
    return median(finite[:SHORT]), median(finite[-SHORT:])


def trend(values: Sequence[float]) -> float:
    """Compute Mann-Kendall's test (Mann 1945): how many standard errors the number of rises exceeds
    that of falls.

    The variance counts ties, and is multiplied by (1 + r) / (1 - r) for autocorrelation r > 0
    around the linear trend, which reduces the number of independent values.
    """
    import torch

    x = torch.tensor(values, dtype=torch.float64)
    n = len(x)
    score = float((x[None, :] - x[:, None]).sign().triu(1).sum())
    ties = x.unique(return_counts=True)[1].double()
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if variance <= 0:
        return 0.0
    time = torch.arange(n, dtype=torch.float64) - (n - 1) / 2
    rest = x - x.mean() - time * (time @ x) / (time @ time)
    r = float((rest[1:] @ rest[:-1]) / rest.square().sum().clamp(min=1e-300))
    stretch = math.sqrt((1 + r) / (1 - r)) if 0 < r < 1 else 1.0
    return (score - math.copysign(min(1.0, abs(score)), score)) / math.sqrt(variance) / stretch
