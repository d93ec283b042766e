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


def by_tag(prompts, tag):
    return [prompt for prompt in prompts if prompt["tag"] == tag]


def test_the_texts_are_those_of_the_templates(geneval):
    for prompt in geneval.train + geneval.held_out:
        text, include = prompt["text"], prompt["include"]
        first = include[0]
        last = include[-1]
        assert text == prompt["prompt"] and {e["class"] for e in include} <= set(OBJECTS)
        if prompt["tag"] == "counting":
            words = ["zero", "one", "two", "three", "four"]
            ending = "es" if first["class"].endswith("s") else "s"
            assert text == f"a photo of {words[first['count']]} {first['class']}{ending}"
            assert prompt["exclude"] == [{"class": first["class"], "count": first["count"] + 1}]
        if prompt["tag"] == "position":
            relation, anchor = last["position"]
            assert anchor == 0 and text.startswith(
                f"a photo of a{'n' * (last['class'][0] in 'aeiou')}"
            )
            assert text.index(last["class"]) < text.index(f" {relation} ") and len(include) == 2
        if prompt["tag"] in ("colors", "color_attr"):
            assert all(e["color"] in COLORS and e["class"] != "person" for e in include)
        if prompt["tag"] == "color_attr":
            assert first["color"] != last["color"] and first["class"] != last["class"]
    assert by_tag(geneval.train, "colors")[0]["text"].startswith("a photo of a")


def test_tasks_have_the_published_shares(geneval):
    counted = Counter(prompt["tag"] for prompt in geneval.train)
    assert counted == {tag: 100 * share for tag, share in PUBLISHED_MIX.items() if share}
    assert len(by_tag(geneval.held_out, "single_object")) == 80
    assert all(len(by_tag(geneval.held_out, tag)) == 20 for tag in list(TASKS)[1:])


def test_nothing_that_is_held_out_is_trained_on_in_any_order(geneval):
    assert not set(map(meaning, geneval.train)) & set(map(meaning, geneval.held_out))
    cat = {"class": "cat", "count": 1}
    dog = {"class": "dog", "count": 1}
    pair = {"tag": "two_object", "include": [cat, dog]}
    assert meaning(pair) == meaning({**pair, "include": [dog, cat]})
    left = {"tag": "position", "include": [cat, {**dog, "position": ["left of", 0]}]}
    swapped = {"tag": "position", "include": [dog, {**cat, "position": ["left of", 0]}]}
    assert meaning(left) != meaning(swapped)


def test_a_seed_is_a_set():
    assert GenEvalPrompts(count=50).train == GenEvalPrompts(count=50).train
    assert GenEvalPrompts(count=50, seed=1).train != GenEvalPrompts(count=50).train
    assert len(geneval_suite(43)) == 580


def test_official_files_are_read(tmp_path):
    rows = [
        {
            "tag": "single_object",
            "include": [{"class": "bench", "count": 1}],
            "prompt": "a photo of a bench",
        }
    ]
    lines(tmp_path / "train_metadata.jsonl", rows)
    lines(tmp_path / "test_metadata.jsonl", [{**rows[0], "prompt": "a photo of a cow"}])
    source = GenEvalPrompts(tmp_path)
    assert [p["text"] for p in source.train] == ["a photo of a bench"]
    assert source.held_out[0]["text"] == "a photo of a cow" and source.train[0]["include"]
    lines(tmp_path / "ocr" / "train.txt", ['A sign that says "OPEN"'])
    lines(tmp_path / "ocr" / "test.txt", ['A mug that says "HOT"'])
    source = OCRPrompts(tmp_path / "ocr")
    assert target_of(source.train[0], "text") == "OPEN" and len(source.held_out) == 1


def test_ocr_prompts_hold_their_target_in_double_quotes():
    source = OCRPrompts(count=300, held_out=50)
    texts = [prompt["text"] for prompt in source.train + source.held_out]
    assert len(set(texts)) == 350 and all(text[0].isupper() for text in texts)
    assert all(target_of(p, "text") == p["target"] for p in source.train)


@pytest.mark.parametrize("mixture", [{"counting": 0}, {"count": 1}, {"counting": -1, "colors": 2}])
def test_a_mixture_that_is_none_is_refused(mixture):
    with pytest.raises(UserError, match="must give shares above 0"):
        GenEvalPrompts(count=10, mixture=mixture)
