"""The reward server: requests, mistakes, limits, batches, the command. Over loopback."""

from __future__ import annotations

import io
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from mmrl.apps.serve.lanes import Lane
from mmrl.apps.serve.server import load
from mmrl.core.errors import UserError
from rewards import Remote, jpeg_compressibility
from tests.fixtures import waiting, warm
from tests.fixtures.reward_servers import b64, eighth, good, mean, numbers, png, refusing, serving
from tests.fixtures.tiny_rewards import asked, pictures


def test_info_health_and_metrics(url):
    waiting.post(f"{url}/score", json=good(2, rewards=["numbers"]))
    assert waiting.get(f"{url}/health").json() == {"status": "ok"}
    info = waiting.get(f"{url}/info").json()
    about = {"media": ["image", "video", "text"], "needs": [], "pictures": []}
    assert info["rewards"]["mean"] == {"weight": 0.5, "about": "Mean of the picture.", **about}
    assert info["formats"] == ["png", "webp", "tensor"] and info["limits"]["max_samples"] == 1024
    text = waiting.get(f"{url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(values['mmrl_reward_requests_total{status="200"}']) >= 1
    assert int(values['mmrl_reward_samples_total{reward="numbers"}']) >= 2
    assert float(values['mmrl_reward_seconds_total{reward="numbers"}']) > 0
    assert "mmrl_reward_failures_total" in text
    assert waiting.get(f"{url}/nothing").json()["error"] == "Not Found"
    assert waiting.get(f"{url}/docs").status_code == 404


def test_a_reward_that_cannot_score_a_sample_says_null(url):
    body = good(2, rewards=["mean", "picky"])
    body["prompts"][1]["odd"] = True
    first = waiting.post(f"{url}/score", json=body).json()
    assert first["rewards"]["picky"] == [1.0, None]
    assert first["weights"] == {"mean": 0.5, "picky": 0.0}
    cause = "it returned NaN, also when called again"
    assert first["failures"] == {"picky": {"count": 1, "cause": cause}}


def test_the_token_is_asked_for_before_anything_else(monkeypatch):
    with serving({"mean": mean}, token="s3cret") as address:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret"},
            {b"Authorization": b"\xff"},
        ):
            for method, path in (("POST", "score"), ("GET", "info"), ("GET", "metrics")):
                url = f"{address}/{path}"
                answer = httpx.request(method, url, headers=headers, verify=False)
                assert answer.status_code == 401 and "token" in answer.json()["error"]
        assert waiting.get(f"{address}/health").status_code == 200
        with pytest.raises(UserError, match="refused the token; set `token` or MMRL_REWARD_TOKEN"):
            Remote(address, token="wrong")(pictures(2), asked(2))
        monkeypatch.setenv("MMRL_REWARD_TOKEN", "s3cret")
        assert Remote(address)(pictures(2), asked(2)).isfinite().all()


def test_too_much_is_refused_when_it_is_announced_and_when_it_arrives():
    limits = {"max_request_mib": 0.01, "max_samples": 3, "max_megapixels": 0.003}
    with serving({"mean": mean}, **limits) as address:
        score = f"{address}/score"
        big = b"x" * 20_000
        kind = {"content-type": "application/json"}
        announced = waiting.post(score, content=big, headers=kind)
        streamed = waiting.post(score, content=iter([big[:8000]] * 3), headers=kind)
        for answer in (announced, streamed):
            assert answer.status_code == 413 and "fewer samples" in answer.json()["error"]
        with pytest.raises(UserError, match="lower `batch_size`"):
            Remote(address)(pictures(8, 64, 64), asked(8))
        tiny = {"images": [b64(gray_png(1))] * 4, "prompts": [{}] * 4}
        assert "1 to 3" in waiting.post(score, json=tiny).json()["error"]


def gray_png(side):
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    return buffer.getvalue()


def tensor(shape, **options):
    return {"tensor": b64(save({"media": torch.zeros(shape, **options)})), "prompts": [{}] * 2}


X, PNG = [{}], b64(png())
MISTAKES = [
    (b"{", "body"),
    (b"[]", "body"),
    (b"[" * 100_000, "body"),
    (b'{"texts": ["a"], "prompts": [{"n": NaN}]}', "body"),
    (b"\xff\xfe\x00", "body"),
    ({"prompts": X}, "body"),
    (good(2, texts=["a", "b"]), "body"),
    ({"images": [PNG]}, "prompts"),
    (good(2, prompts=["a", "b"]), "prompts"),
    (good(2, prompts=X), "prompts"),
    ({"images": [], "prompts": []}, "prompts"),
    (good(2, images=[PNG, "%%%"]), "images[1]"),
    (good(2, images=[PNG, 3]), "images[1]"),
    (good(2, images=[PNG, b64(b"hello")]), "images[1]"),
    (good(2, images=[PNG, b64(png()[:200])]), "images[1]"),
    (good(1, images=[b64(jpeg())]), "images[0]"),
    (good(2, images=[PNG, b64(gray_png(9))]), "images[1]"),
    (good(2, images={"a": "b"}), "images"),
    ({"videos": [[PNG], [PNG] * 2], "prompts": X * 2}, "videos"),
    ({"videos": [[], []], "prompts": X * 2}, "videos"),
    ({"videos": ["ab"], "prompts": X}, "videos"),
    ({"texts": [1], "prompts": X}, "texts"),
    ({"tensor": b64(b"\x08\0\0\0\0\0\0\0{}      "), "prompts": X}, "tensor"),
    (tensor((2, 3)), "tensor"),
    (tensor((2, 4, 8, 8)), "tensor"),
    (tensor((2, 3, 8, 8), dtype=torch.long), "tensor"),
    (tensor((0,)), "tensor"),
    (good(2, rewards=[1]), "rewards"),
    (good(2, rewards=["maen"]), "rewards"),
    ({"texts": ["a"], "prompts": X, "rewards": ["\ud800"]}, "rewards"),
    ({"texts": ["a"], "prompts": [{"image": "/etc/passwd"}]}, "prompts"),
    ({"texts": ["a"], "prompts": [{"images": [{"png": "!"}]}]}, "prompts"),
    ({"texts": ["a"], "prompts": [{"images": [{"png": "AAAA"}]}]}, "prompts"),
    *(({"texts": ["a"], "prompts": X, "marks": m}, "marks") for m in ([1], [], [{"tokens": True}])),
    *((good(2, ids=ids), "ids") for ids in ([], ["a", "a"], ["a", 1], ["a", "b" * 65], {"a": 1})),
]


def test_a_mistake_is_answered_with_its_field(url, subtests):
    with httpx.Client(timeout=waiting.HANG) as client:
        for body, field in MISTAKES:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            kind = {"content-type": "application/json"}
            answer = client.post(f"{url}/score", content=content, headers=kind)
            with subtests.test(body=str(body)[:200], field=field):
                assert answer.status_code == 400 and answer.json()["field"] == field
                assert answer.json()["error"].startswith(f"{field}: ")


def test_other_bodies_formats_and_what_a_reward_refuses(url):
    assert waiting.post(f"{url}/score", content=b"x").status_code == 400
    form = {"content-type": "multipart/form-data; boundary=b"}
    answer = waiting.post(f"{url}/score", content=b"--b--", headers=form)
    assert answer.status_code == 400 and answer.json()["field"] == "content-type"
    with serving({"mean": refusing}, formats=["png"]) as address:
        for kind, says in (
            ("webp", "refused a request: 400"),
            ("tensor", "refused a request: 400"),
            ("png", "images of the moon"),
        ):
            with pytest.raises(UserError, match=says):
                Remote(address, format=kind)(pictures(2), asked(2))


def test_eight_threads_get_their_own_answers_in_order(url):
    remote = Remote(url, name="numbers", batch_size=3)

    def one(thread):
        prompts = [{"n": 1000 * thread + i} for i in range(10)]
        return [remote(pictures(10), prompts).tolist() for _ in range(3)]

    with ThreadPoolExecutor(8) as pool:
        for thread, answers in enumerate(pool.map(one, range(8))):
            assert answers == [[1000.0 * thread + i for i in range(10)]] * 3


def test_requests_that_wait_together_become_one_batch_and_a_bad_one_fails_alone():
    sizes = []
    hold, held = threading.Event(), threading.Event()

    def slow(media, prompts):
        held.set()
        hold.wait(waiting.HANG)
        sizes.append(len(prompts))
        if any("bad" in prompt for prompt in prompts):
            raise UserError("bad prompt")
        return mean(media, prompts)

    lane = Lane("slow", slow, max_batch=6)
    media = pictures(4)
    batches = [media[:1], media[:2], media[:2] + 1, media[:3], pictures(1, 8, 8)]
    jobs = [lane.submit(batches[0], [{}])]
    assert held.wait(waiting.HANG)
    jobs += [lane.submit(batch, [{}] * 2) for batch in batches[1:3]]
    bad = lane.submit(media[:1], [{"bad": 1}])
    jobs += [lane.submit(batch, [{}] * len(batch)) for batch in batches[3:]]
    assert lane.submit(media[:2], [{}] * 2).cancel()
    hold.set()
    for batch, job in zip(batches, jobs, strict=True):
        assert torch.equal(job.result(waiting.HANG).values, mean(batch, None))
    with pytest.raises(UserError, match="bad prompt"):
        bad.result(waiting.HANG)
    # the batch of five failed, and was scored request by request
    assert sizes == [1, 5, 2, 2, 1, 3, 1]
    assert lane.counts["samples"] == 9 and lane.counts["failures"] == 0


def test_a_large_request_is_cut_and_a_full_or_slow_server_says_so():
    sizes = []
    hold, held = threading.Event(), threading.Event()

    def slow(media, prompts):
        sizes.append(len(prompts))
        held.set()
        hold.wait(waiting.HANG)
        return numbers(media, prompts)

    limits = {"max_batch": 4, "max_waiting": 1}
    with serving({"numbers": slow}, **limits) as address, ThreadPoolExecutor(1) as pool:
        prompts = [{"n": i} for i in range(10)]
        going = pool.submit(Remote(address, batch_size=10), pictures(10), prompts)
        assert held.wait(waiting.HANG)
        full = waiting.post(f"{address}/score", json=good())
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        hold.set()
        assert going.result(waiting.HANG).tolist() == list(range(10)) and sizes == [4, 4, 2]
    hold.clear()
    with serving({"numbers": slow}, timeout=0.2) as address:
        assert waiting.post(f"{address}/score", json=good(1)).status_code == 504
        hold.set()


def test_configurations_of_servers_are_checked(tmp_path, monkeypatch, subtests):
    file = tmp_path / "serve.yaml"
    jpeg = "reward: {jpeg_compressibility: 1.0}\n"
    for text, words, says in (
        (jpeg + "srve: {port: 1}\n", (), "did you mean 'serve'"),
        ("serve: {port: 1}\n", (), "section 'reward' is missing"),
        (jpeg + "serve: {prot: 1}\n", (), "serve.yaml:2: serve.prot: unknown option"),
        (jpeg, ("serve.port=70000",), "serve.port"),
        (jpeg + "serve: {host: 0.0.0.0}\n", (), "set a token"),
        ("reward: {jpeg_compresibility: 1.0}\n", (), "did you mean 'jpeg_compressibility'"),
        ("", (), "empty|expected sections"),
    ):
        file.write_text(text)
        with subtests.test(says=says), pytest.raises(UserError, match=says):
            load(file, words)
    monkeypatch.setenv("MMRL_REWARD_TOKEN", "t")
    reward = "reward: {jpeg_compressibility: {weight: 2, quality: 30}}\n"
    file.write_text(reward + "serve: {host: 0.0.0.0}\n")
    rewards, options = load(file, ["serve.max_batch=3", "reward.jpeg_compressibility.quality=50"])
    assert options.max_batch == 3 and rewards["jpeg_compressibility"].weight == 2
    assert rewards["jpeg_compressibility"].reward.keywords == {"quality": 50}


def test_the_command_serves_until_it_is_told_to_stop():
    words = ["-m", "mmrl", "serve-reward", "serve/example"]
    process = warm.start([*words, "serve.port=0"], MMRL_REWARD_TOKEN="t", PYTHONUNBUFFERED="1")
    try:
        waiting.until(lambda: process.stdout.endswith("\n") or process.poll() is not None)
        line = process.stdout
        assert line.startswith("serving jpeg_compressibility on http://127.0.0.1:"), process.stderr
        address = line.split()[-1]
        media = eighth(pictures(3))
        remote = Remote(address, token="t", name="jpeg_compressibility", retry_seconds=1e6)
        values = remote(media, asked(3))
        assert torch.equal(values, jpeg_compressibility(media, asked(3), scale=0.002))
        port = address.rpartition(":")[2]
        taken = warm.run([*words, f"serve.port={port}"], MMRL_REWARD_TOKEN="t")
        assert taken.returncode == 2 and "another one: serve.port" in taken.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0 and "stopped" in process.stdout
        assert "Traceback" not in process.stderr + taken.stderr
    finally:
        process.send_signal(signal.SIGKILL)
