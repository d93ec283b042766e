"""BLEU against values worked out by hand, and the layers of structured answers."""

from __future__ import annotations

import json
import math

import pytest

from mmrl.core.errors import UserError
from rewards import Bleu, Structured
from rewards.answers.reference import bleu, words_13a


def naive_bleu(text, references, order, smooth):
    """The definition, n-gram by n-gram, over lists of words."""
    words = text.split()
    right = [reference.split() for reference in references]
    logs = []
    for n in range(1, order + 1):
        grams = [words[i : i + n] for i in range(len(words) - n + 1)]
        matches = 0
        for gram in {tuple(g) for g in grams}:
            most = max(
                sum(r[i : i + n] == list(gram) for i in range(len(r) - n + 1)) for r in right
            )
            matches += min(most, sum(g == list(gram) for g in grams))
        if matches + smooth == 0:
            return 0.0
        logs.append(math.log((matches + smooth) / (len(grams) + smooth)))
    ratio = len(words) / min(len(r) for r in right)
    penalty = 1.0 if ratio > 1 else math.exp(1 - 1 / ratio)
    return penalty * math.exp(sum(logs) / order)


def test_bleu_is_its_definition(subtests):
    for smooth in [False, True]:
        for order in [1, 2, 4]:
            for text, references in [
                ("the cat sat on the mat", ["the cat is on the mat", "there is a cat on the mat"]),
                (
                    "the the the the the the the",
                    ["the cat is on the mat", "there is a cat on the mat"],
                ),
                ("a b c d e f", ["a b c d x y z"]),
                ("red", ["a red car", "blue"]),
                ("nothing is shared here", ["completely different words"]),
                ("one two three four five", ["one two three four five"]),
            ]:
                with subtests.test(smooth=smooth, order=order, text=text, references=references):
                    expected = naive_bleu(text, references, order, smooth)
                    assert bleu(text, references, order, smooth) == pytest.approx(
                        expected, abs=1e-9
                    )


def test_bleu_by_hand():
    references = ["the cat is on the mat", "there is a cat on the mat"]
    # Papineni et al. 2002, example 2: "the" counts twice of seven
    assert bleu("the the the the the the the", references, 1, False) == pytest.approx(2 / 7)
    # 5 of 6 words, 3 of 5 pairs, 1 of 4 triples, 0 of 3 fours
    assert bleu("the cat sat on the mat", references[:1], 4, False) == 0.0
    hand = (6 / 7 * 4 / 6 * 2 / 5 * 1 / 4) ** 0.25
    assert bleu("the cat sat on the mat", references[:1]) == pytest.approx(hand, abs=1e-9)
    # two words of four: exp(1 - 4 / 2)
    assert bleu("a b", ["a b c d"], 2, False) == pytest.approx(math.exp(-1), abs=1e-9)
    assert bleu("", ["a"]) == bleu(" \n", ["a"]) == 0.0


def test_words_are_those_of_mteval_13a(subtests):
    for text, words in [
        ("The cat sat on the mat.", "The cat sat on the mat ."),
        ('A dog, 3.5 years old - said "hi".', 'A dog , 3.5 years old - said " hi " .'),
        ("It costs $1,000.50 &amp; more", "It costs $ 1,000.50 & more"),
        ("x-y 3-4 (a/b)", "x-y 3 - 4 ( a / b )"),
        ("well-\nknown it's, 5,000. end", "wellknown it's , 5,000 . end"),
        ("a.b,c 1.e", "a . b , c 1 . e"),
        ("don't [x] {y} a_b ~z ^ | \\ `q`", "don't [ x ] { y } a _ b ~ z ^ | \\ ` q `"),
    ]:
        with subtests.test(text=text, words=words):
            assert words_13a(text) == words.split()  # as sacrebleu 2.6.0 splits them


def test_the_answer_is_compared_with_all_references():
    prompt = {"text": "q", "answer": ["two dogs play in a park", "a b c d"]}
    values = Bleu()(
        ["<think>so</think>a b c d", "<answer>two dogs play in a park</answer>"], [prompt] * 2
    )
    assert values.tolist() == pytest.approx([1.0, 1.0])
    assert Bleu()(["x"], [{"text": "q", "answer": []}]).isnan().all()


# Structure

RIGHT = {"name": "Red bus", "count": 2, "box": [1, 2.5], "new": True}


def score(value, **options):
    text = value if isinstance(value, str) else json.dumps(value)
    return float(Structured(**options)([text], [{"answer": RIGHT}]))


def test_every_layer_counts_by_itself():
    """Five leaves: name, count, box 0, box 1, new."""
    only = {name: {name: 1.0} for name in ("validity", "format", "integrity", "content")}
    half = RIGHT | {"count": "two", "name": "red  BUS.", "colour": "red"}
    expected = {"validity": 1.0, "format": 1.0, "integrity": 4 / 7, "content": 4 / 5}
    for name, value in expected.items():
        assert score(half, weights=only[name]) == pytest.approx(value, abs=1e-6), name
    assert score(half) == pytest.approx((1 + 1 + 4 / 7 + 4 / 5) / 4, abs=1e-6)
    weights = {"validity": 1.0, "content": 3.0}
    assert score(half, weights=weights) == pytest.approx((1 + 3 * 4 / 5) / 4, abs=1e-6)
    noisy = f"So: {json.dumps(RIGHT)}"
    assert score(noisy, weights=only["format"]) == 0.0 and score(noisy) == 0.75
    assert score(f"```json\n{json.dumps(RIGHT)}\n```") == 1.0
    assert score("So: there") == score(json.dumps(RIGHT)[:-1]) == score("7") == 0.0


def test_layers_in_order_stop_at_the_first_that_is_not_full():
    half = RIGHT | {"count": "two"}
    noisy = f"So: {json.dumps(RIGHT)}"
    assert score(noisy, ordered=True) == pytest.approx(1 / 4)
    assert score(half, ordered=True) == pytest.approx((1 + 1 + 4 / 6) / 4, abs=1e-6)
    assert score(RIGHT | {"count": 3}, ordered=True) == pytest.approx((3 + 4 / 5) / 4, abs=1e-6)
    assert score(RIGHT, ordered=True) == 1.0


def test_values_are_compared_by_kind():
    only = {"content": 1.0}
    for change, share in (
        ({"count": 2.0}, 1.0),
        ({"count": 2.1}, 0.8),
        ({"count": True}, 0.8),
        ({"new": 1}, 0.8),
        ({"new": None}, 0.8),
        ({"box": [1]}, 0.8),
        ({"name": 3}, 0.8),
        ({"count": math.nan}, 0.8),
    ):
        assert score(RIGHT | change, weights=only) == pytest.approx(share, abs=1e-6), change
    assert score(RIGHT | {"count": 2.1}, weights=only, tolerance=0.06) == 1.0


def test_layers_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="no layer 'form'"):
        Structured(weights={"form": 1.0})
    with pytest.raises(UserError, match="one of them above 0"):
        Structured(weights={"format": 0.0})
    assert Structured()(["{}"], [{"answer": "no json"}]).isnan().all()
