"""The time of a verifiable reward is at most linear in its input, whatever a model writes: an
answer four times as long takes about four times as long."""

from __future__ import annotations

import logging
import math
import time

import pytest
from PIL import Image

from mmrl.core.registry import REWARDS, load_built_in
from rewards.answers import maths, svg
from rewards.answers.reading import LONGEST, loose_json, objects
from rewards.answers.reading.plain import SHORT
from rewards.answers.sandbox import Broken, Sandbox
from rewards.answers.verifiable import Verifiable
from tests.fixtures.text_rewards import SMALLEST, prompts_of

load_built_in()
NAMES = sorted(
    name
    for name in SMALLEST
    if isinstance(REWARDS[name], type) and issubclass(REWARDS[name], Verifiable)
)
WRAPS = (
    *("{}", "<answer>{}</answer>", "<think>{}</think><answer>1</answer>", "```json\n{}"),
    *("<think>x</think><answer>{}<think>", "<think>{}<think>", "\\boxed{{{}"),
)
VARIANTS = [
    ("format", {"form": "answer"}),
    ("format", {"form": "think"}),
    ("format", {"form": "boxed"}),
    ("referring", {"form": "vlm_r1"}),
    ("transcription", {"unit": "word"}),
    ("temporal", {"form": "hull"}),
    ("detection", {"measure": "map"}),
    ("detection", {"measure": "visual_rft"}),
    ("detection", {"measure": "vlm_r1"}),
    ("confidence", {"form": "visual_rft"}),
]
PIECES = (
    *("[", "]", "{{", "(", ")", "<", ">", "1", "1,", "1 ", "1.", "-", "1e", "+1", "1:", "0:1"),
    *(",", " ", "\n", "\t", "\\", '"', "'", "```", "=", "|", "|a", "| |\n", "a", "a ", "A,", "A "),
    *("_", ".", ":", "\u0663", "\u00e9", "#", "$1", "%", "&", "*", "~", "\r\n", "\n\n", "!", "x^"),
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "<answer>a",
        "<box>",
        "<ref>",
        "<ref>a</ref>",
    ),
    *("<|box_start|>", "<|object_ref_start|>", '<point x="1"', '<point x="1" y="', "<loc0001>"),
    *("<glue>", "<time>", "</time>", "<svg ", "</svg>", "<use", "<table>", "<tr><td>1", "<td>a<b>"),
    *("<!--", "<![", "&#", "<a b='", "\\boxed{{", "\\frac{{", "{{1}}", "[1,", "[[1,2],", "(1,2)"),
    *("(1,2),(3,4)", "[1,2,3,4]", "[1,2,3,4],", '{{"a":', '{{"a":[', '{{"a":1}},', '"a",', '{{"a"'),
    *(
        "1-",
        "1 - ",
        "1s",
        "1 to ",
        "from 1 to 2 ",
        "1:00:00",
        "A and ",
        "click(",
        "click(1,",
        "x=1,",
    ),
    *(
        "Step 1",
        "step 1: ",
        "1. ",
        "- ",
        "<|0-0|>",
        "<|up|>",
        "the answer is ",
        "yes, ",
        "twenty-a ",
        "A, , ",
        "a. ",
        "1/",
        ",000",
    ),
)
assert LONGEST > 12_000
LONG = 12_000  # below LONGEST, beyond which nothing is read
NOTHING = 0.06  # seconds of a processor: growth is not looked at below
TIMES = 4  # as long as the short text
RATIO = 9.0  # between linear, 4, and quadratic, 16: a loaded processor may double either


def text_of(wrap: str, piece: str, length: int) -> str:
    piece = piece.format()
    return wrap.format((piece * (length // len(piece) + 1))[:length])


def seconds(reward, text: str, prompt) -> float:
    start = time.process_time()
    value = float(reward([text], [prompt])[0])
    assert not math.isinf(value)
    return time.process_time() - start


def grows(reward, short: str, long: str, prompt) -> bool:
    """Whether the longer text takes more than it should: the best of up to six, for others who
    use the processor only add."""
    after = math.inf
    for _ in range(6):
        after = min(after, seconds(reward, long, prompt))
        if after < NOTHING or after < RATIO * seconds(reward, short, prompt):
            return False
    return True


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def without_processes(monkeypatch):
    """What runs in processes beside is bounded there."""

    def nothing(*question):
        raise Broken

    for worker in (objects.REPAIRER, *maths.WORKERS.workers, svg.WORKER):
        monkeypatch.setattr(worker, "ask", nothing)
    yield
    maths.EQUAL.clear()  # "no answer" is remembered of answers


def guilty(name: str, wrap: str, pieces=PIECES, long: int = LONG, **options: str) -> list[str]:
    """Those of the pieces whose repetition takes more than its share."""
    reward = REWARDS.build(name, **SMALLEST[name][0] | options)
    prompt = prompts_of(name)[0] if name != "svg" else {"image": Image.new("RGB", (8, 8))}
    return [
        piece
        for piece in pieces
        if grows(reward, *(text_of(wrap, piece, n) for n in (long // TIMES, long)), prompt)
    ]


def test_twice_as_long_an_answer_takes_no_more_than_its_share(without_processes, subtests):
    for name in NAMES:
        with subtests.test(name=name):
            assert not guilty(name, "{}")


def test_so_does_one_so_short_that_all_rules_look_at_it(without_processes, subtests):
    for name in NAMES:
        with subtests.test(name=name):
            assert not guilty(name, "{}", long=SHORT)


def test_so_does_the_form_of_a_text(subtests):
    for wrap in ["{}", *WRAPS[4:]]:
        for name, options in VARIANTS[:3]:
            with subtests.test(wrap=wrap, name=name, options=options):
                assert not guilty(name, wrap, **options)


@pytest.mark.slow
def test_so_does_one_with_other_options(without_processes, subtests):
    for name, options in VARIANTS[3:]:
        with subtests.test(name=name, options=options):
            assert not guilty(name, "{}", **options)


@pytest.mark.slow
def test_so_does_one_in_tags(without_processes, subtests):
    """Every piece in every pair of tags, and every reward in all of them: tags are taken off by
    what all share, so a piece in tags is tried with a sixth of the rewards."""
    for wrap in WRAPS[1:]:
        for name in NAMES:
            with subtests.test(wrap=wrap, name=name):
                others = len(WRAPS) - 1
                assert not guilty(
                    name, wrap, PIECES[(NAMES.index(name) + WRAPS.index(wrap)) % others :: others]
                )


def test_such_growth_would_be_seen(monkeypatch):
    """By cubes, 64 times as long, and by squares, 16 times; by a clock that others do not slow."""
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])

    def taking(power, unit):
        def reward(texts, prompts):
            clock[0] += unit * len(texts[0]) ** power
            return [0.0]

        return reward

    assert grows(taking(3, 1e-13), "a" * 3000, "a" * 12_000, {})
    assert grows(taking(2, 1e-9), "a" * 3000, "a" * 12_000, {})
    assert not grows(taking(1, 1e-5), "a" * 3000, "a" * 12_000, {})


# processes beside


def test_a_broken_value_that_takes_too_long_to_repair_is_given_up(monkeypatch):
    """json_repair takes time with the square of these objects."""
    worker = Sandbox("repaired", seconds=0.2)
    monkeypatch.setattr(objects, "REPAIRER", worker)
    assert loose_json("[" + "{1}" * 2000).status == "unparseable"
    assert worker.given_up == 1
    assert loose_json("[{'a': 1}, {'a': 2").value == [{"a": 1}, {"a": 2}]
    assert loose_json("[[1, 2], [3").value == [[1, 2], [3]]
