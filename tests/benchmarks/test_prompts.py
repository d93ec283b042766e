"""Prompts in the manner of GenEval and of the OCR task."""

from collections import Counter

import pytest

from mmrl.apps.benchmarks.prompts import (
    PUBLISHED_MIX,
    TASKS,
    GenEvalPrompts,
    OCRPrompts,
    geneval_suite,
    meaning,
)
from mmrl.core.errors import UserError
from rewards.images.geneval import COLORS, OBJECTS
from rewards.images.ocr import target_of
from tests.benchmarks.files import lines


@pytest.fixture(scope="module")
def geneval():
    return GenEvalPrompts(count=1700, held_out=20)


def test_the_texts_are_those_of_the_templates(geneval):
    for prompt in geneval.train + geneval.held_out:
        text, tag, include = prompt["text"], prompt["tag"], prompt["include"]
        first, last = include[0], include[-1]
        name, count = first["class"], first["count"]
        assert text == prompt["prompt"] and {e["class"] for e in include} <= set(OBJECTS)
        if tag == "counting":
            word = ["zero", "one", "two", "three", "four"][count]
            assert text == f"a photo of {word} {name}{'es' if name.endswith('s') else 's'}"
            assert prompt["exclude"] == [{"class": name, "count": count + 1}]
        if tag == "position":
            relation, anchor = last["position"]
            assert anchor == 0 and len(include) == 2
            assert text.startswith(f"a photo of a{'n' * (last['class'][0] in 'aeiou')}")
            assert text.index(last["class"]) < text.index(f" {relation} ")
        if tag in ("colors", "color_attr"):
            assert all(e["color"] in COLORS and e["class"] != "person" for e in include)


def test_tasks_have_the_published_shares_and_held_out_ones_are_not_trained_on(geneval):
    counted = Counter(prompt["tag"] for prompt in geneval.train)
    assert counted == {tag: 100 * share for tag, share in PUBLISHED_MIX.items() if share}
    held = Counter(prompt["tag"] for prompt in geneval.held_out)
    assert held == {tag: 80 if tag == "single_object" else 20 for tag in TASKS}
    assert not set(map(meaning, geneval.train)) & set(map(meaning, geneval.held_out))
    cat, dog = ({"class": name, "count": 1} for name in ("cat", "dog"))
    pair = {"tag": "two_object", "include": [cat, dog]}
    assert meaning(pair) == meaning({**pair, "include": [dog, cat]})
    left, swapped = (
        {"tag": "position", "include": [a, {**b, "position": ["left of", 0]}]}
        for a, b in ((cat, dog), (dog, cat))
    )
    assert meaning(left) != meaning(swapped) and len(geneval_suite(43)) == 580
    assert GenEvalPrompts(count=50).train == GenEvalPrompts(count=50).train
    assert GenEvalPrompts(count=50, seed=1).train != GenEvalPrompts(count=50).train
    for mixture in ({"counting": 0}, {"count": 1}, {"counting": -1, "colors": 2}):
        with pytest.raises(UserError, match="must give shares above 0"):
            GenEvalPrompts(count=10, mixture=mixture)


def test_official_files_are_read_and_ocr_prompts_hold_their_target(tmp_path):
    row = {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
    for part, text in (("train", "a photo of a bench"), ("test", "a photo of a cow")):
        lines(tmp_path / f"{part}_metadata.jsonl", [row | {"prompt": text}])
        lines(tmp_path / f"ocr/{part}.txt", [f'A sign that says "{part}"'])
    source = GenEvalPrompts(tmp_path)
    (prompt,) = source.train
    assert prompt["text"] == "a photo of a bench" and prompt["include"] == row["include"]
    assert source.held_out[0]["text"] == "a photo of a cow"
    assert target_of(OCRPrompts(tmp_path / "ocr").train[0], "text") == "train"
    source = OCRPrompts(count=300, held_out=50)
    texts = [prompt["text"] for prompt in source.train + source.held_out]
    assert len(set(texts)) == 350 and all(text[0].isupper() for text in texts)
    assert all(target_of(p, "text") == p["target"] for p in source.train)
