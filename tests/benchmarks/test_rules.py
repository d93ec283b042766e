"""The published rules, worked by hand."""

import pytest

from mmrl.apps.benchmarks import rules
from rewards.answers.reading.published import agreement


def test_relaxed_accuracy(subtests):
    for answer, right, good in [
        ("105", "100", True),  # 5 % off is still right
        ("105.1", "100", False),
        ("95", "100", True),
        ("94.9", "100", False),
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
        ("11.875", "12.5", True),
        ("12%", "12%", True),
        ("-5", "5", False),
        ("-5.2", "-5", True),
        ("0", "0.0", False),
        ("nan", "nan", False),
        ("inf", "5", False),
        ("1e3", "1000", True),
        ("1_000", "1000", True),
        ("\u0661\u0662", "12", True),
        ("5%%", "0.05", True),
        ("% 5", "5", False),
        (" France", "France", False),
        ("12.5 ", "12.5", True),
        ("12.5% ", "0.125", False),
        ("", "", True),
    ]:
        with subtests.test(answer=answer, right=right):
            assert rules.relaxed(answer, right) is good


def test_anls_takes_the_nearest_answer_and_a_threshold():
    assert rules.anls("Hello World", ["hello world"]) == 1.0
    # one letter of five: 1 - 1/5
    assert rules.anls("hallo", ["hello", "something else"]) == pytest.approx(0.8)
    # two of four is a similarity of exactly 0.5, which the published code keeps
    assert rules.anls("abxx", ["abcd"]) == 0.5
    assert rules.anls("axxx", ["abcd"]) == 0.0
    assert rules.anls("abcx", ["abcd"]) == pytest.approx(0.75)
    assert rules.anls("  the   end ", ["The end"]) == 1.0
    assert rules.anls("", ["abc"]) == 0.0


# as lmms-eval's anls says (main of September 2026)
def test_anls_is_the_published_one(subtests):
    for answer, right, score in [
        ("abx", "abcd", 0.5),
        ("", "", 1.0),
        ("12", "12.0", 0.5),
        ("aaaaaaaaa b", "aaaaaaaaa", 9 / 11),
        ("stra\u00dfe", "STRASSE", 5 / 7),
        ("\uff41", "a", 0.0),
    ]:
        with subtests.test(answer=answer, right=right):
            assert rules.anls(answer, [right]) == pytest.approx(score)


# as in lmms-eval's textvqa_process_results: the number of annotators out of ten
def test_people_agree_as_published(subtests):
    for people, score in [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)]:
        with subtests.test(people=people, score=score):
            assert agreement("cat", ["cat"] * people + ["dog"] * (10 - people)) == pytest.approx(
                score
            )


def test_the_final_answer_is_read():
    assert rules.written("<think>5 or 6</think><answer>6.</answer>") == "6"
    assert rules.written("so it is \\boxed{12} cm") == "12"
    assert rules.written("<think>cut off while thinking 7") == ""
    assert rules.written("3.5") == "3.5"


def test_counts_and_words():
    assert rules.same_answer("three", "3") and rules.same_answer("3", "3")
    assert not rules.same_answer("30", "3") and not rules.same_answer("", "yes")
    assert rules.same_answer("Yes", "yes") and not rules.same_answer("no", "yes")


def test_letters_of_a_choice():
    for text in ("B", "(B)", "b.", "B. 30", "B) 30"):
        assert rules.choice(text, "B")
    for text in ("Because", "A", "", "30"):
        assert not rules.choice(text, "B")


def test_questions_count_only_with_those_they_depend_on():
    """1: is there a cat; 2: is it black (needs 1); 3: is it asleep (needs 2); 0 is no question."""
    parents = {1: [0], 2: [1], 3: [2]}
    yes = {1: True, 2: True, 3: True}
    assert sum(rules.with_dependencies(yes, parents).values()) == 3
    assert rules.with_dependencies({**yes, 1: False}, parents) == {1: 0.0, 2: 0.0, 3: 0.0}
    assert rules.with_dependencies({**yes, 2: False}, parents) == {1: 1.0, 2: 0.0, 3: 0.0}
