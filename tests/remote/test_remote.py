"""The remote reward, against real and misbehaving servers on loopback."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from mmrl.apps.ray.workers import RewardWorker, Surroundings
from mmrl.apps.serve.lanes import Job
from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.core.media.sound import sound_of, with_sound
from mmrl.core.registry import REWARDS
from mmrl.scoring import Handled, Handling, Scorer
from mmrl.scoring.returned import does_not_apply
from rewards import Remote, jpeg_compressibility
from rewards.card import PICTURES, Card, card
from rewards.servers.wire import read_answer
from tests.fixtures import waiting
from tests.fixtures.reward_servers import (
    answering,
    b64,
    dripping,
    eighth,
    free_port,
    mean,
    numbers,
    png,
    saying,
    serving,
    silence,
    words,
)
from tests.fixtures.tiny_rewards import asked, pictures
from tests.fixtures.tiny_sounds import save_clap, sounding


@pytest.mark.parametrize("kind", ["png", "webp", "tensor"])
def test_pictures_of_eight_bits_score_the_same_to_the_last_bit(url, kind):
    media = eighth(pictures(7))
    video = eighth(torch.stack([pictures(5), pictures(5, seed=3)], 1))
    for name, local, samples in (
        ("mean", mean, media),
        ("jpeg", jpeg_compressibility, media),
        ("jpeg", jpeg_compressibility, video),
    ):
        prompts = asked(len(samples))
        remote = Remote(url, name=name, format=kind, batch_size=3)
        assert torch.equal(remote(samples, prompts), torch.as_tensor(local(samples, prompts)))


def test_floats_are_rounded_by_png_and_not_by_tensor(url):
    media = pictures(6)
    exact = Remote(url, name="mean", format="tensor")
    for each in (media, media.half()):
        assert torch.equal(exact(each, asked(6)), mean(each.float(), None))
    through_png = Remote(url, name="mean")(media, asked(6))
    assert torch.equal(through_png, mean(eighth(media), None))
    assert 0 < (through_png - mean(media, None)).abs().max() <= 0.5 / 255


def test_a_configuration_without_a_name_is_the_weighted_sum(url):
    media = eighth(pictures(4))
    prompts = [{"text": "a", "n": i} for i in range(4)]
    remote = build_rewards({"remote": {"url": url, "batch_size": 3, "weight": 2}})["remote"]
    jpeg = jpeg_compressibility(media, prompts)
    expected = 0.5 * mean(media, None) + torch.arange(4.0) + 0.1 * jpeg
    torch.testing.assert_close(remote.reward(media, prompts), expected)
    assert remote.weight == 2


def test_texts_and_samples_without_a_value(url):
    with serving({"words": words}) as address:
        texts = ["one", "one two", "\U0001f600 drei vier \u00e4"]
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
        images = [([p["image"]] if "image" in p else p.get("images", [])) for p in prompts]
        return [sum(i[0].resize((1, 1)).getpixel((0, 0))) / 765 if i else -1.0 for i in images]


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
    Image.new("RGB", (6, 4), (51, 51, 51)).save(tmp_path / "grey.png")
    prompts = [
        {"text": "a", "image": str(tmp_path / "grey.png")},
        {"text": "b", "images": [Image.new("RGB", (2, 2), "white")]},
        {"text": "c"},
    ]
    for options, values in (
        ({"name": "seeing"}, [0.2, 1.0, -1.0]),
        ({"name": "unseeing"}, [0, 0, 0]),
        ({"name": "unseeing", "fields": ["image"]}, [1, 0, 0]),
    ):
        found = Remote(words_url, **options)(["x"] * 3, prompts)
        assert found.tolist() == pytest.approx(values)
    with pytest.raises(UserError, match="cannot read a picture of a prompt: .*nowhere.png"):
        Remote(words_url, name="seeing")(["x"], [{"text": "a", "image": "nowhere.png"}])


# servers that fail


def test_a_dead_server_is_named_once_and_its_share_goes_to_the_other(url, caplog):
    dead = f"http://127.0.0.1:{free_port()}"
    remote = Remote([dead, url], name="numbers", batch_size=2, backoff=0.01)
    prompts = [{"n": i} for i in range(20)]
    for _ in range(3):
        assert remote(pictures(20), prompts).tolist() == list(range(20))
    (warning,) = [record.getMessage() for record in caplog.records if dead in record.getMessage()]
    assert "refused" in warning and f"its share goes to {url}" in warning
    first, second = remote.servers
    assert first.dead and first.failures >= 1 and second.failures == 0


@pytest.mark.parametrize("reply", [silence, dripping])
def test_a_slow_server_costs_one_time_out(url, reply, caplog, monkeypatch):
    module = importlib.import_module("rewards.servers.remote")
    post = module.post
    with answering(reply) as slow:

        def patient(client, url, content, count, timeout):
            """Who answers is never cut off."""
            return post(client, url, content, count, timeout if url == slow else waiting.HANG)

        monkeypatch.setattr(module, "post", patient)
        options = {"batch_size": 2, "timeout": 0.2, "concurrency": 2, "cooldown": 1e9}
        remote = Remote([slow, url], name="numbers", **options)
        values = remote(pictures(12), [{"n": i} for i in range(12)])
        first = remote.servers[0]
        assert values.tolist() == list(range(12)) and first.silent
        asked_before = first.requests
        assert asked_before <= 3  # those that were on their way when the first ran out of time
        remote(pictures(4), [{"n": i} for i in range(4)])
        assert first.requests == asked_before  # left alone for a while
    assert f"{slow} failed: no" in caplog.text and "within 0.2 s" in caplog.text


def test_nobody_left_is_nan_or_stops(caplog):
    gone = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    options = {"retry_seconds": 0, "batch_size": 1, "retries": 1, "backoff": 0.01}
    remote = Remote(gone, **options)
    assert remote(pictures(6), asked(6)).isnan().all()
    assert all(address in caplog.text for address in gone)
    with pytest.raises(UserError, match=f"no value for 6 of 6 samples.*{gone[0]}"):
        Remote(gone, on_failure="stop", **options)(pictures(6), asked(6))
    with pytest.raises(UserError, match="'remote' could not score 4 of 6"):
        Scorer({"remote": remote})(pictures(6), asked(6))


def test_a_server_that_restarts_is_waited_for_and_one_that_stays_away_is_named(caplog):
    """Without patience requests get no value, and the scorer's message says why."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    patient = Remote(address, name="numbers", batch_size=2, backoff=0.01, retry_seconds=1e6)
    prompts = [{"n": i} for i in range(6)]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(patient, pictures(6), prompts)
        waiting.until(lambda: patient.servers[0].failures > 3 * (1 + patient.retries))
        with serving({"numbers": numbers}, port=port):
            assert done.result(waiting.HANG).tolist() == list(range(6))
    assert f"{address} failed: ConnectError: connection refused; waiting for it" in caplog.text
    assert f"{address} answers again" in caplog.text
    hasty = Remote(address, name="numbers", backoff=0.01, retry_seconds=0.2)
    says = r"it returned NaN, also when called again \(http.*connection refused\)"
    with pytest.raises(UserError, match=says):
        Scorer({"remote": hasty})(pictures(6), prompts)
    requests = hasty.servers[0].requests
    assert hasty(pictures(6), prompts).isnan().all()
    assert hasty.servers[0].requests <= requests + 1 + hasty.retries, "it has waited already"


def test_a_full_server_is_waited_for():
    """Three requests at once of which the server takes one at a time: all have their values,
    though none may be repeated after a failure."""
    with serving({"numbers": numbers}, max_waiting=1) as address:
        remote = Remote(address, name="numbers", batch_size=1, concurrency=3, retries=0, backoff=0)
        assert remote(pictures(5), [{"n": i} for i in range(5)]).tolist() == list(range(5))


def test_batches_are_cut_by_what_the_server_takes(subtests):
    """10 noisy pictures of 24 x 24: a server that takes fewer in one request gets them in parts."""
    media = torch.rand(10, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    for limits in ({"max_samples": 3}, {"max_megapixels": 0.002}, {"max_request_mib": 0.004}):
        with subtests.test(limits=limits), serving({"numbers": numbers}, **limits) as address:
            remote = Remote(address, name="numbers")
            assert remote(media, [{"n": i} for i in range(10)]).tolist() == list(range(10))
            assert remote.servers[0].requests >= 3


def test_errors_that_may_pass_are_repeated_and_others_stop(caplog):
    with answering(saying("500 Oh", '{"error": "out of\\nmemory"}')) as broken:
        remote = Remote(broken, retry_seconds=0, retries=2, backoff=0.0)
        assert remote(pictures(2), asked(2)).isnan().all() and remote.servers[0].requests == 3
        assert caplog.text.count("500, out of\\nmemory") == 1
    for status, says in (
        ("401 No", "refused the token"),
        ("413 Big", "lower `batch_size`"),
        ("302 Go", "refused"),
    ):
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


# sub-scores and what does not apply


LETTERS = ["a", "bb", "ccc", "dddd", "eeeee"]


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
def returned():
    with serving({"subs": subs, "whole": whole}) as address:
        yield address


def test_none_and_sub_scores_come_over_the_wire(returned):
    far = Scorer({"r": Remote(returned, name="subs", batch_size=2)})
    near = Scorer({"r": subs})
    groups = [0, 0, 1, 1, 1]
    values = [scorer(LETTERS, asked(5), groups)["r"] for scorer in (far, near)]
    assert torch.equal(*values) and values[0].isfinite().all() and not far.failures
    for scorer in (far, near):
        scorer.remember()
    assert far.sub_scores() == near.sub_scores() == {"r/size": [15.0, 5.0]}


def test_a_sum_leaves_out_what_does_not_apply(returned):
    values, parts = Remote(returned)(LETTERS, asked(5))
    assert values.tolist() == pytest.approx([0.2, 0.2, 0.6, 0.4, 1.0])
    assert {key: tuple(sums) for key, sums in parts.items()} == {"subs/size": (15.0, 5.0)}


def test_an_answer_that_makes_no_sense_is_refused(subtests):
    for more in (
        '"does_not_apply": {"a": [7]}',
        '"does_not_apply": {"a": 3}',
        '"does_not_apply": [1]',
        '"sub_scores": {"a": {"x": [1]}}',
        '"sub_scores": {"a": {"x": [1e999, 1]}}',
        '"sub_scores": {"a": [1]}',
    ):
        content = f'{{"ids": ["i"], "rewards": {{"a": [1.0]}}, "weights": {{"a": 1.0}}, {more}}}'
        says = pytest.raises(ValueError, match="answer|numbers|sub-score")
        with subtests.test(more=more), says:
            read_answer(content.encode(), ["a"], ["i"])


def test_a_worker_elsewhere_says_them_too(monkeypatch):
    worker = RewardWorker(Surroundings("", ""), "", b"")
    worker.reward = Handled.of(subs, Handling(), "subs")

    opened = "mmrl.apps.ray.parcels.opened"
    monkeypatch.setattr(opened, lambda parcel: (LETTERS, asked(5)))
    reply = worker.work(None)
    values = torch.from_numpy(reply.values.copy())
    assert does_not_apply(values).tolist() == [False, True, False, True, False]
    assert reply.parts == {"size": [15.0, 5.0]} and not reply.problem


# sounds


@card(media="video", sound=True)
def pitch(media, prompts):
    """How often the sound of the left changes its sign a second, and where it is loudest."""
    sound, rate = sound_of(media, "pitch")
    changes = (sound[:, 0].diff(dim=-1).sign().diff(dim=-1) != 0).double().mean(-1)
    return (changes * rate + sound.abs().amax((1, 2))).float()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    clap = REWARDS.build("clap", model=save_clap(tmp_path_factory.mktemp("clap")), device="cpu")
    return {"pitch": pitch, "clap": clap, "mean": mean}


@pytest.fixture(scope="module")
def sounds_url(hearing):
    with serving(hearing) as address:
        yield address


@pytest.mark.parametrize(("form", "name"), [("png", "pitch"), ("tensor", "clap")])
def test_a_server_hears_what_the_process_hears(sounds_url, hearing, form, name):
    media = sounding()
    remote = Remote(sounds_url, name=name, format=form, batch_size=2)
    values = remote(media, asked())
    torch.testing.assert_close(values, hearing[name](media, asked()), atol=1e-5, rtol=0)
    assert len(values.unique()) == len(values)


def test_a_sound_that_is_not_finite_has_no_score(sounds_url):
    media = sounding()
    media.sound[1, 0, 3] = torch.nan
    values = Remote(sounds_url, name="clap", retries=0)(media, asked())
    assert values.isnan().tolist() == [False, True, False, False, False]


def test_silent_videos_and_their_rewards(sounds_url):
    silent = sounding() * 1
    rounded = Remote(sounds_url, name="mean")(silent, asked())
    torch.testing.assert_close(rounded, mean(silent, asked()), atol=1e-3, rtol=0)
    with pytest.raises(UserError, match="'pitch' wants videos with their sound"):
        Remote(sounds_url, name="pitch", retries=0)(silent, asked())


def test_unlike_sounds_are_no_batch():
    jobs = [Job(sounding(rate=rate), asked()) for rate in (1000, 1000, 2000)]
    assert jobs[0].like(jobs[1]) and not jobs[0].like(jobs[2])
    assert not jobs[0].like(Job(sounding() * 1, asked()))


def test_what_is_no_sound_is_named_and_what_is_passes(subtests):
    sound = torch.zeros(2, 1, 8)
    media = with_sound(torch.rand(2, 3, 3, 8, 8), sound, 8000)
    videos = {"videos": [[b64(png())] * 3] * 2}
    rates = [
        ({"sampling_rate": rate}, "sampling_rate: expected") for rate in (0, 10**9, None, True)
    ]
    with serving({"mean": mean}, max_megapixels=0.05) as small:
        assert Remote(small, name="mean")(media, asked(2)).isfinite().all()
        for fields, words in [
            ({"sound": b"none"}, "sound: is not a safetensors file with a tensor called sound"),
            ({"sound": save({"other": sound})}, "with a tensor called sound"),
            ({"sound": save({"sound": sound[:1]})}, "[1, 1, 8] is not the sound of 2 videos"),
            ({"sound": save({"sound": sound.long()})}, "expected floats"),
            ({"sound": save({"sound": sound[0]})}, "expected floats"),
            ({"sound": save({"sound": torch.zeros(2, 17, 8)})}, "at most 16 channels"),
            ({"sound": save({"sound": torch.zeros(2, 1, 30_000)})}, "50000 numbers"),
            ({"images": [b64(png())] * 2}, "sound: belongs to videos"),
            *rates,
        ]:
            body = {"sound": save({"sound": sound}), "sampling_rate": 8000} | fields
            body |= {"prompts": [{"text": "a"}] * 2, "sound": b64(body["sound"])}
            body |= {} if "images" in fields else videos
            answer = waiting.post(f"{small}/score", json=body)
            with subtests.test(words=words):
                assert answer.status_code == 400 and words in answer.json()["error"]
