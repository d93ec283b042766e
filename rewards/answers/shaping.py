"""Rewards the form and length of an answer, not its correctness."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.thoughts import MARK, one_thought
from mmrl.core.types import Completion, Prompt, Reward
from rewards.answers.reading import boxed, final, strict_json
from rewards.answers.reading.parts import ANSWER, only_answer
from rewards.answers.verifiable import Verdict, Verifiable
from rewards.card import card, method_of

Whole = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]
EXAMPLES = {
    "think_answer": "<think>so it is</think> <answer>{}</answer>",
    "answer": "<answer>{}</answer>",
    "think": "<think>so it is</think> {}",
    "boxed": r"so it is \boxed{{{}}}",
}


def thought_and_answer(text: str) -> str | None:
    """Return the thought of a text that is one thought followed by one ``<answer>``, each closed,
    and nothing else; None for any other text."""
    parts = one_thought(text)
    good = parts is not None and only_answer(parts[1]) and not ANSWER.search(parts[0])
    return parts[0] if parts is not None and good else None


def thought_and_words(text: str) -> bool:
    parts = one_thought(text)
    return parts is not None and bool(parts[1].strip()) and not ANSWER.search(text)


FORMS: dict[str, Callable[[str], bool]] = {
    "think_answer": lambda text: thought_and_answer(text) is not None,
    "answer": lambda text: only_answer(text) and not MARK.search(text),
    "think": thought_and_words,
    "boxed": lambda text: bool(boxed(text)),
}


def length(text: str) -> int:
    """Count tokens, if the text has them (``Completion``), else words."""
    tokens = Completion.of(text).tokens
    return len(text.split()) if tokens is None else tokens


class Shaping(Verifiable):
    """Provides the base of rewards whose best answer does not depend on the prompt."""

    shaping = True

    def ground_truth(self, prompt: Prompt) -> str:
        return EXAMPLES["think_answer"].format(prompt.get("answer", "7"))


@REWARDS.register("format")
@card(media="text", low=0, high=1, source="DeepSeek-R1 (arXiv:2501.12948), format reward")
class Format(Shaping):
    """Check the format of the whole text: every tag once, in order, nothing before or after.

    A thought may have the tags of any model family: ``<think>``, ``[THINK]``, Kimi's ... (see
    docs/verifiable-rewards.md).

    Args:
        form: "think_answer": ``<think>...</think><answer>...</answer>``; "answer"; "think";
            "boxed": somewhere.
        pattern: a regular expression instead, for the whole text (re.DOTALL). Avoid backtracking:
            its time on a model's text is not limited.
        json: the answer must be valid JSON, such as boxes, without repair.
    """

    def __init__(
        self,
        form: Literal["think_answer", "answer", "think", "boxed"] = "think_answer",
        pattern: str | None = None,
        json: bool = False,
    ):
        try:
            self.matches = FORMS[form] if pattern is None else re.compile(pattern, re.S).fullmatch
        except re.error as error:
            raise UserError(
                f"reward 'format': the pattern {pattern!r} is not a regular expression: {error}"
            ) from error
        self.form = form
        self.json = json
        self.has_pattern = pattern is not None

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        good = bool(self.matches(str(text)))
        if good and self.json:
            good = strict_json(final(text).value).status == "ok"
        return Verdict(float(good), "ok" if good else "unparseable")

    def ground_truth(self, prompt: Prompt) -> str:
        return EXAMPLES[self.form].format("[1]" if self.json else prompt.get("answer", "7"))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = self.ground_truth(prompt)
        if self.has_pattern or self.form == "boxed":
            return {}
        return (
            {"twice": f"{right}\n{right}", "not closed": right[: right.rfind("<")], "no tags": "7"}
            if "<answer>" in right
            else {}
        )


@REWARDS.register("think_or_not")
@card(media="text", low=0, high=1, source="TON (arXiv:2505.16854), think or not")
class ThinkOrNot(Shaping):
    """Reward the choice to think or not: 1 for an answer without a thought, ``thought`` for one
    with it.

    Texts have the form ``<think>...</think><answer>...</answer>``. TON lets the policy leave the
    thought empty; this rewards it. It does not judge the answer: gate it by a reward that does, or
    give it a small weight.

    Args:
        thought: reward of a text with a thought; 1 accepts both alike, as in TON's format reward.
    """

    def __init__(self, thought: Share = 0.5):
        self.thought = thought

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        thought = thought_and_answer(str(text))
        if thought is None:
            return Verdict(0.0, "unparseable")
        return Verdict(self.thought if thought.strip() else 1.0)

    def ground_truth(self, prompt: Prompt) -> str:
        return f"<think>\n\n</think>\n<answer>{prompt.get('answer', '7')}</answer>"

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        return {"thought without an answer": "<think>well</think>"}


@REWARDS.register("length")
@card(media="text", low=0, high=1)
class Length(Shaping):
    """Reward lengths: 1 from ``low`` to ``high`` tokens (else words), falling linearly to 0
    outside.

    Args:
        low, high: the range that earns 1.
        fade: tokens below ``low`` or above ``high`` at which the reward is 0.
    """

    def __init__(self, low: Annotated[int, Ge(0)] = 1, high: Whole = 256, fade: Whole = 64):
        if low > high:
            raise UserError(f"reward 'length': low is {low}, more than high, {high}")
        self.low = low
        self.high = high
        self.fade = fade

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        count = length(text)
        beyond = max(self.low - count, count - self.high, 0)
        return Verdict(max(0.0, 1 - beyond / self.fade) if count else float(self.low == 0))

    def ground_truth(self, prompt: Prompt) -> str:
        return " ".join(["word"] * self.low)


@REWARDS.register("overlong")
@card(media="text", low=-1, high=0, source="DAPO (arXiv:2503.14476), equation 13")
class Overlong(Shaping):
    """Penalise length as DAPO does: 0 up to ``limit - buffer`` tokens, down to -1 at ``limit`` and
    beyond.

    Args:
        limit: the longest completion, ``max_tokens`` of the policy.
        buffer: tokens before the limit over which it falls; DAPO has 4096 of 20480.
    """

    def __init__(self, limit: Whole, buffer: Whole):
        if buffer > limit:
            raise UserError(f"reward 'overlong': buffer is {buffer}, more than limit, {limit}")
        self.limit = limit
        self.buffer = buffer

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        over = length(text) - (self.limit - self.buffer)
        return Verdict(-min(max(over / self.buffer, 0.0), 1.0))

    def ground_truth(self, prompt: Prompt) -> str:
        return "7"

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        return {"at the limit": "word " * self.limit}


@REWARDS.register("repetition")
@card(
    media="text",
    low=-1,
    high=0,
    source="Demystifying long CoT (arXiv:2502.03373), repetition penalty",
)
class Repetition(Shaping):
    """Negate the share of repeated n-grams of words: -(1 - different / all), 0 for shorter texts.

    Entries of a JSON list in the answer count as 1-grams, as in VLM-R1: a repeated box is a
    repetition.

    Args:
        n: words of an n-gram.
    """

    def __init__(self, n: Whole = 6):
        self.n = n

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        words = str(text).casefold().split()
        grams = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        answer = strict_json(final(text).value)
        listed = (
            [json.dumps(entry, sort_keys=True) for entry in answer.value]
            if isinstance(answer.value, list)
            else []
        )
        return Verdict(-max(_repeated(grams), _repeated(listed)))

    def ground_truth(self, prompt: Prompt) -> str:
        return "<answer>7</answer>"

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        return {
            "the same again and again": "it is seven " * (10 + self.n),
            "a box three times": "[[1,2,3,4],[1,2,3,4],[1,2,3,4]]",
        }


def _repeated(grams: Sequence[object]) -> float:
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@REWARDS.register("cosine_length")
@card(
    media="text", low=-1, high=1, source="Demystifying long CoT (arXiv:2502.03373), cosine reward"
)
class CosineLength(Verifiable):
    """Shape a reward by a cosine of the length: right and short is best, wrong and short is worst.

    right: from ``best_right`` down to ``least_right``; wrong: from ``worst_wrong`` up to
    ``best_wrong``. Beyond the limit the value stays constant (the published code turns round there,
    and one version takes every answer as right).

    Args:
        reward: the reward of correctness, and its options; at least ``threshold`` is right.
        limit: tokens (words, if a text has no tokens).
    """

    def __init__(
        self,
        reward: Annotated[Reward, REWARDS] | None = None,
        limit: Annotated[int, Gt(0)] = 1024,
        threshold: Share = 1.0,
        best_right: float = 1.0,
        least_right: float = 0.5,
        worst_wrong: float = -1.0,
        best_wrong: float = -0.5,
    ):
        from rewards.answers.words import Answer

        if not -1 <= worst_wrong <= best_wrong <= least_right <= best_right <= 1:
            raise UserError(
                "reward 'cosine_length': -1 <= worst_wrong <= best_wrong <= "
                "least_right <= best_right <= 1"
            )
        self.inner: Any = reward or Answer()  # or a user's reward with its methods
        if not method_of(self.inner, "judge"):
            raise UserError(
                "reward 'cosine_length': its reward must be one of the verifiable "
                "ones, such as answer"
            )
        self.limit = limit
        self.threshold = threshold
        self.right = (best_right, least_right)
        self.wrong = (worst_wrong, best_wrong)

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        score, status, note = self.inner.judge(text, prompt)
        start, end = self.right if score >= self.threshold - 1e-6 else self.wrong
        progress = min(length(text) / self.limit, 1.0)
        return Verdict(end + (start - end) * (1 + math.cos(math.pi * progress)) / 2, status, note)

    def ground_truth(self, prompt: Prompt) -> str:
        answer: str = self.inner.ground_truth(prompt)
        return answer

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        wrong: dict[str, str] = self.inner.wrong_answers(prompt)
        return wrong | {"right but long": "well " * self.limit + self.ground_truth(prompt)}
