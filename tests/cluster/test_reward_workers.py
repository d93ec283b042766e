"""Rewards with ``place: ray``: the same numbers as here, whatever happens to the workers."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.scoring import Scorer
from tests.fixtures import waiting

FILE = Path(__file__).parents[1] / "fixtures" / "ray_rewards.py"
COUNT = 12
MEDIA = torch.rand(COUNT, 3, 4, 4, generator=torch.Generator().manual_seed(0))
PROMPTS = [{"text": "x", "number": i} for i in range(COUNT)]
TRUE = MEDIA.flatten(1).mean(1)


@pytest.fixture
def placed():
    """Makes a scorer of one reward with ``place: ray``, and ends its workers afterwards."""
    scorers = []

    def make(function, **options):
        spec = {f"{FILE}:{function}": {"place": "ray", "worker_cpus": 0.5, **options}}
        (weighted,) = build_rewards(spec).values()
        scorers.append(Scorer({"r": weighted.reward}))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.rewards["r"].reward.close()


def values(scorer):
    return scorer(MEDIA, PROMPTS)["r"]


def calls(folder):
    """The prompts of every call."""
    return [path.name.split("_")[1] for path in folder.iterdir()]


def test_workers_score_every_sample_once_and_as_it_is_scored_here(cluster, placed, tmp_path):
    scorer = placed("brightness", workers=2, batch_size=3, folder=str(tmp_path))
    assert torch.equal(values(scorer), TRUE)
    assert sorted(calls(tmp_path)) == ["0-1-2", "3-4-5", "6-7-8", "9-10-11"]
    assert str(os.getpid()) not in {path.name.split("_")[0] for path in tmp_path.iterdir()}


def test_what_a_reward_raises_is_told_in_its_own_words(cluster, placed):
    scorer = placed("failing", workers=2)
    found = values(scorer)
    odd = torch.arange(COUNT) % 2 == 1
    assert found[odd].isnan().all() and torch.equal(found[~odd], TRUE[~odd])
    assert "ValueError: odd numbers are beyond me" in scorer.failures["r"].cause
    assert "ray_rewards.py" in scorer.failures["r"].cause


def test_a_slow_worker_does_not_stall_the_others(cluster, placed, tmp_path):
    scorer = placed("slow_one", workers=2, batch_size=1, folder=str(tmp_path))
    assert torch.equal(values(scorer), TRUE)
    assert not (tmp_path / "release").exists()
    pool = scorer.rewards["r"].reward.pool
    assert pool.repeated >= 1 and not pool.lost
    (tmp_path / "release").touch()  # its late answer is not taken for one of the next call
    assert torch.equal(scorer(1 - MEDIA, PROMPTS)["r"], (1 - MEDIA).flatten(1).mean(1))


def test_a_worker_that_dies_is_replaced_and_its_samples_are_scored(cluster, placed, tmp_path):
    scorer = placed("suicidal", workers=2, batch_size=3, folder=str(tmp_path))
    assert torch.equal(values(scorer), TRUE)
    pool = scorer.rewards["r"].reward.pool
    # its death may be noticed after another has done its work
    waiting.until(lambda: torch.equal(values(scorer), TRUE) and pool.lost)
    assert len(pool.lost) == 1 and len(pool.members) == 2


def test_samples_that_end_every_worker_are_an_error_with_its_last_output(cluster, placed, tmp_path):
    scorer = placed("suicidal", workers=1, folder=str(tmp_path), always=True)
    with pytest.raises(UserError, match="3 workers have died of the same samples") as caught:
        values(scorer)
    assert "the last words of a reward" in str(caught.value)


def test_a_node_that_dies_in_the_middle_loses_no_sample(cluster, placed, tmp_path):
    scorer = placed("patient", workers=3, worker_cpus=0.3, batch_size=2, folder=str(tmp_path))
    pool = scorer.rewards["r"].reward.pool
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(values, scorer)
        waiting.until(lambda: len(list(tmp_path.glob("call-*"))) >= 2 and all_placed(pool))
        head = cluster.head_node.node_id
        (lost, *_) = [m.place.node for m in pool.members if m.place.node != head]
        (node,) = [node for node in cluster.worker_nodes if node.node_id == lost]
        cluster.remove_node(node, allow_graceful=False)
        (tmp_path / "release").touch()
        assert torch.equal(future.result(), TRUE)
    # by those that are left, and one that is new
    waiting.until(lambda: torch.equal(values(scorer), TRUE) and pool.lost)
    assert all(member.place is None or member.place.node != lost for member in pool.members)


def all_placed(pool):
    return all(member.place is not None for member in pool.members)
