"""Audits a reward on the user's own data before any model is trained: ``mmrl check-reward``.

The probes depend on what the reward judges: ``mmrl.apps.check_reward.texts`` for texts,
``mmrl.apps.check_reward.images`` for images. A module of probes offers ``audit(subject) ->
list[Line]`` and is named in ``PROBES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mmrl.config as config
from mmrl.apps.check_reward.places import named, where
from mmrl.config import Config, import_plugins
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, POLICIES, load_built_in
from mmrl.core.types import Media, Prompt, Reward
from mmrl.experiment.build import short_names
from mmrl.policies.capabilities import capabilities_of
from mmrl.scoring.attempt import describe
from rewards.card import method_of
from samplers.noise import Rng

PROBES = {
    "text": "mmrl.apps.check_reward.texts",
    "image": "mmrl.apps.check_reward.images",
    "video": "mmrl.apps.check_reward.images",
}


@dataclass(frozen=True)
class Subject:
    """Holds a reward, its name, and the prompts to try it on; each prompt has ``where`` (file:line,
    if known)."""

    name: str
    reward: Reward
    prompts: list[Prompt]
    seed: int = 0
    bare: bool = False  # its answers are written without <answer> tags

    def ask(self, media: Media, prompts: Sequence[Prompt], what: str) -> Any:
        """Return the reward of samples (``what``, in words). UserError if it raises."""
        try:
            return self.reward(media, list(prompts))
        except UserError:
            raise
        except Exception as error:  # a user's own reward may raise anything
            raise UserError(
                f"reward {self.name!r} fails on {what} ({where(prompts[0])}): "
                f"{describe(error).text}"
            ) from error


@dataclass(frozen=True)
class Offence:
    """Names a row that broke a rule."""

    where: str  # file:line or the question
    answer: str  # what was scored: an answer, a kind of picture
    score: float
    note: str = ""


@dataclass(frozen=True)
class Line:
    """Reports one probe: what was scored, the rule, and the rows that broke it. No offence:
    passed."""

    probe: str
    rule: str
    scores: list[float]  # NaN: could not be scored
    offences: list[Offence]
    applies: bool = True  # False: it does not apply here, ``rule`` says why
    note: str = ""  # remarks for the table


@dataclass(frozen=True)
class Audit:
    """Holds all probes of one reward."""

    reward: str
    lines: list[Line]

    @property
    def passed(self) -> bool:
        return not any(line.offences for line in self.lines)


def audit(
    path: Path, overrides: Sequence[str] = (), samples: int = 200, seed: int = 0
) -> list[Audit]:
    """Audit every reward of a configuration, also those of ``evaluate``, on ``samples`` of its
    prompts.

    Raises:
        UserError: the configuration cannot be read, or a reward judges something without probes.
    """
    load_built_in()
    configuration = config.load(path, overrides, required=("data", "reward"))
    import_plugins(configuration)
    weighted = configuration.rewards()
    rewards = {name: entry.reward for name, entry in weighted.items()}
    weights = {name: entry.weight for name, entry in weighted.items()}
    if (configuration.plain.get("evaluate") or {}).get("reward"):
        rewards |= {
            name: entry.reward
            for name, entry in configuration.rewards(("evaluate", "reward")).items()
        }
    prompts = some(
        named(list(configuration.build("data", DATA).train), configuration), samples, seed
    )
    names = short_names(rewards)
    medium = _made(configuration)
    audits = [
        audit_one(subject, medium)
        for name, reward in rewards.items()
        for subject in _subjects(Subject(names[name], reward, prompts, seed))
    ]
    sums = importlib.import_module("mmrl.apps.check_reward.sums")
    together = medium in ("text", None) and sums.applies(rewards, weights)
    if together and (lines := sums.audit(rewards, weights, prompts)):
        audits.append(Audit("weighted sum", lines))
    return audits


def _subjects(subject: Subject) -> list[Subject]:
    """Split a reward with one reward per task into these."""
    tasks = method_of(subject.reward, "tasks")
    if tasks is None:
        return [subject]
    return [
        replace(subject, name=f"{subject.name}, task {task}", reward=reward, prompts=prompts)
        for task, (reward, prompts) in tasks(subject.prompts).items()
    ]


def audit_one(subject: Subject, policy_medium: str | None = None) -> Audit:
    """Audit one reward; ``policy_medium``: the policy's medium, None if unknown."""
    from rewards.card import card_of

    media = card_of(subject.reward).media
    if policy_medium not in media and "text" in media and len(media) > 1:
        raise UserError(
            f"reward {subject.name!r} judges {', '.join(media)}: say which is meant, by a "
            f"`policy:` in the file "
            'or, in a reward of your own, by @card(media="text") from rewards.card'
        )
    medium = policy_medium if policy_medium in media else media[0]
    if medium not in PROBES:
        raise UserError(
            f"reward {subject.name!r} judges {medium}s; check-reward has probes for: "
            f"{', '.join(PROBES)}"
        )
    return Audit(subject.name, importlib.import_module(PROBES[medium]).audit(subject))


def some(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """Draw ``count`` of the prompts without replacement, in the order of the data."""
    order = Rng.of(seed, "audit").permutation(len(prompts)).tolist()
    return [prompts[i] for i in sorted(order[:count])]


def _made(configuration: Config) -> str | None:
    spec: Any = configuration.plain.get("policy")
    name = next(iter(spec), None) if isinstance(spec, dict) else spec
    can = capabilities_of(POLICIES.find(name)) if isinstance(name, str) else None
    return None if can is None else can.makes
