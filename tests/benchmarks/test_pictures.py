"""Benchmarks of pictures, on files in the layouts people have; models are tiny ones of the real
classes."""

import json

import pytest
import torch

from mmrl import config
from mmrl.apps.benchmarks import command, samples
from mmrl.apps.benchmarks.pictures import DPG, OCRBenchmark, cut_up
from mmrl.core.errors import UserError
from mmrl.core.registry import BENCHMARKS
from rewards.images.detector import Detector
from rewards.images.geneval import OBJECTS
from tests.benchmarks.files import document, lines, picture, save_coco_yolos, save_owlvit
from tests.fixtures.tiny_image_rewards import save_hf_clip, save_mask2former
from tests.fixtures.tiny_rewards import save_tiny_clip

CAT = {"class": "cat", "count": 1}
DOG = {"class": "dog", "count": 1}
METADATA = [
    {"tag": "single_object", "include": [CAT], "prompt": "a photo of a cat"},
    {
        "tag": "counting",
        "include": [{"class": "dog", "count": 2}],
        "exclude": [{"class": "dog", "count": 3}],
        "prompt": "a photo of two dogs",
    },
    {
        "tag": "position",
        "include": [CAT, {**DOG, "position": ["left of", 0]}],
        "prompt": "a photo of a dog left of a cat",
    },
    {
        "tag": "colors",
        "include": [{**CAT, "color": "red"}],
        "prompt": "a photo of a red cat",
    },
]


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
    objects = {
        (0, 0): [seen("cat", 0, 0), seen("dog", 50, 0)],  # more than asked for is right
        (0, 1): [seen("cat", 0, 0, score=0.3)],  # 0.3 is not above the threshold
        (1, 0): [seen("dog", 0, 0), seen("dog", 40, 0), seen("dog", 80, 0, score=0.85)],
        (1, 1): [seen("dog", 0, 0), seen("dog", 40, 0), seen("dog", 80, 0)],  # three are too many
        (2, 0): [seen("cat", 60, 0), seen("dog", 0, 0)],
        (2, 1): [seen("cat", 0, 0), seen("dog", 60, 0)],  # the dog is on the right
        (3, 0): [seen("cat", 0, 0, color="red")],
        (3, 1): [seen("cat", 0, 0, color="pink")],
    }
    rows = [
        {"image": f"{i:05d}/samples/{n:04d}.png", "detections": found}
        for (i, n), found in objects.items()
    ]
    lines(desk / "detections.jsonl", rows)
    words = ["benchmark.path=evaluation_metadata.jsonl", "benchmark.detections=detections.jsonl"]
    page, sentences = command.evaluate(desk / "samples", "geneval", words)
    assert verdicts(desk) == {(i, n): float(n == 0) for i in range(4) for n in range(2)}
    content = json.loads((desk / "samples/benchmark-geneval.json").read_text())
    assert content["total"]["mean"] == 0.5 and content["headline"] == "mean of the categories"
    assert content["best_of_prompt"]["mean"] == 1.0 and content["samples_mean"]["samples"] == 8
    assert set(content["categories"]) == {record["tag"] for record in METADATA}
    assert "0.5000" in sentences[0]
    text = page.read_text()
    assert "a photo of two dogs" in text and "http" not in text.replace("http-equiv", "")
    # the metadata beside the samples say the same
    assert command.evaluate(desk / "samples", "geneval", words[1:])[1] == sentences


def test_results_of_the_official_evaluation_are_read(desk):
    rows = []
    for index, record in enumerate(METADATA):
        for number in range(2):
            details = {"cat": [[60, 0, 80, 20, 0.99]], "dog": [[0, 0, 20, 20, 0.99]]}
            rows.append(
                {
                    "filename": f"/data/images/{index:05d}/samples/{number:04d}.png",
                    "tag": record["tag"],
                    "correct": number == 1,
                    "details": json.dumps(details),
                }
            )
    lines(desk / "results.jsonl", rows)
    command.evaluate(desk / "samples", "geneval", ["benchmark.detections=results.jsonl"])
    scores = verdicts(desk)
    assert [scores[0, 0], scores[1, 0], scores[2, 0]] == [1, 0, 1]
    assert [scores[3, 0], scores[3, 1]] == [0, 1]  # colours only the evaluation itself saw


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"detections": []}, 'no "image"'),
        ({"image": "x.png", "detections": [{"class": "cat"}]}, "a detection is"),
        ("{broken", 'no "image"'),
        ({"image": "other.png", "detections": []}, "has no row for 00000/samples/0000.png"),
    ],
)
def test_detections_that_do_not_fit_are_named(desk, row, why):
    lines(desk / "detections.jsonl", [row])
    with pytest.raises(UserError, match=why):
        command.evaluate(desk / "samples", "geneval", ["benchmark.detections=detections.jsonl"])


def test_colours_must_be_known(desk):
    rows = [
        {"image": f"{i:05d}/samples/{n:04d}.png", "detections": [seen("cat", 0, 0)]}
        for i in range(4)
        for n in range(2)
    ]
    lines(desk / "detections.jsonl", rows)
    with pytest.raises(UserError, match='needs colours, and its detections have no "color"'):
        command.evaluate(desk / "samples", "geneval", ["benchmark.detections=detections.jsonl"])


@pytest.mark.parametrize("save", [save_coco_yolos, save_owlvit])
def test_geneval_with_a_detector_of_transformers(desk, save):
    detector = save(desk / "detector")
    clip = save_tiny_clip(desk / "clip")
    words = [f"benchmark.detector={detector}", f"benchmark.clip={clip}", "benchmark.limit=3"]
    command.evaluate(desk / "samples", "geneval", words)
    assert set(verdicts(desk)) == {(i, n) for i in range(3) for n in range(2)}
    assert set(verdicts(desk).values()) <= {0.0, 1.0}


def test_an_open_detector_is_asked_for_all_of_genevals_names(tmp_path):
    """Its boxes are those of transformers' own post-processing."""
    from transformers import OwlViTForObjectDetection, OwlViTProcessor

    folder = save_owlvit(tmp_path / "owl")
    detector = Detector(folder, "cpu")
    media = torch.rand(2, 3, 24, 40, generator=torch.Generator().manual_seed(1))
    rows = detector(media)
    assert len(rows) == 2 and {d.name for row in rows for d in row} <= set(OBJECTS)
    from PIL import Image

    pixels = (media * 255).round().byte().permute(0, 2, 3, 1).numpy()
    images = [Image.fromarray(array) for array in pixels]
    processor = OwlViTProcessor.from_pretrained(folder)
    network = OwlViTForObjectDetection.from_pretrained(folder).eval()
    queries = [[f"a photo of a {name}" for name in OBJECTS]] * 2
    with torch.no_grad():
        inputs = processor(text=queries, images=images, return_tensors="pt")
        official = processor.post_process_grounded_object_detection(
            network(**inputs), threshold=0.0, target_sizes=[(24, 40)] * 2
        )
    best = int(official[1]["scores"].argmax())
    assert rows[1][0].score == pytest.approx(float(official[1]["scores"][best]), abs=1e-5)
    assert rows[1][0].name == OBJECTS[int(official[1]["labels"][best])]


def test_mask2former_still_makes_instances(tmp_path):
    detector = Detector(save_mask2former(tmp_path / "m2f"), "cpu")
    assert detector.masks and not detector.asks


def test_a_flat_folder_is_read_by_number(desk):
    words = ["benchmark.path=evaluation_metadata.jsonl", "benchmark.detections=d.jsonl"]
    rows = []
    for name in ("0.png", "00001.png", "00002_0.png", "00002_1.png"):
        picture(desk / "flat" / name)
        rows.append({"image": name, "detections": [seen("cat", 60, 0), seen("dog", 0, 0)]})
    lines(desk / "d.jsonl", rows)
    _, sentences = command.evaluate(desk / "flat", "geneval", words)
    assert "1 of 4 prompts have no sample" in sentences[1]
    file = desk / "flat/benchmark-geneval.jsonl"
    scored = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["index"], row["score"]) for row in scored] == [(0, 1), (1, 0), (2, 1), (2, 1)]


def test_samples_of_another_benchmark_are_noticed(desk):
    items = BENCHMARKS.build("geneval", path=desk / "evaluation_metadata.jsonl").items
    lines(desk / "samples/00002/metadata.jsonl", [{**METADATA[2], "prompt": "a photo of a cow"}])
    with pytest.raises(UserError, match="its prompt is 'a photo of a cow', that of line 2"):
        samples.pictures(desk / "samples", items)
    picture(desk / "flat/00007.png")
    with pytest.raises(UserError, match="00007.png: no line of the benchmark has this number"):
        samples.pictures(desk / "flat", items)
    picture(desk / "deep/00009/samples/0000.png")
    with pytest.raises(UserError, match="has no line 9"):
        samples.pictures(desk / "deep", items)
    (desk / "empty").mkdir()
    with pytest.raises(UserError, match="no samples; expected 00000/samples/0000.png"):
        samples.pictures(desk / "empty", items)


def test_geneval_metadata_without_include_are_refused(tmp_path):
    file = lines(tmp_path / "prompts.jsonl", [{"prompt": "a photo of a cat"}])
    with pytest.raises(UserError, match='has no "include"'):
        BENCHMARKS.build("geneval", path=file)
    with pytest.raises(UserError, match="no such file or folder; expected GenEval's"):
        BENCHMARKS.build("geneval", path=tmp_path / "nowhere.jsonl")


# OCR


def test_ocr_reads_its_pictures(tmp_path):
    pytest.importorskip("rapidocr_onnxruntime")
    from PIL import Image, ImageDraw, ImageFont

    file = lines(tmp_path / "test.txt", ['A sign that says "OPEN"', 'A mug with "Slow Bread 12"'])
    for i, text in enumerate(["OPEN", "Slow Bread 1"]):
        image = Image.new("RGB", (512, 512), "white")
        draw = ImageDraw.Draw(image)
        draw.text((40, 200), text, fill="black", font=ImageFont.load_default(60))
        (tmp_path / "pictures").mkdir(exist_ok=True)
        image.save(tmp_path / f"pictures/{i}.png")
    benchmark = OCRBenchmark(file)
    scores = benchmark.score(samples.pictures(tmp_path / "pictures", benchmark.items))
    # one of eleven letters is missing
    assert [score.value for score in scores] == pytest.approx([1.0, 1 - 1 / 11])


# DPG

HEAD = "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple"
CSV = f"""{HEAD},question_natural_language
stars,"two cats, one black",k,1,0,entity,whole,entity - whole (cats),Are there cats?
stars,"two cats, one black",k,2,1,other,count,"other - count (cats, ==2)",Are there two cats?
stars,"two cats, one black",k,3,1,attribute,color,"attribute - color (cat, black)",Is one cat black?
sea,the sea at night,k,1,0,global,,global (night),Is it night?
"""


@pytest.fixture
def dpg(tmp_path):
    (tmp_path / "dpg_bench.csv").write_text(CSV)
    picture(tmp_path / "pictures/stars.png", (40, 40))
    picture(tmp_path / "pictures/sea.png", (40, 40))
    return tmp_path


def test_dpg_counts_questions_with_what_they_depend_on(dpg):
    rows = [
        {"image": "stars.png", "answers": {"1": "no", "2": "yes", "3": "yes"}},
        {"image": "sea.png", "answers": {"1": "yes"}},
    ]
    lines(dpg / "answers.jsonl", rows)
    words = [f"benchmark.path={dpg}/dpg_bench.csv", f"benchmark.answers={dpg}/answers.jsonl"]
    command.evaluate(dpg / "pictures", "dpg", words)
    content = json.loads((dpg / "pictures/benchmark-dpg.json").read_text())
    # without cats, neither their number nor their colour counts; categories count every answer
    assert content["total"]["mean"] == 0.5
    means = {name: part["mean"] for name, part in content["categories"].items()}
    assert means == {"entity": 0.0, "other": 1.0, "attribute": 1.0, "global": 1.0}


def test_dpg_asks_a_vision_language_model(dpg):
    from tests.fixtures.tiny_vlms import folder

    benchmark = DPG(dpg / "dpg_bench.csv", model=str(folder("qwen2_vl")), tiles=4)
    listed = samples.pictures(dpg / "pictures", benchmark.items)
    assert [sample.item.name for sample in listed] == ["sea", "stars"]
    scores = benchmark.score(listed)
    assert len(scores[1].parts) == 12 and all(0 <= score.value <= 1 for score in scores)


def test_a_grid_is_cut_into_its_pictures():
    rows = torch.arange(4.0).view(1, 2, 2).repeat(3, 1, 1)
    grid = rows.repeat_interleave(5, 1).repeat_interleave(5, 2)
    assert [float(tile.unique()) for tile in cut_up(grid, 4)] == [0, 1, 2, 3]
    assert cut_up(grid, 1)[0] is grid


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "dpg_bench.csv:2: not a row of dpg_bench.csv"),
        (CSV.splitlines()[0] + "\n", "no questions there"),
    ],
)
def test_files_that_are_not_dpgs_are_named(tmp_path, text, why):
    (tmp_path / "dpg_bench.csv").write_text(text)
    with pytest.raises(UserError, match=why):
        DPG(tmp_path / "dpg_bench.csv")


def test_answers_of_dpg_must_be_whole(dpg):
    lines(dpg / "answers.jsonl", [{"image": "stars.png", "answers": {"1": True}}])
    benchmark = DPG(dpg / "dpg_bench.csv", answers=dpg / "answers.jsonl")
    listed = samples.pictures(dpg / "pictures", benchmark.items)
    with pytest.raises(UserError, match=r"no row for the picture sea\.png"):
        benchmark.score(listed[:1])
    with pytest.raises(UserError, match=r"stars\.png has no answer to question 2"):
        benchmark.score(listed[1:])


# Preferences


def test_preferences_are_averaged_by_style(tmp_path):
    (tmp_path / "hpd").mkdir()
    document(tmp_path / "hpd/anime.json", ["a fox", "a cat"])
    document(tmp_path / "hpd/photo.json", [{"prompt": "a tree"}])
    for i in range(3):
        picture(tmp_path / f"pictures/{i:05d}.png", (48, 40), (60 * i, 90, 10))
    words = [f"benchmark.path={tmp_path}/hpd", f"benchmark.model={save_tiny_clip(tmp_path / 'c')}"]
    command.evaluate(tmp_path / "pictures", "hpsv2", words)
    content = json.loads((tmp_path / "pictures/benchmark-hpsv2.json").read_text())
    parts = content["categories"]
    assert {name: part["samples"] for name, part in parts.items()} == {"anime": 2, "photo": 1}
    assert content["total"]["mean"] == pytest.approx(
        (parts["anime"]["mean"] + parts["photo"]["mean"]) / 2
    )


def test_pickscores_are_logits(tmp_path):
    from rewards import PickScore

    model = save_hf_clip(tmp_path / "pick")
    file = lines(tmp_path / "prompts.txt", ["a fox"])
    picture(tmp_path / "pictures/00000.png", (48, 40))
    spec = {"pickscore": {"path": str(file), "model": model}}
    benchmark = config.build(spec, BENCHMARKS, "benchmark")
    listed = samples.pictures(tmp_path / "pictures", benchmark.items)
    value = benchmark.score(listed)[0].value
    reward = PickScore(model=model, processor=model, device="cpu")
    pixels = torch.tensor([200, 40, 40]).view(1, 3, 1, 1).expand(1, 3, 40, 48) / 255
    assert value == pytest.approx(26 * float(reward(pixels, [{"text": "a fox"}])), rel=1e-4)
