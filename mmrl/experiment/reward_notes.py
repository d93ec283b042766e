"""Notes about rewards during a run: one that is slow, one that dominates another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

LONG = 0.5  # of an iteration
FAR_APART = 100.0  # times as much say


def notes(
    metrics: Mapping[str, float],
    weights: Mapping[str, float],
    seconds: Mapping[str, float],
    chunks: int,
    advantage: Callable[..., Any],
) -> dict[str, str]:
    """Return sentences by topic.

    ``seconds``: spent in every reward so far. ``chunks``: train.reward_overlap_chunks.
    """
    sentences = {}
    share = metrics.get("share/reward", 0.0)
    if share > LONG and seconds:
        slowest = max(seconds, key=lambda name: seconds[name])
        remedy = (
            "train.reward_overlap_chunks=2 scores one half while the other is sampled"
            if chunks < 2
            else "a server or several (docs/remote-rewards.md) would share the work"
        )
        sentences["slow reward"] = (
            f"the rewards take {share:.0%} of an iteration, most of it {slowest}; {remedy}"
        )
    if sums(advantage) and (sentence := drowned(metrics, weights)):
        sentences["scales"] = sentence
    return sentences


def sums(advantage: Callable[..., Any]) -> bool:
    """Tell whether an advantage sums the rewards before comparing."""
    try:
        combine = inspect.signature(advantage).parameters.get("combine")
    except (TypeError, ValueError):
        return True
    return combine is None or combine.default == "sum"


def drowned(metrics: Mapping[str, float], weights: Mapping[str, float]) -> str:
    """Return a sentence about the two rewards whose weighted spreads differ most; "" if none is
    dominated."""
    say = {
        name: abs(weight) * metrics.get(f"reward/{name}/std", 0.0)
        for name, weight in weights.items()
    }
    say = {name: spread for name, spread in say.items() if spread > 0}
    if len(say) < 2:
        return ""
    loud, quiet = max(say, key=lambda name: say[name]), min(say, key=lambda name: say[name])
    ratio = say[loud] / say[quiet]
    if ratio < FAR_APART:
        return ""
    return (
        f"reward {loud} has {ratio:.3g} times the say of {quiet} (std {say[loud]:.2g} against "
        f"{say[quiet]:.2g} in the weighted sum), which is hardly learnt: change their weights, or "
        "take advantage=gdpo, which normalises each"
    )
