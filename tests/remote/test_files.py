"""No field of a request is ever a path: nothing a client names is opened, whatever the reward."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.apps.serve.service import make_app
from mmrl.config import Weighted
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.scoring import Handled, Handling
from mmrl.scoring.cache import stamp
from rewards import ByTask, Calibrated, Remote, Segmentation, Svg, jpeg_compressibility
from rewards.base.files import NoPath, of_a_request, open_picture, request
from rewards.card import PICTURES, Card, card_of
from tests.fixtures.reward_servers import b64, png, serving
from tests.fixtures.tiny_image_rewards import TINY_OPTIONS as TINY
from tests.remote.test_fuzz import answer

load_built_in()
MEDIA = sorted(
    (name, field) for name, entry in REWARDS.items() for field in card_of(entry).pictures
)
REST = {"source_text": "a", "text": "b", "width": 8, "height": 8}


def build(name, tmp_path):
    return REWARDS.build(name, **TINY[name](tmp_path)) if name in TINY else REWARDS[name]()


def ask(reward, prompt):
    """Status and content of a request with one picture, or text, and this prompt."""
    app = make_app({"reward": Weighted(reward, 1.0)})
    media = (
        {"texts": ["<answer>[[1, 1, 5, 5]]</answer>"]}
        if "text" in card_of(reward).media
        else {"images": [b64(png())]}
    )
    body = json.dumps({"prompts": [prompt], **media}).encode()
    return asyncio.run(answer(app, body, "application/json"))


@pytest.fixture
def places(tmp_path):
    """A picture, what is no picture, a pipe at which a reader would wait, and nothing."""
    Image.new("L", (8, 8), 255).save(tmp_path / "there.png")
    (tmp_path / "secret.txt").write_text("s3cret")
    os.mkfifo(tmp_path / "pipe.png")
    return [tmp_path / name for name in ("there.png", "secret.txt", "pipe.png", "nowhere.png")]


listeners = []  # of a hook that stays as long as this process


@cache
def listen():
    def watch(event, args):
        if listeners and event == "open" and isinstance(args[0], (str, bytes)):
            listeners[0].add(os.path.abspath(os.fsdecode(args[0])))

    sys.addaudithook(watch)


@pytest.fixture
def opened():
    """The paths that this process opens while the test runs."""
    listen()
    listeners.append(set())
    yield listeners[0]
    listeners.clear()


@pytest.mark.parametrize(("name", "field"), MEDIA)
def test_a_path_in_a_field_of_pictures_is_refused_whether_it_exists_or_not(
    name, field, tmp_path, places, opened
):
    reward = build(name, tmp_path)
    for form in (str, lambda p: [str(p)], lambda p: f"file://{p}", lambda p: [{"png": str(p)}]):
        answers = {ask(reward, {**REST, field: form(place)}) for place in places}
        ((status, content),) = answers  # one and the same for all places
        assert status == 400 and f"prompts[0].{field}".encode() in content
    assert not opened & {str(place) for place in places}


def test_fields_have_the_names_that_options_give_them(places):
    renamed = partial(Segmentation)
    renamed.card = Card(pictures=("other",))
    routes = ByTask({"a": renamed, "b": Svg()})
    assert set(routes.card.pictures) == {"other", *PICTURES}
    # a baseline is a picture where pictures are judged
    reward = Calibrated(jpeg_compressibility)
    ((status, content),) = {ask(reward, {"baseline": str(place)}) for place in places}
    assert status == 400 and b"prompts[0].baseline" in content
    for baseline in ({"png": b64(png())}, 0.5):
        assert ask(reward, {"baseline": baseline})[0] == 200


# rewards of users, which declare nothing


def opening(texts, prompts):
    return [float(len(Path(prompt["deep"][0]["file"]).read_bytes())) for prompt in prompts]


def sampled(texts, prompts):
    with open(texts[0], "rb") as file:
        return [float(len(file.read()))]


def showing(texts, prompts):
    return [float(open_picture(prompt["deep"][0]["file"]).size[0]) for prompt in prompts]


@pytest.mark.parametrize(("reward", "timed"), [(opening, True), (sampled, False), (showing, False)])
def test_what_a_reward_opens_by_itself_is_refused_too(reward, timed, places, monkeypatch):
    monkeypatch.chdir(places[0].parent)
    handled = Handled(reward, Handling(timeout=60.0), "r") if timed else reward
    app = make_app({"r": Weighted(handled, 1.0)})
    answers = set()
    for name in (form for p in places for form in (str(p), p.name, f"./{p.name}")):
        body = json.dumps({"texts": [name], "prompts": [{"deep": [{"file": name}]}]}).encode()
        status, content = asyncio.run(answer(app, body, "application/json"))
        answers.add((status, content.replace(name.encode(), b"")))
    ((status, content),) = answers
    said = json.loads(content)
    assert status == 200 and said["rewards"] == {"r": [None]}
    assert "a field of a request is never a path" in said["failures"]["r"]["cause"]


def test_a_server_that_asks_another_one_reads_no_file_for_its_client(places, opened):
    """The reward of the first is ``remote``, which reads pictures of prompts from disk."""
    reference = places[0]
    with serving({"segmentation": Segmentation()}) as second:
        remote = Remote(second)
        prompt = {"mask": str(reference)}
        status, content = ask(remote, prompt)
        assert status == 422 and b"never a path" in content
        assert str(reference) not in opened
        assert remote(["<answer>[[0, 0, 8, 8]]</answer>"], [prompt]).tolist() == [1.0]
        assert str(reference) in opened


def test_only_what_is_scored_for_a_request_is_refused(places):
    assert stamp(places[0])
    with request(["a"], [{"file": str(places[0])}]):
        assert of_a_request() and stamp(places[0]) == ""  # a cache looks at no file of it
        with pytest.raises(NoPath):
            places[0].read_bytes()
        assert Path(__file__).read_bytes()  # what the request does not name
    assert not of_a_request() and places[0].read_bytes()


# what a client sends instead


def test_pictures_of_declared_fields_travel_as_pictures(tmp_path):
    mask = np.zeros((8, 8), dtype=np.uint8)
    mask[2:5, 3:7] = 9
    file = str(tmp_path / "mask.png")
    Image.fromarray(mask).save(file)
    reward = Segmentation()
    texts = ["<answer>[[3, 2, 7, 5]]</answer>", "<answer>[[0, 0, 4, 4]]</answer>"]
    bits, polygon = (mask > 0).astype(int).tolist(), [[3, 2, 7, 2, 7, 5, 3, 5]]
    with serving({"segmentation": reward}) as address:
        for value in (file, Image.open(file), bits, polygon):
            prompts = [{"width": 8, "height": 8, "mask": value}] * 2
            local = reward(texts, prompts)
            assert torch.equal(Remote(address)(texts, prompts), local) and local[0] == 1
        only = Remote(address, fields=["mask"])
        assert only(texts, [{"mask": file}] * 2)[0] == 1
