"""Measures policies on held-out prompts, from Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.api.arguments import Overrides, needed, prompts_of, words_of
from mmrl.api.isolation import isolated
from mmrl.api.policies import Policy, model_of
from mmrl.api.processes import meet
from mmrl.api.protocols import RunLike
from mmrl.api.rewards import named
from mmrl.cli import commands
from mmrl.config import build_rewards
from mmrl.config.options import EvaluateOptions
from mmrl.core.errors import UserError
from mmrl.experiment import build, evaluation
from mmrl.experiment.evaluation import Estimate
from mmrl.policies.contracts import guidance_of
from mmrl.scoring import Scorer

if TYPE_CHECKING:
    import pandas


class Evaluation:
    """Holds mean rewards with 95 % confidence intervals, of one or several models.

    rows: as in ``evaluation.json``, for each model {"model", "guidance", "rewards"}; about: the
    rest of that file. ``evaluation["trained", "digits"]`` is an ``Estimate`` with mean, low and
    high. Shown as a table in notebooks.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any] = {}):
        self.rows = [dict(row) for row in rows]
        self.about = {key: value for key, value in about.items() if key != "rows"}

    @property
    def frame(self) -> pandas.DataFrame:
        """Return a pandas frame, a row for each model and reward."""
        return needed("pandas", "evaluation.frame").DataFrame(self._lines())

    def __getitem__(self, key: tuple[str, str]) -> Estimate:
        model, reward = key
        for row in self.rows:
            if row["model"] == model and reward in row["rewards"]:
                known = row["rewards"][reward]
                return Estimate(*(known[name] for name in ("mean", "low", "high", "n")))
        models = ", ".join(dict.fromkeys(row["model"] for row in self.rows))
        names = ", ".join(dict.fromkeys(name for row in self.rows for name in row["rewards"]))
        raise KeyError(f"no reward {reward!r} of {model!r}; models: {models}; rewards: {names}")

    def _lines(self) -> list[dict[str, Any]]:
        return [
            {"model": row["model"], "guidance": row["guidance"], "reward": name, **estimate}
            for row in self.rows
            for name, estimate in row["rewards"].items()
        ]

    def _repr_html_(self) -> str:
        lines = [
            f"<tr><td>{escape(str(line['model']))}</td><td>{escape(line['reward'])}</td>"
            f"<td>{_number(line['mean'])}</td><td>{_interval(line)}</td><td>{line['n']}</td></tr>"
            for line in self._lines()
        ]
        head = "<tr><th>model</th><th>reward</th><th>mean</th><th>95 % interval</th><th>n</th></tr>"
        return f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>"

    def __repr__(self) -> str:
        lines = [
            f"{line['model']}: {line['reward']} {_number(line['mean'])} ({_interval(line)})"
            for line in self._lines()
        ]
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _interval(line: Mapping[str, Any]) -> str:
    return f"{_number(line['low'])} to {_number(line['high'])}"


def evaluate(
    source: str | Path | RunLike | Policy,
    overrides: Overrides = None,
    *,
    checkpoint: str | None = None,
    prompts: Any = None,
    reward: Any = None,
    num_samples: int = 4,
    seed: int = 1,
) -> Evaluation:
    """Measure rewards on held-out prompts, as ``mmrl evaluate`` does.

    source: a run (base and trained model), a configuration (base model), or a ``Policy``. For a
    policy, ``reward`` (a function, a name, or several, as for ``mmrl.Trainer``) is measured on
    ``prompts``, by default those of its configuration, with ``num_samples`` each and the noise of
    ``seed``. Intervals are over prompts. Raises UserError with the same sentence as the command
    line.
    """
    if isinstance(source, Policy):
        if reward is None:
            raise UserError("evaluate(policy): give the reward to measure, such as reward=function")
        rows = prompts_of(source.prompts if prompts is None else prompts)
        options = EvaluateOptions(prompts=len(rows), num_samples=num_samples, seed=seed)
        return _of_policy(source, rows, reward, options)
    if prompts is not None or reward is not None:
        raise UserError(
            "evaluate: prompts and reward belong to a policy, mmrl.evaluate(run.policy, "
            "prompts=..., reward=...); a run is measured as its configuration says"
        )
    place = Path(source) if isinstance(source, (str, Path)) else source.folder
    with isolated({} if isinstance(source, (str, Path)) else source.live()):
        commands.evaluate(place, words_of(overrides), checkpoint)
        meet()
    return _written(place)


def _written(path: Path) -> Evaluation:
    """Read the written evaluation: in a run, or in the working directory for a configuration."""
    import json

    folder = build.last_stage(path) if path.is_dir() else Path()
    known = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    return Evaluation(known["rows"], known)


def _of_policy(
    policy: Policy, prompts: list[Any], reward: Any, options: EvaluateOptions
) -> Evaluation:
    """Measure rewards on fresh samples of a policy."""
    rewards = named(reward)
    with isolated({"rewards": rewards.live}), torch.no_grad():
        weighted = build_rewards(rewards.section)
        names = build.short_names(weighted)
        scorer = Scorer({names[name]: entry.reward for name, entry in weighted.items()})
        measured = evaluation.scores(model_of(policy), prompts, scorer, options)
    row = evaluation.row("policy", guidance_of(model_of(policy)), measured)
    return Evaluation([row], {"prompts": len(prompts), "num_samples": options.num_samples})
