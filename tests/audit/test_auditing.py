"""`mmrl check-reward`: ground truths win, tricks are caught, offending rows are named, the exit
status tells."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mmrl.apps.check_reward import Subject, audit, audit_one
from mmrl.apps.check_reward.places import named, where
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.data.vision.source import Vision
from rewards import Grounding
from rewards.answers.verifiable import row_name
from rewards.card import card_of
from tests.fixtures.text_rewards import SMALLEST, prompts_of

load_built_in()
ROWS = [
    {"text": "Where is the cat?", "boxes": [[10, 20, 110, 220]], "answer": "grey wolf"},
    {"text": "Where is the dog?", "boxes": [[30, 20, 60, 220]], "answer": "fox"},
    {"text": "Where is the dog?", "boxes": [[300, 20, 330, 220]], "answer": "a hare"},
]
MINE = '''
import torch
from rewards.card import card

@card(media="text", low=0, high=1)
def published_classification(texts, prompts):
    """Visual-RFT's: part of one another."""

    def clean(text):
        bare = str(text).replace("<answer>", "").replace("</answer>", "")
        return bare.lower().replace(" ", "")

    pairs = [(clean(t), clean(p["answer"])) for t, p in zip(texts, prompts)]
    return torch.tensor([float(a in b or b in a) for a, b in pairs])

@card(media="text", low=0, high=1)
def breaks(texts, prompts):
    return torch.tensor([1.0 / len(t) for t in texts])

def undeclared(texts, prompts):
    return torch.zeros(len(texts))

@card(media="text", low=0, high=1)
class Older:
    """As written for an earlier version."""

    def __call__(self, texts, prompts):
        return torch.zeros(len(texts))

    def right_answer(self, prompt):
        return prompt["answer"]

@card(media="text", low=0, high=1)
def too_much(texts, prompts):
    return torch.tensor([2.0 * ("wolf" in t or "fox" in t or "hare" in t) for t in texts])
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    sys.modules.pop("mine", None)  # other tests have modules of that name


def check(reward: str, rows: str = "rows.jsonl") -> tuple[int, str]:
    with open("c.yaml", "w") as file:
        file.write(f"data: {{prompts: {{path: {rows}, held_out: 0.0}}}}\nreward: {{{reward}}}\n")
    done = CliRunner().invoke(app, ["check-reward", "c.yaml"])
    if isinstance(done.exception, UserError):
        raise done.exception
    return done.exit_code, done.output


def test_every_reward_of_ours_passes_on_good_data(subtests):
    for name in sorted(SMALLEST):
        with subtests.test(name=name):
            found = audit_one(
                Subject(name, REWARDS.build(name, **SMALLEST[name][0]), prompts_of(name)), "text"
            )
            assert found.passed, [
                (line.probe, line.offences) for line in found.lines if line.offences
            ]
            probes = [line.probe for line in found.lines]
            assert {"ground truth", "empty", "echo of the prompt", "all of them"} <= set(probes)
            spatial = "ground truth in other coordinate spaces" in probes
            assert spatial == getattr(REWARDS[name], "spatial", False)


VARIANTS = [
    ("grounding", {"overlap": "giou"}),
    ("grounding", {"threshold": 0.5}),
    ("referring", {"overlap": "giou"}),
    ("detection", {"measure": "f1"}),
    ("detection", {"measure": "map"}),
    ("detection", {"measure": "ap"}),
    ("point", {"form": "gaussian"}),
    ("point", {"form": "distance"}),
    ("gui", {"type_weight": 0.2, "form": "gaussian"}),
    ("count", {"fuzzy": False}),
    ("choice", {"partial": "none"}),
    ("choice", {"partial": "jaccard"}),
    ("transcription", {"unit": "word"}),
    ("chart", {"partial": True}),
    ("answer", {"tolerance": 0.1}),
    ("temporal", {"form": "hull"}),
    ("video_qa", {"gated": True}),
    ("key_steps", {"ordered": True}),
    ("key_steps", {"sections": ["Look", "Think"]}),
    ("svg", {"measure": "ssim", "size": 64}),
    ("svg", {"measure": "mse", "size": 64}),
    ("svg", {"measure": "standardised", "size": 64}),
    ("format", {"form": "answer", "json": True}),
    ("format", {"form": "boxed"}),
    ("repetition", {"n": 2}),
]
PUBLISHED = {
    ("confidence", "form", "visual_rft"): "a wrong box of zero confidence",
    ("referring", "form", "vlm_r1"): "ground truth in other coordinate spaces",
    ("detection", "measure", "recall"): "spam of 20 boxes",
    ("detection", "measure", "visual_rft"): "wrong labels",
}


def test_other_options_pass_too(subtests):
    for name, options in VARIANTS:
        with subtests.test(name=name, options=options):
            prompts = (
                prompts_of(name)[:1]
                if (name, options) == ("temporal", {"form": "hull"})
                else prompts_of(name)
            )
            found = audit_one(Subject(name, REWARDS.build(name, **options), prompts), "text")
            assert found.passed, [
                (line.probe, line.offences) for line in found.lines if line.offences
            ]


@pytest.mark.parametrize("name, option, value", PUBLISHED)
def test_what_is_wrong_with_published_forms_is_found(name, option, value):
    found = audit_one(
        Subject(name, REWARDS.build(name, **{option: value}), prompts_of(name)), "text"
    )
    assert PUBLISHED[name, option, value] in [line.probe for line in found.lines if line.offences]


def test_a_good_reward_on_good_data_exits_with_0(folder):
    code, said = check("grounding: 1.0, classification: 1.0")
    assert code == 0 and said.rstrip().endswith("passed") and "FAIL" not in said
    assert "spam of 20 boxes" in said and "inverted" in said and "echo of the prompt" in said


def test_a_broken_row_is_named_with_file_and_line(folder):
    rows = [*ROWS, {**ROWS[1], "boxes": [[9, 9, 1, 1]]}]
    (folder / "rows.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows))
    code, said = check("grounding: 1.0")
    assert (
        code == 1
        and "rows.jsonl:7: data:" in said
        and "not x0 < x1" in said
        and "failed: grounding" in said
    )


def test_a_row_of_the_vision_data_is_named_with_file_and_line(folder):
    from PIL import Image

    Image.new("RGB", (60, 60)).save(folder / "a.png")
    rows = [{"text": "Where?", "image": "a.png", "boxes": [[1, 2, 30, 40]], "labels": ["dog"]}] * 2
    (folder / "v.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = Vision(folder / "v.jsonl", held_out=0.0)
    found = named(source.train, SimpleNamespace(plain={}, file="c.yaml"))
    assert [where(prompt) for prompt in found] == [f"{folder / 'v.jsonl'}:{n}" for n in (1, 2)]
    assert row_name(source.train[1]) == f"{folder / 'v.jsonl'}:2"


def test_the_published_exploit_is_found(folder):
    code, said = check('"mine.py:published_classification": 1.0')
    assert code == 1 and "rows.jsonl:1: empty: '' scores 1; the ground truth scores 1" in said
    assert "inside a sentence" in said


def test_a_reward_outside_its_range_is_found(folder):
    code, said = check('"mine.py:too_much": 1.0')
    assert code == 1 and "the card says 0 to 1" in said


def test_mistakes_are_one_sentence(folder):
    with pytest.raises(UserError, match="reward 'breaks' fails on 3 answers .*ZeroDivisionError"):
        check('"mine.py:breaks": 1.0')
    with pytest.raises(UserError, match="say which is meant"):
        check('"mine.py:undeclared": 1.0')
    (folder / "c.yaml").write_text("reward: {grounding: 1.0}\n")
    with pytest.raises(UserError, match="the section 'data' is missing"):
        audit(folder / "c.yaml")


def test_a_reward_that_is_not_deterministic_is_found():
    class Moody:
        card = card_of(REWARDS["answer"])
        calls = 0

        def __call__(self, texts, prompts):
            self.calls += 1
            return [1.0 if self.calls == 1 else 0.9 for _ in texts]

    found = audit_one(
        Subject("moody", Moody(), [{"text": "a", "answer": 1}, {"text": "b", "answer": 2}]), "text"
    )
    broken = {line.probe for line in found.lines if line.offences}
    assert "ground truth, one by one" in broken and not math.isnan(found.lines[1].scores[0])


def test_coordinate_spaces_are_tried_on_a_reward_that_declares_no_maximum():
    class Open(Grounding):
        card = replace(card_of(Grounding), high=None)

    found = audit_one(Subject("open", Open(), ROWS), "text")
    spaces = [line for line in found.lines if line.probe.endswith("coordinate spaces")]
    assert [len(line.scores) for line in spaces] == [4 * len(ROWS)] and not spaces[0].offences


def test_each_task_of_a_mixture_has_a_table_of_its_own(folder):
    rows = [
        {"text": "9 times 9?", "answer": "81", "task": "sum"},
        {"text": "Which animal?", "answer": "fox", "task": "animal"},
        {"text": "Which one?", "answer": "hare", "task": "unheard"},
    ]
    (folder / "mixed.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    routes = "routed: {routes: {sum: maths, animal: classification}}"
    status, printed = check(routes, "mixed.jsonl")
    assert status == 1
    assert all(f"reward routed, task {task} " in printed for task in ("sum", "animal", "unheard"))
    assert printed.rstrip().endswith("failed: routed, task unheard")
