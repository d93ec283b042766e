"""What a caller may pass: overrides, prompts, rewards; and the sentence for what is wrong."""

import math
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.api.arguments import prompts_of, words_of
from mmrl.api.media import Samples, Video, shown
from mmrl.api.rewards import batch_reward, named
from mmrl.config.yamltext import read
from tests.fixtures.mistakes import message

PICTURES = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)])
ASKED = [{"text": "dark"}, {"text": "light"}]


def test_overrides_are_read_back_as_they_were(subtests):
    for value in [20, 1e-5, "a: b", "no", None, True, [1, 2], {"ppo": {"clip": 0.2}}, math.inf]:
        with subtests.test(value=value):
            ((word),) = words_of({"train.x": value})
            assert read(word.partition("=")[2], "")[0] == value
    assert words_of({"a.b": np.float64(0.5), "c": Path("x/y")}) == ["a.b=0.5", 'c="x/y"']
    assert words_of(["a=1"]) == ["a=1"] and words_of(None) == []
    for wrong in ({"reward": print}, "train.iterations=3", [1]):
        assert "override" in message(words_of, wrong)


def test_prompts_are_texts_dicts_frames_and_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    assert prompts_of("a cat") == [{"text": "a cat"}]
    known = prompts_of([" a ", {"prompt": "b", "label": 1}])
    assert known == [{"text": " a "}, {"prompt": "b", "label": 1, "text": "b"}]
    frame = pandas.DataFrame({"prompt": ["a", "b"], "label": [1, 2], "hint": ["x", None]})
    rows = prompts_of(frame)
    assert [row["text"] for row in rows] == ["a", "b"] and rows[0]["label"] == 1
    assert type(rows[0]["label"]) is int
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert [row["text"] for row in prompts_of(tmp_path / "p.txt")] == ["one", "two"]


def test_wrong_prompts_name_the_row():
    for prompts, sentence in [
        ([], "there are none"),
        (["a", ""], "row 1: 'text' must be text"),
        (["a", 3], "row 1: expected a text or a dict"),
        ([{"caption": "a"}], "row 0: no 'text' or 'prompt'; it has caption"),
        (7, "got int"),
    ]:
        assert sentence in message(prompts_of, prompts)


def brightness(sample):
    return sum(sample.resize((1, 1)).getpixel((0, 0))) / 765


def of_prompt(sample, prompt):
    return None if prompt["text"] == "dark" else 2.0


def of_batch(samples, prompts):
    assert samples.shape == (2, 3, 4, 4) and len(prompts) == 2
    return samples.flatten(1).mean(1)


def test_the_signature_says_what_a_reward_sees():
    def value(reward, samples=PICTURES):
        return list(batch_reward(reward, "mine")(samples, ASKED))

    assert value(brightness) == [0.0, 1.0] and value(of_prompt) == [None, 2.0]
    assert value(of_batch) == [0.0, 1.0] and value(lambda images: images.amax((1, 2, 3)))[1] == 1
    assert value(lambda text: len(text), ["a", "bcd"]) == [1.0, 3.0]
    for wrong in (lambda a, b: 0, lambda: 0, lambda a, b, c: 0, lambda a, *, need: 0):
        assert "(samples, prompts)" in message(batch_reward, wrong, "mine")
    assert "'mine' returned 'good' for one sample" in message(value, lambda sample: "good")


def test_several_rewards_and_weights():
    rewards = named([brightness, "clip_score", lambda image: 0.0], [1.0, 0.5, 0.1])
    assert rewards.section == {"python:brightness": 1.0, "clip_score": 0.5, "python:reward": 0.1}
    assert set(rewards.live) == {"brightness", "reward"}
    of_dict = named({"glow": brightness, "clip_score": 2})
    assert of_dict.section == {"python:glow": 1.0, "clip_score": 2}
    assert set(named([brightness, brightness]).live) == {"brightness", "brightness_2"}
    assert "1 weights for 2 rewards" in message(named, [brightness, brightness], [1.0])
    assert "got 3" in message(named, 3)


def test_media_become_pictures_videos_and_texts(tmp_path):
    first, second = shown(PICTURES)
    assert isinstance(first, Image.Image) and second.getpixel((0, 0)) == (255, 255, 255)
    (video,) = shown(PICTURES[None], fps=24)
    assert isinstance(video, Video) and len(video) == 2 and "data:video/mp4" in video._repr_html_()
    samples = Samples([first, video, "<b>"], [{"text": "<i>"}] * 3, {"r": [1.0, 2.0, 3.0]})
    page = samples._repr_html_()
    assert "&lt;b&gt;" in page and "&lt;i&gt;" in page and "r 2" in page and "<i>" not in page
    assert [path.name for path in samples.save(tmp_path / "x")] == ["000.png", "001.mp4", "002.txt"]
    with av.open(str(tmp_path / "x" / "001.mp4")) as file:
        assert file.streams.video[0].average_rate == 24 and file.streams.video[0].frames == 2


def test_mistakes_of_overrides_name_the_argument(tmp_path):
    words = {"train.iteration": 1, "run": str(tmp_path / "run")}
    said = message(mmrl.train, "digits/flow_grpo", words)
    assert "overrides: train.iteration=1: " in said and "command line" not in said
    said = message(mmrl.load_policy, "digits/flow_grpo", {"nothing": 1})
    assert said.startswith("overrides: nothing=1: unknown section")
