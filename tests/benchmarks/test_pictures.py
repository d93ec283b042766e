"""GenEval on samples and detections in the layouts people have."""

import json

import pytest

from mmrl.apps.benchmarks import command, samples
from mmrl.core.errors import UserError
from mmrl.core.registry import BENCHMARKS
from tests.benchmarks.files import lines, picture

CAT = {"class": "cat", "count": 1}
DOG = {"class": "dog", "count": 1}
LEFT = {**DOG, "position": ["left of", 0]}
METADATA = [
    {"tag": "single_object", "include": [CAT], "prompt": "a photo of a cat"},
    {"tag": "counting", "include": [{**DOG, "count": 2}], "prompt": "a photo of two dogs"},
    {"tag": "position", "include": [CAT, LEFT], "prompt": "a photo of a dog left of a cat"},
    {"tag": "colors", "include": [{**CAT, "color": "red"}], "prompt": "a photo of a red cat"},
]
METADATA[1]["exclude"] = [{**DOG, "count": 3}]


def seen(name, left, top, score=0.95, side=20, color=None):
    box = [left, top, left + side, top + side]
    return {"class": name, "score": score, "box": box} | ({"color": color} if color else {})


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """GenEval's metadata, and two pictures of each prompt in its folders."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "evaluation_metadata.jsonl", METADATA)
    for index, record in enumerate(METADATA):
        for number in range(2):
            picture(tmp_path / f"samples/{index:05d}/samples/{number:04d}.png")
        lines(tmp_path / f"samples/{index:05d}/metadata.jsonl", [record])
    return tmp_path


def verdicts(desk):
    file = desk / "samples/benchmark-geneval.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["index"], row["number"]): row["score"] for row in rows}


def test_genevals_rule_on_detections_of_a_file(desk):
    """Each second picture of a prompt misses it by one thing."""
    dogs = [seen("dog", 0, 0), seen("dog", 40, 0)]
    objects = [
        [seen("cat", 0, 0), seen("dog", 50, 0)],  # more than asked for is right
        [seen("cat", 0, 0, score=0.3)],  # 0.3 is not above the threshold
        [*dogs, seen("dog", 80, 0, score=0.85)],
        [*dogs, seen("dog", 80, 0)],  # three are too many
        [seen("cat", 60, 0), seen("dog", 0, 0)],
        [seen("cat", 0, 0), seen("dog", 60, 0)],  # the dog is on the right
        [seen("cat", 0, 0, color="red")],
        [seen("cat", 0, 0, color="pink")],
    ]
    files = [f"{i // 2:05d}/samples/{i % 2:04d}.png" for i in range(8)]
    pairs = zip(files, objects, strict=True)
    lines(desk / "detections.jsonl", [{"image": f, "detections": found} for f, found in pairs])
    words = ["benchmark.path=evaluation_metadata.jsonl", "benchmark.detections=detections.jsonl"]
    page, sentences = command.evaluate(desk / "samples", "geneval", words)
    assert verdicts(desk) == {(i, n): float(n == 0) for i in range(4) for n in range(2)}
    content = json.loads((desk / "samples/benchmark-geneval.json").read_text())
    assert content["total"]["mean"] == 0.5 and content["headline"] == "mean of the categories"
    assert content["best_of_prompt"]["mean"] == 1.0 and content["samples_mean"]["samples"] == 8
    assert set(content["categories"]) == {record["tag"] for record in METADATA}
    text = page.read_text()
    assert "0.5000" in sentences[0] and "a photo of two dogs" in text
    assert "http" not in text.replace("http-equiv", "")
    # the metadata beside the samples say the same
    assert command.evaluate(desk / "samples", "geneval", words[1:])[1] == sentences


def test_results_of_the_official_evaluation_are_read(desk):
    boxes = {"cat": [[60, 0, 80, 20, 0.99]], "dog": [[0, 0, 20, 20, 0.99]]}
    rows = [
        {"filename": f"/data/{i:05d}/samples/{n:04d}.png", "correct": n == 1, "tag": record["tag"]}
        for i, record in enumerate(METADATA)
        for n in range(2)
    ]
    lines(desk / "results.jsonl", [row | {"details": json.dumps(boxes)} for row in rows])
    command.evaluate(desk / "samples", "geneval", ["benchmark.detections=results.jsonl"])
    scores = verdicts(desk)
    assert [scores[0, 0], scores[1, 0], scores[2, 0]] == [1, 0, 1]
    assert [scores[3, 0], scores[3, 1]] == [0, 1]  # colours only the evaluation itself saw


def test_detections_that_do_not_fit_are_named(desk, subtests):
    colourless = [
        {"image": f"{i:05d}/samples/{n:04d}.png", "detections": [seen("cat", 0, 0)]}
        for i in range(4)
        for n in range(2)
    ]
    for rows, why in (
        ([{"detections": []}], 'no "image"'),
        ([{"image": "x.png", "detections": [{"class": "cat"}]}], "a detection is"),
        (["{broken"], 'no "image"'),
        ([{"image": "other.png", "detections": []}], "has no row for 00000/samples/0000.png"),
        (colourless, 'needs colours, and its detections have no "color"'),
    ):
        lines(desk / "detections.jsonl", rows)
        with subtests.test(why=why), pytest.raises(UserError, match=why):
            command.evaluate(desk / "samples", "geneval", ["benchmark.detections=detections.jsonl"])


def test_samples_and_metadata_of_another_benchmark_are_noticed(desk):
    items = BENCHMARKS.build("geneval", path=desk / "evaluation_metadata.jsonl").items
    lines(desk / "samples/00002/metadata.jsonl", [{**METADATA[2], "prompt": "a photo of a cow"}])
    picture(desk / "flat/00007.png")
    picture(desk / "deep/00009/samples/0000.png")
    (desk / "empty").mkdir()
    picture(desk / "good/00002_1.png")
    (sample,) = samples.pictures(desk / "good", items)
    assert sample.item.index == 2
    for folder, says in (
        ("samples", "its prompt is 'a photo of a cow', that of line 2"),
        ("flat", "00007.png: no line of the benchmark has this number"),
        ("deep", "has no line 9"),
        ("empty", "no samples; expected 00000/samples/0000.png"),
    ):
        with pytest.raises(UserError, match=says):
            samples.pictures(desk / folder, items)
    file = lines(desk / "prompts.jsonl", [{"prompt": "a photo of a cat"}])
    with pytest.raises(UserError, match='has no "include"'):
        BENCHMARKS.build("geneval", path=file)
