"""Lets the policy improve an answer by what is asked of it: RGR-GRPO's offline guidance (2025), and
guided error correction as in EDGE-GRPO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mmrl.advantages.groups import measured
from mmrl.config.options import Refinement
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.rollout.collect import rescored
from mmrl.rollout.past import Remembered, inserted, with_marks
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup
from samplers.noise import Rng


@STAGES.register("refinement")
class Refined(KnowsPrompts):
    """Puts an improved answer in groups whose best one leaves room (``train.refinement``).

    The policy sees its best answer and the criteria, and answers once more; what it writes is
    scored, and trained on, as an answer to the prompt without them, its ratio being to the policy's
    own probability of it there (our reading).
    """

    def __init__(self, options: Refinement, setup: Setup):
        self.options = options
        self.setup = setup
        self.grows = options.place == "append"
        self.origins: dict[int, Prompt] = {}

    @classmethod
    def build(cls, setup: Setup) -> Refined | None:
        options = setup.options.refinement
        if options is None:
            return None
        if setup.policy.capabilities.makes != "text":
            raise UserError(
                f"train.refinement: {type(setup.policy).__name__} reads no criticism of its "
                f"answers; it is for policies that write texts"
            )
        if all(prompt.get(options.feedback) is None for prompt in setup.prompts):
            raise UserError(
                f"train.refinement: no prompt has the field {options.feedback!r}; set feedback to "
                f"the one that says what a good answer has"
            )
        return cls(options, setup)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        active = self.options.until is None or iteration < self.options.until
        due = self._questions(drawn) if active else []
        device = drawn.rollout.group.device
        counts = distributed.all_gather_rows(torch.tensor([len(due)], device=device)).tolist()
        rank, _ = distributed.world()
        mixed = drawn
        if max(counts):
            # all processes draw equally many, as sharded models need
            idle = [(-1, drawn.rollout.prompts[0])] * (max(counts) - len(due))
            rng = Rng.of(self.setup.options.seed, iteration, "refine")
            rng = replace(rng, offset=sum(counts[:rank]))
            better = sample([question for _, question in [*due, *idle]], rng, 1)
            mixed = self._joined(drawn, better.rollout, [group for group, _ in due], iteration)
        elif self.grows:
            mixed = inserted(self.setup.policy, drawn, [], True)
        return mixed, {"refinement/groups": sum(counts)}

    def _joined(self, drawn: Drawn, better: Rollout, groups: list[int], iteration: int) -> Drawn:
        """Put the answers, the first ones of ``better``, in their groups, scored as answers to
        these prompts. A collective call."""
        policy = self.setup.policy
        old_prompts = drawn.rollout.prompts
        idle = [0] * (len(better) - len(groups))
        asked_again = tuple(old_prompts[group] for group in [*groups, *idle])
        device = better.group.device
        places = torch.arange(len(better), device=device)
        rows = better.replace(group=places, prompts=asked_again, cond=None)
        written = torch.ones_like(places, dtype=torch.bool)
        marks = rows.provenance.replace(is_ground_truth=written, is_replayed=written)
        rows = rows.replace(provenance=marks)
        rewards = self.setup.score(rows)
        chosen = []
        for place, group in enumerate(groups):
            values = {name: value[place : place + 1] for name, value in rewards.items()}
            row = rows[place : place + 1].replace(prompts=())
            entry = Remembered(-1, iteration, row, Rewards(values, rewards.weights))
            chosen.append((group, entry))
        mixed = inserted(
            policy, replace(drawn, rollout=with_marks(drawn.rollout)), chosen, self.grows
        )
        rollout = mixed.rollout
        new = rollout.provenance.is_replayed
        assert new is not None
        with self.setup.behavior():
            logprob = rescored(policy, rollout, new)
        provenance = rollout.provenance.replace(is_replayed=torch.zeros_like(new))
        return replace(mixed, rollout=rollout.replace(logprob=logprob, provenance=provenance))

    def _questions(self, drawn: Drawn) -> list[tuple[int, Prompt]]:
        """List groups with room, and what is asked of the policy."""
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        total = torch.where(groups.present, double.total(), -torch.inf).tolist()
        best: dict[int, int] = {}
        for row, group in enumerate(rollout.group.tolist()):
            if group not in best or total[row] > total[best[group]]:
                best[group] = row
        questions = []
        for group, row in sorted(best.items()):
            prompt = self.origins.get(id(rollout.prompts[group]), {})
            feedback = prompt.get(self.options.feedback)
            if feedback is not None and -torch.inf < total[row] < self.options.threshold:
                text = self.options.template.format(
                    text=prompt["text"], answer=str(drawn.media[row]), feedback=listed(feedback)
                )
                questions.append((group, {**prompt, "text": text}))
        return questions


def listed(feedback: Any) -> str:
    """Write criteria down, one a line."""
    if not isinstance(feedback, (list, tuple)):
        return str(feedback)
    items = (item[0] if isinstance(item, (list, tuple)) else item for item in feedback)
    return "\n".join(f"- {item}" for item in items)
