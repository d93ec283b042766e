"""Audits rewards from Python."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any, Literal

from mmrl.api.arguments import Overrides, prompts_of, words_of
from mmrl.api.isolation import isolated
from mmrl.api.rewards import batch_reward
from mmrl.apps.check_reward import Audit, Subject, audit, audit_one, some
from mmrl.apps.check_reward.tables import described
from mmrl.config import build_rewards
from mmrl.core.errors import UserError, called
from mmrl.core.paths import find_config
from mmrl.core.registry import load_built_in
from rewards.card import card_of


class Audits(list[Audit]):
    """Holds the audits of rewards; ``passed``: no rule was broken. Shown as tables in notebooks."""

    @property
    def passed(self) -> bool:
        return all(audit.passed for audit in self)

    def _repr_html_(self) -> str:
        return "".join(_table(each) for each in self)

    def __repr__(self) -> str:
        lines = []
        for each in self:
            lines.append(f"{each.reward}: {'passed' if each.passed else 'FAILED'}")
            for line in each.lines:
                lines += [
                    f"  {line.probe}: {offence.where}: {described(offence)}"
                    for offence in line.offences[:5]
                ]
        return "\n".join(lines)


def _table(each: Audit) -> str:
    rows = []
    for line in each.lines:
        known = [score for score in line.scores if score == score]
        mean = f"{sum(known) / len(known):.3f}" if known else ""
        verdict = f"<b>{len(line.offences)} FAIL</b>" if line.offences else "ok"
        first = line.offences[0].where if line.offences else ""
        cells = [escape(line.probe), mean, escape(line.rule), verdict, escape(first)]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("answer", "mean", "must be", "", "first"))
    title = f"<b>reward {escape(each.reward)}: {'passed' if each.passed else 'failed'}</b>"
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def check_reward(
    reward: str | Path | Callable[..., Any],
    prompts: Any = None,
    *,
    media: Literal["image", "video", "text"] | None = None,
    overrides: Overrides = None,
    samples: int = 200,
    seed: int = 0,
) -> Audits:
    """Audit rewards before any model is trained, as ``mmrl check-reward`` does: ground truths must
    win, tricks must not pay.

    reward: a configuration (its rewards on its own data, with ``overrides``), or a function or the
    name of a reward as for ``mmrl.Trainer``, with the ``prompts`` to try it on and the ``media`` it
    judges (by default from its card). samples: number of prompts; seed: which of them. Raises
    UserError if nothing can be audited.
    """
    with isolated():
        named = isinstance(reward, str) and prompts is not None
        if not (callable(reward) or named):
            return Audits(audit(find_config(reward), words_of(overrides), samples, seed))
        if prompts is None:
            raise UserError("check_reward(function): give the prompts to try it on, prompts=[...]")
        name, judge = _registered(reward) if isinstance(reward, str) else _wrapped(reward)
        rows = prompts_of(prompts)
        placed = [{"where": f"prompt {i}", **row} for i, row in enumerate(rows)]
        judged = list(card_of(judge).media)
        if media is None and len(judged) > 1:
            raise UserError(
                f"reward {name!r}: say what it judges, media='image', 'video' or 'text'"
            )
        subject = Subject(name, judge, some(placed, samples, seed), seed)
        return Audits([audit_one(subject, media)])


def _registered(name: str) -> tuple[str, Any]:
    """Build the reward of that name, as for ``mmrl.Trainer``."""
    load_built_in()
    return name, build_rewards(name)[name].reward


def _wrapped(function: Any) -> tuple[str, Any]:
    name = called(function).replace("<lambda>", "reward")
    return name, batch_reward(function, name)
