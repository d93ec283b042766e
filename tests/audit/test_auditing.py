"""`mmrl check-reward`: ground truths win, tricks are caught, offending rows are named, the exit
status tells."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.apps.check_reward import Subject, audit, audit_one
from mmrl.apps.check_reward.places import named, where
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.data.vision.source import Vision
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
import re
from rewards.card import card

@card(media="text", low=0, high=1)
def published_classification(texts, prompts):
    """Visual-RFT's: part of one another."""
    clean = [re.sub("<.?answer>| ", "", text.lower()) for text in texts]
    rights = [str(prompt["answer"]).lower().replace(" ", "") for prompt in prompts]
    return [float(a in b or b in a) for a, b in zip(clean, rights)]

@card(media="text", low=0, high=1)
def breaks(texts, prompts):
    return [1.0 / len(text) for text in texts]

def undeclared(texts, prompts):
    return [0.0] * len(texts)

@card(media="text", low=0, high=1)
def too_much(texts, prompts):
    return [2.0 * ("wolf" in t or "fox" in t or "hare" in t) for t in texts]
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


VARIANTS = {name: [{}] for name in sorted(SMALLEST)} | {
    "grounding": [{}, {"overlap": "giou"}, {"threshold": 0.5}],
    "referring": [{}, {"overlap": "giou"}],
    "detection": [{}, *({"measure": measure} for measure in ("f1", "map", "ap"))],
    "point": [{}, {"form": "gaussian"}, {"form": "distance"}],
    "gui": [{}, {"type_weight": 0.2, "form": "gaussian"}],
    "count": [{}, {"fuzzy": False}],
    "choice": [{}, {"partial": "none"}, {"partial": "jaccard"}],
    "transcription": [{}, {"unit": "word"}],
    "chart": [{}, {"partial": True}],
    "answer": [{}, {"tolerance": 0.1}],
    "video_qa": [{}, {"gated": True}],
    "key_steps": [{}, {"ordered": True}, {"sections": ["Look", "Think"]}],
    "svg": [{}, *({"measure": measure} for measure in ("ssim", "mse", "standardised"))],
    "format": [{}, {"form": "answer", "json": True}, {"form": "boxed"}],
    "repetition": [{}, {"n": 2}],
}
PUBLISHED = {
    ("confidence", "form", "visual_rft"): "a wrong box of zero confidence",
    ("referring", "form", "vlm_r1"): "ground truth in other coordinate spaces",
    ("detection", "measure", "recall"): "spam of 20 boxes",
    ("detection", "measure", "visual_rft"): "wrong labels",
}


def audited(name, **options):
    reward = REWARDS.build(name, **SMALLEST[name][0] | options)
    return audit_one(Subject(name, reward, prompts_of(name)), "text")


def test_every_reward_passes_on_good_data(subtests):
    for name, variants in VARIANTS.items():
        for options in variants:
            with subtests.test(name=name, options=options):
                found = audited(name, **options)
                bad = [line for line in found.lines if line.offences]
                assert found.passed, [(line.probe, line.offences) for line in bad]
                probes = [line.probe for line in found.lines]
                assert {"ground truth", "empty", "echo of the prompt"} <= set(probes)
                spatial = "ground truth in other coordinate spaces" in probes
                assert spatial == getattr(REWARDS[name], "spatial", False)


def test_what_is_wrong_with_published_forms_is_found(subtests):
    for (name, option, value), probe in PUBLISHED.items():
        with subtests.test(name=name, value=value):
            found = audited(name, **{option: value})
            assert probe in [line.probe for line in found.lines if line.offences]


def test_the_command_tells_by_its_exit_status_and_names_rows(folder, subtests):
    broken = [*ROWS, {**ROWS[1], "boxes": [[9, 9, 1, 1]]}]
    (folder / "broken.jsonl").write_text("\n\n".join(json.dumps(row) for row in broken))
    published = '"mine.py:published_classification": 1.0'
    empty = "rows.jsonl:1: empty: '' scores 1; the ground truth scores 1"
    for reward, rows, code, words in (
        ("grounding: 1.0, classification: 1.0", "rows.jsonl", 0, ["spam of 20 boxes", "inverted"]),
        ("grounding: 1.0", "broken.jsonl", 1, ["broken.jsonl:7: data:", "not x0 < x1"]),
        (published, "rows.jsonl", 1, [empty, "inside a sentence"]),
        ('"mine.py:too_much": 1.0', "rows.jsonl", 1, ["the card says 0 to 1"]),
    ):
        with subtests.test(reward=reward, rows=rows):
            status, said = check(reward, rows)
            assert status == code and all(word in said for word in words), said
            assert ("FAIL" in said) == bool(code)
            assert said.splitlines()[-1].startswith("failed: " if code else "passed")


def test_a_row_of_the_vision_data_is_named_with_file_and_line(folder):
    Image.new("RGB", (60, 60)).save(folder / "a.png")
    row = {"text": "Where?", "image": "a.png", "boxes": [[1, 2, 30, 40]], "labels": ["dog"]}
    (folder / "v.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    source = Vision(folder / "v.jsonl", held_out=0.0)
    found = named(source.train, SimpleNamespace(plain={}, file="c.yaml"))
    assert [where(prompt) for prompt in found] == [f"{folder / 'v.jsonl'}:{n}" for n in (1, 2)]
    assert row_name(source.train[1]) == f"{folder / 'v.jsonl'}:2"


def test_mistakes_are_one_sentence(folder):
    with pytest.raises(UserError, match="reward 'breaks' fails on 3 answers .*ZeroDivisionError"):
        check('"mine.py:breaks": 1.0')
    with pytest.raises(UserError, match="say which is meant"):
        check('"mine.py:undeclared": 1.0')
    (folder / "c.yaml").write_text("reward: {grounding: 1.0}\n")
    with pytest.raises(UserError, match="the section 'data' is missing"):
        audit(folder / "c.yaml")


def test_a_reward_that_is_not_deterministic_is_found():
    calls = iter([1.0])

    def moody(texts, prompts):
        return [next(calls, 0.9)] * len(texts)

    moody.card = card_of(REWARDS["answer"])
    prompts = [{"text": "a", "answer": 1}, {"text": "b", "answer": 2}]
    found = audit_one(Subject("moody", moody, prompts), "text")
    assert "ground truth, one by one" in {line.probe for line in found.lines if line.offences}


def test_each_task_of_a_mixture_has_a_table_of_its_own(folder):
    tasks = (("81", "sum"), ("fox", "animal"), ("hare", "unheard"))
    rows = [{"text": f"{i}?", "answer": a, "task": task} for i, (a, task) in enumerate(tasks)]
    (folder / "mixed.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    routes = "routed: {routes: {sum: maths, animal: classification}}"
    status, printed = check(routes, "mixed.jsonl")
    assert status == 1
    assert all(f"reward routed, task {task} " in printed for task in ("sum", "animal", "unheard"))
    assert printed.rstrip().endswith("failed: routed, task unheard")
