"""check-reward finds careless readers, by faulty answers made of a row's own ground truth."""

from __future__ import annotations

import re

from mmrl.apps.check_reward import Subject, sums, texts
from mmrl.apps.check_reward.faults import contradiction, faults
from rewards.answers.words import Answer, Choice
from rewards.answers.writing import Transcription

NUMBERS = [{"text": "how many?", "answer": str(n)} for n in (-7, 3, 12, 450)]
LENGTHS = [{"text": "how long?", "answer": f"{n} cm"} for n in (2, 5, 9)]
CHOICES = [{"text": str(i), "choices": ["a cat", "a dog", "a fox"], "answer": a} for i, a in
           enumerate("ABC")]  # fmt: skip
WORDS = [{"text": "?", "answer": word} for word in ("red", "blue", "green")]


def reading(change):
    """A user's reward that compares what ``change`` leaves of answer and ground truth."""

    def reward(answers, prompts):
        inside = [re.sub(r"^.*<answer>|</answer>.*$", "", a, flags=re.S) for a in answers]
        same = [change(a) == change(str(p["answer"])) for a, p in zip(inside, prompts)]
        return [float(each) for each in same]

    return reward


def broken(reward, rows):
    return {line.probe for line in texts.audit(Subject("mine", reward, rows)) if line.offences}


CARELESS = {
    "sign flipped": (lambda text: text.lstrip("-"), NUMBERS),
    "decimal point shifted": (lambda text: text.rstrip("0"), NUMBERS),
    "neighbouring number": (lambda text: int(text) // 2 if text.lstrip("-").isdigit() else text,
                            [{"text": "?", "answer": "2"}, {"text": "?", "answer": "9"}]),
    "another unit": (lambda text: re.sub(r"[^\d-]", "", text), LENGTHS),
    "answer negated": (lambda text: text.removeprefix("not "), WORDS),
    "right letter, another option's text": (lambda text: text[:1], CHOICES),
    "thought cut off": (lambda text: text.replace("<think>It may be ", "").removesuffix(", or"),
                        WORDS),
}  # fmt: skip


def test_a_careless_reader_is_found_by_its_fault(subtests):
    for fault, (change, rows) in CARELESS.items():
        with subtests.test(fault=fault):
            assert fault in broken(reading(change), rows)


def test_careful_readers_pass(subtests):
    for reward, rows in [
        (Answer(), NUMBERS),
        (Answer(), LENGTHS),
        (Answer(), WORDS),
        (Choice(), CHOICES),
        (Transcription(), WORDS),
    ]:
        with subtests.test(reward=reward, rows=rows):
            assert broken(reward, rows) == set()


def test_faults_differ_from_the_ground_truth_and_say_what_they_are():
    assert faults({"answer": "-3"}, "<answer>-3</answer>") == {
        "answer negated": "<answer>not -3</answer>",
        "sign flipped": "<answer>3</answer>",
        "decimal point shifted": "<answer>-30</answer>",
        "neighbouring number": "<answer>-2</answer>",
        "thought cut off": "<think>It may be <answer>-3</answer>, or",
    }
    assert faults(LENGTHS[1], "5 cm")["another unit"] == "5 m"
    assert faults({"answer": "a\nb"}, "a\nb") == {}
    assert contradiction(CHOICES[1], "<answer>B</answer>") == "<answer>B. a cat</answer>"
    assert contradiction({"choices": ["B", "A"]}, "<answer>B</answer>") is None


def test_a_weighted_sum_that_pays_form_above_truth_is_found():
    from rewards.answers.shaping import Format

    rewards = {"answer": Answer(), "format": Format()}
    weights = {"answer": 0.1, "format": 5.0}
    assert sums.applies(rewards, weights)
    (line,) = sums.audit(rewards, weights, WORDS)
    assert len(line.offences) == len(WORDS)
    (line,) = sums.audit(rewards, {"answer": 1.0, "format": 0.2}, WORDS)
    assert line.scores and not line.offences
    assert not sums.applies(rewards, {"answer": 1.0, "format": 0.0})
