"""Rows that a model cannot take are found before the first is sampled, all in one list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import OPTConfig, Qwen2Config

from mmrl.cli.commands import show_data
from mmrl.core.broken_rows import BrokenRows
from mmrl.core.errors import UserError
from mmrl.data.ledger import Summary
from mmrl.experiment.build import Session, admitted, read
from mmrl.policies.base import Report
from mmrl.policies.vlm import first_look
from mmrl.policies.vlm.engines.limits import EngineLimits, of_model
from mmrl.policies.vlm.first_look import misfits
from tests.fixtures import tiny_vlms
from tests.fixtures.clips import film
from tests.policies.vlm.test_vlm_inputs import inputs


@pytest.fixture()
def rows(tmp_path, monkeypatch):
    """Rows of which one in ten is broken, each in its own way; the reason of each."""
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    picture, clip, thin, short, cut_picture, cut_clip = (
        tmp_path / name for name in ("a.png", "b.mp4", "thin.png", "short.mp4", "c.png", "c.mp4")
    )
    tiny_vlms.image(70, 60).save(picture)
    tiny_vlms.image(900, 4).save(thin)
    film(clip, 20)
    film(short, 1)
    cut_clip.write_bytes(clip.read_bytes()[:700])
    cut_picture.write_bytes(picture.read_bytes()[:5000])
    broken = {
        "1 <image> placeholders for 2 images": {"text": "<image> q", "images": [picture, picture]},
        "more <image> placeholders": {"text": "<image> q"},
        "images[1] is null": {"images": [picture, None]},
        "images[0] is a list": {"images": [[picture]]},
        "own token <|image_pad|>": {"text": "q <|image_pad|>", "image": picture},
        "own token <|im_end|>": {"text": "q<|im_end|>", "image": picture},
        "aspect ratio must be smaller": {"image": thin},
        "no such file": {"image": tmp_path / "gone.png"},
        "truncated": {"image": cut_picture},
        "cut short": {"video": cut_clip},
        "temporal_factor": {"video": short},
    }
    prompts = [{"text": f"q {i}", "image": picture} for i in range(10 * len(broken))]
    prompts += [{"text": "<video> q", "video": clip}, {"text": "q"}]
    for i, row in enumerate(broken.values()):
        prompts[10 * i + 9] = {"text": "q"} | row
    for i, prompt in enumerate(prompts):
        prompt["origin"] = f"q.jsonl:{i + 1}"
    prompts = json.loads(json.dumps(prompts, default=str))
    return prompts, {10 * i + 9: why for i, why in enumerate(broken)}


def test_every_broken_row_is_named_and_others_are_encoded_once_a_kind(rows, monkeypatch):
    prompts, reasons = rows
    reader = inputs("qwen3_vl")
    problems = misfits(prompts, reader)
    assert problems.keys() == reasons.keys()
    for place, why in reasons.items():
        assert problems[place].startswith(f"q.jsonl:{place + 1}: ") and why in problems[place]
    encoded = []
    encode = reader.encode
    monkeypatch.setattr(reader, "encode", lambda p: encoded.append(p["origin"]) or encode(p))
    misfits([p for i, p in enumerate(prompts) if i not in reasons], reader)
    assert len(encoded) == 3  # a picture, a clip, none
    refused = Mock(side_effect=UserError("no such role"))
    monkeypatch.setattr(reader, "encode", refused)
    assert len(misfits([{"text": f"{i}"} for i in range(50)], reader)) == 50
    assert refused.call_count == first_look.ALIKE


def test_broken_rows_are_left_out_where_the_source_skips_them(rows):
    prompts, reasons = rows

    def admit(given):
        if problems := misfits(given, inputs("qwen3_vl")):
            raise BrokenRows(problems, len(given))
        return given

    source = SimpleNamespace(train=prompts[:60], held_out=prompts[60:])
    policy = SimpleNamespace(admit=admit, report=Report())
    fitting = admitted(policy, source, [Summary("q.jsonl", skips=True)])
    whole = [p for i, p in enumerate(prompts) if i not in reasons]
    assert [*fitting.train, *fitting.held_out] == whole
    assert f"{len(reasons)} of {len(prompts)} rows are left out" in policy.report.notes[0]


def test_what_an_engine_does_not_take_is_found_before_the_run():
    """By the row's name: too many tokens with the answer, too many pictures or clips."""
    reader = inputs("qwen3_vl")
    picture = tiny_vlms.image(56, 56)
    limits = EngineLimits("the engine", 120, 2, 1, "max_model_len", "max_images")
    exact = {"text": "q", "images": [picture], "origin": "q.jsonl:1"}
    used = reader.measure(exact)[0].tokens
    prompts = [
        exact,
        {"text": "word " * 120, "origin": "q.jsonl:2"},
        {"text": "q", "images": [picture] * 3, "origin": "q.jsonl:3"},
    ]
    problems = misfits(prompts, reader, limits, answer=120 - used)
    assert problems.keys() == {1, 2}
    assert "q.jsonl:2: its " in problems[1] and "more than the 120 that the engine" in problems[1]
    assert "or raise max_model_len" in problems[1]
    assert "it has 3 images, and the engine takes 2 images of a prompt (max_images" in problems[2]
    assert misfits(prompts[:1], reader, limits, answer=121 - used).keys() == {0}


def test_what_limits_a_row_is_measured_only_where_it_may_be_long(monkeypatch):
    reader = inputs("qwen3_vl")
    refused = Mock(side_effect=UserError("q.jsonl:1: its font is missing"))
    monkeypatch.setattr(reader, "measure", refused)
    limits = EngineLimits("the engine", 10_000)
    short = [{"text": "word " * 100}, {"text": "q", "images": [tiny_vlms.image(56, 56)]}]
    assert not misfits(short, reader, limits, answer=100) and not refused.called
    long = {"text": "word " * 2500, "origin": "q.jsonl:1"}
    problems = misfits([long], reader, limits, answer=100)
    assert problems == {0: "q.jsonl:1: its font is missing"}
    # learnt positions are a limit and rotary ones are none
    assert of_model(OPTConfig(max_position_embeddings=100)).tokens == 100
    assert of_model(Qwen2Config(max_position_embeddings=100)).tokens is None


RUN = """
policy: {vlm: {path: model, max_new_tokens: 4}}
data: {vision: {path: q.jsonl, held_out: 0.2}}
reward: {repetition: 1.0}
objective: {policy_gradient: {clip_range: 0.2}}
train: {prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}
"""


@pytest.fixture()
def configuration(tmp_path, monkeypatch):
    """Of the rows the source refuses some and the processor others; the model has no weights."""
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_vlms.folder("qwen3_vl"), "model", ignore=ignored)
    tiny_vlms.image(70, 60).save("a.png")
    tiny_vlms.image(900, 4).save("thin.png")
    odd = {
        3: {"text": "q", "images": ["thin.png"]},  # the processor
        5: {"text": "q", "images": ["gone.png"]},  # the source
        7: {"text": "q <|image_pad|>"},  # the processor
        9: {"text": " "},  # the source
    }
    rows = [odd.get(i, {"text": f"q {i}", "images": ["a.png"]}) for i in range(1, 41)]
    Path("q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def test_rows_that_source_and_processor_refuse_are_one_list_before_any_weights(configuration):
    """Training, evaluation and ``mmrl data --check`` say the same, in the order of the file."""
    with pytest.raises(UserError) as refusal:
        Session.of(read(configuration, []))
    said = str(refusal.value)
    head, *lines, remedy = said.splitlines()
    assert head == "4 of 40 rows are broken:" and "leave them out with broken: skip" in remedy
    reasons = ("aspect ratio", "no file", "own token <|image_pad|>", "no text")
    assert len(lines) == len(reasons)
    for line, number, why in zip(lines, (3, 5, 7, 9), reasons):
        assert f"q.jsonl:{number}: " in line and why in line
    listed = "\n".join(show_data(configuration, [], None, 4, check=True))
    assert f"problem: {said}" in listed
    plain = "\n".join(show_data(configuration, [], None, 4))
    assert "2 of 40 rows are broken" in plain  # without the model's folder
