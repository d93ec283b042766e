"""The reward server: requests, mistakes, limits, batches, the command. Over loopback."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image

from mmrl.apps.serve.lanes import Lane
from mmrl.apps.serve.server import load
from mmrl.core.errors import UserError
from rewards import Remote, jpeg_compressibility
from tests.fixtures import waiting, warm
from tests.fixtures.reward_servers import (
    b64,
    eighth,
    good,
    mean,
    numbers,
    png,
    refusing,
    serving,
)
from tests.fixtures.tiny_rewards import asked, pictures

ROOT = Path(__file__).parents[2]


# --------------------------------------------------------------------------------------------------
# the server


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
    assert first["rewards"]["picky"] == [1.0, None] and first["weights"] == {
        "mean": 0.5,
        "picky": 0.0,
    }
    assert first["failures"] == {
        "picky": {"count": 1, "cause": "it returned NaN, also when called again"}
    }
    video = {"videos": [[b64(png())] * 3] * 2, "prompts": body["prompts"], "rewards": ["jpeg"]}
    still = waiting.post(f"{url}/score", json={**body, "rewards": ["jpeg"]}).json()["rewards"][
        "jpeg"
    ]
    assert waiting.post(f"{url}/score", json=video).json()["rewards"]["jpeg"] == pytest.approx(
        still
    )


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
        assert waiting.get(f"{address}/health").status_code == 200
        with pytest.raises(UserError, match="refused the token; set `token` or MMRL_REWARD_TOKEN"):
            Remote(address, token="wrong")(pictures(2), asked(2))
        monkeypatch.setenv("MMRL_REWARD_TOKEN", "s3cret")
        assert Remote(address)(pictures(2), asked(2)).isfinite().all()


def test_too_much_is_refused_when_it_is_announced_and_when_it_arrives():
    with serving(
        {"mean": mean}, max_request_mib=0.01, max_samples=3, max_megapixels=0.003
    ) as address:
        big = b"x" * 20_000
        kind = {"content-type": "application/json"}
        announced = waiting.post(f"{address}/score", content=big, headers=kind)
        streamed = waiting.post(f"{address}/score", content=iter([big[:8000]] * 3), headers=kind)
        for answer in (announced, streamed):
            assert answer.status_code == 413 and "fewer samples" in answer.json()["error"]
        with pytest.raises(UserError, match="lower `batch_size`"):
            Remote(address)(pictures(8, 64, 64), asked(8))
        tiny = {"images": [b64(png(gray_png(1)))] * 4, "prompts": [{}] * 4}
        assert "1 to 3" in waiting.post(f"{address}/score", json=tiny).json()["error"]
        bomb = {"images": [b64(gray_png(2000))], "prompts": [{}]}
        assert ("2000 x 2000 pixels are more") in waiting.post(
            f"{address}/score", json=bomb
        ).json()["error"]


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


def test_a_mistake_is_answered_with_its_field(url):
    kind = {"content-type": "application/json"}
    for case, (body, field) in MISTAKES.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = waiting.post(f"{url}/score", content=content, headers=kind)
        assert answer.status_code == 400 and answer.json()["field"] == field, (case, answer.text)
        assert answer.json()["error"].startswith(f"{field}: "), case


def test_other_bodies_and_tensors_are_refused(url):
    from safetensors.torch import save

    assert waiting.post(f"{url}/score", content=b"x").status_code == 400
    form = {"content-type": "multipart/form-data; boundary=b"}
    answer = waiting.post(f"{url}/score", content=b"--b--", headers=form)
    assert answer.status_code == 400 and answer.json()["field"] == "content-type"
    for wrong in (
        torch.zeros(2, 3),
        torch.zeros(2, 4, 8, 8),
        torch.zeros(2, 3, 8, 8, dtype=torch.long),
        torch.zeros(0),
    ):
        body = {"tensor": b64(save({"media": wrong})), "prompts": [{}] * 2}
        assert waiting.post(f"{url}/score", json=body).json()["field"] == "tensor"
    with serving({"mean": mean}, formats=["png"]) as address:
        for kind in ("webp", "tensor"):
            with pytest.raises(UserError, match="refused a request: 400"):
                Remote(address, format=kind)(pictures(2), asked(2))


def test_what_a_reward_refuses_is_a_message_and_spoils_no_other_request():
    with (
        serving({"refusing": refusing}) as address,
        pytest.raises(UserError, match="images of the moon"),
    ):
        Remote(address)(pictures(2), asked(2))


# -------------------------------------------------------------------------------------------- many
# at a time


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
    hold = threading.Event()
    held = threading.Event()

    def slow(media, prompts):
        held.set()
        hold.wait(waiting.HANG)
        sizes.append(len(prompts))
        if any("bad" in prompt for prompt in prompts):
            raise UserError("bad prompt")
        return media.flatten(1).mean(1)

    lane = Lane("slow", slow, max_batch=6)
    media = pictures(4)
    first = lane.submit(media[:1], [{}])
    assert held.wait(waiting.HANG)
    waiting_requests = [lane.submit(media[:2] + i, [{}] * 2) for i in range(2)]
    bad = lane.submit(media[:1], [{"bad": 1}])
    last = lane.submit(media[:3], [{}] * 3)
    odd = lane.submit(pictures(1, 8, 8), [{}])
    late = lane.submit(media[:2], [{}] * 2)
    assert late.cancel()
    hold.set()
    assert torch.equal(first.result(waiting.HANG).values, media[:1].flatten(1).mean(1))
    for i, waiting_request in enumerate(waiting_requests):
        assert torch.equal(
            waiting_request.result(waiting.HANG).values, (media[:2] + i).flatten(1).mean(1)
        )
    with pytest.raises(UserError, match="bad prompt"):
        bad.result(waiting.HANG)
    assert torch.equal(
        last.result(waiting.HANG).values, media[:3].flatten(1).mean(1)
    ) and odd.result(waiting.HANG).values.shape == (1,)
    # the batch of five failed, and was scored request by request
    assert sizes == [1, 5, 2, 2, 1, 3, 1], sizes
    assert lane.counts["samples"] == 9 and lane.counts["failures"] == 0


def test_a_large_request_is_cut_and_a_full_server_says_come_back():
    sizes = []
    hold = threading.Event()
    held = threading.Event()

    def slow(media, prompts):
        sizes.append(len(prompts))
        held.set()
        hold.wait(waiting.HANG)
        return numbers(media, prompts)

    with (
        serving({"numbers": slow}, max_batch=4, max_waiting=1) as address,
        ThreadPoolExecutor(1) as pool,
    ):
        prompts = [{"n": i} for i in range(10)]
        going = pool.submit(Remote(address, batch_size=10), pictures(10), prompts)
        assert held.wait(waiting.HANG)
        full = waiting.post(f"{address}/score", json=good())
        assert full.status_code == 503 and full.headers["retry-after"] == "1"
        hold.set()
        assert going.result(waiting.HANG).tolist() == list(range(10)) and sizes == [4, 4, 2]


def test_a_reward_that_takes_too_long_is_a_504():
    hold = threading.Event()
    with serving(
        {"slow": lambda media, prompts: hold.wait(waiting.HANG) and [1.0]}, timeout=0.2
    ) as address:
        assert waiting.post(f"{address}/score", json=good(1)).status_code == 504
        hold.set()


# --------------------------------------------------------------------------------------------- the
# command


def test_configurations_of_servers_are_checked(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"

    def refused(text, *overrides):
        file.write_text(text)
        with pytest.raises(UserError) as error:
            load(file, overrides)
        return str(error.value)

    assert "did you mean 'serve'" in refused(
        "reward: {jpeg_compressibility: 1.0}\nsrve: {port: 1}\n"
    )
    assert "section 'reward' is missing" in refused("serve: {port: 1}\n")
    assert "serve.yaml:2: serve.prot: unknown option" in refused(
        "reward: {jpeg_compressibility: 1}\nserve: {prot: 1}\n"
    )
    assert "serve.port" in refused("reward: {jpeg_compressibility: 1.0}\n", "serve.port=70000")
    assert "set a token" in refused("reward: {jpeg_compressibility: 1.0}\nserve: {host: 0.0.0.0}\n")
    assert "did you mean 'jpeg_compressibility'" in refused("reward: {jpeg_compresibility: 1.0}\n")
    assert "empty" in refused("") or "expected sections" in refused("")
    monkeypatch.setenv("MMRL_REWARD_TOKEN", "t")
    file.write_text(
        "reward: {jpeg_compressibility: {weight: 2, quality: 30}}\nserve: {host: 0.0.0.0}\n"
    )
    rewards, options = load(file, ["serve.max_batch=3", "reward.jpeg_compressibility.quality=50"])
    assert options.max_batch == 3 and rewards["jpeg_compressibility"].weight == 2
    assert rewards["jpeg_compressibility"].reward.keywords == {"quality": 50}
    _, options = load(ROOT / "configs/serve/example.yaml")
    assert options.port == 8123


def test_the_command_serves_until_it_is_told_to_stop():
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MMRL_REWARD_TOKEN": "t",
    }
    command = [sys.executable, "-m", "mmrl", "serve-reward", "serve/example", "serve.port=0"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving jpeg_compressibility on http://127.0.0.1:"), (
            line + process.stderr.read()
        )
        address = line.split()[-1]

        def healthy():
            try:
                return waiting.get(f"{address}/health").json() == {"status": "ok"}
            except httpx.ConnectError:
                return False

        waiting.until(healthy)
        media = eighth(pictures(3))
        values = Remote(address, token="t", name="jpeg_compressibility")(media, asked(3))
        assert torch.equal(values, jpeg_compressibility(media, asked(3), scale=0.002))
        port = address.rpartition(":")[2]
        words = [*command[1:-1], f"serve.port={port}"]
        taken = warm.run(words, MMRL_REWARD_TOKEN="t")
        assert (
            taken.returncode == 2
            and ("another one: serve.port") in taken.stderr
            and "Traceback" not in taken.stderr
        )
        process.send_signal(signal.SIGTERM)
        shown, errors = process.communicate(timeout=waiting.HANG)
        assert process.returncode == 0 and "stopped" in shown and "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
