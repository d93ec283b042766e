"""Rows that a model cannot take are found before the first is sampled, all in one list."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from mmrl.cli.commands import show_data
from mmrl.core.broken_rows import SHOWN, BrokenRows
from mmrl.core.errors import UserError
from mmrl.data.ledger import Summary
from mmrl.experiment.build import Session, admitted, read
from mmrl.policies.base import Report
from mmrl.policies.vlm import first_look
from mmrl.policies.vlm.engines.limits import EngineLimits, of_model
from mmrl.policies.vlm.first_look import misfits
from mmrl.policies.vlm.media import Budgets
from tests.fixtures import tiny_vlms
from tests.fixtures.clips import film
from tests.policies.vlm.test_vlm_inputs import inputs


@pytest.fixture()
def rows(tmp_path, monkeypatch):
    """Sixty rows of which one in ten is broken, each in its own way; the reason of each."""
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    tiny_vlms.image(70, 60).save(tmp_path / "a.png")
    tiny_vlms.image(900, 4).save(tmp_path / "thin.png")
    film(tmp_path / "clip.mp4", 20)
    film(tmp_path / "short.mp4", 1)
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes()[:700])
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    picture, clip = str(tmp_path / "a.png"), str(tmp_path / "clip.mp4")
    broken = {
        "1 <image> placeholders for 2 images": {"text": "<image> q", "images": [picture, picture]},
        "more <image> placeholders": {"text": "<image> q"},
        "images[1] is null": {"images": [picture, None]},
        "images[0] is a list": {"images": [[picture]]},
        "own token <|image_pad|>": {"text": "q <|image_pad|>", "image": picture},
        "own token <|im_end|>": {"text": "q<|im_end|>", "image": picture},
        "aspect ratio must be smaller": {"image": str(tmp_path / "thin.png")},
        "no such file": {"image": str(tmp_path / "gone.png")},
        "truncated": {"image": str(tmp_path / "cut.png")},
        "cut short": {"video": str(tmp_path / "cut.mp4")},
        "temporal_factor": {"video": str(tmp_path / "short.mp4")},
    }
    prompts = [{"text": f"q {i}", "image": picture} for i in range(10 * len(broken))]
    prompts += [{"text": "<video> q", "video": clip}, {"text": "q"}]
    for i, row in enumerate(broken.values()):
        prompts[10 * i + 9] = {"text": "q"} | row
    for i, prompt in enumerate(prompts):
        prompt["origin"] = f"q.jsonl:{i + 1}"
    return prompts, {10 * i + 9: why for i, why in enumerate(broken)}


def test_every_broken_row_is_named_with_its_reason(rows):
    prompts, reasons = rows
    problems = misfits(prompts, inputs("qwen3_vl"))
    assert problems.keys() == reasons.keys()
    for place, why in reasons.items():
        assert problems[place].startswith(f"q.jsonl:{place + 1}: ") and why in problems[place]


def test_only_rows_of_new_kinds_are_encoded(rows, monkeypatch):
    prompts, _ = rows
    reader = inputs("qwen3_vl")
    encoded = []
    encode = reader.encode
    monkeypatch.setattr(reader, "encode", lambda p: encoded.append(p["origin"]) or encode(p))
    misfits([p for i, p in enumerate(prompts) if i % 10 != 9], reader)
    assert len(encoded) == 3  # a picture, a clip, none


def test_what_all_rows_of_a_kind_have_is_not_tried_for_each(rows, monkeypatch):
    prompts, _ = rows
    reader = inputs("qwen3_vl")
    tries = []

    def refuse(prompt):
        tries.append(prompt)
        raise UserError(f"{prompt['origin']}: no such role")

    monkeypatch.setattr(reader, "encode", refuse)
    texts = [{"text": f"{i}", "origin": f"q.jsonl:{i}"} for i in range(50)]
    assert len(misfits(texts, reader)) == 50
    assert len(tries) == first_look.ALIKE


class Policy:
    """Takes what the first look lets through."""

    def __init__(self, reader):
        self.reader = reader
        self.report = Report()

    def admit(self, prompts):
        if problems := misfits(prompts, self.reader):
            raise BrokenRows(problems, len(prompts))
        return prompts


def test_broken_rows_of_all_parts_stop_a_run_or_are_left_out(rows):
    prompts, reasons = rows
    source = SimpleNamespace(train=prompts[:60], held_out=prompts[60:])
    policy = Policy(inputs("qwen3_vl"))
    with pytest.raises(UserError, match=f"{len(reasons)} of {len(prompts)} rows are broken") as e:
        admitted(policy, source, [Summary("q.jsonl")])
    assert all(why in str(e.value) for why in reasons.values())
    fitting = admitted(policy, source, [Summary("q.jsonl", skips=True)])
    assert [*fitting.train, *fitting.held_out] == [
        p for i, p in enumerate(prompts) if i not in reasons
    ]
    assert f"{len(reasons)} of {len(prompts)} rows are left out" in policy.report.notes[0]


def test_overlong_prompts_that_stop_a_run_are_named_together():
    from mmrl.policies.vlm.budgets import admit

    reader = inputs("qwen3_vl", Budgets(prompt_tokens=30, overlong="error"))
    texts = [{"text": "q" * n, "origin": f"q.jsonl:{n}"} for n in (1, 90, 2, 91)]
    with pytest.raises(BrokenRows) as error:
        admit(texts, reader.budgets, reader.measure)
    assert "q.jsonl:90: " in str(error.value) and "q.jsonl:91: " in str(error.value)


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
        {"text": "é" * 200, "origin": "q.jsonl:4"},
    ]
    problems = misfits(prompts, reader, limits, answer=120 - used)
    assert problems.keys() == {1, 2, 3}
    assert "q.jsonl:2: its " in problems[1] and "more than the 120 that the engine" in problems[1]
    assert "or raise max_model_len" in problems[1]
    assert "it has 3 images, and the engine takes 2 images of a prompt (max_images" in problems[2]
    assert misfits(prompts[:1], reader, limits, answer=121 - used).keys() == {0}


def test_rows_that_are_surely_short_are_not_encoded_for_that(monkeypatch):
    reader = inputs("qwen3_vl")
    measured = []
    measure = reader.measure
    monkeypatch.setattr(reader, "measure", lambda p: measured.append(p) or measure(p))
    limits = EngineLimits("the engine", 10_000)
    short, picture = {"text": "word " * 100}, {"text": "q", "images": [tiny_vlms.image(56, 56)]}
    long = {"text": "word " * 2500}
    assert not misfits([short, picture], reader, limits, answer=100) and not measured
    misfits([long], reader, limits, answer=100)
    assert measured == [long]


def test_learnt_positions_are_a_limit_and_rotary_ones_are_none():
    from transformers import OPTConfig, Qwen2Config

    assert of_model(OPTConfig(max_position_embeddings=100)).tokens == 100
    assert of_model(Qwen2Config(max_position_embeddings=100)).tokens is None


def test_what_stops_a_row_from_being_measured_is_its_reason(monkeypatch):
    reader = inputs("qwen3_vl")

    def refuse(prompt):
        raise UserError(f"{prompt['origin']}: its font is missing")

    monkeypatch.setattr(reader, "measure", refuse)
    row = {"text": "word " * 50, "origin": "q.jsonl:1"}
    problems = misfits([row], reader, EngineLimits("the engine", 20))
    assert problems == {0: "q.jsonl:1: its font is missing"}


@pytest.fixture()
def configuration(tmp_path, monkeypatch):
    """A run over rows of which the source refuses some and the processor others; the folder of its
    model holds no weights."""
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_vlms.folder("qwen3_vl"), tmp_path / "model", ignore=ignored)
    tiny_vlms.image(70, 60).save(tmp_path / "a.png")
    tiny_vlms.image(900, 4).save(tmp_path / "thin.png")
    odd = {
        3: {"text": "q", "images": ["thin.png"]},  # the processor
        5: {"text": "q", "images": ["gone.png"]},  # the source
        7: {"text": "q <|image_pad|>"},  # the processor
        9: {"text": " "},  # the source
    }
    rows = [odd.get(i, {"text": f"q {i}", "images": ["a.png"]}) for i in range(1, 41)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "run.yaml"
    file.write_text(
        "policy: {vlm: {path: model, max_new_tokens: 4}}\n"
        "data: {vision: {path: q.jsonl, held_out: 0.2}}\n"
        "reward: {repetition: 1.0}\n"
        "objective: {policy_gradient: {clip_range: 0.2}}\n"
        "train: {prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    return file


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


def test_a_long_list_is_cut_and_counted(configuration):
    texts = [f"q <|image_pad|> {'<image>' * i}" if i % 2 else {"a": i} for i in range(60)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in [*texts, "q"])
    (configuration.parent / "q.jsonl").write_text(rows)
    with pytest.raises(UserError, match="60 of 61 rows are broken") as refusal:
        Session.of(read(configuration, []))
    assert str(refusal.value).count("\n") <= SHOWN + 3 and "more" in str(refusal.value)
