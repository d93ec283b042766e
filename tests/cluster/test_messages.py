"""What can be wrong is one sentence before anything is loaded; and what needs no cluster."""

import socket
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from mmrl.apps.ray import connection
from mmrl.apps.ray.output import LastLines, where
from mmrl.apps.ray.parcels import opened, packed
from mmrl.apps.ray.rewards import check_card, parts_of
from mmrl.apps.ray.rollouts import edges, misfits
from mmrl.config import build_rewards
from mmrl.config.building import resolve_rewards, unplaceable
from mmrl.config.values import Place
from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.core.registry import REWARDS
from mmrl.core.types import Completion
from mmrl.experiment.build import read
from rewards.card import Card

PLACED = {"jpeg_compressibility": {"place": "ray"}}


def installed(monkeypatch, number):
    def version(name):
        if number is None:
            raise PackageNotFoundError(name)
        return number

    monkeypatch.setattr(connection, "version", version)


def test_ray_absent_or_of_another_version_or_not_starting_is_a_sentence(monkeypatch):
    for number, message in (
        (None, r"Ray is not installed.*pip install 'multimodal-rl\[ray\]'"),
        ("2.59.1", r"Ray 2\.59\.1 is installed, and mmrl works with Ray 2\.60"),
    ):
        installed(monkeypatch, number)
        with pytest.raises(UserError, match=message):
            connection.join()
        (entry,) = resolve_rewards(PLACED, REWARDS, Place.of("reward"), []).items()
        (problem,) = unplaceable(*entry)  # found by the check of a configuration, too
        assert problem.startswith("reward.jpeg_compressibility: Ray ")

    def init(**_):  # on a busy machine: Ray raises Exception itself
        raise Exception("The current node timed out during startup.\n\nThis could happen")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    installed(monkeypatch, "2.60.0")
    connection.check_version()
    monkeypatch.setattr(connection.importlib, "import_module", lambda name: ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="could not be started on this machine: The current node"):
        connection.join()


@pytest.mark.ray
def test_no_cluster_at_the_address(monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (multimodal-rl[ray])")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match=f"no Ray cluster can be joined at {address}.*ray start"):
        connection.join(address)
    with pytest.raises(UserError, match="expected host:port.*got '10.0.0.1'"):
        connection.join("10.0.0.1")


def test_a_place_that_does_not_fit_is_a_sentence():
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}] * 3
    three = SimpleNamespace(nodes=lambda: nodes)  # all that is asked of the module ray
    connection.check_fit(three, [{"CPU": 1}] * 12, "this run")
    for wanted, sentence in (
        ([{"GPU": 8}], "this run needs 8 GPUs, and the Ray cluster has 0 on 3"),
        ([{"CPU": 1}] * 13, "needs 13 CPUs"),
        ([{"CPU": 6}], "needs 6 CPUs on one node, and the largest has 4"),
    ):
        with pytest.raises(UserError, match=sentence):
            connection.check_fit(three, wanted, "this run")


def test_options_of_workers_belong_to_a_place():
    for options, sentence in (
        ({"workers": 2}, "add `place: ray`"),
        ({"place": "ray", "offload": True}, "offload makes room"),
    ):
        with pytest.raises(UserError, match=sentence):
            build_rewards({"jpeg_compressibility": options})
    with pytest.raises(UserError, match="all samples of an iteration in one call"):
        check_card("r", Card(of="batch"))


CORRECTED = "objective.policy_gradient.importance_sampling={mode: mask}"


@pytest.mark.parametrize(
    "changes, message",
    [
        (["staleness=1"], "ray.staleness: the trainers sample themselves"),
        (["rollout_workers=3", "ray.trainers=2"], "shared evenly by 2 trainers"),
        (["rollout_workers=1", "ray.staleness=1"], "importance_sampling, such as"),
        (
            ["rollout_workers=1", "ray.staleness=1", "train.dynamic_sampling_rounds=1"],
            "train.dynamic_sampling_rounds: it does not work with sampling ahead",
        ),
        (["rollout_workers=1"], ""),
        (["rollout_workers=1", "ray.staleness=1", CORRECTED], ""),
    ],
)
def test_what_workers_cannot_do_is_said(changes, message):
    configuration = read(find_config("digits/flow_grpo"), [f"ray.{changes[0]}", *changes[1:]])
    text = "\n".join(misfits(configuration))
    assert message in text and bool(message) == bool(text)


def test_a_batch_is_cut_into_whole_groups_and_whole_passes():
    prompts = [{"group": row // 3} for row in range(12)]
    whole = parts_of(prompts, workers=2, rows=4, whole_groups=True)
    assert [(part.start, part.stop) for part in whole] == [(0, 6), (6, 12)]
    plain = parts_of(prompts, workers=2, rows=None, whole_groups=False)
    assert [part.stop - part.start for part in plain] == [3, 3, 3, 3]
    assert edges(15, 16, 80, 2) == [0, 5, 10, 15]  # 80 rows a pass are five prompts of 16
    assert edges(4, 4, 8, 2) == [0, 2, 4]
    assert edges(5, [1, 2, 3, 1, 1], 8, 2) == [0, 5]


def test_a_completion_travels_with_all_that_a_reward_may_ask():
    answer = Completion("ab", 2, True, -0.5, 0.25, 8, lambda: ["a", "ab"])
    answer.question_gain = 0.125
    answer.last_logprob = -1.5
    parcel = packed([answer, "plain"], [{}, {}], slice(0, 2), spelled=True)
    (arrived, plain), _ = opened(parcel)
    assert arrived == "ab" and plain == "plain" and arrived.spell() == ["a", "ab"]
    for name in ("tokens", "finished", "logprob", "self_certainty", "question_gain", "limit"):
        assert getattr(arrived, name) == getattr(answer, name)
    assert arrived.last_logprob == -1.5
    media = torch.rand(4, 3, 2, 2)
    parcel = packed(media, [{}] * 4, slice(1, 3), spelled=False)
    assert torch.equal(parcel.media, media[1:3])
    assert parcel.media.untyped_storage().nbytes() == media[1:3].nbytes  # not the whole batch


def test_a_worker_is_named_with_its_last_lines(monkeypatch):
    monkeypatch.setattr("mmrl.apps.ray.output.SETTLE", 0.0)
    lines = LastLines()
    for number in range(30):
        lines.hear({"pid": "7", "ip": "10.0.0.1", "lines": [f"line {number}", " "]})
    lines.hear({"pid": "8", "ip": "10.0.0.1", "lines": ["another"]})
    text = lines.of(f"a worker {where(7, '10.0.0.1')} has died")
    assert "line 29" in text and "line 10" in text and "line 9\n" not in text
    assert "another" not in text and lines.of("nobody") == ""
