"""Raises alarms during a run: the reward is being exploited, samples become alike, pictures
saturate.

Each rule looks at curves of the run only, is stated in ``docs/rewards.md``, and was tried on
simulated runs for how often it is wrong (``tests/monitoring/test_alarms.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, NamedTuple

from annotated_types import Ge, Gt, Lt

if TYPE_CHECKING:  # it imports torch, and this module is read for its options
    from mmrl.monitoring.monitors import Sampled

SCALES = (1, 4, 16)  # windows that trends are looked for in, in units of ``window``
SHORT = 10  # iterations whose median stands for a moment of the run


@dataclass(frozen=True)
class AlarmOptions:
    """Holds ``alarms:`` of a configuration. An alarm is an event and a line on the terminal; it
    changes nothing."""

    enabled: bool = True
    # iterations that a trend is looked for in; also in 4 and 16 times as many
    window: Annotated[int, Ge(20)] = 40
    z: Annotated[float, Gt(0)] = 5.0  # standard errors a trend must be away from none
    # share of the first diversity below which there is an alarm
    diversity: Annotated[float, Gt(0), Lt(1)] = 0.5
    contrast: Annotated[float, Gt(0), Lt(1)] = 0.5  # the same of the first contrast
    # rise of the share of clipped pixel values since the start
    clipped: Annotated[float, Gt(0), Lt(1)] = 0.2


class Alarm(NamedTuple):
    """Describes an alarm: ``kind`` says what it is about, ``numbers`` are the evidence."""

    kind: str
    message: str
    numbers: dict[str, float]


@dataclass
class Alarms:
    """Judges the metrics of every iteration. ``monitors``: names of the rewards that are only
    measured."""

    options: AlarmOptions
    monitors: Sequence[str] = ()
    news: list[Alarm] = field(default_factory=list)  # alarms that are not yet written
    # metric -> finite values, oldest first
    columns: dict[str, list[float]] = field(default_factory=dict)
    last_alarm: dict[str, int] = field(default_factory=dict)  # kind -> iteration of the last alarm

    def recall(self, lines: Sequence[Mapping[str, object]], alarms: Mapping[str, int] = {}) -> None:
        """Take up the metrics logged before a resume; no alarm is raised about them again.

        ``alarms``: kind -> iteration of the last one, which does not come again before its time."""
        for line in lines:
            self._note(line)
        self.last_alarm |= alarms

    def see(self, sampled: Sampled) -> dict[str, float]:
        """Judge an iteration, as a monitor; its alarms wait in ``news``."""
        self.news += self.judge(sampled.iteration + 1, sampled.metrics)
        return {}

    def judge(self, iteration: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """Return the new alarms after this iteration; one about the same thing comes at most once
        in ``window`` iterations."""
        if not self.options.enabled:
            return []
        self._note(metrics)
        alarms = [
            alarm
            for alarm in [*self._exploited(), *self._alike(), *self._saturated()]
            if iteration - self.last_alarm.get(alarm.kind, -math.inf) >= self.options.window
        ]
        self.last_alarm |= {alarm.kind: iteration for alarm in alarms}
        return alarms

    def _note(self, metrics: Mapping[str, object]) -> None:
        watched = ["reward/mean", "samples/diversity", "samples/clipped", "samples/contrast"]
        values = {name: metrics.get(name) for name in [*watched, *map(curve, self.monitors)]}
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
        if now < self.options.diversity * first:
            yield Alarm(
                "diversity",
                f"samples of one prompt become alike: their mean distance fell from "
                f"{first:.3g} to {now:.3g}. "
                "Soon there is nothing left to compare. Raise objective.kl or the noise "
                "(policy.noise_level, temperature), "
                "lower the learning rate, or reward diversity",
                {"first": first, "now": now},
            )

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
    """Return the medians of the first and of the last iterations; NaN, which raises no alarm, while
    there are too few."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 * SHORT:
        return math.nan, math.nan
    return median(finite[:SHORT]), median(finite[-SHORT:])


def trend(values: Sequence[float]) -> float:
    """Compute Mann-Kendall's test (Mann 1945): how many standard errors the number of rises exceeds
    that of falls.

    The variance counts ties, and is multiplied by (1 + r) / (1 - r) for neighbours that are
    correlated by r > 0 around the straight line through the values: such a series has fewer
    independent ones than it has values.
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
