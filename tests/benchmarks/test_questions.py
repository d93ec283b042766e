"""Benchmarks of vision-language models: rows of the official files, and answers worked by hand."""

from pathlib import Path

import pytest

from mmrl.apps.benchmarks import samples
from mmrl.core.errors import UserError
from mmrl.core.registry import BENCHMARKS, load_built_in
from tests.benchmarks.files import document, lines, picture

load_built_in()


def values(benchmark, *texts, items=None, **row):
    """What answers to the first questions score, or those to ``items``."""
    rows = [
        samples.Sample(item, 0, None, text, row)
        for item, text in zip(items or benchmark.items, texts, strict=False)
    ]
    return [score.value for score in benchmark.score(rows)]


BOX = [10, 10, 30, 30]
COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "width": 100, "height": 80, "caption": "the cup"}],
    "annotations": [{"id": 5, "image_id": 1, "bbox": [10, 10, 20, 20]}],
}
VLM_R1 = {"image": "a.jpg", "normal_caption": "the cup", "solution": BOX}
LMMS = {"file_name": "a.jpg", "bbox": [10, 10, 20, 20], "answer": ["the cup", "a cup"]}
REFERS = {"image": "a.jpg", "bbox": [10, 10, 20, 20], "sentences": [{"sent": "the cup"}]}


@pytest.mark.parametrize("content", [COCO, [VLM_R1], [LMMS], [REFERS]])
def test_refcoco_counts_boxes_of_half_overlap(tmp_path, content):
    picture(tmp_path / "train2014/a.jpg")
    benchmark = BENCHMARKS.build("refcoco", path=document(tmp_path / "refcoco_val.json", content))
    prompt = benchmark.items[0].prompt
    assert prompt["text"] == "Give the box of the cup." and prompt["boxes"] == [BOX]
    assert prompt["images"] == [str(tmp_path / "train2014/a.jpg")]
    # 20 x 20 over 20 x 40 is IoU 0.5; a pixel more is less; two boxes are no answer
    texts = [
        "[10, 10, 30, 30]",
        "[10, 10, 30, 50]",
        "[10, 10, 30, 51]",
        "[[10,10,30,30],[0,0,9,9]]",
    ]
    assert values(benchmark, *texts, items=[benchmark.items[0]] * 4) == [1, 1, 0, 0]


def test_answers_in_another_space_are_converted(tmp_path):
    rows = [{"image": "a.png", "normal_caption": "the cup", "solution": [0, 0, 20, 15]}]
    file = document(tmp_path / "refcoco_val.json", rows)
    picture(tmp_path / "a.png", (40, 30))
    plain = BENCHMARKS.build("refcoco", path=file)
    view = {"coords": "rel1000", "sizes": [[40, 30]]}
    assert values(plain, "[0, 0, 500, 500]") == [0.0]
    assert values(plain, "[0, 0, 500, 500]", view=view) == [1.0]  # the policy's note goes first
    relative = BENCHMARKS.build("refcoco", path=file, coords="rel1000")
    assert values(relative, "[0, 0, 500, 500]") == [1.0]


def test_screenspot_wants_a_point_in_the_box(tmp_path):
    mail = {"img_filename": "m.png", "bbox": [10, 10, 20, 20], "instruction": "open mail"}
    mail |= {"data_type": "text", "data_source": "ios"}
    document(tmp_path / "screenspot_mobile.json", [mail] * 4)
    benchmark = BENCHMARKS.build("screenspot", path=tmp_path)
    assert benchmark.items[0].category == "mobile text"
    texts = ["[30, 30]", "[31, 30]", '{"point_2d": [20, 20]}', "nowhere"]
    assert values(benchmark, *texts) == [1, 0, 1, 0]  # the border counts
    pro = {"img_filename": "p.png", "bbox": [10, 10, 30, 30], "instruction": "cut"}
    pro |= {"ui_type": "icon", "platform": "windows", "img_size": [200, 100]}
    file = document(tmp_path / "pro.json", [pro])
    benchmark = BENCHMARKS.build("screenspot", path=file, boxes="corners", coords="rel1000")
    assert benchmark.items[0].category == "desktop icon"
    assert values(benchmark, "[100, 200]") == [1.0]  # of 200 x 100: (20, 20)


def test_geometry3k_compares_mathematics_and_reads_inter_gps(tmp_path):
    rows = [{"problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }", "images": ["a.png"]}] * 2
    benchmark = BENCHMARKS.build("geometry3k", path=lines(tmp_path / "test.jsonl", rows))
    text = benchmark.items[0].prompt["text"]
    assert text == "Find x.\nPut the final answer into \\boxed{}."
    assert values(benchmark, "\\boxed{\\sqrt{884}}", "\\boxed{21}") == [1, 0]
    content = {"problem_text": "Find x.", "choices": ["1", "2", "30", "4"], "answer": "C"}
    for name in ("2401", "10"):
        document(tmp_path / f"gps/{name}/data.json", content)
    benchmark = BENCHMARKS.build("geometry3k", path=tmp_path / "gps")
    assert [item.name for item in benchmark.items] == ["10", "2401"]  # by number
    prompt = benchmark.items[1].prompt
    assert prompt["images"][0].endswith("2401/img_diagram.png") and "C. 30" in prompt["text"]
    assert values(benchmark, "<answer>C</answer>", "\\boxed{30}") == [1, 1]


def test_clevr_has_kinds_of_questions(tmp_path):
    kinds = {"count": "count", "exist": "exist", "query_color": "query attribute"}
    kinds |= {"greater_than": "compare numbers", "equal_shape": "compare attribute"}
    row = {"image_filename": "c.png", "question": "?", "answer": "3"}
    questions = [
        row | {"program": [{"function": "scene"}, {"function": name}], "question_index": 7 + i}
        for i, name in enumerate(kinds)
    ]
    picture(tmp_path / "images/val/c.png")
    file = document(tmp_path / "questions/CLEVR_val_questions.json", {"questions": questions})
    benchmark = BENCHMARKS.build("clevr", path=file)
    assert [item.category for item in benchmark.items] == list(kinds.values())
    (image,) = benchmark.items[0].prompt["images"]
    assert Path(image).samefile(tmp_path / "images/val/c.png")
    assert values(benchmark, "three", "no") == [1, 0]
    rows = lines(tmp_path / "answers.jsonl", [{"id": 9, "answer": "red"}])
    (sample,) = samples.answers(rows, benchmark.items)
    assert sample.item.index == 2  # by the name in the official file


R1V = {"image_path": "./s.png", "question": "How many bikes?", "ground_truth": 4}
R1V_CLEVR = {"image": "c.png", "problem": "How many?", "solution": "<answer> 3 </answer>"}
HUB = {"image": "1.png", "question": "How much?", "answer": ["4"], "type": "human_test"}


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("superclevr", R1V, "<think>1, 2, 3, 4</think> <answer> 4 </answer>", "5"),
        ("clevr", R1V_CLEVR, "3", "4"),
        ("chartqa", HUB, "<answer>4</answer>", "5"),
    ],
)
def test_rows_of_other_layouts_are_read(tmp_path, name, row, right, wrong):
    benchmark = BENCHMARKS.build(name, path=lines(tmp_path / "t.jsonl", [row]))
    assert values(benchmark, right) == [1] and values(benchmark, wrong) == [0]


# Files of answers


@pytest.fixture
def docs(tmp_path):
    rows = [{"question": f"q{i}", "answers": [str(i)], "questionId": 100 + i} for i in range(3)]
    return BENCHMARKS.build("docvqa", path=document(tmp_path / "val.json", {"data": rows}))


def test_answers_come_in_many_forms(docs, tmp_path):
    texts = ["0", "1", "2"]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / f"texts/{i:03d}-q.txt").write_text(text)
    by_number = [{"index": i, "answer": text} for i, text in enumerate(texts)]
    by_name = [{"question_id": 100 + i, "prediction": text} for i, text in enumerate(texts)]
    for file in (
        lines(tmp_path / "a.jsonl", by_number[::-1]),
        lines(tmp_path / "b.jsonl", by_name[::-1]),
        lines(tmp_path / "c.jsonl", ['"0"', '"1"', '"2"']),
        document(tmp_path / "d.json", [{"pred": text} for text in texts]),
        tmp_path / "texts",
    ):
        listed = samples.answers(file, docs.items)
        assert sorted((s.item.index, s.text) for s in listed) == list(enumerate(texts)), file


def test_rows_that_make_no_sense_are_named_with_their_place(docs, tmp_path, subtests):
    for rows, why in (
        ([{"answer": "0"}], "1 answers without an index for 3 questions"),
        (
            [{"index": 9, "answer": "0"}],
            "a.jsonl:1: no question of the benchmark is called index=9",
        ),
        ([{"index": 0}], "a.jsonl:1: no answer; expected one of answer"),
        (["{broken"], "a.jsonl:1: broken JSON"),
        ([[1]], "a.jsonl:1: expected an object with an answer, got list"),
    ):
        with subtests.test(why=why), pytest.raises(UserError, match=why):
            samples.answers(lines(tmp_path / "a.jsonl", rows), docs.items)
    for name, row, why in (
        ("refcoco", {"image": "a.png", "bbox": [0, 0, 5, 5]}, "none of caption, expression"),
        ("geometry3k", {"problem": "x"}, "none of answer"),
        ("chartqa", {"label": "x"}, "none of text"),
        ("clevr", [1], "not a row of CLEVR"),
    ):
        file = lines(tmp_path / "rows.jsonl", [row])
        with subtests.test(name=name, row=row), pytest.raises(UserError, match=f"jsonl:1.*{why}"):
            BENCHMARKS.build(name, path=file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no .json, .jsonl or .parquet file; expected ChartQA"):
        BENCHMARKS.build("chartqa", path=tmp_path / "empty")
