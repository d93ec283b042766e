"""The remote reward, against real and misbehaving servers on loopback."""

from __future__ import annotations

import importlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.scoring import Scorer
from rewards import Remote, jpeg_compressibility
from rewards.card import PICTURES, Card
from tests.fixtures import waiting
from tests.fixtures.reward_servers import (
    answering,
    dripping,
    eighth,
    free_port,
    mean,
    numbers,
    ones,
    read_all,
    saying,
    send_ok,
    serving,
    silence,
    words,
)
from tests.fixtures.tiny_rewards import asked, pictures, save_tiny_clip

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------------------------------------- the
# same numbers


@pytest.mark.parametrize("kind", ["png", "webp", "tensor"])
def test_pictures_of_eight_bits_score_the_same_to_the_last_bit(url, kind):
    media = eighth(pictures(7))
    for name, local in {"mean": mean, "jpeg": jpeg_compressibility}.items():
        remote = Remote(url, name=name, format=kind, batch_size=3)
        assert torch.equal(remote(media, asked(7)), torch.as_tensor(local(media, asked(7))))
    video = eighth(torch.stack([pictures(5), pictures(5, seed=3)], 1))
    remote = Remote(url, name="jpeg", format=kind, batch_size=2)
    assert torch.equal(remote(video, asked()), jpeg_compressibility(video, asked()))


def test_floats_are_rounded_by_png_and_not_by_tensor(url):
    media = pictures(6)
    assert torch.equal(
        Remote(url, name="mean", format="tensor")(media, asked(6)), mean(media, None)
    )
    through_png = Remote(url, name="mean")(media, asked(6))
    assert torch.equal(through_png, mean(eighth(media), None))
    assert 0 < (through_png - mean(media, None)).abs().max() <= 0.5 / 255
    half = media.half()
    assert torch.equal(
        Remote(url, name="mean", format="tensor")(half, asked(6)), mean(half.float(), None)
    )


def test_a_model_scores_the_same_at_a_distance(tmp_path):
    local = REWARDS.build(
        "clip_score", model=save_tiny_clip(tmp_path / "clip"), device="cpu", preprocess="pil"
    )
    with serving({"clip_score": local}) as address:
        media = eighth(pictures(5))
        torch.testing.assert_close(
            Remote(address, retry_seconds=0, batch_size=2)(media, asked()),
            local(media, asked()),
            rtol=0,
            atol=1e-6,
        )
        with pytest.raises(UserError, match="needs a"):
            Remote(address)(media, [{}] * 5)


def test_without_a_name_it_is_the_weighted_sum(url):
    media = eighth(pictures(4))
    prompts = [{"text": "a", "n": i} for i in range(4)]
    values = Remote(url, batch_size=3)(media, prompts)
    expected = (
        0.5 * mean(media, None) + torch.arange(4.0) + 0.1 * jpeg_compressibility(media, prompts)
    )
    torch.testing.assert_close(values, expected)


def test_texts_and_samples_without_a_value(url):
    with serving({"words": words}) as address:
        texts = [
            "one",
            "one two",
            "\ud83d\ude00 drei vier \u00e4".encode("utf-16", "surrogatepass").decode("utf-16"),
        ]
        assert Remote(address, retry_seconds=0, batch_size=2)(texts, [{}] * 3).tolist() == [1, 2, 4]
    prompts = [{"n": 0}, {"odd": True}, {"broken": True}, {}]
    values = Remote(url, name="picky")(pictures(4), prompts)
    assert values.isnan().tolist() == [False, True, True, False] and values[0] == 1
    media = pictures(4)
    media[1, 0, 0, 0] = torch.nan
    for kind in ("png", "tensor"):
        values = Remote(url, name="mean", format=kind)(media, prompts)
        assert values.isnan().tolist() == [False, True, False, False]
    with pytest.raises(UserError, match="no value for 2 of 4 samples"):
        Remote(url, name="picky", on_failure="stop")(pictures(4), prompts)


def test_prompts_that_json_cannot_hold_are_named_and_can_be_left_at_home(url):
    prompts = [{"n": i, "thing": torch.zeros(3)} for i in range(2)]
    with pytest.raises(UserError, match="cannot hold 'thing' of the prompt"):
        Remote(url, name="numbers")(pictures(2), prompts)
    assert Remote(url, name="numbers", fields=["n"])(pictures(2), prompts).tolist() == [0, 1]


class Seeing:
    """Brightness of the prompt's picture; -1 where none has come."""

    card = Card(pictures=PICTURES)

    def __call__(self, media, prompts):
        images = [
            prompt["image"] if "image" in prompt else (prompt.get("images") or [None])[0]
            for prompt in prompts
        ]
        return [
            -1.0 if image is None else sum(image.resize((1, 1)).getpixel((0, 0))) / 765
            for image in images
        ]


def shapes(texts, prompts):
    """What a text knows of itself."""
    names = ("tokens", "logprob", "self_certainty")
    return [
        sum(getattr(t, n, 0) or 0 for n in names) + 0.5 * getattr(t, "finished", False)
        for t in texts
    ]


def unseeing(media, prompts):
    return [float("image" in prompt or "images" in prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def words_url():
    with serving({"seeing": Seeing(), "shapes": shapes, "unseeing": unseeing}) as address:
        yield address


def test_completions_keep_what_they_know_over_the_wire(words_url):
    from mmrl.core.types import Completion

    texts = [
        Completion("one", 3, True, -0.25, 8.0),
        "plain",
        Completion("two", 7, False, float("nan")),
    ]
    prompts = [{"text": "a"}] * 3
    rewards = Remote(words_url, name="shapes", batch_size=2)(texts, prompts)
    assert rewards.tolist() == [11.25, 0.0, 7.0]
    assert rewards[:2].tolist() == shapes(texts[:2], prompts)


def test_pictures_of_prompts_go_to_those_who_look_at_them(words_url, tmp_path):
    from PIL import Image

    Image.new("RGB", (6, 4), (51, 51, 51)).save(tmp_path / "grey.png")
    prompts = [
        {"text": "a", "image": str(tmp_path / "grey.png")},
        {"text": "b", "images": [Image.new("RGB", (2, 2), "white")]},
        {"text": "c"},
    ]
    assert Remote(words_url, name="seeing")(["x"] * 3, prompts).tolist() == pytest.approx(
        [0.2, 1.0, -1.0]
    )
    assert Remote(words_url, name="unseeing")(["x"] * 3, prompts).tolist() == [0, 0, 0]
    assert Remote(words_url, name="unseeing", fields=["image"])(["x"] * 3, prompts).tolist() == [
        1,
        0,
        0,
    ]
    with pytest.raises(UserError, match="cannot read a picture of a prompt: .*nowhere.png"):
        Remote(words_url, name="seeing")(["x"], [{"text": "a", "image": "nowhere.png"}])


def test_pictures_and_marks_that_are_none_are_refused_by_name(words_url):
    for body, field, says in (
        ({"prompts": [{"image": "/etc/passwd"}]}, "prompts", "expected {"),
        ({"prompts": [{"images": [{"png": "!"}]}]}, "prompts", "is not base64"),
        ({"prompts": [{"images": [{"png": "AAAA"}]}]}, "prompts", "cannot be read as PNG"),
        ({"prompts": [{}], "marks": [1]}, "marks", "expected null or"),
        ({"prompts": [{}], "marks": []}, "marks", "expected a list of 1"),
        ({"prompts": [{}], "marks": [{"tokens": True}]}, "marks", "expected null or"),
    ):
        sent = {"texts": ["x"], "rewards": ["shapes"], **body}
        answer = waiting.post(f"{words_url}/score", json=sent)
        assert answer.status_code == 400 and answer.json()["field"] == field, body
        assert says in answer.json()["error"], body


# -------------------------------------------------------------------------------------------
# servers that fail


def test_a_dead_server_is_named_once_and_its_share_goes_to_the_other(url, caplog):
    dead = f"http://127.0.0.1:{free_port()}"
    remote = Remote([dead, url], name="numbers", batch_size=2, backoff=0.01)
    media = pictures(20)
    prompts = [{"n": i} for i in range(20)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert remote(media, prompts).tolist() == list(range(20))
    (warning,) = [record.getMessage() for record in caplog.records if dead in record.getMessage()]
    assert "refused" in warning and f"its share goes to {url}" in warning
    assert (
        remote.servers[0].dead
        and remote.servers[0].failures >= 1
        and remote.servers[1].failures == 0
    )


@pytest.fixture
def only_patient_with(monkeypatch):
    """Give every request to another address than these all the time it needs: who answers is never
    cut off."""
    module = importlib.import_module("rewards.servers.remote")
    post = module.post

    def choose(*short):
        def patient(client, url, content, count, timeout):
            return post(client, url, content, count, timeout if url in short else waiting.HANG)

        monkeypatch.setattr(module, "post", patient)

    return choose


@pytest.mark.parametrize("reply", [silence, dripping])
def test_a_slow_server_costs_one_time_out(url, reply, caplog, only_patient_with):
    with answering(reply) as slow:
        only_patient_with(slow)
        remote = Remote(
            [slow, url], name="numbers", batch_size=2, timeout=0.6, concurrency=2, cooldown=1e9
        )
        values = remote(pictures(12), [{"n": i} for i in range(12)])
        assert values.tolist() == list(range(12)) and remote.servers[0].silent
        # those that were on their way when the first ran out of time
        assert remote.servers[0].requests <= 3
        asked_before = remote.servers[0].requests
        remote(pictures(4), [{"n": i} for i in range(4)])
        assert remote.servers[0].requests == asked_before  # left alone for a while
    assert f"{slow} failed: no" in caplog.text and "within 0.6 s" in caplog.text


def test_nobody_left_is_nan_or_stops(caplog):
    gone = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    remote = Remote(gone, retry_seconds=0, batch_size=1, retries=1, backoff=0.01)
    assert remote(pictures(6), asked(6)).isnan().all()
    assert all(address in caplog.text for address in gone)
    with pytest.raises(UserError, match="no value for 6 of 6 samples") as error:
        Remote(gone, retry_seconds=0, batch_size=1, retries=0, on_failure="stop")(
            pictures(6), asked(6)
        )
    assert gone[0] in str(error.value)
    with pytest.raises(UserError, match="'remote' could not score 4 of 6"):
        Scorer({"remote": remote})(pictures(6), asked(6))


def test_one_slow_request_does_not_make_a_server_dead(monkeypatch):
    """One request runs out of time, after others that were sent later have been answered."""
    module = importlib.import_module("rewards.servers.remote")
    post = module.post
    first = threading.Semaphore(1)
    with answering(ones) as address, answering(silence) as nobody:

        def send(client, url, parts, count, timeout):
            if not first.acquire(blocking=False):
                return post(client, url, parts, count, timeout)
            waiting.until(lambda: remote.servers[0].answered)
            return post(client, nobody, parts, count, 0.2)

        monkeypatch.setattr(module, "post", send)
        remote = Remote(
            address,
            retry_seconds=0,
            batch_size=1,
            concurrency=2,
            timeout=waiting.HANG,
            backoff=0.01,
        )
        assert remote(pictures(10), asked(10)).tolist() == [1.0] * 10
        assert remote.servers[0].failures == 1 and remote.servers[0].requests == 11


def test_a_server_that_comes_back_is_asked_again(url):
    with serving({"numbers": numbers}) as address:
        port = int(address.rpartition(":")[2])
        remote = Remote([address, url], name="numbers", batch_size=1, cooldown=0, backoff=0.01)
        prompts = [{"n": i} for i in range(8)]
        assert remote(pictures(8), prompts).tolist() == list(range(8))
    assert remote(pictures(8), prompts).tolist() == list(range(8)) and remote.servers[0].dead
    with serving({"numbers": numbers}, port=port):
        assert (
            remote(pictures(8), prompts).tolist() == list(range(8)) and not remote.servers[0].dead
        )


def test_one_of_two_dies_in_the_middle():
    """The first answers three requests, then only hangs up; the second answers none before that."""
    answered = []
    died = threading.Event()

    def dying(media, prompts):
        answered.append(len(prompts))
        return numbers(media, prompts)

    def patient(media, prompts):
        assert died.wait(waiting.HANG)
        return numbers(media, prompts)

    with serving({"numbers": dying}) as real, serving({"numbers": patient}) as second:
        left = threading.Semaphore(3)

        def reply(connection):
            headers, body = read_all(connection)
            if not body:
                return  # it was asked what it takes
            if not left.acquire(blocking=False):
                died.set()
                return  # it hangs up
            kind = {"content-type": headers[b"content-type"].decode()}
            send_ok(connection, waiting.post(f"{real}/score", content=body, headers=kind).content)

        with answering(reply) as first:
            remote = Remote(
                [first, second], name="numbers", batch_size=1, concurrency=2, backoff=0.01
            )
            assert remote(pictures(24), [{"n": i} for i in range(24)]).tolist() == list(range(24))
            assert (
                sum(answered) == 3
                and remote.servers[0].failures >= 1
                and remote.servers[1].failures == 0
            )


def test_a_server_that_restarts_is_waited_for_and_one_that_stays_away_is_named(caplog):
    """Requests while the server is down get their values once it is back; without patience they
    get none, and the scorer's message says why."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    patient = Remote(address, name="numbers", batch_size=2, backoff=0.01, retry_seconds=1e6)
    asked_ones = [{"n": i} for i in range(6)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(patient, pictures(6), asked_ones)
        waiting.until(lambda: patient.servers[0].failures > 3 * (1 + patient.retries))
        with serving({"numbers": numbers}, port=port):
            assert done.result(waiting.HANG).tolist() == list(range(6))
    assert f"{address} failed: ConnectError: connection refused; waiting for it" in caplog.text
    assert f"{address} answers again" in caplog.text
    hasty = Remote(address, name="numbers", backoff=0.01, retry_seconds=0.2)
    with pytest.raises(
        UserError, match=r"it returned NaN, also when called again \(http.*connection refused\)"
    ):
        Scorer({"remote": hasty})(pictures(6), asked_ones)
    requests = hasty.servers[0].requests
    assert hasty(pictures(6), asked_ones).isnan().all()
    assert hasty.servers[0].requests <= requests + 1 + hasty.retries, "it has waited already"


def test_a_full_server_is_waited_for():
    """Five requests at once of which the server takes one at a time: all have their values, though
    none may be repeated after a failure."""
    with serving({"numbers": numbers}, max_waiting=1) as address:
        remote = Remote(address, name="numbers", batch_size=1, concurrency=5, retries=0, backoff=0)
        count = 10
        asked_ones = [{"n": i} for i in range(count)]
        assert remote(pictures(count), asked_ones).tolist() == list(range(count))


@pytest.mark.parametrize(
    "limits", [{"max_samples": 3}, {"max_megapixels": 0.002}, {"max_request_mib": 0.004}]
)
def test_batches_are_cut_by_what_the_server_takes(limits):
    """10 noisy pictures of 24 x 24: a server that takes fewer in one request gets them in parts."""
    torch.manual_seed(0)
    media = torch.rand(10, 3, 24, 24)
    asked_ones = [{"n": i} for i in range(10)]
    with serving({"numbers": numbers}, **limits) as address:
        remote = Remote(address, name="numbers")
        assert remote(media, asked_ones).tolist() == list(range(10))
        assert remote.servers[0].requests >= 3


LIES = {
    "not JSON": "hello",
    "a list": "[1, 2]",
    "too few": '{"rewards": {"r": [1.0]}, "weights": {"r": 1}}',
    "text": '{"rewards": {"r": [1.0, "2"]}, "weights": {"r": 1}}',
    "truth": '{"rewards": {"r": [1.0, true]}, "weights": {"r": 1}}',
    "NaN": '{"rewards": {"r": [1.0, NaN]}, "weights": {"r": 1}}',
    "infinity": '{"rewards": {"r": [1.0, 1e999]}, "weights": {"r": 1}}',
    "another reward": '{"rewards": {"q": [1.0, 2.0]}, "weights": {"q": 1}}',
    "nothing": '{"rewards": {}, "weights": {}}',
    "no weights": '{"rewards": {"r": [1.0, 2.0]}}',
    "deep": "[" * 100_000,
    "endless": " " * 2_000_000,
}


def test_no_number_comes_out_of_a_malformed_answer(caplog):
    for lie, answer in LIES.items():
        with answering(saying("200 OK", answer)) as liar:
            remote = Remote(liar, retry_seconds=0, name="r", retries=1, backoff=0.0)
            assert remote(pictures(2), asked(2)).isnan().all(), lie
            assert remote.servers[0].failures == 2 and liar in caplog.text, lie


def test_errors_that_may_pass_are_repeated_and_others_stop(caplog):
    with answering(saying("500 Oh", '{"error": "out of\\nmemory"}')) as broken:
        remote = Remote(broken, retry_seconds=0, retries=2, backoff=0.0)
        assert remote(pictures(2), asked(2)).isnan().all() and remote.servers[0].requests == 3
        assert caplog.text.count("500, out of\\nmemory") == 1
    for status, says in {
        "401 No": "refused the token",
        "413 Big": "lower `batch_size`",
        "302 Go": "refused",
    }.items():
        with answering(saying(status, "{}")) as address, pytest.raises(UserError, match=says):
            Remote(address)(pictures(2), asked(2))


def test_what_is_no_address_is_refused():
    hosts = "127.0.0.1:80 ftp://x http:// http://u:p@x http://x?y=1 http://x:99999".split()
    for bad in (*hosts, "http://\u2603.\u0000"):
        with pytest.raises(UserError, match="is not the address of a reward server"):
            Remote(bad)
    with pytest.raises(UserError, match="at least one server"):
        Remote([])
    with pytest.raises(UserError, match="printable ASCII"):
        Remote("http://x", token="a\nb")
