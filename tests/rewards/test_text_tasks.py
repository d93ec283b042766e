"""Rewards of texts against oracles: tables, formulas, charts, form, length, steps, mixtures,
drawings, BLEU, structured answers, mazes."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmrl import config
from mmrl.core.errors import UserError
from mmrl.core.thoughts import THOUGHTS
from mmrl.core.types import Completion
from mmrl.worlds.mazes import Mazes
from rewards import (
    Bleu,
    Chart,
    CosineLength,
    Count,
    Format,
    KeySteps,
    Length,
    Maths,
    MazeWalk,
    Overlong,
    Repetition,
    Routed,
    Structured,
    Svg,
    Table,
    TextSimilarity,
    ThinkOrNot,
    Transcription,
    VideoQa,
    Vqa,
)
from rewards.answers.maze import MOVES, moves_of, read_maze, written
from rewards.answers.reference import bleu, words_13a
from rewards.answers.svg import find_svg, render, ssim
from rewards.answers.tables import Node, read_table, teds
from rewards.answers.writing import bidirectional
from rewards.judges.listener import reasoning
from rewards.judges.question import Unreadable, answer_of, conclusion_of
from tests.fixtures.tiny_text_encoder import save_text_encoder


def one(reward, text, prompt) -> float:
    return reward([text], [prompt]).item()


def levenshtein(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


# Tables

CELL = st.builds(
    Node, st.just("td"), st.tuples(st.integers(1, 2), st.just(1)), st.text("ab", max_size=3)
)
ROW = st.lists(CELL, max_size=3).map(lambda cells: Node("tr", children=cells))
TREE = st.lists(ROW, min_size=1, max_size=3).map(lambda rows: Node("table", children=rows))


def frozen(node: Node) -> tuple:
    return (node.tag, node.spans, node.text, tuple(frozen(child) for child in node.children))


@cache
def forest(a: tuple, b: tuple) -> float:
    """Edit distance of two ordered forests by the recursion that defines it."""
    if not a or not b:
        return sum(map(nodes, a or b))
    (tag, spans, text, below), (tag2, spans2, text2, below2) = a[-1], b[-1]
    rename = levenshtein(text, text2) / max(len(text), len(text2), 1) if tag == "td" else 0.0
    if tag != tag2 or spans != spans2:
        rename = 1.0
    return min(
        forest(a[:-1] + below, b) + 1,
        forest(a, b[:-1] + below2) + 1,
        forest(below, below2) + forest(a[:-1], b[:-1]) + rename,
    )


def nodes(tree: tuple) -> int:
    return 1 + sum(map(nodes, tree[3]))


@settings(max_examples=60, deadline=None)
@given(a=TREE, b=TREE)
def test_teds_equals_the_definition(a, b):
    distance = forest((frozen(a),), (frozen(b),))
    assert teds(a, b) == pytest.approx(max(0, 1 - distance / max(a.size(), b.size())))
    assert teds(a, a) == 1 and teds(a, b, structure=True) >= teds(a, b) - 1e-9


def test_tables_are_read_from_html_and_markdown():
    html = "<table><thead><tr><th>a</th><th>b|c</th></tr></thead><tbody>"
    html += "<tr><td>1</td><td> 2 <b>x</b></td></tr></tbody></table>"
    markdown = "| a | b\\|c |\n|:--|--:|\n| 1 | 2 x |"
    prompt = {"answer": html}
    assert frozen(read_table(html)[0]) == frozen(read_table(markdown)[0])
    assert one(Table(), markdown, prompt) == 1
    cut = html[: html.rfind("</tbody>")]
    assert Table().verdicts([cut], [prompt])[0][:2] == (1.0, "repaired")
    other = html.replace("<td>1</td>", "<td>9</td>")
    assert one(Table(), other, prompt) == pytest.approx(1 - 1 / 7)
    assert one(Table(True), other, prompt) == 1
    assert math.isnan(one(Table(), html, {"answer": "no table"}))
    assert one(Table(), "no table", prompt) == 0
    assert one(Table(), "<table>" + "<tr><td>1</td></tr>" * 3000, prompt) == 0


# Texts


@settings(max_examples=60, deadline=None)
@given(a=st.text("abc d", min_size=1, max_size=12), b=st.text("abc d", min_size=1, max_size=12))
def test_ocr_equals_the_edit_distance(a, b):
    left = " ".join(a.split())
    right = " ".join(b.split())
    if left and right:
        wanted = 1 - levenshtein(left, right) / max(len(left), len(right))
        assert one(Transcription(), f"<answer>{a}</answer>", {"answer": b}) == pytest.approx(
            wanted, abs=1e-6
        )


def test_bidirectional_similarity_by_loops():
    rng = np.random.default_rng(0)
    a, b = (
        x / np.linalg.norm(x, axis=1, keepdims=True)
        for x in (rng.normal(size=(4, 6)), rng.normal(size=(7, 6)))
    )
    forth = sum(max(float(x @ y) for y in b) for x in a) / 4
    back = sum(max(float(x @ y) for x in a) for y in b) / 7
    assert bidirectional(a, b) == pytest.approx((forth + back) / 2) == bidirectional(b, a)
    assert bidirectional(a, a) == pytest.approx(1)


def test_text_similarity_with_a_transformers_encoder(tmp_path):
    prompt = {"answer": "a cat is it"}
    reward = TextSimilarity(save_text_encoder(tmp_path))
    assert one(reward, "a cat is it", prompt) == pytest.approx(1, abs=1e-5)
    assert one(reward, "two dogs", prompt) < 0.99
    assert one(TextSimilarity(), "a cat is it", prompt) == 1
    assert 0.5 < one(TextSimilarity(), "a cat is it and two dogs", prompt) < 1


# Formulas and charts


def test_maths_says_what_math_verify_says(subtests):
    from math_verify import parse, verify

    for right, found in [
        ("\\frac{1}{2}", "0.5"),
        ("x^2+2x+1", "(x+1)^2"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("x+1", "x-1"),
        ("\\frac{1}{3}", "0.33"),
    ]:
        with subtests.test(right=right, found=found):
            theirs = verify(parse(f"${right}$"), parse(f"${found}$"))
            text = f"<think>$7$</think><answer>\\boxed{{{found}}}</answer>"
            assert one(Maths(), text, {"answer": right}) == float(theirs)
    with ThreadPoolExecutor(1) as pool:  # math_verify's own time-outs want the main thread
        assert pool.submit(one, Maths(), "0.5", {"answer": "\\frac{1}{2}"}).result() == 1


# Form and length


def said(tokens: int, text: str = "7") -> Completion:
    return Completion(text, tokens, True, -0.1)


EUR = {"answer": "Total 12 EUR"}
LISTED = {"answer": [10, 20]}
B = {"answer": "B", "choices": ["x", "y"], "spans": [[2, 6]]}
BY_HAND = [
    (Transcription("word"), "Total 13 EUR", EUR, 2 / 3),
    (Transcription(case=False), "TOTAL 12 eur", EUR, 1),
    (Transcription(), "TOTAL 12 eur", EUR, 5 / 12),
    (Transcription(least=0.5), "Total zzzzzzzzzzz", EUR, 0),
    (Chart(partial=True), "20, 10", LISTED, 0),
    (Chart(partial=True), "10", LISTED, 0.5),
    (Chart(partial=True), "10, 20, 30", LISTED, 2 / 3),
    (Format(pattern=r"\d+"), "12", {}, 1),
    (Format("answer", json=True), "<answer>[1, 2]</answer>", {}, 1),
    (Format("answer", json=True), "<answer>[1, 2</answer>", {}, 0),
    (Format("boxed"), r"so \boxed{7}", {}, 1),
    (Format("boxed"), r"\boxed{ }", {}, 0),
    (Format("boxed"), r"\boxed{ \boxed{7}", {}, 1),
    (ThinkOrNot(), "<think>\n</think><answer>7</answer>", {}, 1),
    (ThinkOrNot(), "<think>a</think><answer>7</answer>", {}, 0.5),
    (ThinkOrNot(), "x <think>a</think><answer>7</answer>", {}, 0),
    (Overlong(64, 16), said(49), {}, -1 / 16),
    (Overlong(64, 16), said(90), {}, -1),
    (Overlong(4, 2), "one two three", {}, -0.5),
    (Length(10, 20, 10), said(5), {}, 0.5),
    (Length(10, 20, 10), said(20), {}, 1),
    (Length(10, 20, 10), said(40), {}, 0),
    (Repetition(2), "a b a b a b", {}, -(1 - 2 / 5)),
    (Repetition(), "[[1,2,3,4],[1,2,3,4],[5,6,7,8]]", {}, -1 / 3),
    (VideoQa(), "<answer>B</answer><glue>[[4, 6]]</glue>", B, 0.75),
    (VideoQa(gated=True), "<answer>A</answer><glue>[[4, 6]]</glue>", B, 0),
    (VideoQa(), "<answer>B</answer>", B, 0.5),
    (VideoQa(), "B", B | {"spans": None}, 1),
    (Maths(), "9^{9^{9^9}}", {"answer": "1"}, 0),
    (Maths(), "9" * 401, {"answer": "1"}, 0),
    (Maths(), "1", {"answer": "  "}, math.nan),
]


def test_options_by_hand(subtests):
    for reward, text, prompt, value in BY_HAND:
        with subtests.test(reward=reward, text=text):
            assert one(reward, text, prompt) == pytest.approx(value, nan_ok=True)
    for make, says in (
        (lambda: Format(pattern="("), "not a regular expression"),
        (lambda: Overlong(8, 9), "buffer is 9"),
        (lambda: KeySteps(form="step_grpo", each=True), "leave out each"),
    ):
        with pytest.raises(UserError, match=says):
            make()


TAGS = re.compile(r"(</?(?:think|answer)>)")
FORMS = {
    "think_answer": ["<think>", "x", "</think>", "", "<answer>", "y", "</answer>", ""],
    "answer": ["<answer>", "y", "</answer>", ""],
    "think": ["<think>", "x", "</think>", "y"],
}


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.sampled_from([*FORMS["think_answer"], "a", " ", "\n", "<", "</"]), max_size=11),
)
def test_format_is_strict(form, pieces):
    """Tags in their order; "" is blank, "x" anything without a tag, "y" the same and not blank."""
    parts = TAGS.split(text := "".join(pieces))
    expected = ["", *FORMS[form]]
    right = len(parts) == len(expected) and all(
        part == piece
        if piece.startswith("<")
        else piece == "x" or bool(part.strip()) == (piece == "y")
        for part, piece in zip(parts, expected, strict=True)
    )
    assert one(Format(form), text, {}) == right
    whole = "".join(FORMS[form])
    assert one(Format(form), whole, {}) == 1 and one(Format(form), whole + "<answer>", {}) == 0


def test_the_cosine_falls_for_right_and_rises_for_wrong_answers_and_stays_beyond_the_limit():
    expected = [1, 0.5 + 0.25 * (1 + math.cos(math.pi / 4)), 0.75, 0.5, 0.5]
    mixture = CosineLength(Routed({"count": Count()}), limit=100)
    for reward in (CosineLength(limit=100), mixture):
        for text, sign in (("7", 1), ("8", -1)):
            prompts = [{"answer": 7, "task": "count"}] * 5
            texts = [said(n, text) for n in (0, 25, 50, 100, 150)]
            assert reward(texts, prompts).tolist() == pytest.approx([sign * x for x in expected])
    assert math.isnan(one(mixture, "8", {"answer": 7, "task": "point"}))


def test_a_thought_of_any_family_is_one(subtests):
    for begin, end in THOUGHTS:
        with subtests.test(begin=begin, end=end):
            text = f"{begin}so{end}\n<answer>7</answer>"
            assert one(Format(), text, {}) == one(Format("think"), f"{begin}so{end}\n7", {}) == 1
            assert one(ThinkOrNot(), text, {}) == 0.5
            assert one(ThinkOrNot(), f"{begin} {end}<answer>7</answer>", {}) == 1
            assert answer_of(text) == conclusion_of(text) == "7" and reasoning(text) == "so"
            with pytest.raises(Unreadable, match="ends before its reasons do"):
                answer_of(f"{begin}<answer>7</answer>")


# Steps, questions, mixtures


def test_key_steps_are_found_as_whole_words_and_in_order(subtests):
    prompt = {"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"], "is 3"]}
    good = "<think>We add 2+1, altogether it is 3.</think><answer>3</answer>"
    backwards = "<think>it is 3, the sum of 2 + 1</think><answer>3</answer>"
    sections = {"sections": ["Picture", "Reasoning"]}
    for weight, options, text, value in [
        (0.5, {}, good, 1),
        (0.0, {}, "12 + 1 altogether", 1 / 3),
        (0.5, {}, backwards, 1),
        (0.5, {"ordered": True}, backwards, 0.5 + 0.5 / 3),
        (0.0, sections, "Picture: 2+1 Reasoning: the sum is 3", 1),
        (0.0, sections, "Reasoning: 2+1 Picture: the sum is 3", 0.75),
    ]:
        with subtests.test(text=text, options=options):
            assert one(KeySteps(weight, **options), text, prompt) == pytest.approx(value)


def test_key_steps_in_the_form_of_step_grpo():
    """R1-VL, section 3.2: 1 + 0.1 k if right, 0.1 k if wrong, 0 without an answer, and 1 more if
    all is in order."""
    prompt = {"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"]]}
    reward = KeySteps(form="step_grpo", sections=["Picture", "Reasoning"])
    plain = KeySteps(form="step_grpo", alpha=0.5)
    whole = "<think>Picture: 2 + 1. Reasoning: altogether three.</think><answer>{}</answer>"
    mixed_up = "<think>Reasoning: altogether three. Picture.</think><answer>3</answer>"
    assert reward.card.high == pytest.approx(2.1) and plain.card.high == 1.5
    for each, text, value in (
        (reward, whole.format(3), 2.1),
        (reward, whole.format(4), 1.1),
        (reward, whole.format(""), 0),
        (reward, mixed_up, 1.05),
        (plain, mixed_up, 1.25),
        (reward, reward.ground_truth(prompt), 2.1),
    ):
        assert one(each, text, prompt) == pytest.approx(value), text


def spelled(text: str, size: int, limit: int = 40) -> Completion:
    """An answer whose tokens are ``size`` letters each."""
    parts = [text[: i + size] for i in range(0, len(text), size)]
    return Completion(text, len(parts), True, -0.1, limit=limit, spell=lambda: parts)


def test_steps_are_paid_at_the_token_that_completes_them_and_in_all_as_before(subtests):
    prompts = [{"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"], "is 3"]}] * 4
    good = "<think>First we add 2 + 1. Then the sum is 3.</think><answer>3</answer>"
    texts = [good, "is 35, is 3.5, <answer>4</answer>", "", "Then is 3"]
    for options in ({}, {"ordered": True}, {"sections": ["First", "Then"]}, {"answer": 0.0}):
        each, whole = KeySteps(each=True, **options), KeySteps(**options)(texts, prompts)
        for size in (1, 3, 7):
            with subtests.test(size=size, options=options):
                answers = [spelled(text, size, 90) for text in texts]
                found = each(answers, prompts)
                assert each.card.of == "step" and found.shape == (4, 90)
                torch.testing.assert_close(found.nansum(1), whole)
                for row, answer in zip(found, answers, strict=True):
                    assert not answer.tokens or not row[answer.tokens - 1].isnan()
                    assert row[answer.tokens :].isnan().all() or not answer.tokens
                if size == 1:
                    first = 11 if "sections" in options else good.index("2 + 1") + 4
                    assert (found[0] > 0).nonzero()[0, 0] == first
        plain = each([good], prompts[:1])
        assert plain.shape == (1, 1) and plain.item() == pytest.approx(float(whole[0]))


def test_vqa_accuracy_equals_the_mean_over_nine_of_ten(subtests):
    for count in range(11):
        with subtests.test(count=count):
            people = ["yes"] * count + ["no"] * (10 - count)
            subsets = itertools.combinations(people, 9)
            wanted = np.mean([min(1, nine.count("yes") / 3) for nine in subsets])
            assert one(Vqa(), "Yes.", {"answers": people}) == pytest.approx(wanted)


def test_routes_are_checked_and_built_from_a_configuration():
    routes = {"find": {"detection": {"measure": "f1"}}, "count": "count", "solve": {"maths": {}}}
    spec = {"routes": routes, "default": {"answer": {"tolerance": 0.1}}}
    reward = config.build_rewards({"routed": spec})["routed"].reward
    prompts = [{"task": "count", "answer": 3}, {"task": "find", "boxes": [[1, 2, 3, 4]]}]
    prompts += [{"answer": 10}, {"task": "solve", "answer": "1/2"}]
    assert reward(["3", "[1,2,3,4]", "10.5", "0.5"], prompts).tolist() == [1, 1, 1, 1]
    statuses = ["wrong_count", "unparseable", "ok", "ok"]
    assert reward.status(["3 or 4", "?", "10", "x"], prompts) == statuses
    strict = config.build_rewards({"routed": {"routes": {"count": "count"}}})["routed"].reward
    assert math.isnan(one(strict, "3", {"task": "other", "answer": 3}))
    assert strict.card.needs == ("task",)
    with pytest.raises(UserError, match="did you mean 'count'"):
        config.build_rewards({"routed": {"routes": {"a": "cuont"}}})


# Drawings

RED = '<svg viewBox="0 0 10 10"><rect x="1" y="1" width="4" height="4" fill="red"/></svg>'


def test_drawings_are_rendered_and_compared():
    shown = render(find_svg(RED)[0], 100)
    assert shown.shape == (3, 100, 100)
    assert shown[:, 30, 30].tolist() == [1, 0, 0] and shown[:, 80, 80].tolist() == [1, 1, 1]
    half = RED.replace('height="4"', 'height="2"')
    assert one(Svg(size=100), half, {"svg": RED}) == pytest.approx(0.5, abs=0.02)
    for measure in ("explained", "mse", "standardised", "ssim"):
        scores = Svg(measure, size=64)([RED, half, "<svg></svg>"], [{"svg": RED}] * 3)
        assert scores[0].item() == pytest.approx(1, abs=1e-5), measure
        assert scores[0] > scores[1] > scores[2], measure


def test_drawings_that_reach_outside_are_refused(subtests):
    for text, status in [
        ('<svg><image href="a.png"/></svg>', "out_of_range"),
        ('<svg><use href="b.svg#x"/></svg>', "out_of_range"),
        ("<svg><script/></svg>", "out_of_range"),
        ('<svg><rect style="fill:url(http://a)"/></svg>', "out_of_range"),
        ('<svg><filter id="a"/></svg>', "out_of_range"),
        ("<svg><!ENTITY a></svg>", "out_of_range"),
        ("<!DOCTYPE x><svg></svg>", "ok"),
        ('<svg><rect width="1"/>', "repaired"),
        ("nothing", "unparseable"),
    ]:
        with subtests.test(text=text):
            assert find_svg(text)[1] == status and (
                status != "out_of_range" or not find_svg(text)[0]
            )


def test_an_image_is_a_target_and_another_reward_can_join():
    prompt = {"images": [Image.new("RGB", (32, 32), "red")]}
    sheet = '<svg viewBox="0 0 9 9"><rect width="9" height="9" fill="red"/></svg>'
    assert one(Svg(size=32), sheet, prompt) == 1
    joined = Svg(size=32, also=lambda media, prompts: media.mean((1, 2, 3)), weight=0.5)
    assert one(joined, sheet, prompt) == pytest.approx(0.5 + 0.5 / 3)
    assert math.isnan(one(Svg(), sheet, {"text": "no picture"}))


def test_ssim_by_loops():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 3, 14, 13, generator=generator)
    line = np.exp(-((np.arange(11) - 5) ** 2) / 4.5)
    window = np.outer(line, line) / line.sum() ** 2
    found = []
    for c, y, x in itertools.product(range(3), range(4), range(3)):
        p, q = (t[c, y : y + 11, x : x + 11].double().numpy() for t in (a, b))
        mp, mq = (window * p).sum(), (window * q).sum()
        vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
        both = (window * (p - mp) * (q - mq)).sum()
        luminance = (2 * mp * mq + 1e-4) / (mp**2 + mq**2 + 1e-4)
        found.append(luminance * (2 * both + 9e-4) / (vp + vq + 9e-4))
    assert ssim(a, b) == pytest.approx(max(0.0, float(np.mean(found))), abs=1e-6)


# BLEU and the layers of structured answers


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
    # Papineni et al. 2002, examples 2 and 1
    mats = ["the cat is on the mat", "there is a cat on the mat"]
    for text, references in [
        ("the cat sat on the mat", mats),
        ("the the the the the the the", mats),
        ("a b c d e f", ["a b c d x y z"]),
        ("red", ["a red car", "blue"]),
        ("nothing is shared here", ["completely different words"]),
        ("one two three four five", ["one two three four five"]),
        ("a b", ["a b c d"]),
    ]:
        for order, smooth in itertools.product([1, 2, 4], [False, True]):
            with subtests.test(smooth=smooth, order=order, text=text):
                expected = naive_bleu(text, references, order, smooth)
                value = bleu(text, references, order, smooth)
                assert value == pytest.approx(expected, abs=1e-9)
    assert bleu("the the the the the the the", mats, 1, False) == pytest.approx(2 / 7)
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


def test_every_layer_counts_by_itself(subtests):
    """Five leaves: name, count, box 0, box 1, new."""
    half = RIGHT | {"count": "two", "name": "red  BUS.", "colour": "red"}
    whole = json.dumps(RIGHT)
    for value, weights, expected in (
        (half, {"validity": 1.0}, 1),
        (half, {"format": 1.0}, 1),
        (half, {"integrity": 1.0}, 4 / 7),
        (half, {"content": 1.0}, 4 / 5),
        (half, {"validity": 1.0, "content": 3.0}, (1 + 3 * 4 / 5) / 4),
        (half, None, (1 + 1 + 4 / 7 + 4 / 5) / 4),
        (f"So: {whole}", {"format": 1.0}, 0),
        (f"So: {whole}", None, 0.75),
        (f"```json\n{whole}\n```", None, 1),
        ("So: there", None, 0),
        (whole[:-1], None, 0),
        ("7", None, 0),
        # values are compared by kind
        (RIGHT | {"count": 2.0}, {"content": 1.0}, 1),
        (RIGHT | {"count": 2.1}, {"content": 1.0}, 0.8),
        (RIGHT | {"count": True}, {"content": 1.0}, 0.8),
        (RIGHT | {"new": 1}, {"content": 1.0}, 0.8),
        (RIGHT | {"new": None}, {"content": 1.0}, 0.8),
        (RIGHT | {"box": [1]}, {"content": 1.0}, 0.8),
        (RIGHT | {"name": 3}, {"content": 1.0}, 0.8),
        (RIGHT | {"count": math.nan}, {"content": 1.0}, 0.8),
    ):
        with subtests.test(value=value, weights=weights):
            options = {} if weights is None else {"weights": weights}
            assert score(value, **options) == pytest.approx(expected, abs=1e-6)
    assert score(RIGHT | {"count": 2.1}, weights={"content": 1.0}, tolerance=0.06) == 1.0


def test_layers_in_order_stop_at_the_first_that_is_not_full():
    for value, expected in (
        (f"So: {json.dumps(RIGHT)}", 1 / 4),
        (RIGHT | {"count": "two"}, (1 + 1 + 4 / 6) / 4),
        (RIGHT | {"count": 3}, (3 + 4 / 5) / 4),
        (RIGHT, 1),
    ):
        assert score(value, ordered=True) == pytest.approx(expected, abs=1e-6)


def test_layers_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="no layer 'form'"):
        Structured(weights={"form": 1.0})
    with pytest.raises(UserError, match="one of them above 0"):
        Structured(weights={"format": 0.0})
    assert Structured()(["{}"], [{"answer": "no json"}]).isnan().all()


# mazes


# a ring of four cells: two ways of two steps lead from corner to corner
RING = (
    "<|0-0|><|up_left_wall|><|origin|><|0-1|><|up_right_wall|><|blank|>"
    "<|1-0|><|down_left_wall|><|blank|><|1-1|><|down_right_wall|><|target|>"
)


def published(maze, text, credit, each=False):
    """Walk by hand: the paper's three sums over the answer's tokens."""
    body = text.split("</think>")[-1].strip()
    row, column = next(cell for cell in maze.walls if cell == maze.origin)
    stopped = False
    tokens = [token for token in body.replace(">", "> ").split() if token]
    for token in tokens:
        move = token.strip("<|>")
        if stopped or move not in MOVES or move in maze.walls[(row, column)]:
            stopped = True
            continue
        row += {"up": -1, "down": 1}.get(move, 0)
        column += {"left": -1, "right": 1}.get(move, 0)
    length = len(maze.solution())
    arrived = not stopped and (row, column) == maze.target
    steps = length if arrived and (credit != "shortest" or len(tokens) == length) else 0
    if credit == "progress" and not arrived:
        steps = min(max(0, length - maze.distances(maze.target)[(row, column)]), length - 1)
    clean = bool(tokens) and all(token.strip("<|>") in MOVES for token in tokens)
    tags = 0.125 * (text.count("<think>") == 1) + 0.125 * (text.count("</think>") == 1)
    return 0.2 * steps + 0.5 * clean * (len(tokens) if each else 1) + tags


def test_the_reward_is_the_papers_sum():
    prompts = Mazes(size=4, mazes=12, held_out=4).train
    for each, credit in product([False, True], ["shortest", "arrival", "progress"]):
        reward = MazeWalk(credit=credit, each=each)
        draw = random.Random(0)
        for prompt in prompts:
            maze = read_maze(prompt["maze"])
            right = maze.solution()
            walks = [right, right[:-1], [*right, draw.choice(sorted(MOVES))]]
            walks += [draw.choices(sorted(MOVES), k=draw.randint(1, 9)) for _ in range(20)]
            thoughts = ["<think>a</think>", "", "<think><think></think>"]
            for moves, thought in product(walks, thoughts):
                text = thought + written(moves)
                expected = published(maze, text, credit, each)
                assert reward.judge(text, prompt).score == pytest.approx(expected, abs=1e-9)


def test_a_broken_maze_is_the_prompts_fault(subtests):
    for maze, cause in [
        ("", "one <|origin|>"),
        (RING.replace("target", "blank"), "one <|origin|>"),
        (RING.replace("down_left", "west"), "walls 'west'"),
        (RING.replace("1-1", "0-0"), "twice"),
        (RING.replace("down_right", "up_down_left_right"), "no way"),
    ]:
        with subtests.test(maze=maze, cause=cause):
            (verdict,) = MazeWalk().verdicts(["<|up|>"], [{"maze": maze}])
            assert verdict.score != verdict.score and cause in verdict.note


def test_drawn_mazes_have_one_way_and_are_the_same_for_a_seed():
    mazes = Mazes(size=4, mazes=40, held_out=10, least=2, most=6)
    texts = [prompt["maze"] for prompt in [*mazes.held_out, *mazes.train]]
    assert len(set(texts)) == 50 and len(mazes.train) == 40
    for prompt in mazes.train:
        maze = read_maze(prompt["maze"])
        doors = sum(4 - len(sides) for sides in maze.walls.values())
        assert doors == 2 * (16 - 1) and len(maze.distances(maze.origin)) == 16  # a tree
        assert 2 <= prompt["steps"] == len(maze.solution()) <= 6
        assert maze.walk(moves_of(prompt["answer"])[0])[-1] == maze.target
        assert maze.text() == prompt["maze"] and prompt["maze"] in prompt["text"]
    again = Mazes(size=4, mazes=20, held_out=10, least=2, most=6)
    assert again.held_out == mazes.held_out and again.train == mazes.train[:20]
    assert Mazes(size=4, mazes=40, held_out=10, least=2, most=6, seed=1).train != mazes.train
