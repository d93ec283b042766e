"""The published rules, worked by hand."""

import pytest

from mmrl.apps.benchmarks import rules
from rewards.answers.reading.published import agreement


def test_relaxed_accuracy(subtests):
    for answer, right, good in [
        ("105", "100", True),  # 5 % off is still right
        ("105.1", "100", False),
        ("-95", "-100", True),
        ("12%", "0.12", True),  # a percentage is a share, as published
        ("12%", "12", False),
        ("0", "0", True),  # 0 is compared as a word
        ("0.0", "0", False),
        ("0.001", "0", False),
        ("Yes", "yes", True),
        ("yes.", "yes", False),
        ("2019", "2019", True),
        ("1,000", "1000", False),  # the published code reads no thousands
        ("", "5", False),
        ("nan", "5", False),
        # the rest as lmms-eval's relaxed_correctness says (main of September 2026)
        ("13.125", "12.5", True),
        ("13.13", "12.5", False),
        ("-5", "5", False),
        ("nan", "nan", False),
        ("inf", "5", False),
        ("1e3", "1000", True),
        ("1_000", "1000", True),
        ("\u0661\u0662", "12", True),
        (" France", "France", False),
        ("12.5 ", "12.5", True),
        ("12.5% ", "0.125", False),
        ("", "", True),
    ]:
        with subtests.test(answer=answer, right=right):
            assert rules.relaxed(answer, right) is good


# as lmms-eval's anls says (main of September 2026)
def test_anls_is_the_published_one(subtests):
    for answer, right, score in [
        ("Hello World", ["hello world"], 1.0),
        ("hallo", ["hello", "something else"], 0.8),
        ("abxx", ["abcd"], 0.5),
        ("axxx", ["abcd"], 0.0),
        ("  the   end ", ["The end"], 1.0),
        ("abx", ["abcd"], 0.5),
        ("", [""], 1.0),
        ("", ["abc"], 0.0),
        ("12", ["12.0"], 0.5),
        ("aaaaaaaaa b", ["aaaaaaaaa"], 9 / 11),
        ("stra\u00dfe", ["STRASSE"], 5 / 7),
        ("\uff41", ["a"], 0.0),
    ]:
        with subtests.test(answer=answer, right=right):
            assert rules.anls(answer, right) == pytest.approx(score)


# as in lmms-eval's textvqa_process_results: the number of annotators out of ten
def test_people_agree_as_published():
    for people, score in [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)]:
        answers = ["cat"] * people + ["dog"] * (10 - people)
        assert agreement("cat", answers) == pytest.approx(score)


def test_final_answers_counts_and_choices():
    for text, answer in (
        ("<think>5 or 6</think><answer>6.</answer>", "6"),
        ("so it is \\boxed{12} cm", "12"),
        ("<think>cut off while thinking 7", ""),
        ("3.5", "3.5"),
    ):
        assert rules.written(text) == answer
    for text, right, same in (("three", "3", True), ("30", "3", False), ("", "yes", False)):
        assert rules.same_answer(text, right) is same
    assert all(rules.choice(text, "B") for text in ("B", "(B)", "b.", "B. 30", "B) 30"))
    assert not any(rules.choice(text, "B") for text in ("Because", "A", "", "30"))


def test_questions_count_only_with_those_they_depend_on():
    """1: is there a cat; 2: is it black (needs 1); 3: is it asleep (needs 2); 0 is no question."""
    for said, counts in (((1, 1, 1), [1, 1, 1]), ((0, 1, 1), [0, 0, 0]), ((1, 0, 1), [1, 0, 0])):
        answers = {number: bool(yes) for number, yes in enumerate(said, 1)}
        scores = rules.with_dependencies(answers, {1: [0], 2: [1], 3: [2]})
        assert list(scores.values()) == counts
