"""The sections of ``scripts/dev/soak`` that send hostile things to rewards and their server, for a
moment each."""

from __future__ import annotations

import random

import pytest

from scripts.dev.soak_parts import answers, images, load, requests
from scripts.dev.soak_parts.page import Soak
from scripts.dev.soak_parts.serving import SLOW, Tally
from tests.fixtures.text_rewards import SMALLEST


def test_pieces_of_a_picture_make_it_again():
    whole = images.whole("PNG", "RGB", (9, 7))
    assert images.joined(images.chunks(whole)) == whole
    draw = random.Random(0)
    bodies = {images.request(draw)[0] for _ in range(20)}
    assert len(bodies) > 15
    assert len({requests.head(draw) for _ in range(20)}) > 15


def test_answers_are_tried_on_every_reward(tmp_path):
    (experiment,) = answers.run(Soak(tmp_path, 1.0, 0))
    assert experiment.passed
    assert len(SMALLEST) > 25


def test_a_traceback_a_5xx_and_a_hang_are_failures():
    def broken(texts, prompts):
        raise ValueError("x")

    assert answers.judged(broken, "a", {}).startswith("ValueError")
    assert answers.judged(lambda texts, prompts: __import__("torch").ones(1), "a", {}) == "scored"
    tally = Tally()
    for status, seconds in (("200", 0.1), ("500", 0.1), ("gone", 0.1), ("400", SLOW + 1)):
        tally.add(status, seconds)
    assert (tally.tries, tally.errors, tally.slow) == (4, 2, 1)


@pytest.mark.slow
def test_many_clients_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "CLIENTS", 8)
    (experiment,) = load.run(Soak(tmp_path, 1.0, 0))
    assert experiment.passed and "0 wrong, 0 lost, 0 scored twice" in experiment.outcome


@pytest.mark.slow
def test_hostile_requests_change_nothing(tmp_path):
    for experiment in requests.run(Soak(tmp_path, 2.0, 0)):
        assert experiment.passed, experiment.line()
