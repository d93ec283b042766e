"""Defines ``key_steps``, ``vqa`` and ``video_qa``: reasoning steps, questions about images and
videos."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Completion, Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import normal, plain, quantity_in, stated, worst
from rewards.answers.reading.names import names_of
from rewards.answers.reading.parts import ANSWER
from rewards.answers.reading.plain import SHORT, bare
from rewards.answers.reading.published import agreement, vqa_key
from rewards.answers.spans import Temporal, true_spans
from rewards.answers.verifiable import Verdict, Verifiable, need, tagged
from rewards.answers.words import Answer, Choice
from rewards.card import card, card_of

Share = Annotated[float, Ge(0), Le(1)]


def true_steps(prompt: Prompt) -> list[list[str]]:
    """Return ``key_steps``: for every step its paraphrases."""
    value = need(prompt, "key_steps")
    if not isinstance(value, (list, tuple)) or not value:
        raise Unscorable(
            f'"key_steps" is {value!r}; expected a list of texts, or of lists of ways to say a step'
        )
    steps = [
        [str(way) for way in (step if isinstance(step, (list, tuple)) else [step]) if words(way)]
        for step in value
    ]
    if not all(steps):
        raise Unscorable('"key_steps" holds an empty step')
    return steps


def words(text: object) -> str:
    """Split into words, numbers and signs with single blanks between and around them, to find one
    text in another."""
    tokens = re.findall(r"\d+(?:\.\d+)?|\w+|[^\w\s]", normal(text))
    return f" {' '.join(tokens)} " if tokens else ""


def steps_found(text: str, steps: Sequence[Sequence[str]], ordered: bool) -> int:
    """Count the steps that occur as whole words; ``ordered``: each after the previous one."""
    body = words(text)
    at = 0
    count = 0
    for ways in steps:
        places = [(body.find(words(way), at if ordered else 0), len(words(way))) for way in ways]
        places = [(start, size) for start, size in places if start >= 0]
        if places:
            start, size = min(places)
            at = start + size - 1
            count = count + 1
    return count


def thinking(text: str) -> str:
    """Return the text before the final answer, or all of it."""
    tags = [tag.start() for tag in ANSWER.finditer(str(text)) if not tag[1]]
    return str(text)[: tags[-1]] if tags else str(text)


def whole(part: str, text: str) -> bool:
    """Tell whether ``part`` begins a text and ends where one of its words does."""
    rest = str(text)[len(part) : len(part) + 2]
    if not part or not rest or not str(text).startswith(part):
        return str(text) == part
    decimal = part[-1].isdigit() and rest[0] == "." and rest[1:].isdigit()
    return not (part[-1].isalnum() and rest[0].isalnum() or decimal)


@REWARDS.register("key_steps")
@card(
    media="text",
    needs="key_steps answer",
    low=0,
    high=1,
    source="StepGRPO, R1-VL (arXiv:2503.12937)",
)
class KeySteps(Verifiable):
    """Reward key steps of the reasoning (StepRAR), sections in order (StepRVR), and the answer.

    reward = mean over the parts in use, the answer counted with its weight against the rest: answer
    * [right] + (1 - answer) * mean(share of ``key_steps`` found, share of ``sections`` in order). A
    step is a text or a list of ways to say it, and is found as whole words, once, outside the final
    answer.

    StepGRPO's own sum is ``form: step_grpo``: StepRAR, [right] + alpha * share of ``key_steps``
    found, 0 without a final answer, plus StepRVR, 1 if all ``sections`` stand in order before a
    final answer. It compares whole answers by this sum, so that ``advantage: grpo`` goes with it
    (Zhang et al. 2025, section 3.2).

    Args:
        answer: weight of the answer, judged as by ``answer``; without it, only the reasoning is
            rewarded.
        ordered: every step must come after the previous one.
        sections: texts that the reasoning must hold in this order, such as ["Description",
            "Reasoning"].
        each: the parts of the reward as step rewards [B, K], each at the token that completes it,
            the answer's at the last token. ``advantage: process`` compares all rewards of a group
            with one mean: a step worth less than that mean, for example next to a heavily weighted
            answer, is pushed down.
        form: shares, the mean above, or step_grpo.
        alpha: weight of all key steps together in form step_grpo.
    """

    def __init__(
        self,
        answer: Share = 0.5,
        ordered: bool = False,
        sections: list[str] = [],  # noqa: B006
        each: bool = False,
        form: Literal["shares", "step_grpo"] = "shares",
        alpha: Annotated[float, Ge(0)] = 0.1,
    ):
        if each and form == "step_grpo":
            raise UserError(
                "key_steps: form step_grpo compares whole answers and pays no single tokens; "
                "leave out each, or take form shares"
            )
        self.weight = answer
        self.ordered = ordered
        self.sections = list(sections)
        self.inner = Answer()
        self.each = each
        self.form = form
        self.alpha = alpha
        if each:
            self.card = replace(card_of(type(self)), of="step")
        if form == "step_grpo":
            self.card = replace(card_of(type(self)), high=1 + alpha + bool(self.sections))

    def __call__(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> Tensor:
        total = super().__call__(texts, prompts)
        if not self.each:
            return total
        limits = [limit for text in texts if (limit := Completion.of(text).limit) is not None]
        if len(limits) < len(texts):  # external texts, whose tokens are unknown
            return total[:, None]
        rows = [
            self._earned(text, prompt, float(all_))
            for text, prompt, all_ in zip(texts, prompts, total)
        ]
        scores = torch.full((len(texts), max(limits, default=1)), math.nan)
        for row, earned in enumerate(rows):
            for token, value in earned.items():
                scores[row, token] = value
        return scores

    def _earned(self, text: Any, prompt: Prompt, total: float) -> dict[int, float]:
        """Return token -> reward earned there, ``total`` in all."""
        last = max(text.tokens - 1, 0)
        if math.isnan(total) or not text.tokens:
            return {last: total}
        before = [thinking(part) if whole(part, text) else "" for part in text.spell()]
        earned: dict[int, float] = {}
        for steps, ordered, share in self._parts(prompt):
            known = 0
            for token, part in enumerate(before):
                count = steps_found(part, steps, ordered) if part else known
                if count > known:
                    earned[token] = earned.get(token, 0.0) + share * (count - known)
                    known = count
        earned[last] = earned.get(last, 0.0) + total - sum(earned.values())
        return earned

    def _parts(self, prompt: Prompt) -> list[tuple[Sequence[Sequence[str]], bool, float]]:
        """Return the texts to find, whether in order, and the weight of each."""
        parts = [(true_steps(prompt), self.ordered)]
        if self.sections:
            parts.append(([[section] for section in self.sections], True))
        return [
            (steps, order, (1 - self.weight) / len(parts) / len(steps)) for steps, order in parts
        ]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        thought = thinking(text)
        right = self.inner.judge(text, prompt)
        if self.form == "step_grpo":
            return Verdict(self._published(thought, right, prompt), right.status)
        reasoning = sum(
            share * steps_found(thought, steps, order)
            for steps, order, share in self._parts(prompt)
        )
        return Verdict(self.weight * right.score + reasoning, right.status)

    def _published(self, thought: str, right: Verdict, prompt: Prompt) -> float:
        """Compute StepRAR + StepRVR of R1-VL."""
        steps = true_steps(prompt)
        if right.status == "unparseable":
            return 0.0
        share = steps_found(thought, steps, self.ordered) / len(steps)
        in_order = steps_found(thought, [[section] for section in self.sections], True)
        valid = bool(self.sections) and in_order == len(self.sections)
        return right.score + self.alpha * share + valid

    def ground_truth(self, prompt: Prompt) -> str:
        steps = [ways[0] for ways in true_steps(prompt)]
        if not self.sections:
            thought = ". ".join(steps)
        else:
            thought = ". ".join([self.sections[0], *steps, *self.sections[1:]])
        return f"<think>{thought}.</think>{self.inner.ground_truth(prompt)}"

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        steps = ". ".join(ways[0] for ways in true_steps(prompt))
        return {
            "no reasoning": self.inner.ground_truth(prompt),
            "steps as the answer": tagged(steps),
        }


@REWARDS.register("vqa")
@card(media="text", needs="answers", low=0, high=1, source="VQA v2 accuracy (arXiv:1505.00468)")
class Vqa(Verifiable):
    """Compute VQA accuracy: three of ``answers`` must agree, averaged over leaving each annotator
    out.

    In a sentence, the predicate counts, or its number, or the yes or no before it. With fewer than
    three annotators one agreement is enough. Answers are normalised as in the published evaluation
    (punctuation, articles, number words to ten, apostrophes), which however loses the sign of -5,
    the factorial of 2! and the minus of grade A-: those must match here.

    Args:
        form: vqa_v2, or textvqa, whose evaluation also drops commas and question marks first.
    """

    def __init__(self, form: Literal["vqa_v2", "textvqa"] = "vqa_v2"):
        self.textvqa = form == "textvqa"

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        people = [vqa_key(answer, self.textvqa) for answer in self._people(prompt)]
        body, status = stated(text)
        if not normal(body):
            return Verdict(0.0, "unparseable")
        if len(body) > SHORT:
            return Verdict(agreement(vqa_key(body), people), status)
        whole = agreement(vqa_key(bare(plain(body)), self.textvqa), people)
        ways = () if whole else self._ways(body)
        spoken = [agreement(vqa_key(way, self.textvqa), people) for way in ways]
        return Verdict(max([whole, *spoken]), status)

    def _ways(self, body: str) -> list[str]:
        """Return the answers in a sentence; the published rule reads short answers only."""
        number = quantity_in(body).value
        plain_number = number is not None and number.unit is None and not number.percent
        return [*names_of(body)[1:], *([str(number.value)] if number and plain_number else [])]

    def _people(self, prompt: Prompt) -> list[str]:
        value = need(prompt, "answers")
        answers = [str(answer) for answer in value] if isinstance(value, (list, tuple)) else []
        if not any(answer.strip() for answer in answers):
            raise Unscorable(f'"answers" is {value!r}; expected a list of texts')
        return answers

    def ground_truth(self, prompt: Prompt) -> str:
        people = [answer for answer in self._people(prompt) if answer.strip()]
        most = Counter(vqa_key(answer, self.textvqa) for answer in people).most_common(1)[0][0]
        return tagged(next(a for a in people if vqa_key(a, self.textvqa) == most))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        return {"all answers": tagged(" or ".join([*dict.fromkeys(self._people(prompt)), "no"]))}


@REWARDS.register("video_qa")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="VideoChat-R1 (arXiv:2504.06958), Temporal-R1 (arXiv:2506.01908)",
)
class VideoQa(Verifiable):
    """Check the answer about a video and, if its prompt has ``spans``, when it is to be seen.

    reward = (1 - time) * answer + time * temporal IoU. The answer is judged as by ``choice`` if the
    prompt has ``choices``, else as by ``answer``; the span is given in ``<glue>[[start,
    end]]</glue>``.

    Args:
        time: weight of the span; prompts without ``spans`` are judged by the answer alone.
        gated: the span counts only if the answer is right.
    """

    def __init__(self, time: Share = 0.5, gated: bool = False):
        self.time = time
        self.gated = gated
        self.choice = Choice()
        self.answer = Answer()
        self.temporal = Temporal()

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        verdict = self._inner(prompt).judge(text, prompt)
        if prompt.get("spans") is None:
            return verdict
        when = (
            self.temporal.judge(text, prompt) if "<glue>" in text else Verdict(0.0, "unparseable")
        )
        true_spans(prompt)
        share = when.score * (verdict.score if self.gated else 1.0)
        return Verdict(
            (1 - self.time) * verdict.score + self.time * share, worst(verdict.status, when.status)
        )

    def _inner(self, prompt: Prompt) -> Verifiable:
        return self.choice if prompt.get("choices") else self.answer

    def ground_truth(self, prompt: Prompt) -> str:
        answer = self._inner(prompt).ground_truth(prompt)
        if prompt.get("spans") is None:
            return answer
        return f"{answer}<glue>{[list(span) for span in true_spans(prompt)]}</glue>"

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        return self._inner(prompt).wrong_answers(prompt)
