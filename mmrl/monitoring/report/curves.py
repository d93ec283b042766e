"""Chooses which curves a report shows, under which headings."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from mmrl.monitoring.report.charts import Chart, Numbers, Series, smooth
from mmrl.monitoring.report.runs import Run

Item = TypeVar("Item")
MOST_POINTS = 800  # points of a curve; more cannot be distinguished


class Plot(NamedTuple):
    """Describes one chart of known metrics; unrecorded ones are left out."""

    title: str
    keys: tuple[str, ...]
    note: str = ""
    zero: bool = True  # the axis starts at 0


UPDATE = (
    Plot("KL to the reference", ("kl",), "How far the policy has moved from where it started."),
    Plot(
        "Clip fraction", ("clip_fraction",), "Share of decisions whose ratio left the clip range."
    ),
    Plot(
        "Ratio, mean",
        ("ratio/mean",),
        "New over old probability; 1 before the first step.",
        zero=False,
    ),
    Plot("Ratio, largest deviation from 1", ("ratio/max_deviation",)),
    Plot("Gradient norm", ("grad_norm",), "Before clipping."),
    Plot(
        "Loss",
        ("loss",),
        "Not expected to fall: advantages are centred in every group.",
        zero=False,
    ),
    Plot("Learning rate", ("lr",)),
)
ANSWERS = (
    Plot(
        "Entropy of the tokens",
        ("entropy",),
        "Nats a token; near 0 every answer to a prompt is the same.",
    ),
    Plot("Length of the answers", ("answer/tokens",), "Mean number of tokens."),
    Plot(
        "Length by reward",
        ("answer/tokens_better", "answer/tokens_worse"),
        "Mean tokens of answers above the iteration's mean reward, and of the others: "
        "right and wrong if it is 0 or 1.",
    ),
    Plot("Answers cut at the limit", ("answer/cut",), "Share that did not end by themselves."),
)
SIGNAL = (
    Plot(
        "Diversity",
        ("samples/diversity",),
        "Mean distance of two samples of one prompt; near 0 nothing is left to compare.",
    ),
    Plot(
        "Saturation and contrast",
        ("samples/clipped", "samples/contrast"),
        "Share of pixel values at 0 or 1; standard deviation of the grey picture.",
    ),
    Plot(
        "Dark pixels and colour",
        ("samples/dark", "samples/colour"),
        "Share of pixels with a grey value below 0.2; mean difference of a pixel's largest and "
        "smallest colour value.",
    ),
    Plot("Edges", ("samples/edges",), "Mean gradient of the grey picture, in grey values a pixel."),
    Plot(
        "Entropy of colours, bits",
        ("samples/colour_entropy",),
        "Of a picture's histogram of 512 colours; 0 is a picture of one colour.",
    ),
    Plot("Advantage, standard deviation", ("advantage/std",)),
    Plot(
        "Samples excluded",
        ("samples/excluded",),
        "A reward failed on them twice; they are not trained on.",
    ),
)
TIME = (
    Plot("Seconds an iteration", ("seconds",)),
    Plot("By phase, seconds", ("time/rollout", "time/reward", "time/update")),
    Plot(
        "Share of an iteration",
        ("share/rollout", "share/reward", "share/sync", "share/update"),
        "Of the seconds of an iteration; the rest is log, pictures and checkpoints.",
    ),
    Plot(
        "A second and device",
        ("throughput/samples", "throughput/tokens"),
        "Samples, and tokens of answers, that one device makes and trains on in a second.",
    ),
    Plot(
        "MFU",
        ("throughput/mfu",),
        "Share of the card's published bf16 arithmetic that is used (Chowdhery et al. 2022).",
    ),
)
PLACED = {key for plot in (*UPDATE, *ANSWERS, *SIGNAL, *TIME) for key in plot.keys}
PLACED |= {"iteration", "reward/mean", "reward/std", "groups/flat", "groups/total"}


def reward_chart(run: Run) -> Chart | None:
    """Chart the total reward: raw, smoothed, one standard deviation over an iteration's samples."""
    raw = run.column("reward/mean")
    if all(value is None for value in raw):
        return None
    window = max(3, len(raw) // 10)
    spread = smooth(run.column("reward/std"), window)
    series = thin(Series("reward", run.iterations(), smooth(raw, window), spread, raw))
    note = (
        f"Mean over the samples of an iteration (faint), smoothed over {window} "
        f"iterations; ± one standard deviation."
    )
    return Chart("Training reward", [series], note, wide=True)


def chart_sections(run: Run) -> list[tuple[str, list[Chart]]]:
    """Return the charts by theme; metrics of unknown names come last."""
    names = run.measured()
    parts = [
        key
        for key in names
        if key.startswith("reward/") and key.endswith("/mean") and key not in PLACED
    ]
    held_out = [key for key in names if key.startswith("eval/")]
    placed = PLACED.union(parts, map(_spread_key, parts), held_out)
    unplaced = [key for key in names if key not in placed]
    rewards = [
        Plot(f"Training reward {_short(key)}", (key,), zero=False)
        for key in parts
        if len(parts) > 1
    ]
    rewards += [Plot(f"Held-out {_short(key)}", (key,), zero=False) for key in held_out]
    themes = {
        "Reward by reward": rewards,
        "Is the update healthy?": UPDATE,
        "What the answers are like": ANSWERS,
        "Is there a signal?": SIGNAL,
        "Where the time goes": TIME,
        "Everything else": [Plot(key, (key,), zero=False) for key in unplaced],
    }
    drawn = {title: [_chart(run, plot) for plot in plots] for title, plots in themes.items()}
    drawn["Is there a signal?"].insert(1, _flat(run))
    sections = [
        (title, [chart for chart in charts if chart is not None]) for title, charts in drawn.items()
    ]
    return [(title, charts) for title, charts in sections if charts]


def spread_out(items: list[Item], most: int) -> list[Item]:
    """Return at most ``most`` of the items, evenly spaced, first and last included."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / max(1, most - 1))] for i in range(most)]


def _chart(run: Run, plot: Plot) -> Chart | None:
    columns = {key: run.column(key) for key in plot.keys}
    known = {
        key: values for key, values in columns.items() if any(value is not None for value in values)
    }
    curves = [
        thin(Series(_short(key), *joined(run.iterations(), values)))
        for key, values in known.items()
    ]
    return Chart(plot.title, curves, plot.note, zero=plot.zero) if curves else None


def joined(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Join the points of a metric taken every tenth iteration to one curve; a gap inside a dense
    one stays a gap."""
    known = [i for i, value in enumerate(y) if value is not None]
    if len(known) * 2 > len(y):
        return x, y
    return [x[i] for i in known], [y[i] for i in known]


def _flat(run: Run) -> Chart | None:
    flat = run.column("groups/flat")
    total = run.column("groups/total")
    share = [None if f is None or not t else f / t for f, t in zip(flat, total)]
    if all(value is None for value in share):
        return None
    note = "All samples of the prompt got the same reward: nothing to compare, nothing learned."
    return Chart(
        "Groups without variance, share",
        [thin(Series("share", run.iterations(), share))],
        note,
        zero=True,
    )


def _spread_key(key: str) -> str:
    return key.removesuffix("/mean") + "/std"


def _short(key: str) -> str:
    return key.partition("/")[2].removesuffix("/mean") or key


def thin(s: Series) -> Series:
    keep = spread_out(list(range(len(s.x))), MOST_POINTS)

    def pick(values: Numbers) -> Numbers:
        return [values[i] for i in keep]

    spread = s.spread and pick(s.spread)
    return Series(s.label, pick(s.x), pick(s.y), spread, s.faint and pick(s.faint))
