"""Adds demonstrations (external answers) to the groups of their prompts: CHORD, LUFFY, TempSamp-R1,
RLEP's pools of texts, pairs for DPO, IPO and RPO, A-LoL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmrl.advantages.groups import measured
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.numbers import Count, Natural
from mmrl.core.registry import STAGES
from mmrl.policies.contracts import Demonstrates
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup, group_sizes
from mmrl.zoo.stages.answers import of_field, of_file
from mmrl.zoo.stages.insertion import Wanted, demonstrated
from samplers.noise import Rng


@STAGES.register("demonstrations")
@dataclass
class Demonstrated(KnowsPrompts):
    """Adds demonstrations (answers from another model or a person) to the groups of their prompts.

    ``path``: a .jsonl file, each line {"prompt": ..., "answers": [...]}, an answer a text, the path
    of a picture, or {"text": ..., "reward": ..., "logprobs": [...]}, whose reward then replaces the
    run's rewards; ``field``: or a field of the prompts, one answer or a list. ``key``: the field of
    a prompt that "prompt" is matched with. ``number``: at most this many are added to a group.
    ``when``: in groups without a total reward above ``threshold``, or always.
    ``threshold``: of the total reward. ``place``: they
    replace the last samples of the group, of which one stays, or are appended to it.
    ``own_baseline``: they are compared among themselves, not with the policy's samples: pairs for
    DPO, IPO; CHORD's experts. ``logprob``: the denominator of the ratio: the policy's log-probs
    before the update (current: TempSamp-R1, RLEP), those of the file (recorded, where it has them),
    or 0 (one: LUFFY, Yan et al. 2025, whose expert has probability 1). ``until``: the iteration
    from which on none is used.

    They are scored like the policy's samples, unless the file has their rewards. Which of a
    prompt's answers are used depends on the iteration and the prompt alone.
    """

    path: Path | None = None
    field: str | None = None
    key: str = "text"
    number: Count = 1
    when: Literal["always", "all_wrong"] = "always"
    threshold: float = 0.5
    place: Literal["append", "replace"] = "append"
    own_baseline: bool = False
    logprob: Literal["current", "recorded", "one"] = "current"
    until: Natural | None = None
    effects = Effects(
        looks_at_samples=True, exchanges_rows=True, brings_answers=True, in_dry_run=False
    )

    def __post_init__(self) -> None:
        if (self.path is None) == (self.field is None):
            raise UserError("demonstrations: set either path, a .jsonl file, or field")
        self.grows = self.place == "append"
        self.baseline_of = "is_ground_truth" if self.own_baseline else ""

    @classmethod
    def unfit(cls, options: Demonstrated, policy: Any) -> Iterator[tuple[str, str]]:
        if not Demonstrates.kept_by(policy):
            yield "", f"{called(policy)} takes no demonstrations: it has no demonstrate"

    def setup(self, setup: Setup) -> None:
        self.run = setup
        self.origins = {}
        if self.field is not None:
            self.known = of_field(self.field)
        elif self.path is not None:
            self.known = of_file(self.path, self.key)
        if not any(self.known(prompt) for prompt in setup.prompts):
            raise UserError(
                f"train.stages.demonstrations: {self.path or self.field} has no answer to any "
                f"prompt of the data; key names the field of a prompt by which it is found"
            )

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        active = self.until is None or iteration < self.until
        due = self._wanted(drawn, iteration) if active else []
        mixed, count = demonstrated(self.run, drawn, due, self.logprob, self.grows, iteration)
        return mixed, {"demonstrations/rows": count}

    def _wanted(self, drawn: Drawn, iteration: int) -> Wanted:
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        right = (double.total() > self.threshold) & groups.present
        solved = set(rollout.group[right.to(rollout.group.device)].tolist())
        due: Wanted = []
        for group, size in enumerate(group_sizes(rollout)):
            prompt = self.origins.get(id(rollout.prompts[group]))
            needed = self.when == "always" or group not in solved
            if not size or prompt is None or not needed:
                continue
            answers = self.known(prompt)
            rng = Rng.of(self.run.options.seed, iteration, "demonstrations", str(prompt["text"]))
            most = self.number if self.grows else min(self.number, size - 1)
            chosen = sorted(rng.permutation(len(answers)).tolist()[:most]) if answers else []
            due += [(group, prompt, answers[place]) for place in chosen]
        return due
