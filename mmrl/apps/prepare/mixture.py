"""Predicts the outcome of a mixture of data from runs with other mixtures, and proposes the best.

    python -m mmrl.apps.prepare.mixture RUN [RUN ...] [--reward NAME ...]
        [--form quadratic] [--least 0.05]

A RUN is the folder of a run over ``data: mixture`` after ``mmrl evaluate RUN``, or a .jsonl file of
measured mixtures, {"weights": {"maths": 0.3, "boxes": 0.7}, "score": 0.61} a line. The score of a
run is the mean of the trained model's rewards (of those named with --reward). MoDoMoDo (Liang et
al. 2025): a quadratic function of the weights is fitted and its maximum on weights of sum 1 is the
mixture to train on next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mmrl.core.errors import UserError
from mmrl.zoo.curricula import mixing

Measured = tuple[Mapping[str, float], float]  # weights by source, and the score


def measured(path: Path, rewards: Sequence[str]) -> Iterator[Measured]:
    """Yield the mixture and score of a run, or those of a file."""
    if path.is_dir():
        yield weights_of(path), score_of(path, rewards)
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
                weights = {str(name): float(value) for name, value in row["weights"].items()}
                yield weights, float(row["score"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f'{path}:{number}: expected {{"weights": {{"a": 0.5}}, "score": 0.6}}: {error}'
                ) from error


def weights_of(run: Path) -> Mapping[str, float]:
    """Return the weights of a run's mixture."""
    sections = yaml.safe_load(read(run / "config.yaml", "is it the folder of a run?"))
    mixture = within(sections.get("data"))
    if mixture is None or not mixture.get("weights") or mixture.get("stages"):
        raise UserError(f"{run}: its data is no mixture with weights that stay the same")
    return {name: float(value) for name, value in mixture["weights"].items()}


def within(section: Any) -> dict[str, Any] | None:
    """Find the options of ``mixture`` in a data section, also nested in other sources."""
    if not isinstance(section, dict):
        return None
    if "mixture" in section:
        return dict(section["mixture"])
    return next((inner for part in section.values() if (inner := within(part))), None)


def score_of(run: Path, rewards: Sequence[str]) -> float:
    """Return the mean reward of a run's trained model in its evaluation."""
    rows = json.loads(read(run / "evaluation.json", f"run: mmrl evaluate {run}"))["rows"]
    trained = [row["rewards"] for row in rows if row["model"] == "trained"]
    if not trained:
        raise UserError(f"{run}: evaluation.json has no trained model; run: mmrl evaluate {run}")
    names = list(rewards) or list(trained[-1])
    if unknown := [name for name in names if name not in trained[-1]]:
        raise UserError(f"{run}: no reward {unknown[0]!r}; there are {', '.join(trained[-1])}")
    return float(np.mean([trained[-1][name]["mean"] for name in names]))


def read(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {remedy}") from error


def proposed(rows: Sequence[Measured], form: mixing.Form, least: float) -> str:
    """Return the output: the fit, every mixture, the proposal as an override."""
    names = list(dict.fromkeys(name for weights, _ in rows for name in weights))
    table = np.array([[weights.get(name, 0.0) for name in names] for weights, _ in rows])
    scores = np.array([score for _, score in rows])
    surrogate = mixing.fit(table, scores, form)
    mixtures = mixing.shares(table)
    best = mixing.best_mixture(surrogate, len(names), least)
    lines = [
        f"{form} in {len(names)} weights from {len(rows)} mixtures, ridge {surrogate.ridge:g}; "
        f"left out, a mixture is missed by {surrogate.error:.4g}, by the mean of all by "
        f"{surrogate.spread:.4g}"
    ]
    if surrogate.error >= surrogate.spread:
        lines.append("the fit predicts no better than the mean: measure more mixtures")
    predictions = surrogate.predict(np.vstack([mixtures, best]))
    cells = [*(f"{score:.4f}" for score in scores), "proposed"]
    for mixture, score, value in zip([*mixtures, best], cells, predictions, strict=True):
        weights = ", ".join(f"{name} {share:.3f}" for name, share in zip(names, mixture))
        lines.append(f"{score:>9}  predicted {value:.4f}  {weights}")
    override = ", ".join(f"{name}: {share:.3f}" for name, share in zip(names, best))
    return "\n".join([*lines, f"'data.mixture.weights={{{override}}}'"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or .jsonl files")
    parser.add_argument("--reward", action="append", default=[], help="that counts; all by default")
    parser.add_argument("--form", choices=["quadratic", "linear"], default="quadratic")
    parser.add_argument("--least", type=float, default=0.0, help="share of every source")
    options = parser.parse_args()
    try:
        rows = [row for path in options.runs for row in measured(path, options.reward)]
        print(proposed(rows, options.form, options.least))
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
