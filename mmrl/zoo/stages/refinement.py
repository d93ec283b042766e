"""Lets the policy improve its answers from feedback: RGR-GRPO's offline guidance (2025), and
EDGE-GRPO's guided error correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le

from mmrl.advantages.groups import measured
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.numbers import Natural
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rewards, Rollout
from mmrl.rollout.collect import evenly, rescored
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup
from mmrl.zoo.stages.answer_memory import Remembered, with_marks
from mmrl.zoo.stages.answers import Answer
from mmrl.zoo.stages.insertion import demonstrated, inserted
from rewards.card import method_of
from samplers.noise import Rng


@dataclass(frozen=True)
class Corrections:
    """Corrects every wrong answer in place: EDGE-GRPO's guided error correction.

    Zhang et al. 2025, "EDGE-GRPO: Entropy-driven GRPO with guided error correction for advantage
    diversity". The first three options are shares of the wrong answers, drawn at random (defaults
    as published; the rest stays wrong). All are trained on as the policy's own answers to the plain
    prompt. An answer that would exceed the policy's length limit stays as it was.

    ``continued``: share of the wrong answers to which ``cue`` is appended, and which the policy
    continues. ``answer``: share to which ``correction`` is appended. ``solution``: share that the
    prompt's field ``field`` replaces; where there is none, ``correction`` is appended. ``cue``: a
    text (mmrl's). ``correction``: a text (mmrl's) with the right answer as {feedback}. ``field``:
    of the prompt, with a whole solution.
    """

    continued: Annotated[float, Ge(0), Le(1)] = 0.5
    answer: Annotated[float, Ge(0), Le(1)] = 0.25
    solution: Annotated[float, Ge(0), Le(1)] = 0.25
    cue: str = "\nBut this cannot be right. Once more:"
    correction: str = "\nBut this cannot be right. I checked it: the answer is {feedback}."
    field: str = "solution"

    def __post_init__(self) -> None:
        total = self.continued + self.answer + self.solution
        if not 0 < total <= 1 + 1e-9:
            raise UserError(
                f"corrections: continued, answer and solution are shares of the wrong answers, "
                f"they must add up to more than 0 and at most 1, not {total:g}"
            )
        _checked_template("corrections: correction", self.correction, feedback="")


@STAGES.register("refinement")
@dataclass
class Refined(KnowsPrompts):
    """Lets the policy improve its best answer by given criteria (RGR-GRPO's offline guidance).

    The policy sees its best answer and the criteria, and answers again. The new answer joins the
    group; it is scored and trained on as an answer to the plain prompt.

    ``threshold``: groups whose best total reward is below it get a new answer. ``feedback``: the
    prompt's field with the criteria of a good answer: a text, a list (of texts, or of pairs whose
    first is one), or the right answer. ``failed_by``: the name of a reward that checks criteria,
    such as judge_checklist: instead of ``feedback`` the policy sees those that the best answer
    fails; a group whose best answer fails none gets no other (RGR-GRPO). ``template``: of the
    question, with {text}, {answer} and {feedback}. ``place``: the new answer replaces the last of
    the group, or is appended to it. ``logprob``: the denominator of the ratio: the policy's
    log-probs of the answer to the plain prompt (current), those it was sampled with, given the
    criteria (guided), or 0 (one); with the last two set the objective's ``shaping``. ``until``: the
    iteration from which on there are none. ``corrections``: instead, every answer with a total
    reward below ``threshold`` is corrected in place, with ``feedback`` as the right answer
    (EDGE-GRPO).
    """

    threshold: float = 1.0
    feedback: str = "rubric"
    failed_by: str | None = None
    template: str = (
        "{text}\n\nAn earlier answer:\n{answer}\n\nA good answer has:\n{feedback}\n\n"
        "Write a better answer."
    )
    place: Literal["replace", "append"] = "append"
    logprob: Literal["current", "guided", "one"] = "current"
    until: Natural | None = None
    corrections: Corrections | None = None
    effects = Effects(looks_at_samples=True, exchanges_rows=True, in_dry_run=False)

    def __post_init__(self) -> None:
        _checked_template("refinement: template", self.template, text="", answer="", feedback="")
        if self.corrections is not None and (self.failed_by or self.logprob != "current"):
            raise UserError(
                "refinement: corrections are answers to the plain prompt and need the right "
                "answer: leave out failed_by and logprob, or corrections"
            )
        self.grows = self.place == "append" and self.corrections is None

    @classmethod
    def unfit(cls, options: Refined, policy: Any) -> Iterator[tuple[str, str]]:
        can = policy.capabilities
        if can.makes != "text":
            yield (
                "",
                f"{called(policy)} reads no criticism of its answers; it is for policies that "
                f"write texts",
            )
        if options.corrections and options.corrections.continued and not can.one_pass:
            yield (
                "corrections",
                f"{called(policy)} cannot go on with an answer; set continued to 0, or take a "
                f"policy that writes token by token",
            )

    def setup(self, setup: Setup) -> None:
        self.run = setup
        self.origins = {}
        fields = [] if self.failed_by else [self.feedback]
        fields += [] if self.corrections is None else [self.corrections.field]
        if fields and all(prompt.get(name) is None for prompt in setup.prompts for name in fields):
            raise UserError(
                f"train.stages.refinement: no prompt has the field {self.feedback!r}; set feedback "
                f"to the one that says what a good answer has"
            )
        if self.failed_by is not None and criteria(setup, self.failed_by) is None:
            raise UserError(
                f"train.stages.refinement.failed_by: {self.failed_by!r} is no reward of this run "
                f"that goes through criteria; name one such as judge_checklist, or leave it out"
            )

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        active = self.until is None or iteration < self.until
        if self.corrections is not None:
            wrong = self._wrong(drawn, iteration) if active else []
            mixed, count = self._corrected(drawn, iteration, sample, wrong)
            return mixed, {"refinement/corrected": count}
        due = self._questions(drawn) if active else []
        better, count = self._asked(drawn, iteration, sample, [question for _, question in due])
        mixed = drawn
        if better is not None:
            mixed = self._joined(drawn, better.rollout, [group for group, _ in due], iteration)
        elif self.grows:
            mixed = inserted(self.run.policy, drawn, [], True)
        return mixed, {"refinement/groups": count}

    def _asked(
        self, drawn: Drawn, iteration: int, sample: Sample, questions: Sequence[Prompt]
    ) -> tuple[Drawn | None, int]:
        """Sample an answer to each question; also return their number over all processes. Every
        process draws equally many, as sharded models need. None where there are no questions."""
        share = evenly(len(questions), drawn.rollout.group.device)
        if not share.total:
            return None, 0
        idle = [drawn.rollout.prompts[0]] * share.idle
        rng = Rng.of(self.run.options.seed, iteration, "refine")
        return sample([*questions, *idle], replace(rng, offset=share.offset), 1), share.total

    # the best answer, improved

    def _joined(self, drawn: Drawn, better: Rollout, groups: list[int], iteration: int) -> Drawn:
        """Put the answers, the first ones of ``better``, in their groups, scored as answers to
        these prompts. A collective call."""
        policy = self.run.policy
        old_prompts = drawn.rollout.prompts
        idle = [0] * (len(better) - len(groups))
        asked_again = tuple(old_prompts[group] for group in [*groups, *idle])
        device = better.group.device
        places = torch.arange(len(better), device=device)
        rows = better.replace(group=places, prompts=asked_again, cond=None)
        written = torch.ones_like(places, dtype=torch.bool)
        marks = rows.provenance.replace(is_ground_truth=written, is_replayed=written)
        rows = rows.replace(provenance=marks)
        if self.logprob == "one":
            rows = rows.replace(logprob=torch.zeros_like(rows.logprob))
        rewards = self.run.score(rows)
        chosen = []
        for place, group in enumerate(groups):
            values = {name: value[place : place + 1] for name, value in rewards.items()}
            row = rows[place : place + 1].replace(prompts=())
            entry = Remembered(-1, iteration, row, Rewards(values, rewards.weights))
            chosen.append((group, entry))
        mixed = inserted(
            policy, replace(drawn, rollout=with_marks(drawn.rollout)), chosen, self.grows
        )
        if self.logprob != "current":
            return mixed  # the ratio divides by the recorded log-probs, as for off-policy answers
        rollout = mixed.rollout
        new = rollout.provenance.is_replayed
        assert new is not None
        with self.run.behavior():
            logprob = rescored(policy, rollout, new)
        provenance = rollout.provenance.replace(is_replayed=torch.zeros_like(new))
        return replace(mixed, rollout=rollout.replace(logprob=logprob, provenance=provenance))

    def _questions(self, drawn: Drawn) -> list[tuple[int, Prompt]]:
        """List the groups with room, and the question to each."""
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        total = torch.where(groups.present, double.total(), -torch.inf).tolist()
        best: dict[int, int] = {}
        for row, group in enumerate(rollout.group.tolist()):
            if group not in best or total[row] > total[best[group]]:
                best[group] = row
        rows = [
            (group, row, self.origins.get(id(rollout.prompts[group]), {}))
            for group, row in sorted(best.items())
            if -torch.inf < total[row] < self.threshold
        ]
        rows = [(group, row, prompt) for group, row, prompt in rows if prompt]
        prompts = [prompt for _, _, prompt in rows]
        answers = [drawn.media[row] for _, row, _ in rows]
        questions = []
        for (group, _, prompt), answer, feedback in zip(
            rows, answers, self._feedback(answers, prompts), strict=True
        ):
            if feedback:
                text = self.template.format(
                    text=prompt["text"], answer=str(answer), feedback=listed(feedback)
                )
                questions.append((group, {**prompt, "text": text}))
        return questions

    def _feedback(self, answers: list[Any], prompts: list[Prompt]) -> list[Any]:
        """Return the feedback for each answer: the criteria of its prompt, or those it fails."""
        if self.failed_by is None:
            return [prompt.get(self.feedback) for prompt in prompts]
        unmet = criteria(self.run, self.failed_by)
        assert unmet is not None
        return unmet(answers, prompts) if prompts else []

    # wrong answers, corrected

    def _wrong(self, drawn: Drawn, iteration: int) -> list[Wrong]:
        """List the answers below the threshold to correct, and how."""
        options = self.corrections
        assert options is not None
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        below = (double.total() < self.threshold) & groups.present
        rng = Rng.of(self.run.options.seed, iteration, "correct")
        draws = rng.uniform(rollout.row_id, (1,))[:, 0].tolist()
        of_rows = rollout.group.tolist()
        wrong = []
        for row in below.nonzero()[:, 0].tolist():
            prompt = self.origins.get(id(rollout.prompts[of_rows[row]]), {})
            text = str(drawn.media[row])
            right = prompt.get(self.feedback)
            solution = prompt.get(options.field)
            if draws[row] < options.continued and prompt:
                wrong.append(Wrong(of_rows[row], row, prompt, text + options.cue, True))
            elif draws[row] < options.continued + options.answer + options.solution:
                solved = draws[row] >= options.continued + options.answer and solution is not None
                if solved or right is not None:
                    corrected = text + options.correction.format(feedback=listed(right))
                    text = str(solution) if solved else corrected
                    wrong.append(Wrong(of_rows[row], row, prompt, text, False))
        return wrong

    def _corrected(
        self, drawn: Drawn, iteration: int, sample: Sample, wrong: list[Wrong]
    ) -> tuple[Drawn, float]:
        """Put corrected answers in the places of wrong ones; a collective call."""
        questions = [{**each.prompt, "prefill": each.text} for each in wrong if each.goes_on]
        continued, _ = self._asked(drawn, iteration, sample, questions)
        whole = iter(() if continued is None else continued.media)
        due = [
            (each.group, each.prompt, Answer(str(next(whole)) if each.goes_on else each.text))
            for each in wrong
        ]
        rows = [each.row for each in wrong]
        return demonstrated(self.run, drawn, due, "current", False, iteration, rows)


@dataclass(frozen=True)
class Wrong:
    """Holds the replacement of a wrong answer: a text that the policy may continue."""

    group: int
    row: int
    prompt: Prompt  # as it stands in the data
    text: str
    goes_on: bool


def criteria(setup: Setup, name: str) -> Callable[[list[Any], list[Prompt]], list[Any]] | None:
    """Find the function of reward ``name`` that lists the criteria an answer fails; None where it
    has none, or there is no such reward."""
    return method_of(setup.rewards.get(name), "unmet")


def listed(feedback: Any) -> str:
    """Format criteria, one a line."""
    if not isinstance(feedback, (list, tuple)):
        return str(feedback)
    items = (item[0] if isinstance(item, (list, tuple)) else item for item in feedback)
    return "\n".join(f"- {item}" for item in items)


def _checked_template(where: str, template: str, **names: str) -> None:
    """Raise UserError where a template names anything else."""
    try:
        template.format(**names)
    except (KeyError, IndexError, ValueError) as error:
        listed = [f"{{{name}}}" for name in names]
        known = " and ".join([", ".join(listed[:-1]), listed[-1]] if listed[1:] else listed)
        raise UserError(
            f"{where} may hold {known} alone, and other braces twice ({error!r})"
        ) from error
