"""Answers made to hang or kill what reads them cost their own sample and nothing else."""

import math
import os
import re
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import Format, Maths, Svg
from rewards.answers import maths, svg
from rewards.answers.reading import last_inside, loose_json, objects
from rewards.answers.sandbox import Broken, Sandbox, TooSlow
from rewards.answers.spans import spans
from rewards.answers.svg import aspect, find_svg, render

DRAWING = '<svg viewBox="0 0 10 10"><rect x="1" y="1" width="4" height="4" fill="red"/></svg>'
TALL = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 100000"><rect/></svg>'


@pytest.fixture(scope="module")
def quick():
    """A process that gives up sooner than that of ``maths``."""
    return Sandbox("equal", seconds=0.5)


@pytest.mark.parametrize("bomb", ["3^{100*100*100*100}", "2^{3^{4^{5}}}", "(999*999*999)!"])
def test_a_power_that_explodes_is_seen_before_it_is_computed(quick, bomb):
    assert quick.ask("equal", "x^2+1", "1+x^2") is True
    process = quick.process
    assert quick.ask("equal", "x^2+1", bomb) is None
    assert quick.process is process


def test_a_formula_that_freezes_is_given_up_and_the_next_is_read(quick):
    before = quick.given_up
    with pytest.raises(TooSlow):
        quick.ask("equal", "x^2+1", "(x+1)^{999}")
    assert quick.given_up == before + 1
    assert quick.ask("equal", "x^2+1", "1+x^2") is True
    assert quick.ask("equal", "x^2+1", "x^2") is False
    assert quick.ask("equal", "x^2+1", "") is None


def test_the_process_is_kept_and_replaced_when_it_dies(quick):
    assert quick.ask("readable", "x")
    first = quick.process.pid
    assert quick.ask("readable", "y") and quick.process.pid == first
    os.kill(first, signal.SIGKILL)
    quick.process.wait()
    assert quick.ask("readable", "z") and quick.process.pid != first


def test_what_a_library_raises_is_no_answer_and_keeps_the_process(quick):
    assert quick.ask("readable", "x")
    process = quick.process
    with pytest.raises(Broken, match="KeyError"):
        quick.ask("nothing", 1)
    assert quick.process is process


def test_a_frozen_answer_is_unparseable_and_its_neighbours_are_scored(monkeypatch, quick):
    monkeypatch.setattr(maths.WORKERS, "workers", [quick])
    monkeypatch.setattr(maths, "differ", lambda *formulas: None)  # all are asked
    texts = [r"\boxed{1+x^2}", r"\boxed{(x+2)^{998}}", r"\boxed{x^2+1}"]
    verdicts = Maths().verdicts(texts, [{"answer": "x^2+1"}] * 3)
    assert [verdict.score for verdict in verdicts] == [1, 0, 1]
    assert verdicts[1].status == "unparseable"


def test_a_bad_moment_of_the_process_does_not_spoil_a_prompt_for_the_run(monkeypatch):
    def nothing(*question):
        raise Broken

    prompt = {"answer": r"\{3, 7\}"}
    with monkeypatch.context() as patch:
        for worker in maths.WORKERS.workers:
            patch.setattr(worker, "ask", nothing)
        assert math.isnan(Maths().verdicts([r"\boxed{1}"], [prompt])[0].score)
    assert Maths().verdicts([r"\boxed{\{7, 3\}}"], [prompt])[0].score == 1


def test_the_shape_of_a_drawing_is_read_before_it_is_drawn(subtests):
    for tag, expected in [
        ('<svg viewBox="0 0 1 1000000">', 1e6),
        ("<svg viewBox='0,0,1,30000'>", 30000),
        ('<svg width="1" height="30000">', 30000),
        ('<svg width="10px" height="20px" viewBox="0 0 3 3">', 2),
        ('<svg viewBox="0 0 0 5">', float("inf")),
        ("<svg>", 1),
    ]:
        with subtests.test(tag=tag, expected=expected):
            assert aspect(tag) == expected
            whole = find_svg(f"{tag}<rect/></svg>")
            assert (whole == (None, "out_of_range")) == (expected > svg.TALLEST)


def test_a_drawing_that_kills_the_renderer_is_that_samples_loss():
    """The shape passes unseen here; its picture would take gigabytes."""
    before = svg.WORKER.given_up
    assert render(TALL, 2048) is None and svg.WORKER.given_up == before + 1
    assert render(find_svg(DRAWING)[0], 64).shape == (3, 64, 64)
    (verdict,) = Svg(size=64).verdicts([TALL], [{"svg": DRAWING}])
    assert (verdict.score, verdict.status) == (0, "out_of_range")


# parsers


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["<glue>", "</glue>", "<time>", "</time>", "a", "1 "]), max_size=12)
)
def test_the_last_element_is_that_of_the_plain_pattern(pieces):
    text = "".join(pieces)
    matches = re.findall(r"<(?:glue|time)>(.*?)</(?:glue|time)>", text, flags=re.S)
    assert last_inside(text, ("glue", "time")) == (matches[-1] if matches else None)


def test_only_the_beginning_of_a_broken_value_is_repaired(monkeypatch):
    lengths = []

    def repair(name, text):
        lengths.append(len(text))
        return [1]

    monkeypatch.setattr(objects.REPAIRER, "ask", repair)
    assert loose_json('{"a" ' + '="' * 9_000).status == "repaired"
    assert lengths == [objects.REPAIRED]


def test_a_clock_has_so_many_hours_and_long_answers_are_cut():
    assert spans("from 0:03 to 1:00:08").value == [(3, 3608)]
    assert spans("٣" * 50_000).status == "unparseable"
    assert spans("<glue>" * 20_000).status == "unparseable"
    assert spans("<glue>[[1, 2]]</glue>" + "<time>" * 20_000).value == [(1, 2)]


TAGS = re.compile(r"(</?(?:think|answer)>)")
FORMS = {
    "think_answer": ["<think>", "x", "</think>", "", "<answer>", "y", "</answer>", ""],
    "answer": ["<answer>", "y", "</answer>", ""],
    "think": ["<think>", "x", "</think>", "y"],
}


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.lists(st.sampled_from([*FORMS["think_answer"], "a", " ", "\n", "<", "</"]), max_size=11),
)
def test_the_form_of_a_text_is_that_of_its_pieces(form, pieces):
    """Tags in their order; "" is blank, "x" anything without a tag, "y" the same and not blank."""
    text = "".join(pieces)
    parts = TAGS.split(text)
    expected = ["", *FORMS[form]]
    right = len(parts) == len(expected) and all(
        part == piece
        if piece.startswith("<")
        else piece == "x" or bool(part.strip()) == (piece == "y")
        for part, piece in zip(parts, expected, strict=True)
    )
    assert Format(form)([text], [{}]).tolist() == [float(right)]


def test_something_in_a_box(subtests):
    for text, right in [
        (r"so \boxed{7}", 1),
        (r"\boxed{} and }", 0),
        (r"\boxed{}", 0),
        (r"\boxed{ }", 0),
        (r"\boxed{7", 0),
        (r"\boxed{ \boxed{7}", 1),
    ]:
        with subtests.test(text=text, right=right):
            assert Format("boxed")([text], [{}]).tolist() == [right]
