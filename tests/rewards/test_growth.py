"""What a model writes takes linear time, and answers made to hang or kill what reads them cost
their own sample and nothing else."""

from __future__ import annotations

import logging
import math
import os
import signal
import time

import pytest
from PIL import Image

from mmrl.core.registry import REWARDS, load_built_in
from rewards import Maths, Svg
from rewards.answers import maths, svg
from rewards.answers.reading import LONGEST, loose_json, objects
from rewards.answers.reading.plain import SHORT
from rewards.answers.sandbox import Broken, Sandbox
from rewards.answers.svg import aspect, find_svg, render
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
# of a piece: ␣ is a blank, ⇥ a tab, ⏎ and ␍ end a line
SIGNS = str.maketrans("␣⇥⏎␍", " \t\n\r")
WRITTEN = r"""
[ ] {{ ( ) < > 1 1, 1␣ 1. - 1e +1 1: 0:1 , ␣ ⏎ ⇥ \ " ' ``` = | |a |␣|⏎ a a␣ A, A␣ _ . : ٣ é # $1
% & * ~ ␍⏎ ⏎⏎ ! x^ <think> </think> <answer> </answer> <answer>a <box> <ref> <ref>a</ref>
<|box_start|> <|object_ref_start|> <point␣x="1" <point␣x="1"␣y=" <loc0001> <glue> <time> </time>
<svg␣ </svg> <use <table> <tr><td>1 <td>a<b> <!-- <![ &# <a␣b=' \boxed{{ \frac{{ {{1}} [1,
[[1,2], (1,2) (1,2),(3,4) [1,2,3,4] [1,2,3,4], {{"a": {{"a":[ {{"a":1}}, "a", {{"a" 1- 1␣-␣ 1s
1␣to␣ from␣1␣to␣2␣ 1:00:00 A␣and␣ click( click(1, x=1, Step␣1 step␣1:␣ 1.␣ -␣ <|0-0|> <|up|>
the␣answer␣is␣ yes,␣ twenty-a␣ A,␣,␣ a.␣ 1/ ,000
"""
PIECES = [piece.translate(SIGNS) for piece in WRITTEN.split()]
TIMES = 4  # as long as the short text
LONG = TIMES * 1600  # a fourth of it is longer than SHORT, and it is below LONGEST
NOTHING = 0.017  # seconds of a processor: growth is not looked at below
SHORT_NOTHING = 0.06
RATIO = 9.0  # between linear, 4, and quadratic, 16: a loaded processor may double either


def text_of(wrap: str, piece: str, length: int) -> str:
    piece = piece.format()
    return wrap.format((piece * (length // len(piece) + 1))[:length])


def seconds(reward, text: str, prompt) -> float:
    start = time.process_time()
    value = float(reward([text], [prompt])[0])
    assert not math.isinf(value)
    return time.process_time() - start


assert TIMES * SHORT < LONG < LONGEST


def grows(reward, short: str, long: str, prompt) -> bool:
    """Whether the longer text takes more than it should: the best of up to six, for others who
    use the processor only add."""
    after = math.inf
    nothing = NOTHING if len(long) > SHORT else SHORT_NOTHING
    for _ in range(6):
        after = min(after, seconds(reward, long, prompt))
        if after < nothing or after < RATIO * seconds(reward, short, prompt):
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


def guilty(name: str, wrap: str, long: int = LONG, **options: str) -> list[str]:
    """Those of the pieces whose repetition takes more than its share."""
    reward = REWARDS.build(name, **SMALLEST[name][0] | options)
    prompt = prompts_of(name)[0] if name != "svg" else {"image": Image.new("RGB", (8, 8))}
    pairs = {p: [text_of(wrap, p, n) for n in (long // TIMES, long)] for p in PIECES}
    return [piece for piece, texts in pairs.items() if grows(reward, *texts, prompt)]


def test_twice_as_long_an_answer_takes_no_more_than_its_share(without_processes, subtests):
    for name in NAMES:
        with subtests.test(name=name):
            assert not guilty(name, "{}")


def test_so_does_one_so_short_that_all_rules_look_at_it(without_processes, subtests):
    for name in ("answer", "choice", "count", "label_set", "maths", "vqa"):
        with subtests.test(name=name):
            assert not guilty(name, "{}", long=SHORT)


def test_so_does_one_with_other_options(without_processes, subtests):
    for name, options in VARIANTS:
        for wrap in ["{}", *WRAPS[4:]] if name == "format" else ["{}"]:
            with subtests.test(name=name, options=options, wrap=wrap):
                assert not guilty(name, wrap, **options)


def test_so_does_one_in_tags(without_processes, subtests):
    """All rewards take tags off by the same code."""
    for wrap in WRAPS[1:]:
        with subtests.test(wrap=wrap):
            assert not guilty("answer", wrap)


# processes beside


def test_a_broken_value_that_takes_too_long_to_repair_is_given_up(monkeypatch):
    """json_repair takes time with the square of these objects."""
    worker = Sandbox("repaired", seconds=0.2)
    monkeypatch.setattr(objects, "REPAIRER", worker)
    assert loose_json("[" + "{1}" * 2000).status == "unparseable"
    assert worker.given_up == 1
    assert loose_json("[{'a': 1}, {'a': 2").value == [{"a": 1}, {"a": 2}]
    assert loose_json("[[1, 2], [3").value == [[1, 2], [3]]


# processes beside


DRAWING = '<svg viewBox="0 0 10 10"><rect x="1" y="1" width="4" height="4" fill="red"/></svg>'
TALL = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 100000"><rect/></svg>'


@pytest.fixture(scope="module")
def quick():
    """A process that gives up sooner than that of ``maths``."""
    return Sandbox("equal", seconds=0.5)


def test_the_process_is_kept_and_replaced_when_it_dies(quick):
    assert quick.ask("readable", "x")
    first = quick.process.pid
    assert quick.ask("readable", "y") and quick.process.pid == first
    os.kill(first, signal.SIGKILL)
    quick.process.wait()
    assert quick.ask("readable", "z") and quick.process.pid != first


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
