"""A model of the hub that cannot be loaded is reported at once, with the cause: against a local
server that answers as the hub does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from mmrl.cli import commands
from mmrl.core.errors import UserError
from mmrl.core.hub import ask_for_data_set, cached, check_model
from mmrl.data.sources.hub import HubSet
from mmrl.experiment import build, lifecycle

ROOT = Path(__file__).parents[2] / "configs"


class Hub(BaseHTTPRequestHandler):
    """Knows one model, and needs a licence for two: of one it shows the description."""

    def do_GET(self):
        name = self.path.removeprefix("/api/models/").removeprefix("/api/datasets/")
        statuses = {
            "own/model": (200, ""),
            "own/terms": (200, ""),
            "own/terms/auth-check": (403, "GatedRepo"),
            "own/gated": (403, "GatedRepo"),
        }
        status, code = statuses.get(name, (404, "RepoNotFound"))
        about = {"id": name, "siblings": [], "gated": "auto" if "terms" in name else False}
        body = json.dumps(about if status == 200 else {}).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hub(cache, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_what_the_hub_does_not_know_or_give_is_said(hub):
    check_model("own/model")
    for name, sentence in (
        ("own/gated", "'own/gated' is gated: accept its terms on http"),
        ("own/terms", "'own/terms' is gated: accept its terms on http"),
        ("own/modle", "knows no model 'own/modle', or it is private"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_model(name)
    ask_for_data_set("own/model")
    with pytest.raises(UserError, match="data set 'own/terms': it is gated; accept its terms"):
        HubSet("own/terms").splits()
    hub.shutdown()
    hub.server_close()
    with pytest.raises(UserError, match="not in the cache .* cannot be reached .*HF_ENDPOINT"):
        check_model("own/model")
    with pytest.raises(UserError, match=r"flow_grpo.yaml:\d+: policy.sd3.path: 'stabilityai/"):
        build.Session.of(build.read(ROOT / "sd3" / "flow_grpo.yaml", ["train.precision=fp32"]))
    with pytest.raises(UserError, match="'own/model': no file or folder .* cannot be reached"):
        HubSet("own/model").splits()


REWARDS = {
    "{clip_score: {model: 'hf-hub:own/modle'}}": "own/modle",
    "{judge_yes_no: {model: {local: {path: own/terms}}}}": "own/terms",
}


@pytest.mark.parametrize("reward", REWARDS)
def test_the_model_of_a_reward_or_judge_is_asked_for_before_a_policy_is_loaded(
    hub, reward, monkeypatch
):
    name = REWARDS[reward]
    words = "is gated: accept its terms" if "terms" in name else "knows no model"
    entry, digits = build.POLICIES.find("sd3"), ROOT / "digits" / "flow_grpo.yaml"
    monkeypatch.setattr(entry, "__init__", lambda *_, **__: pytest.fail("a policy was built"))
    with pytest.raises(UserError, match=words) as raised:
        build.Session.of(build.read(digits, [f"reward={reward}"]))
    assert name in str(raised.value)
    for command in (lifecycle.train_one, commands.evaluate):
        with pytest.raises(UserError, match=rf"evaluate.reward.\w+: reward '\w+': .*{words}"):
            command(digits, [f"evaluate.reward={reward}"])
    assert not list(Path().glob("runs/*")), "nothing was begun"


def test_what_is_here_asks_nobody(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "own" / "model").mkdir(parents=True)
    for path in ("own/model", "world:digits/sd3", "/no/such/folder", "one", "a/b/c"):
        check_model(path)
    assert not cached("own/other")
    (cache / "models--own--other" / "snapshots" / "abc").mkdir(parents=True)
    check_model("own/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set: unset it"):
        check_model("own/missing")
