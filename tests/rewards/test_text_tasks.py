"""Tables, texts, formulas, charts, form, length, steps, mixtures and drawings against oracles."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl import config
from mmrl.core.errors import UserError
from mmrl.core.types import Completion
from rewards import (
    Chart,
    CosineLength,
    Count,
    Format,
    KeySteps,
    Length,
    Maths,
    Overlong,
    Repetition,
    Routed,
    Svg,
    Table,
    TextSimilarity,
    ThinkOrNot,
    Transcription,
    VideoQa,
    Vqa,
)
from rewards.answers.svg import find_svg, render, ssim
from rewards.answers.tables import Node, read_table, teds
from rewards.answers.writing import bidirectional


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
    other = tag != tag2 or spans != spans2
    rename = (
        1.0
        if other
        else levenshtein(text, text2) / max(len(text), len(text2), 1)
        if tag == "td"
        else 0.0
    )
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
    assert (
        teds(a, b) == pytest.approx(teds(b, a))
        and teds(a, a) == 1
        and teds(a, b, structure=True) >= teds(a, b) - 1e-9
    )


def test_tables_are_read_from_html_and_markdown():
    html = "<table><thead><tr><th>a</th><th>b|c</th></tr></thead><tbody>"
    html += "<tr><td>1</td><td> 2 <b>x</b></td></tr></tbody></table>"
    markdown = "| a | b\\|c |\n|:--|--:|\n| 1 | 2 x |"
    assert frozen(read_table(html)[0]) == frozen(read_table(markdown)[0])
    assert one(Table(), markdown, {"answer": html}) == 1
    cut = html[: html.rfind("</tbody>")]
    assert Table().verdicts([cut], [{"answer": html}])[0][:2] == (1.0, "repaired")
    other = html.replace("colspan", "x").replace("<td>1</td>", "<td>9</td>")
    assert (
        one(Table(), other, {"answer": html}) == pytest.approx(1 - 1 / 7)
        and one(Table(True), other, {"answer": html}) == 1
    )
    assert (
        math.isnan(one(Table(), html, {"answer": "no table"}))
        and one(Table(), "no table", {"answer": html}) == 0
    )
    assert one(Table(), "<table>" + "<tr><td>1</td></tr>" * 3000, {"answer": html}) == 0


# Texts


@settings(max_examples=100, deadline=None)
@given(a=st.text("abc d", min_size=1, max_size=12), b=st.text("abc d", min_size=1, max_size=12))
def test_ocr_equals_the_edit_distance(a, b):
    left = " ".join(a.split())
    right = " ".join(b.split())
    if left and right:
        wanted = 1 - levenshtein(left, right) / max(len(left), len(right))
        assert one(Transcription(), f"<answer>{a}</answer>", {"answer": b}) == pytest.approx(
            wanted, abs=1e-6
        )


def test_ocr_by_words_case_and_anls():
    prompt = {"answer": "Total 12 EUR"}
    assert one(Transcription("word"), "Total 13 EUR", prompt) == pytest.approx(2 / 3)
    assert (
        one(Transcription(case=False), "TOTAL 12 eur", prompt)
        == 1
        > one(Transcription(), "TOTAL 12 eur", prompt)
    )
    assert one(Transcription(least=0.5), "Total zzzzzzzzzzz", prompt) == 0


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
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "red", "bus", "two", "dogs"]
    tokens = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        BertModel(BertConfig(vocab_size=len(words), **shape)).save_pretrained(tmp_path)
    reward = TextSimilarity(str(tmp_path))
    prompt = {"answer": "a red bus"}
    assert one(reward, "a red bus", prompt) == pytest.approx(1, abs=1e-5)
    assert one(reward, "two dogs", prompt) < 0.99
    assert (
        one(TextSimilarity(), "a red bus", prompt)
        == 1
        > one(TextSimilarity(), "a red bus and two dogs", prompt)
        > 0.5
    )


# Formulas and charts


def test_maths_says_what_math_verify_says(subtests):
    for right, found in [
        ("\\frac{1}{2}", "0.5"),
        ("12", "12.0"),
        ("x^2+2x+1", "(x+1)^2"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("\\sqrt{8}", "2\\sqrt{2}"),
        ("(1,2)", "(1,2)"),
        ("5", "6"),
        ("x+1", "x-1"),
        ("\\frac{1}{3}", "0.33"),
    ]:
        with subtests.test(right=right, found=found):
            from math_verify import parse, verify

            theirs = verify(parse(f"${right}$"), parse(f"${found}$"))
            assert one(
                Maths(), f"<think>$7$</think><answer>\\boxed{{{found}}}</answer>", {"answer": right}
            ) == float(theirs)


def test_maths_works_outside_the_main_thread_and_refuses_monsters():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(one, Maths(), "0.5", {"answer": "\\frac{1}{2}"}).result() == 1
    for monster in ("9" * 401, "9^{9^{9^9}}", "9**9**9**9", "10^{99999}", "99999!", "((9!)!)!"):
        assert one(Maths(), monster, {"answer": "1"}) == 0
    assert math.isnan(one(Maths(), "1", {"answer": "  "}))


def test_charts_are_read_within_five_per_cent():
    texts = ["100", "105", "105.1", "95", "94.9", "$1,00", "100%", "about 100"]
    assert Chart()(texts, [{"answer": 100}] * 8).tolist() == [1, 1, 0, 1, 0, 0, 0, 1]
    assert (
        one(Chart(), "0.01", {"answer": 0}) == 0
        and one(Chart(), "france", {"answer": "France"}) == 1
    )
    listed = {"answer": [10, 20]}
    assert [
        one(Chart(partial=True), t, listed) for t in ("10, 20.5", "20, 10", "10", "10, 20, 30")
    ] == pytest.approx([1, 0, 0.5, 2 / 3])
    assert one(Chart(), "10", listed) == 0


# Form and length


def test_format_is_strict(subtests):
    for text, good in [
        ("<think>a</think><answer>b</answer>", True),
        (" <think></think>\n<answer>b</answer>\n", True),
        ("so: <think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> ok", False),
        ("<think>a<think>b</think></think><answer>b</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<answer>b</answer>", False),
        ("", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think><answer>b", False),
    ]:
        with subtests.test(text=text, good=good):
            assert one(Format(), text, {}) == float(good)


def test_formats_of_ones_own_and_json():
    assert (
        one(Format(pattern=r"\d+"), "12", {}) == 1 and one(Format(pattern=r"\d+"), "12 a", {}) == 0
    )
    assert one(Format("answer", json=True), "<answer>[1, 2]</answer>", {}) == 1
    assert one(Format("answer", json=True), "<answer>[1, 2</answer>", {}) == 0
    with pytest.raises(UserError, match="not a regular expression"):
        Format(pattern="(")


def said(tokens: int, text: str = "7") -> Completion:
    return Completion(text, tokens, True, -0.1)


def test_lengths_are_counted_in_tokens():
    texts = [said(n) for n in (48, 49, 56, 64, 90)]
    assert Overlong(64, 16)(texts, [{}] * 5).tolist() == pytest.approx([0, -1 / 16, -0.5, -1, -1])
    assert Length(10, 20, 10)([said(n) for n in (5, 10, 20, 25, 40)], [{}] * 5).tolist() == [
        0.5,
        1,
        1,
        0.5,
        0,
    ]
    assert one(Overlong(4, 2), "one two three", {}) == -0.5
    with pytest.raises(UserError, match="buffer is 9"):
        Overlong(8, 9)


def test_the_cosine_falls_for_right_and_rises_for_wrong_answers_and_stays_beyond_the_limit():
    reward = CosineLength(limit=100)
    prompt = {"answer": 7}
    right, wrong = (
        [one(reward, said(n, t), prompt) for n in (0, 25, 50, 100, 150)] for t in ("7", "8")
    )
    assert right == pytest.approx([1, 0.5 + 0.25 * (1 + math.cos(math.pi / 4)), 0.75, 0.5, 0.5])
    assert wrong == pytest.approx(
        [-1, -0.5 - 0.25 * (1 + math.cos(math.pi / 4)), -0.75, -0.5, -0.5]
    )


def test_the_cosine_of_a_mixture_follows_the_route_of_each_prompt():
    reward = CosineLength(Routed({"count": Count()}), limit=100)
    prompt = {"answer": 7, "task": "count"}
    assert one(reward, "7", prompt) == pytest.approx(1, abs=1e-3)
    assert one(reward, "8", prompt) == pytest.approx(-1, abs=1e-3)
    assert math.isnan(one(reward, "8", prompt | {"task": "point"}))


def test_repetition_of_words_and_of_boxes():
    assert one(Repetition(2), "a b a b a b", {}) == pytest.approx(-(1 - 2 / 5))
    assert one(Repetition(), "[[1,2,3,4],[1,2,3,4],[5,6,7,8]]", {}) == pytest.approx(-1 / 3)
    assert one(Repetition(), "", {}) == 0


def test_think_or_not():
    texts = [
        "<think>\n</think><answer>7</answer>",
        "<think>a</think><answer>7</answer>",
        "<answer>7</answer>",
    ]
    assert ThinkOrNot()(texts, [{}] * 3).tolist() == [1, 0.5, 0]


# Steps, questions, mixtures


def test_key_steps_are_found_as_whole_words_and_in_order():
    prompt = {"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"], "is 3"]}
    text = "<think>We add 2+1, altogether it is 3.</think><answer>3</answer>"
    assert one(KeySteps(), text, prompt) == 1 and one(
        KeySteps(0.0), "12 + 1 altogether", prompt
    ) == pytest.approx(1 / 3)
    backwards = "<think>it is 3, the sum of 2 + 1</think><answer>3</answer>"
    ordered = one(KeySteps(ordered=True), backwards, prompt)
    assert ordered == pytest.approx(0.5 + 0.5 / 3) and ordered < one(KeySteps(), backwards, prompt)
    sections = KeySteps(0.0, sections=["Picture", "Reasoning"])
    assert one(sections, "Picture: 2+1 Reasoning: the sum is 3", prompt) == 1
    assert one(sections, "Reasoning: 2+1 Picture: the sum is 3", prompt) == pytest.approx(0.75)


def test_key_steps_in_the_form_of_step_grpo():
    """R1-VL, section 3.2: 1 + 0.1 k if right, 0.1 k if wrong, 0 without an answer, and 1 more if
    all is in order."""
    prompt = {"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"]]}
    reward = KeySteps(form="step_grpo", sections=["Picture", "Reasoning"])
    whole = "<think>Picture: 2 + 1. Reasoning: altogether three.</think><answer>{}</answer>"
    assert one(reward, whole.format(3), prompt) == pytest.approx(2.1) == reward.card.high
    assert one(reward, whole.format(4), prompt) == pytest.approx(1.1)
    assert one(reward, whole.format(""), prompt) == 0
    mixed_up = "<think>Reasoning: altogether three. Picture.</think><answer>3</answer>"
    assert one(reward, mixed_up, prompt) == pytest.approx(1.05)
    plain = KeySteps(form="step_grpo", alpha=0.5)
    assert one(plain, mixed_up, prompt) == pytest.approx(1.25) and plain.card.high == 1.5
    assert one(reward, reward.ground_truth(prompt), prompt) == pytest.approx(2.1)
    with pytest.raises(UserError, match="leave out each"):
        KeySteps(form="step_grpo", each=True)


def spelled(text: str, size: int, limit: int = 40) -> Completion:
    """An answer whose tokens are ``size`` letters each."""
    parts = [text[: i + size] for i in range(0, len(text), size)]
    return Completion(text, len(parts), True, -0.1, limit=limit, spell=lambda: parts)


def test_steps_are_paid_at_the_token_that_completes_them_and_in_all_as_before(subtests):
    for size in [1, 3, 7]:
        for options in [{}, {"ordered": True}, {"sections": ["First", "Then"]}, {"answer": 0.0}]:
            with subtests.test(size=size, options=options):
                prompt = {"answer": 3, "key_steps": ["2 + 1", ["the sum", "altogether"], "is 3"]}
                good = "<think>First we add 2 + 1. Then the sum is 3.</think><answer>3</answer>"
                texts = [good, "is 35, is 3.5, <answer>4</answer>", "", "Then is 3"]
                asked = [prompt] * 4
                answers = [spelled(text, size, 90) for text in texts]
                each = KeySteps(each=True, **options)
                assert each.card.of == "step" and KeySteps(**options)(texts, asked).shape == (4,)
                found = each(answers, asked)
                assert found.shape == (4, 90)
                torch.testing.assert_close(found.nansum(1), KeySteps(**options)(texts, asked))
                for row, answer in zip(found, answers, strict=True):
                    assert (
                        not row[max(answer.tokens - 1, 0)].isnan()
                        and row[answer.tokens :].isnan().all()
                        or not answer.tokens
                    )
                first = good.index("2 + 1") + len("2 + 1") - 1
                if size == 1:
                    assert (found[0] > 0).nonzero()[:, 0].tolist()[0] == (
                        first if "sections" not in options else 11
                    )
                assert found[1].nansum() == 0 or "ordered" in options
                plain = each([good], [prompt])
                assert plain.shape == (1, 1) and plain.item() == pytest.approx(
                    float(KeySteps(**options)([good], [prompt]))
                )


def test_vqa_accuracy_equals_the_mean_over_nine_of_ten(subtests):
    for count in range(11):
        with subtests.test(count=count):
            people = ["yes"] * count + ["no"] * (10 - count)
            subsets = itertools.combinations(people, 9)
            wanted = np.mean([min(1, nine.count("yes") / 3) for nine in subsets])
            assert one(Vqa(), "Yes.", {"answers": people}) == pytest.approx(wanted)


def test_video_questions_with_and_without_a_span():
    prompt = {"answer": "B", "choices": ["x", "y"], "spans": [[2, 6]]}
    text = "<answer>B</answer><glue>[[4, 6]]</glue>"
    assert (
        one(VideoQa(), text, prompt) == 0.75
        and one(VideoQa(gated=True), text.replace("B", "A"), prompt) == 0
    )
    assert (
        one(VideoQa(), "<answer>B</answer>", prompt) == 0.5
        and one(VideoQa(), "B", {**prompt, "spans": None}) == 1
    )


def test_routes_are_checked_and_built_from_a_configuration():
    routes = {"find": {"detection": {"measure": "f1"}}, "count": "count", "solve": {"maths": {}}}
    built = config.build_rewards(
        {"routed": {"routes": routes, "default": {"answer": {"tolerance": 0.1}}}}
    )
    reward = built["routed"].reward
    prompts = [
        {"task": "count", "answer": 3},
        {"task": "find", "boxes": [[1, 2, 3, 4]]},
        {"answer": 10},
        {"task": "solve", "answer": "1/2"},
    ]
    assert reward(["3", "[1,2,3,4]", "10.5", "0.5"], prompts).tolist() == [1, 1, 1, 1]
    assert reward.status(["3 or 4", "?", "10", "x"], prompts) == [
        "wrong_count",
        "unparseable",
        "ok",
        "ok",
    ]
    strict = config.build_rewards({"routed": {"routes": {"count": "count"}}})["routed"].reward
    assert math.isnan(one(strict, "3", {"task": "other", "answer": 3})) and strict.card.needs == (
        "task",
    )
    with pytest.raises(UserError, match="did you mean 'count'"):
        config.build_rewards({"routed": {"routes": {"a": "cuont"}}})


# Drawings

RED = '<svg viewBox="0 0 10 10"><rect x="1" y="1" width="4" height="4" fill="red"/></svg>'


def test_drawings_are_rendered_and_compared():
    shown = render(find_svg(RED)[0], 100)
    assert (
        shown.shape == (3, 100, 100)
        and shown[:, 30, 30].tolist() == [1, 0, 0]
        and shown[:, 80, 80].tolist() == [1, 1, 1]
    )
    half = RED.replace('height="4"', 'height="2"')
    assert one(Svg(size=100), half, {"svg": RED}) == pytest.approx(0.5, abs=0.02)
    for measure in ("explained", "mse", "standardised", "ssim"):
        scores = Svg(measure, size=64)([RED, half, "<svg></svg>"], [{"svg": RED}] * 3)
        assert (
            scores[0].item() == pytest.approx(1, abs=1e-5) and scores[0] > scores[1] > scores[2]
        ), measure


def test_drawings_that_reach_outside_are_refused():
    for bad in (
        '<image href="a.png"/>',
        '<use href="b.svg#x"/>',
        "<script/>",
        '<rect style="fill:url(http://a)"/>',
        '<filter id="a"/>',
    ):
        assert find_svg(f"<svg>{bad}</svg>") == (None, "out_of_range")
    assert (
        find_svg("<!DOCTYPE x><svg></svg>")[1] == "ok"
        and find_svg("<svg><!ENTITY a></svg>")[1] == "out_of_range"
    )
    assert (
        find_svg('<svg><rect width="1"/>')[1] == "repaired"
        and find_svg("nothing")[1] == "unparseable"
    )


def test_an_image_is_a_target_and_another_reward_can_join():
    from PIL import Image

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
        mp = (window * p).sum()
        mq = (window * q).sum()
        vp = (window * (p - mp) ** 2).sum()
        vq = (window * (q - mq) ** 2).sum()
        both = (window * (p - mp) * (q - mq)).sum()
        found.append(
            (2 * mp * mq + 1e-4) * (2 * both + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))
        )
    assert ssim(a, b) == pytest.approx(max(0.0, float(np.mean(found))), abs=1e-6)
