"""The engine vllm-server and the judges, against a real vLLM that another process serves."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest
import torch
from transformers import AutoModelForImageTextToText

from mmrl.core.errors import UserError
from mmrl.policies.vlm.engines.vllm_options import VLLMOptions
from mmrl.policies.vlm.engines.vllm_transfer import source_of
from mmrl.policies.vlm.engines.vllm_weights import checkpoint_weights
from mmrl.policies.vlm.engines.vllm_worker import EXTENSION
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import tiny_vlms, vllm_models
from tests.policies.vlm.test_vllm_local import NEAR, gap, shake, video
from tests.policies.vlm.test_vlm_policy import rolled

pytestmark = vllm_models.marks
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # what the command vllm serve runs
OPTIONS = (
    "--enforce-eager --max-model-len 1024 --gpu-memory-utilization 0.1 --dtype float32 "
    "--logprobs-mode processed_logprobs --generation-config vllm --enable-scale-out "
    "--trust-request-mm-kwargs --enable-lora --max-lora-rank 8"
).split()
STARTED = 600  # seconds that a start may take on a busy machine


@contextmanager
def served(folder, model, *options):
    """The address of a vLLM that serves a tiny model, and a folder that it sees."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    place = ["--model", str(vllm_models.folder(model)), "--port", str(port)]
    command = [sys.executable, "-m", ENTRY, *place, *OPTIONS, *options]
    log = folder / "log.txt"
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + STARTED
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not _answers(url):
            alive = process.poll() is None and time.monotonic() < end
            assert alive, f"vLLM did not start: {log.read_text()[-2000:]}"
            time.sleep(1)
        yield url, folder
    finally:
        process.terminate()
        process.wait()


def _answers(url):
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    media = ["--limit-mm-per-prompt", '{"image": 8, "video": 1}']
    with served(tmp_path_factory.mktemp("server"), "wide_qwen2_5_vl", *media) as started:
        yield started


def policy_of(server, sync="weights", vllm=None, model="wide_qwen2_5_vl", **options):
    url, folder = server
    where = {"server_base_url": url, "shared_folder": str(folder)} | (vllm or {})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VLM(
            str(vllm_models.folder(model)),
            engine="vllm-server",
            vllm=VLLMOptions(sync=sync, **where),
            **{"max_new_tokens": 8, "coordinate_space": "original", "temperature": 0.8} | options,
        )


@pytest.fixture(scope="module")
def policy(server):
    return policy_of(server, top_k=20, stop=["e"])


def test_texts_and_images_have_the_policys_log_probs_before_and_after_an_update(policy, server):
    samples = []
    for _ in range(2):
        rollout = rolled(policy, copies=2)
        assert gap(rollout) < NEAR and policy.measures()["time/sync"] > 0
        assert all("e" not in text[:-1] for text in policy.decode(rollout))
        assert torch.equal(rolled(policy, copies=2).sample, rollout.sample), "keyed by the row"
        samples.append(rollout.sample)
        shake(policy)
    assert not torch.equal(*samples)
    pictures = [tiny_vlms.image(70, 60, 0), tiny_vlms.image(56, 56, 2)]
    between = {"text": "what <image> happens? <video> or <image>", "images": pictures}
    assert gap(rolled(policy, [video(4, 140, 28)[0] | between], copies=2)) < NEAR
    assert len(list(policy.outside.transfer.folder.iterdir())) == 1, "the weights of now"
    assert not any("dtype" in note for note in policy.report.notes)


def test_adapters_travel_alone_even_to_a_server_that_had_other_weights(policy, server):
    shake(policy, 0.1)
    rolled(policy, copies=1)  # whole weights, which are not the base model's
    adapted = policy_of(server, sync="lora", lora=2)
    other = policy_of(server, dtype="bfloat16").notes
    assert any("holds its weights in float32 and the policy in bfloat16" in note for note in other)
    for _ in range(2):
        assert gap(rolled(adapted, copies=1)) < 1e-4
        shake(adapted, 0.03)


def test_what_is_missing_is_one_sentence(policy, server, monkeypatch):
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)
    for vllm, words in (
        ({"shared_folder": None}, "vllm.shared_folder is missing"),
        ({"shared_folder": "/no/such/folder"}, "there is no folder /no/such/folder"),
        ({"weight_transfer": "nccl"}, "needs CUDA on this side"),
    ):
        with pytest.raises(UserError, match=words):
            policy_of(server, vllm=vllm)
    monkeypatch.setattr(policy.outside, "model", "no-such-model")
    with pytest.raises(UserError, match=r"server_base_url = http.* answers 404: .*no-such-model"):
        rolled(policy, [{"text": "hello"}], copies=1)


def test_what_a_broadcast_would_send_is_the_checkpoint(policy):
    """Over NCCL only this much can be tried without CUDA: names, types, shapes, order."""
    source = source_of(type("Holder", (), {"module": policy.net.hf}))
    sent = [(name, value.dtype, tuple(value.shape)) for name, value in source]
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == sent
    assert {name for name, *_ in sent} == set(checkpoint_weights(policy.net.hf))


def test_a_head_tied_to_the_embeddings_follows_them(server, tmp_path):
    tied = "tied_qwen2_5_vl"
    with pytest.raises(UserError, match=f"start it with --worker-extension-cls {EXTENSION}"):
        policy_of(server, model=tied)
    with served(tmp_path, tied, "--worker-extension-cls", EXTENSION) as started:
        policy = policy_of(started, model=tied)
        for _ in range(2):
            assert gap(rolled(policy, [{"text": "tell me"}], copies=2)) < NEAR
            shake(policy)
