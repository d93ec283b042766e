"""Runs on the hub: what would be uploaded is whole, says what is so, and arrives.

The upload is by the real client, to a server on this machine that speaks the hub's protocol for
repositories and commits."""

import base64
import json
import threading
from types import SimpleNamespace

import pytest
import uvicorn
import yaml
from fastapi import FastAPI, Request, Response
from PIL import Image
from typer.testing import CliRunner

from mmrl.apps.hub import command
from mmrl.apps.hub.card import Card, license_of, scrubbed
from mmrl.apps.hub.command import Request as Push
from mmrl.apps.view.command import listening
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in, locate
from mmrl.experiment.lifecycle import train
from mmrl.monitoring.report.pictures import data_uri
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.contracts import Exports
from tests.fixtures import toys

SPEC = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 2, guidance_scale: 1.0, lora: 2}}
data: {digits: {captions: 20}}
reward: {digits: 1.0}
objective: {policy_gradient: {clip_range: 1.0}}
train: {prompts_per_iteration: 1, group_size: 2, train_batch_size: 2, iterations: 3, save_every: 0}
log: {tensorboard: false}
"""
load_built_in()
EVALUATION = {
    "prompts": 5,
    "num_samples": 2,
    "rows": [
        {
            "model": model,
            "guidance": 1.0,
            "rewards": {"digits": {"mean": mean, "low": low, "high": None, "n": 10}},
            "prompt_means": {"digits": [0.1, None]},
            "difference": {"digits": {"mean": 0.5, "low": 0.25, "high": 0.75, "p": 0.01}},
        }
        for model, mean, low in (("base", 0.25, 0.125), ("trained", 0.75, 0.5))
    ],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A LoRA of a tiny Stable Diffusion 3, trained for three iterations."""
    place = tmp_path_factory.mktemp("run")
    (place / "run.yaml").write_text(f"{SPEC}run: {place}/run\n")
    folder = train(place / "run.yaml")
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    return folder


@pytest.fixture(scope="module")
def session(run):
    return command.build.trained(run)


@pytest.fixture
def opened(session, monkeypatch):
    """Every command finds the run open already."""
    monkeypatch.setattr(command.build, "trained", lambda *_, **__: session)


class Hub:
    """A hub on this machine: takes repositories and commits, and keeps their files."""

    def __init__(self, status=200, private=None):
        """``private``: the repository exists already, and this is its visibility."""
        self.private = private
        self.files: dict[str, bytes] = {}
        self.repositories: list[dict] = []
        self.tokens: set[str | None] = set()
        self.status = status
        listener = listening("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = FastAPI()
        server.api_route("/{path:path}", methods=["GET", "POST"])(self.answer)
        self.server = uvicorn.Server(uvicorn.Config(server, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})

    async def answer(self, path: str, request: Request):
        body = await request.body()
        if request.method == "POST":
            self.tokens.add(request.headers.get("authorization"))
            if self.status != 200:
                return Response('{"error": "no"}', self.status)
        if path == "api/repos/create":
            self.repositories.append(json.loads(body))
            exists = Response('{"url": "/me/model"}', 409)
            return {"url": f"{self.address}/me/model"} if self.private is None else exists
        if path.endswith("preupload/main"):
            files = [{"path": file["path"]} for file in json.loads(body)["files"]]
            return {"files": [f | {"uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if path == "api/models/me/model":
            made = self.repositories[-1]
            private = made.get("private", made.get("visibility") == "private")
            return {"id": "me/model", "private": private if self.private is None else self.private}
        if path == "api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith("commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitOid": "a" * 40, "commitUrl": f"{self.address}/me/model/commit/a"}
        return Response("{}", 404)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def online(monkeypatch, tmp_path):
    """Logged in, online, and temporary files where the test sees them."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))

    def use(address):
        monkeypatch.setattr(constants, "ENDPOINT", address)

    return use


def test_the_folder_says_all_there_is_to_say(run, tmp_path):
    done = CliRunner().invoke(
        app, ["push", str(run), "me/digits", "--dry-run", str(tmp_path / "new"), "--license", "mit"]
    )
    assert done.exception is None and done.output.strip() == str(tmp_path / "new")
    files = {path.name for path in (tmp_path / "new").iterdir()}
    weights = "pytorch_lora_weights.safetensors"
    assert files >= {"README.md", "config.yaml", "metrics.jsonl", "evaluation.json", weights}
    for name in ("curves.png", "before_after.png"):
        assert Image.open(tmp_path / "new" / name).size > (200, 200)
    text = (tmp_path / "new" / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    meta = yaml.safe_load(head)
    assert meta["library_name"] == "diffusers" and meta["license"] == "mit"
    assert meta["pipeline_tag"] == "text-to-image" and "lora" in meta["tags"]
    (result,) = meta["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 0.75 and "base_model" not in meta
    assert "| **0.75 (no interval)** |" in body  # one that is open is none
    for words in (
        "| change, paired by prompt |  | +0.5 [+0.25, +0.75] |",
        'load_lora_weights("me/digits")',
        "ComfyUI/models/loras",
        "![before and after](before_after.png)",
        "![curves of the training](curves.png)",
        "captions: 20",
        "5 held-out prompts",
    ):
        assert words in body, words


def test_the_loading_code_loads(run, tmp_path):
    """What the card says of diffusers is done, with the base model that was trained."""
    from diffusers import StableDiffusion3Pipeline

    folder = command.write(run, Push("me/digits"), tmp_path / "new")
    pipe = StableDiffusion3Pipeline.from_pretrained(locate("world:digits/sd3-test"))
    pipe.load_lora_weights(folder)
    assert pipe.get_active_adapters()
    (image,) = pipe("a red seven", num_inference_steps=1, height=32, width=32).images
    assert image.size == (32, 32)


@pytest.mark.usefixtures("opened")
def test_an_upload_arrives_and_nothing_private_in_a_public_repository(run, online, tmp_path):
    with Hub() as hub:
        online(hub.address)
        done = CliRunner().invoke(app, ["push", str(run), "me/model", "--private"])
    assert done.exception is None and done.output.strip() == f"{hub.address}/me/model"
    (made,) = hub.repositories
    assert (made["name"], made["organization"]) == ("model", "me")
    assert made.get("private") or made["visibility"] == "private"
    assert hub.files["README.md"].startswith(b"---\nlibrary_name: diffusers")
    assert {"pytorch_lora_weights.safetensors", "curves.png"} <= set(hub.files)
    assert "Bearer hf_test" in hub.tokens and not list(tmp_path.glob("mmrl-push-*"))
    with Hub(private=False) as hub:
        online(hub.address)
        with pytest.raises(UserError, match="me/model exists and is public.*nothing was uploaded"):
            command.push(run, Push("me/model", private=True))
        (kept,) = tmp_path.glob("mmrl-push-*/model")
        assert not hub.files and (kept / "README.md").is_file()
        command.push(run, Push("me/model"))
        assert "README.md" in hub.files
    with Hub(private=True) as hub:
        online(hub.address)
        command.push(run, Push("me/model", private=True))
        assert "README.md" in hub.files


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("status", [401, 500, None])
def test_a_refused_upload_keeps_what_was_written(run, online, tmp_path, status):
    with Hub(status or 500) as hub:
        online(hub.address if status else "http://127.0.0.1:9")  # a hub that is not there
        says = "does not let you write|refused the upload|the upload to .* failed"
        with pytest.raises(UserError, match=says) as error:
            command.push(run, Push("me/model"))
    message = str(error.value)
    assert ("hf auth login" in message) == (status == 401) and "\n" not in message
    (kept,) = tmp_path.glob("mmrl-push-*/model")
    assert f"hf upload me/model {kept}" in message and (kept / "README.md").is_file()


def test_mistakes_are_named_before_anything_is_loaded(run, online, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(command.build, "trained", lambda *_, **__: pytest.fail("loaded"))
    for name in ("model", "a/b/c", "me/--x", "me/mo del"):
        with pytest.raises(UserError, match="org/name"):
            command.push(run, Push(name))
    with pytest.raises(UserError, match="not empty"):
        command.write(run, Push("me/model"), tmp_path.parent)
    with pytest.raises(UserError, match="no run folder"):
        command.write(tmp_path / "nothing", Push("me/model"), tmp_path / "new")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="hf auth login.*--dry-run"):
        command.push(run, Push("me/model"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        command.push(run, Push("me/model"))
    with pytest.raises(UserError, match="--license"):
        license_of("", "My Licence")


def test_secrets_and_folders_stay_at_home(monkeypatch, tmp_path, subtests):
    monkeypatch.setenv("HOME", str(tmp_path))
    for plain, published in (
        ({"api_key": "sk-1", "max_new_tokens": 5}, {"api_key": "...", "max_new_tokens": 5}),
        ([{"hf_token": "hf_1"}, {"password": "x"}], [{"hf_token": "..."}, {"password": "..."}]),
        (f"{tmp_path}/prompts.txt", "~/prompts.txt"),
        ("/mnt/acme/prompts.txt", "prompts.txt"),
        ("/no_think", "/no_think"),
        ("http://a/b/c", "http://a/b/c"),
        ({"/mnt/acme/blue.py:blueness": 1.0}, {"blue.py:blueness": 1.0}),
        ("D:\\acme\\prompts.txt", "prompts.txt"),
        ("/a/list\nof /lines", "/a/list\nof /lines"),
    ):
        with subtests.test(plain=plain):
            assert scrubbed({"key": plain}) == {"key": published}


class Writer(toys.ToyBare, Exports):
    """A policy of texts, whose export is one file."""

    capabilities = Capabilities("categorical", makes="text")

    def __init__(self, name, content):
        self.name = name
        self.content = content

    def export(self, folder):
        (folder / self.name).write_text(json.dumps(self.content))


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A function that writes what is published of a run of texts with this policy."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')
    lines = [
        {
            "iteration": i,
            "prompt": "how many?",
            "picture": data_uri(Image.new("RGB", (4, 4))),
            "answers": [{"text": f"```\n# {word}"}],
        }
        for i, word in ((1, "first"), (9, "last"))
    ]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(policy, base):
        config = {"policy": {"vlm": {"path": base}}, "reward": {"exact": 1.0}, "run": str(run)}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        session = SimpleNamespace(policy=policy)
        monkeypatch.setattr(command.build, "trained", lambda *_, **__: session)
        return command.write(run, Push("me/vlm"), tmp_path / f"{len(list(tmp_path.iterdir()))}")

    return write


def test_no_published_file_names_a_folder_of_this_machine(texts, tmp_path):
    base = "/mnt/acme/base"
    policy = Writer("adapter_config.json", {"base_model_name_or_path": base, "r": 4})
    folder = texts(policy, base)
    for name in ("README.md", "config.yaml", "adapter_config.json"):
        text = (folder / name).read_text()
        assert "/mnt" not in text and str(tmp_path) not in text, name
    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert adapter == {"base_model_name_or_path": "base", "r": 4}


def test_the_card_of_a_run_of_texts(texts, tmp_path):
    """Answers first and last, in code blocks they cannot leave; transformers loads it."""
    policy = Writer("config.json", {"model_type": "qwen2_vl"})
    text = (texts(policy, "org/base") / "README.md").read_text()
    meta = yaml.safe_load(text.split("---\n")[1])
    assert meta["base_model"] == "org/base" and meta["base_model_relation"] == "finetune"
    assert meta["pipeline_tag"] == "image-text-to-text" and meta["license"] == "other"
    assert "````\n```\n# first\n````" in text and "# last" in text and "not evaluated" in text
    assert 'AutoModelForImageTextToText.from_pretrained("me/vlm"' in text
    policy.auto_class = "AutoModelForMultimodalLM"
    heard = (texts(policy, "org/base") / "README.md").read_text()
    assert 'AutoModelForMultimodalLM.from_pretrained("me/vlm"' in heard
    assert "ImageTextToText" not in heard
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model")
    assert license_of(str(tmp_path), None) == "apache-2.0"
    film = Card(None, None, None, "me/clips", "mit", has_curves=False, picture="before_after.mp4")
    assert '<video src="before_after.mp4" controls' in film._before_after()
