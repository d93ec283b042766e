"""What custom rewards return is the same over the wire, and from workers elsewhere."""

from __future__ import annotations

import pytest
import torch

from mmrl.apps.ray.workers import RewardWorker, Surroundings
from mmrl.scoring import Handled, Handling, Scorer
from mmrl.scoring.returned import does_not_apply
from rewards import Remote
from rewards.servers.wire import read_answer
from tests.fixtures.reward_servers import serving
from tests.fixtures.tiny_rewards import asked

TEXTS = ["a", "bb", "ccc", "dddd", "eeeee"]


def subs(media, prompts):
    """Length as a reward of odd ones, with a sub-score of all."""
    sizes = [len(text) for text in media]
    return {
        "score": [size / 10 if size % 2 else None for size in sizes],
        "size": [float(size) for size in sizes],
    }


def whole(media, prompts):
    return [len(text) / 10 for text in media]


@pytest.fixture(scope="module")
def url():
    with serving({"subs": subs, "whole": whole}) as address:
        yield address


def test_none_and_sub_scores_come_over_the_wire(url):
    far = Scorer({"r": Remote(url, name="subs", batch_size=2)})
    near = Scorer({"r": subs})
    groups = [0, 0, 1, 1, 1]
    values = [scorer(TEXTS, asked(5), groups)["r"] for scorer in (far, near)]
    assert torch.equal(*values) and values[0].isfinite().all() and not far.failures
    for scorer in (far, near):
        scorer.remember()
    assert far.sub_scores() == near.sub_scores() == {"r/size": [15.0, 5.0]}


def test_a_sum_leaves_out_what_does_not_apply(url):
    values, parts = Remote(url)(TEXTS, asked(5))
    assert values.tolist() == pytest.approx([0.2, 0.2, 0.6, 0.4, 1.0])
    assert {key: tuple(sums) for key, sums in parts.items()} == {"subs/size": (15.0, 5.0)}


@pytest.mark.parametrize(
    "more",
    [
        '"does_not_apply": {"a": [7]}',
        '"does_not_apply": {"a": 3}',
        '"does_not_apply": [1]',
        '"sub_scores": {"a": {"x": [1]}}',
        '"sub_scores": {"a": {"x": [1e999, 1]}}',
        '"sub_scores": {"a": [1]}',
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(more):
    content = f'{{"ids": ["i"], "rewards": {{"a": [1.0]}}, "weights": {{"a": 1.0}}, {more}}}'
    with pytest.raises(ValueError, match="answer|numbers|sub-score"):
        read_answer(content.encode(), ["a"], ["i"])


def test_a_worker_elsewhere_says_them_too(monkeypatch):
    worker = RewardWorker(Surroundings("", ""), "", b"")
    worker.reward = Handled.of(subs, Handling(), "subs")

    class Parcel:
        media, prompts = TEXTS, asked(5)

    monkeypatch.setattr(
        "mmrl.apps.ray.parcels.opened", lambda parcel: (parcel.media, parcel.prompts)
    )
    reply = worker.work(Parcel())
    values = torch.from_numpy(reply.values.copy())
    assert does_not_apply(values).tolist() == [False, True, False, True, False]
    assert reply.parts == {"size": [15.0, 5.0]} and not reply.problem
