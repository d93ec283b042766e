"""Puts answers that somebody else wrote in the groups of their prompts, beside the policy's own:
CHORD, LUFFY, TempSamp-R1, RLEP's pools of texts, pairs for DPO, IPO and RPO, A-LoL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmrl.advantages.groups import measured
from mmrl.config.options import Demonstrations
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt
from mmrl.policies.contracts import Demonstrates
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup, group_sizes
from mmrl.zoo.stages.answers import Known, of_field, of_file
from mmrl.zoo.stages.insertion import Wanted, demonstrated
from samplers.noise import Rng


@STAGES.register("demonstrations")
class Demonstrated(KnowsPrompts):
    """Puts answers of a file, or of a field of the prompts, in their groups
    (``train.demonstrations``).

    They are scored as the policy's own are, unless the file has their rewards. Which of a prompt's
    answers an iteration takes is a function of the iteration and of the prompt.
    """

    option = "demonstrations"
    effects = Effects(
        looks_at_samples=True, exchanges_rows=True, brings_answers=True, in_dry_run=False
    )

    def __init__(self, options: Demonstrations, setup: Setup, known: Known):
        self.options = options
        self.setup = setup
        self.known = known
        self.grows = options.place == "append"
        self.apart = "is_ground_truth" if options.apart else ""
        self.origins: dict[int, Prompt] = {}

    @classmethod
    def unfit(cls, options: Demonstrations, policy: Any) -> Iterator[tuple[str, str]]:
        if not Demonstrates.kept_by(policy):
            yield "", f"{called(policy)} takes no answers of others: it has no demonstrate"

    @classmethod
    def build(cls, setup: Setup) -> Demonstrated | None:
        options = setup.options.demonstrations
        if options is None:
            return None
        known = of_field(options.field) if options.field else of_file(options.file(), options.key)
        if not any(known(prompt) for prompt in setup.prompts):
            raise UserError(
                f"train.demonstrations: {options.path or options.field} has no answer to any "
                f"prompt of the data; key names the field of a prompt by which it is found"
            )
        return cls(options, setup, known)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        active = self.options.until is None or iteration < self.options.until
        due = self._wanted(drawn, iteration) if active else []
        mixed, count = demonstrated(
            self.setup, drawn, due, self.options.logprob, self.grows, iteration
        )
        return mixed, {"demonstrations/rows": count}

    def _wanted(self, drawn: Drawn, iteration: int) -> Wanted:
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        right = (double.total() > self.options.threshold) & groups.present
        solved = set(rollout.group[right.to(rollout.group.device)].tolist())
        due: Wanted = []
        for group, size in enumerate(group_sizes(rollout)):
            prompt = self.origins.get(id(rollout.prompts[group]))
            needed = self.options.when == "always" or group not in solved
            if not size or prompt is None or not needed:
                continue
            answers = self.known(prompt)
            rng = Rng.of(self.setup.options.seed, iteration, "demonstrations", str(prompt["text"]))
            most = self.options.number if self.grows else min(self.options.number, size - 1)
            chosen = sorted(rng.permutation(len(answers)).tolist()[:most]) if answers else []
            due += [(group, prompt, answers[place]) for place in chosen]
        return due
