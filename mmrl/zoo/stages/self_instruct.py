"""Lets the policy write new instructions in every iteration, for the data source of SeRL (Fang et
al. 2025)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt
from mmrl.policies.base import Policy, RolloutContext
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage
from mmrl.zoo.curricula.drawing import Around
from mmrl.zoo.curricula.self_instruct import SelfInstruct
from rewards.judges.instructions import Filters, new_instruction, pictures_of, request
from samplers.noise import Rng


@STAGES.register("self_instruct")
class SelfInstruction(Stage):
    """Writes and filters instructions for ``data: self_instruct``; it has no option of train."""

    asked_by = "data: self_instruct"

    def __init__(self, policy: Policy, prompts: SelfInstruct, seed: int):
        self.policy = policy
        self.prompts = prompts
        self.seed = seed
        self.filters = Filters(
            forbidden=prompts.forbidden,
            least_words=prompts.least_words,
            most_words=prompts.most_words,
            similarity=prompts.similarity,
        )

    @classmethod
    def build(cls, setup: Setup) -> SelfInstruction | None:
        if not isinstance(setup.prompts, SelfInstruct):
            _refuse_inside(setup.prompts)
            return None
        if setup.policy.capabilities.makes != "text":
            raise UserError(
                "data.self_instruct: the policy writes the instructions, so it must be one that "
                "writes text, such as vlm or masked_lm"
            )
        return cls(setup.policy, setup.prompts, setup.options.seed)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        examples = self.prompts.examples(iteration, self.seed)
        refused: Counter[str] = Counter()
        pool = self.prompts.pool()
        for rows, text in zip(examples, self._written(examples, iteration), strict=True):
            instruction = new_instruction(text)
            cause = self.filters.refuses(instruction, pool) if instruction else "no answer"
            refused[cause] += 1
            if not cause:
                pool.append(instruction)
                self.prompts.add(instruction, rows[-1]["entry"])
        left = len(self.prompts.waiting) - len(self.prompts.taken)  # those taken are asked now
        counts = {f"self_instruct/{c.replace(' ', '_')}": n for c, n in refused.items() if c}
        return drawn, {
            "self_instruct/new": float(refused[""]),
            "self_instruct/waiting": float(left),
            **{name: float(number) for name, number in counts.items()},
        }

    def _written(self, examples: Sequence[Sequence[Prompt]], iteration: int) -> list[str]:
        """Return what the policy writes after each list of examples; every process writes its
        share, in equally many passes."""
        rank, size = distributed.world()
        share = -(-len(examples) // size)
        local = [*examples[rank * share : (rank + 1) * share]]
        padded = [*local, *[examples[0]] * (share - len(local))]
        prompts = [{"text": request(rows), **pictures_of(rows[-1])} for rows in padded]
        stream = replace(Rng.of(self.seed, iteration, "self_instruct"), offset=rank * share)
        context = RolloutContext(iteration, "sample")
        media = self.policy.decode(self.policy.rollout(prompts, 1, stream, context))
        texts = [str(text) for text in media][: len(local)]
        return [str(text) for text in distributed.all_gather_json(texts, self.policy.device)]


def _refuse_inside(prompts: Sequence[Prompt]) -> None:
    while isinstance(prompts, Around):
        prompts = prompts.inner
        if isinstance(prompts, SelfInstruct):
            raise UserError(
                "data: put self_instruct around the other data sources, not inside one of them"
            )
