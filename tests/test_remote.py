"""The remote reward and the server it asks, over loopback."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image

from mmrl.lanes import Lane
from mmrl.registry import REWARDS, UserError
from mmrl.scoring import Scorer
from mmrl.serve import load
from mmrl.training import train
from rewards import Remote, jpeg_compressibility
from tests.reward_servers import answering, dripping, free_port, hanging_up, saying, serving, silence
from tests.tiny_rewards import asked, pictures, save_tiny_clip

ROOT = Path(__file__).parents[1]


def mean(media, prompts):
    """Mean of the picture."""
    return media.flatten(1).mean(1)


def words(media, prompts):
    return [float(len(text.split())) for text in media]


def numbers(media, prompts):
    """What each prompt says; the batch it came in does not matter."""
    return [float(prompt["n"]) for prompt in prompts]


def picky(media, prompts):
    """No value for prompts that say so; an exception for others."""
    if any(prompt.get("broken") for prompt in prompts):
        raise RuntimeError("a broken prompt")
    return [float("nan") if prompt.get("odd") else 1.0 for prompt in prompts]


def refusing(media, prompts):
    raise UserError("reward 'refusing' needs images of the moon")


def eighth(media):
    """The nearest 8-bit picture."""
    return (media * 255).round() / 255


@pytest.fixture(scope="module")
def url():
    rewards = {"mean": mean, "numbers": numbers, "picky": picky, "jpeg": jpeg_compressibility}
    with serving(rewards, {"mean": 0.5, "jpeg": 0.1, "picky": 0.0}) as address:
        yield address


def png(picture=None):
    buffer = io.BytesIO()
    Image.fromarray((eighth(pictures(1))[0] * 255).byte().permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue() if picture is None else picture


def b64(data):
    return base64.b64encode(data).decode()


def good(count=2, **changes):
    return {"images": [b64(png())] * count, "prompts": [{"text": "a", "n": i} for i in range(count)], **changes}


# ---------------------------------------------------------------------------------------------- the same numbers


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
    assert torch.equal(Remote(url, name="mean", format="tensor")(media, asked(6)), mean(media, None))
    through_png = Remote(url, name="mean")(media, asked(6))
    assert torch.equal(through_png, mean(eighth(media), None))
    assert 0 < (through_png - mean(media, None)).abs().max() <= 0.5 / 255
    half = media.half()
    assert torch.equal(Remote(url, name="mean", format="tensor")(half, asked(6)), mean(half.float(), None))


def test_a_model_scores_the_same_at_a_distance(tmp_path):
    local = REWARDS.build("clip_score", model=save_tiny_clip(tmp_path / "clip"), device="cpu", preprocess="pil")
    with serving({"clip_score": local}) as address:
        media = eighth(pictures(5))
        torch.testing.assert_close(
            Remote(address, batch_size=2)(media, asked()), local(media, asked()), rtol=0, atol=1e-6
        )
        with pytest.raises(UserError, match="needs a"):
            Remote(address)(media, [{}] * 5)


def test_without_a_name_it_is_the_weighted_sum(url):
    media, prompts = eighth(pictures(4)), [{"text": "a", "n": i} for i in range(4)]
    values = Remote(url, batch_size=3)(media, prompts)
    wanted = 0.5 * mean(media, None) + torch.arange(4.0) + 0.1 * jpeg_compressibility(media, prompts)
    torch.testing.assert_close(values, wanted)


def test_texts_and_samples_without_a_value(url):
    with serving({"words": words}) as address:
        texts = ["one", "one two", "\ud83d\ude00 drei vier \u00e4".encode("utf-16", "surrogatepass").decode("utf-16")]
        assert Remote(address, batch_size=2)(texts, [{}] * 3).tolist() == [1, 2, 4]
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
    prompts = [{"n": i, "image": torch.zeros(3)} for i in range(2)]
    with pytest.raises(UserError, match="cannot hold 'image' of the prompt"):
        Remote(url, name="numbers")(pictures(2), prompts)
    assert Remote(url, name="numbers", fields=["n"])(pictures(2), prompts).tolist() == [0, 1]


def test_through_the_scorer_of_training(url):
    """One iteration of training whose only reward is remote; failures are counted like those of any reward."""
    from mmrl.config import build_rewards

    built = build_rewards({"remote": {"weight": 2.0, "url": url, "name": "picky", "timeout": 10}})
    scorer = Scorer({"remote": built["remote"].reward}, {"remote": built["remote"].weight})
    found = scorer(pictures(4), [{"text": "a"}, {"odd": True, "text": "b"}, {"text": "c"}, {"text": "d"}])
    assert found.total().isnan().tolist() == [False, True, False, False] and found.total()[0] == 2
    assert scorer.failures["remote"].count == 1 and "nan twice" in scorer.failures["remote"].cause


CONFIG = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 3, sde: all_but_last, lora: 2}}
data: {prompts: {path: prompts.txt}}
objective: {grpo: {clip: 1e-3}}
optimizer: {adamw: {lr: 1e-3}}
train: {prompts: 2, copies: 4, batch_size: 4, iterations: 2}
log: {tensorboard: false}
"""


@pytest.mark.slow
def test_training_with_a_remote_reward_is_training_with_the_local_one(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red one\na blue two\n")
    spec = {"near": "jpeg_compressibility", "far": {"remote": {"url": url, "name": "jpeg", "batch_size": 3}}}
    curves = {}
    for name, reward in spec.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(CONFIG + f"reward: {json.dumps(reward)}\nrun: {name}\n")
        run = train(file)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curves[name] = [(line["reward/mean"], line["reward/std"]) for line in lines]
    assert len(curves["far"]) == 2 and curves["far"] == curves["near"]


# ------------------------------------------------------------------------------------------- servers that fail


def test_a_dead_server_is_named_once_and_its_share_goes_to_the_other(url, caplog):
    dead = f"http://127.0.0.1:{free_port()}"
    remote = Remote([dead, url], name="numbers", batch_size=2, backoff=0.01)
    media, prompts = pictures(20), [{"n": i} for i in range(20)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert remote(media, prompts).tolist() == list(range(20))
    (said,) = [record.getMessage() for record in caplog.records if dead in record.getMessage()]
    assert "refused" in said and f"its share goes to {url}" in said
    assert remote.servers[0].dead and remote.servers[0].failures >= 1 and remote.servers[1].failures == 0


@pytest.mark.parametrize("reply", [silence, dripping])
def test_a_slow_server_costs_one_time_out(url, reply, caplog):
    with answering(reply) as slow:
        remote = Remote([slow, url], name="numbers", batch_size=2, timeout=0.6, concurrency=2)
        values = remote(pictures(12), [{"n": i} for i in range(12)])
        assert values.tolist() == list(range(12)) and remote.servers[0].silent
        assert remote.servers[0].requests <= 3  # those that were on their way when the first ran out of time
        asked_before = remote.servers[0].requests
        remote(pictures(4), [{"n": i} for i in range(4)])
        assert remote.servers[0].requests == asked_before  # left alone for a while
    assert f"{slow} failed: no" in caplog.text and "within 0.6 s" in caplog.text


def test_nobody_left_is_nan_or_stops(caplog):
    gone = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    remote = Remote(gone, batch_size=1, retries=1, backoff=0.01)
    assert remote(pictures(6), asked(6)).isnan().all()
    assert all(address in caplog.text for address in gone)
    with pytest.raises(UserError, match="no value for 6 of 6 samples") as error:
        Remote(gone, batch_size=1, retries=0, on_failure="stop")(pictures(6), asked(6))
    assert gone[0] in str(error.value)
    with pytest.raises(UserError, match="'remote' could not score 4 of 6"):
        Scorer({"remote": remote})(pictures(6), asked(6))


def test_a_silent_lone_server_costs_one_time_out_however_many_requests():
    with answering(silence) as slow:
        remote = Remote(slow, batch_size=1, timeout=0.3, concurrency=2, retries=3)
        assert remote(pictures(20), asked(20)).isnan().all()
        assert remote.servers[0].requests <= 4


def test_a_server_that_comes_back_is_asked_again(url):
    with serving({"numbers": numbers}) as address:
        port = int(address.rpartition(":")[2])
        remote = Remote([address, url], name="numbers", batch_size=1, cooldown=0, backoff=0.01)
        prompts = [{"n": i} for i in range(8)]
        assert remote(pictures(8), prompts).tolist() == list(range(8))
    assert remote(pictures(8), prompts).tolist() == list(range(8)) and remote.servers[0].dead
    with serving({"numbers": numbers}, port=port):
        assert remote(pictures(8), prompts).tolist() == list(range(8)) and not remote.servers[0].dead


def test_one_of_two_dies_in_the_middle(url):
    """The first answers three requests, then only hangs up."""
    answered = []

    def dying(media, prompts):
        answered.append(len(prompts))
        return numbers(media, prompts)

    with serving({"numbers": dying}) as real:
        left = threading.Semaphore(3)

        def reply(connection):
            if not left.acquire(blocking=False):
                return hanging_up(connection)
            data = connection.recv(1 << 20)
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(next(r for r in head.lower().split(b"\r\n") if r.startswith(b"content-length")).split(b":")[1])
            while len(body) < length:
                body += connection.recv(1 << 20)
            kind = next(r for r in head.split(b"\r\n") if r.lower().startswith(b"content-type")).split(b": ")[1]
            answer = httpx.post(f"{real}/score", content=body, headers={"content-type": kind.decode()}).content
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer))
            connection.sendall(answer)

        with answering(reply) as first:
            remote = Remote([first, url], name="numbers", batch_size=1, concurrency=2, backoff=0.01)
            assert remote(pictures(24), [{"n": i} for i in range(24)]).tolist() == list(range(24))
            assert sum(answered) == 3 and remote.servers[0].failures >= 1 and remote.servers[1].failures == 0


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


@pytest.mark.parametrize("lie", LIES)
def test_no_number_comes_out_of_a_malformed_answer(lie, caplog):
    with answering(saying("200 OK", LIES[lie])) as liar:
        remote = Remote(liar, name="r", retries=1, backoff=0.0)
        assert remote(pictures(2), asked(2)).isnan().all()
        assert remote.servers[0].failures == 2 and liar in caplog.text


def test_errors_that_may_pass_are_repeated_and_others_stop(caplog):
    with answering(saying("500 Oh", '{"error": "out of\\nmemory"}')) as broken:
        remote = Remote(broken, retries=2, backoff=0.0)
        assert remote(pictures(2), asked(2)).isnan().all() and remote.servers[0].requests == 3
        assert caplog.text.count("500, out of\\nmemory") == 1
    for status, says in {"401 No": "refused the token", "413 Big": "lower `batch_size`", "302 Go": "refused"}.items():
        with answering(saying(status, "{}")) as address, pytest.raises(UserError, match=says):
            Remote(address)(pictures(2), asked(2))


@pytest.mark.parametrize(
    "bad",
    ["127.0.0.1:80", "ftp://x", "http://", "http://u:p@x", "http://x?y=1", "http://x:99999", "http://\u2603.\u0000"],
)
def test_what_is_no_address_is_refused(bad):
    with pytest.raises(UserError, match="is not the address of a reward server"):
        Remote(bad)
    with pytest.raises(UserError, match="at least one server"):
        Remote([])
    with pytest.raises(UserError, match="printable ASCII"):
        Remote("http://x", token="a\nb")


# --------------------------------------------------------------------------------------------------- the server


def test_info_health_and_metrics(url):
    httpx.post(f"{url}/score", json=good(2, rewards=["numbers"]))
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    info = httpx.get(f"{url}/info").json()
    assert info["rewards"]["mean"] == {"weight": 0.5, "about": "Mean of the picture."}
    assert info["formats"] == ["png", "webp", "tensor"] and info["limits"]["max_samples"] == 1024
    text = httpx.get(f"{url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(values['mmrl_reward_requests_total{status="200"}']) >= 1
    assert int(values['mmrl_reward_samples_total{reward="numbers"}']) >= 2
    assert float(values['mmrl_reward_seconds_total{reward="numbers"}']) > 0
    assert "mmrl_reward_failures_total" in text
    assert httpx.get(f"{url}/nothing").json()["error"] == "Not Found"
    assert httpx.get(f"{url}/docs").status_code == 404


def test_json_and_multipart_say_the_same(url):
    body = good(2, rewards=["mean", "picky"])
    body["prompts"][1]["odd"] = True
    first = httpx.post(f"{url}/score", json=body).json()
    files = [("images", ("a.png", png(), "image/png"))] * 2
    files += [(key, (None, json.dumps(body[key]).encode())) for key in ("prompts", "rewards")]
    assert httpx.post(f"{url}/score", files=files).json() == first
    assert first["rewards"]["picky"] == [1.0, None] and first["weights"] == {"mean": 0.5, "picky": 0.0}
    assert first["failures"] == {"picky": {"count": 1, "cause": "it returned nan twice"}}
    video = {"videos": [[b64(png())] * 3] * 2, "prompts": body["prompts"], "rewards": ["jpeg"]}
    still = httpx.post(f"{url}/score", json={**body, "rewards": ["jpeg"]}).json()["rewards"]["jpeg"]
    assert httpx.post(f"{url}/score", json=video).json()["rewards"]["jpeg"] == pytest.approx(still)


def test_the_token_is_asked_for_before_anything_else(monkeypatch):
    with serving({"mean": mean}, token="s3cret") as address:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {b"Authorization": b"\xff"},
        ):
            for method, path in (("POST", "score"), ("GET", "info"), ("GET", "metrics")):
                answer = httpx.request(method, f"{address}/{path}", headers=headers)
                assert answer.status_code == 401 and "token" in answer.json()["error"]
        assert httpx.get(f"{address}/health").status_code == 200
        with pytest.raises(UserError, match="refused the token; set `token` or MMRL_REWARD_TOKEN"):
            Remote(address, token="wrong")(pictures(2), asked(2))
        monkeypatch.setenv("MMRL_REWARD_TOKEN", "s3cret")
        assert Remote(address)(pictures(2), asked(2)).isfinite().all()


def test_too_much_is_refused_when_it_is_announced_and_when_it_arrives():
    with serving({"mean": mean}, max_request_mib=0.01, max_samples=3, max_megapixels=0.003) as address:
        big = b"x" * 20_000
        kind = {"content-type": "application/json"}
        announced = httpx.post(f"{address}/score", content=big, headers=kind)
        streamed = httpx.post(f"{address}/score", content=iter([big[:8000]] * 3), headers=kind)
        for answer in (announced, streamed):
            assert answer.status_code == 413 and "fewer samples" in answer.json()["error"]
        with pytest.raises(UserError, match="lower `batch_size`"):
            Remote(address)(pictures(8, 64, 64), asked(8))
        tiny = {"images": [b64(png(gray_png(1)))] * 4, "prompts": [{}] * 4}
        assert "1 to 3" in httpx.post(f"{address}/score", json=tiny).json()["error"]
        bomb = {"images": [b64(gray_png(2000))], "prompts": [{}]}
        assert "2000 x 2000 pixels are more" in httpx.post(f"{address}/score", json=bomb).json()["error"]


def gray_png(side):
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


MISTAKES = {
    "not JSON": (b"{", "body"),
    "a list": (b"[]", "body"),
    "deep": (b"[" * 100_000, "body"),
    "NaN": (b'{"texts": ["a"], "prompts": [{"n": NaN}]}', "body"),
    "bytes": (b"\xff\xfe\x00", "body"),
    "no media": ({"prompts": [{}]}, "body"),
    "two media": (good(2, texts=["a", "b"]), "body"),
    "no prompts": ({"images": [b64(png())]}, "prompts"),
    "prompts of text": (good(2, prompts=["a", "b"]), "prompts"),
    "one prompt too few": (good(2, prompts=[{}]), "prompts"),
    "no samples": ({"images": [], "prompts": []}, "prompts"),
    "not base64": (good(2, images=[b64(png()), "%%%"]), "images[1]"),
    "a number": (good(2, images=[b64(png()), 3]), "images[1]"),
    "no PNG": (good(2, images=[b64(png()), b64(b"hello")]), "images[1]"),
    "half a PNG": (good(2, images=[b64(png()), b64(png()[:200])]), "images[1]"),
    "a JPEG": (good(1, images=[b64(jpeg())]), "images[0]"),
    "two sizes": (good(2, images=[b64(png()), b64(gray_png(9))]), "images[1]"),
    "pictures in a mapping": (good(2, images={"a": "b"}), "images"),
    "ragged videos": ({"videos": [[b64(png())], [b64(png())] * 2], "prompts": [{}] * 2}, "videos"),
    "empty videos": ({"videos": [[], []], "prompts": [{}] * 2}, "videos"),
    "videos of text": ({"videos": ["ab"], "prompts": [{}]}, "videos"),
    "texts of numbers": ({"texts": [1], "prompts": [{}]}, "texts"),
    "no tensor": ({"tensor": b64(b"\x08\0\0\0\0\0\0\0{}      "), "prompts": [{}]}, "tensor"),
    "rewards of number": (good(2, rewards=[1]), "rewards"),
    "unknown reward": (good(2, rewards=["maen"]), "rewards"),
    "surrogates": ({"texts": ["a"], "prompts": [{}], "rewards": ["\ud800"]}, "rewards"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_answered_with_its_field(url, case):
    body, field = MISTAKES[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{url}/score", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["field"] == field, answer.text
    assert answer.json()["error"].startswith(f"{field}: ")


def test_other_bodies_and_tensors_are_refused(url):
    from safetensors.torch import save

    assert httpx.post(f"{url}/score", content=b"x").status_code == 400
    kind = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"", b"--b\r\nbroken", b"--b\r\n\r\n\r\n--b--\r\n", b"\0" * 100):
        assert httpx.post(f"{url}/score", content=body, headers=kind).json()["field"] == "body"
    assert httpx.post(f"{url}/score", content=b"", headers={"content-type": "multipart/form-data"}).status_code == 400
    for wrong in (
        torch.zeros(2, 3),
        torch.zeros(2, 4, 8, 8),
        torch.zeros(2, 3, 8, 8, dtype=torch.long),
        torch.zeros(0),
    ):
        body = {"tensor": b64(save({"media": wrong})), "prompts": [{}] * 2}
        assert httpx.post(f"{url}/score", json=body).json()["field"] == "tensor"
    with serving({"mean": mean}, formats=["png"]) as address:
        for kind in ("webp", "tensor"):
            with pytest.raises(UserError, match="refused a request: 400"):
                Remote(address, format=kind)(pictures(2), asked(2))


def test_what_a_reward_refuses_is_a_message_and_spoils_no_other_request():
    with serving({"refusing": refusing}) as address, pytest.raises(UserError, match="images of the moon"):
        Remote(address)(pictures(2), asked(2))


def test_two_thousand_mutated_requests_give_no_server_error(url):
    """Bytes of good requests changed, cut, doubled: a 200 or a 4xx, never a 500, and the server lives."""
    draw = random.Random(0)
    request = httpx.Request("POST", url, files=[("images", ("a", png())), ("prompts", (None, b'[{"n": 1}]'))])
    multipart = (request.read(), request.headers["content-type"])
    plain = (json.dumps(good(1)).encode(), "application/json")
    statuses = set()
    with httpx.Client() as client:
        for i in range(2000):
            body, kind = (multipart, plain)[i % 2]
            body = bytearray(body)
            for _ in range(draw.randint(1, 6)):
                at = draw.randrange(len(body))
                change = draw.randrange(4)
                if change == 0:
                    body[at] = draw.randrange(256)
                elif change == 1:
                    del body[at : at + draw.randint(1, 40)]
                elif change == 2:
                    body[at:at] = body[at : at + draw.randint(1, 40)]
                else:
                    body[at:at] = draw.choice([b'"', b"[", b"}", b"null", b"-1", b"\r\n", b"--", b"1e999", b"\\ud800"])
            body = bytes(body) or b"x"
            statuses.add(client.post(f"{url}/score", content=body, headers={"content-type": kind}).status_code)
    assert {200, 400} <= statuses and max(statuses) < 500, statuses
    assert httpx.get(f"{url}/health").status_code == 200


# -------------------------------------------------------------------------------------------- many at a time


def test_eight_threads_get_their_own_answers_in_order(url):
    remote = Remote(url, name="numbers", batch_size=3)

    def one(thread):
        prompts = [{"n": 1000 * thread + i} for i in range(10)]
        return [remote(pictures(10), prompts).tolist() for _ in range(3)]

    with ThreadPoolExecutor(8) as pool:
        for thread, found in enumerate(pool.map(one, range(8))):
            assert found == [[1000.0 * thread + i for i in range(10)]] * 3


def test_requests_that_wait_together_become_one_batch_and_a_bad_one_fails_alone():
    sizes, hold, held = [], threading.Event(), threading.Event()

    def slow(media, prompts):
        held.set()
        hold.wait(20)
        sizes.append(len(prompts))
        if any("bad" in prompt for prompt in prompts):
            raise UserError("bad prompt")
        return media.flatten(1).mean(1)

    lane = Lane("slow", slow, max_batch=6, wait=0.05)
    media = pictures(4)
    first = lane.submit(media[:1], [{}])
    assert held.wait(20)
    others = [lane.submit(media[:2] + i, [{}] * 2) for i in range(2)]
    bad, last = lane.submit(media[:1], [{"bad": 1}]), lane.submit(media[:3], [{}] * 3)
    odd, late = lane.submit(pictures(1, 8, 8), [{}]), lane.submit(media[:2], [{}] * 2)
    assert late.cancel()
    hold.set()
    assert torch.equal(first.result(20).values, media[:1].flatten(1).mean(1))
    for i, one in enumerate(others):
        assert torch.equal(one.result(20).values, (media[:2] + i).flatten(1).mean(1))
    with pytest.raises(UserError, match="bad prompt"):
        bad.result(20)
    assert torch.equal(last.result(20).values, media[:3].flatten(1).mean(1)) and odd.result(20).values.shape == (1,)
    lane.close()
    assert sizes == [1, 5, 2, 2, 1, 3, 1], sizes  # the batch of five failed, and was scored request by request
    assert lane.samples == 9 and lane.failures == 0


def test_a_large_request_is_cut_and_a_full_server_says_come_back():
    sizes, hold, held = [], threading.Event(), threading.Event()

    def slow(media, prompts):
        sizes.append(len(prompts))
        held.set()
        hold.wait(20)
        return numbers(media, prompts)

    with serving({"numbers": slow}, max_batch=4, max_waiting=1) as address, ThreadPoolExecutor(1) as pool:
        prompts = [{"n": i} for i in range(10)]
        going = pool.submit(Remote(address, batch_size=10), pictures(10), prompts)
        assert held.wait(20)
        full = httpx.post(f"{address}/score", json=good())
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        hold.set()
        assert going.result(20).tolist() == list(range(10)) and sizes == [4, 4, 2]


def test_a_reward_that_takes_too_long_is_a_504():
    hold = threading.Event()
    with serving({"slow": lambda media, prompts: hold.wait(20) and [1.0]}, timeout=0.2) as address:
        assert httpx.post(f"{address}/score", json=good(1)).status_code == 504
        hold.set()


# --------------------------------------------------------------------------------------------- the command


def test_configurations_of_servers_are_checked(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"

    def refused(text, *overrides):
        file.write_text(text)
        with pytest.raises(UserError) as error:
            load(file, overrides)
        return str(error.value)

    assert "did you mean 'serve'" in refused("reward: {jpeg_compressibility: 1.0}\nsrve: {port: 1}\n")
    assert "section 'reward' is missing" in refused("serve: {port: 1}\n")
    assert "serve.yaml:2: serve.prot: unknown option" in refused(
        "reward: {jpeg_compressibility: 1}\nserve: {prot: 1}\n"
    )
    assert "serve.port" in refused("reward: {jpeg_compressibility: 1.0}\n", "serve.port=70000")
    assert "set a token" in refused("reward: {jpeg_compressibility: 1.0}\nserve: {host: 0.0.0.0}\n")
    assert "did you mean 'jpeg_compressibility'" in refused("reward: {jpeg_compresibility: 1.0}\n")
    assert "empty" in refused("") or "expected sections" in refused("")
    monkeypatch.setenv("MMRL_REWARD_TOKEN", "t")
    file.write_text("reward: {jpeg_compressibility: {weight: 2, quality: 30}}\nserve: {host: 0.0.0.0}\n")
    rewards, options = load(file, ["serve.max_batch=3", "reward.jpeg_compressibility.quality=50"])
    assert options.max_batch == 3 and rewards["jpeg_compressibility"].weight == 2
    assert rewards["jpeg_compressibility"].reward.keywords == {"quality": 50}
    _, options = load(ROOT / "configs/serve/example.yaml")
    assert options.port == 8123


def test_the_command_serves_until_it_is_told_to_stop():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MMRL_REWARD_TOKEN": "t"}
    command = [sys.executable, "-m", "mmrl", "serve-reward", "serve/example", "serve.port=0"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving jpeg_compressibility on http://127.0.0.1:"), line + process.stderr.read()
        address = line.split()[-1]
        for _ in range(200):
            try:
                assert httpx.get(f"{address}/health").json() == {"status": "ok"}
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        media = eighth(pictures(3))
        values = Remote(address, token="t", name="jpeg_compressibility")(media, asked(3))
        assert torch.equal(values, jpeg_compressibility(media, asked(3), scale=0.002))
        taken = subprocess.run(
            [*command[:-1], f"serve.port={address.rpartition(':')[2]}"], cwd=ROOT, env=environment, capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip
        assert taken.returncode == 2 and "another one: serve.port" in taken.stderr and "Traceback" not in taken.stderr
        process.send_signal(signal.SIGTERM)
        shown, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and "stopped" in shown and "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
