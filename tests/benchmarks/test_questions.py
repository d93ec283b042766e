"""Benchmarks of vision-language models: rows of the official files, and answers worked by hand."""

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


# RefCOCO

COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "width": 100, "height": 80, "caption": "the cup"}],
    "annotations": [{"id": 5, "image_id": 1, "bbox": [10, 10, 20, 20]}],
}
RIGHT = [10, 10, 30, 30]


@pytest.mark.parametrize(
    "row",
    [
        COCO,  # MDETR's files
        [{"image": "a.jpg", "normal_caption": "the cup", "solution": RIGHT}],  # VLM-R1's
        [{"file_name": "a.jpg", "bbox": [10, 10, 20, 20], "answer": ["the cup", "a cup"]}],
        [{"image": "a.jpg", "bbox": [10, 10, 20, 20], "sentences": [{"sent": "the cup"}]}],
    ],
)
def test_refcoco_counts_boxes_of_half_overlap(tmp_path, row):
    picture(tmp_path / "train2014/a.jpg")
    benchmark = BENCHMARKS.build("refcoco", path=document(tmp_path / "refcoco_val.json", row))
    prompt = benchmark.items[0].prompt
    assert prompt["text"] == "Give the box of the cup." and prompt["boxes"] == [RIGHT]
    assert prompt["images"] == [str(tmp_path / "train2014/a.jpg")]
    first = [benchmark.items[0]] * 4
    # 20 x 20 over 20 x 40 is IoU 0.5; a pixel more is less; two boxes are no answer
    texts = [
        "[10, 10, 30, 30]",
        "[10, 10, 30, 50]",
        "[10, 10, 30, 51]",
        "[[10,10,30,30],[0,0,9,9]]",
    ]
    assert values(benchmark, *texts, items=first) == [1, 1, 0, 0]


def test_answers_in_another_space_are_converted(tmp_path):
    rows = [{"image": "a.png", "normal_caption": "the cup", "solution": [0, 0, 20, 15]}]
    file = document(tmp_path / "refcoco_val.json", rows)
    picture(tmp_path / "a.png", (40, 30))
    relative = BENCHMARKS.build("refcoco", path=file, coords="rel1000")
    assert values(relative, "[0, 0, 500, 500]") == [1.0]
    plain = BENCHMARKS.build("refcoco", path=file)
    assert values(plain, "[0, 0, 500, 500]") == [0.0]
    # what the policy noted beside its answer goes first
    view = {"coords": "rel1000", "sizes": [[40, 30]]}
    assert values(plain, "[0, 0, 500, 500]", view=view) == [1.0]
    (tmp_path / "a.png").unlink()
    with pytest.raises(UserError, match="needed for the size of the picture"):
        values(BENCHMARKS.build("refcoco", path=file, coords="rel1000"), "[0, 0, 500, 500]")


def test_splits_of_refcoco_are_categories(tmp_path):
    for split in ("val", "testA"):
        document(tmp_path / f"refcoco_{split}.json", COCO)
    benchmark = BENCHMARKS.build("refcoco", path=tmp_path)
    assert [item.category for item in benchmark.items] == ["refcoco_testA", "refcoco_val"]


# ScreenSpot


def test_screenspot_wants_a_point_in_the_box(tmp_path):
    rows = [
        {
            "img_filename": "m.png",
            "bbox": [10, 10, 20, 20],
            "instruction": "open mail",
            "data_type": "text",
            "data_source": "ios",
        },
        {
            "img_filename": "w.png",
            "bbox": [0, 0, 5, 5],
            "instruction": "search",
            "data_type": "icon",
            "data_source": "gitlab",
        },
    ]
    document(tmp_path / "screenspot_mobile.json", rows[:1])
    document(tmp_path / "screenspot_web.json", rows[1:])
    benchmark = BENCHMARKS.build("screenspot", path=tmp_path)
    assert [item.category for item in benchmark.items] == ["mobile text", "web icon"]
    assert values(benchmark, "[30, 30]", "(6, 3)") == [1, 0]  # the border counts
    assert values(benchmark, '{"point_2d": [20, 20]}', "[0, 0, 4, 4]") == [1, 1]
    assert values(benchmark, "[[20, 20], [21, 21]]", "nowhere")[1] == 0
    pro = [
        {
            "img_filename": "p.png",
            "bbox": [10, 10, 30, 30],
            "instruction": "cut",
            "ui_type": "icon",
            "platform": "windows",
            "img_size": [200, 100],
        }
    ]
    file = document(tmp_path / "pro.json", pro)
    benchmark = BENCHMARKS.build("screenspot", path=file, boxes="corners", coords="rel1000")
    assert benchmark.items[0].category == "desktop icon"
    assert values(benchmark, "[100, 200]") == [1.0]  # of 200 x 100: (20, 20)


# Geometry3K


def test_geometry3k_compares_mathematics(tmp_path):
    rows = [
        {"problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }", "images": ["a.png"]},
        {"problem": "<image>Find y.", "answer": "12", "images": ["a.png"]},
    ]
    benchmark = BENCHMARKS.build("geometry3k", path=lines(tmp_path / "test.jsonl", rows))
    text = benchmark.items[0].prompt["text"]
    assert text == "Find x.\nPut the final answer into \\boxed{}."
    assert values(benchmark, "\\boxed{2\\sqrt{221}}", "it is \\boxed{12.0}") == [1, 1]
    assert values(benchmark, "\\boxed{\\sqrt{884}}", "\\boxed{21}") == [1, 0]


def test_inter_gps_letters_and_values_are_right(tmp_path):
    for name, right in (("2401", "C"), ("10", "A")):
        content = {"problem_text": "Find x.", "choices": ["1", "2", "30", "4"], "answer": right}
        document(tmp_path / f"test/{name}/data.json", content)
    benchmark = BENCHMARKS.build("geometry3k", path=tmp_path / "test")
    assert [item.name for item in benchmark.items] == ["10", "2401"]  # by number
    assert benchmark.items[1].prompt["images"][0].endswith("2401/img_diagram.png")
    assert "C. 30" in benchmark.items[1].prompt["text"]
    assert values(benchmark, "<answer>A</answer>", "\\boxed{30}") == [1, 1]
    assert values(benchmark, "B", "\\boxed{C}") == [0, 1]


# CLEVR


def test_clevr_has_kinds_of_questions(tmp_path):
    questions = [
        {
            "image_filename": "c.png",
            "question": "How many cubes?",
            "answer": "3",
            "program": [{"function": "scene"}, {"function": "count"}],
            "question_index": 7,
        },
        {
            "image_filename": "c.png",
            "question": "Is there a cube?",
            "answer": "yes",
            "program": [{"function": "exist"}],
            "question_index": 8,
        },
        {
            "image_filename": "c.png",
            "question": "Colour?",
            "answer": "red",
            "program": [{"function": "query_color"}],
            "question_index": 9,
        },
        {
            "image_filename": "c.png",
            "question": "More?",
            "answer": "no",
            "program": [{"function": "greater_than"}],
            "question_index": 10,
        },
        {
            "image_filename": "c.png",
            "question": "Same?",
            "answer": "no",
            "program": [{"function": "equal_shape"}],
            "question_index": 11,
        },
    ]
    picture(tmp_path / "images/val/c.png")
    file = document(tmp_path / "questions/CLEVR_val_questions.json", {"questions": questions})
    benchmark = BENCHMARKS.build("clevr", path=file)
    kinds = ["count", "exist", "query attribute", "compare numbers", "compare attribute"]
    assert [item.category for item in benchmark.items] == kinds
    assert benchmark.items[0].prompt["images"] == [
        str(tmp_path / "questions/../images/val/c.png")
    ] or benchmark.items[0].prompt["images"] == [str(tmp_path / "images/val/c.png")]
    assert values(benchmark, "three", "Yes", "red", "no", "yes") == [1, 1, 1, 1, 0]
    listed = samples.answers(
        lines(tmp_path / "answers.jsonl", [{"id": 9, "answer": "red"}]), benchmark.items
    )
    assert listed[0].item.index == 2  # by the name in the official file


def test_superclevr_reads_r1vs_rows(tmp_path):
    rows = [{"image_path": "./images/s.png", "question": "How many bikes?", "ground_truth": 4}]
    benchmark = BENCHMARKS.build("superclevr", path=lines(tmp_path / "t.jsonl", rows))
    answer = "<think>1, 2, 3, 4</think> <answer> 4 </answer>"
    assert values(benchmark, answer) == [1] and values(benchmark, "5") == [0]
    clevr = [{"image": "c.png", "problem": "How many?", "solution": "<answer> 3 </answer>"}]
    benchmark = BENCHMARKS.build("clevr", path=lines(tmp_path / "c.jsonl", clevr))
    assert benchmark.items[0].prompt["answer"] == "3" and values(benchmark, "3") == [1]


# Charts and documents


def test_chartqa_has_two_halves(tmp_path):
    human = [{"imgname": "1.png", "query": "How much?", "label": "40"}]
    document(tmp_path / "test/test_human.json", human)
    document(tmp_path / "test/test_augmented.json", [{**human[0], "label": "Japan"}])
    picture(tmp_path / "test/png/1.png")
    benchmark = BENCHMARKS.build("chartqa", path=tmp_path / "test")
    assert [item.category for item in benchmark.items] == ["augmented", "human"]
    assert benchmark.items[0].prompt["images"] == [str(tmp_path / "test/png/1.png")]
    assert values(benchmark, "<answer>japan</answer>", "<answer>42</answer>") == [1, 1]
    assert values(benchmark, "Korea", "43") == [0, 0]
    row = {"image": "1.png", "question": "How much?", "answer": ["4"], "type": "human_test"}
    benchmark = BENCHMARKS.build("chartqa", path=lines(tmp_path / "hub.jsonl", [row]))
    assert benchmark.items[0].category == "human" and benchmark.items[0].prompt["answer"] == "4"


def test_docvqa_counts_kinds_beside_the_total(tmp_path):
    rows = [
        {
            "questionId": 11,
            "question": "Who?",
            "answers": ["ITC Limited", "itc limited"],
            "image": "documents/a.png",
            "question_types": ["handwritten", "form"],
        },
        {"questionId": 12, "question": "When?", "answers": ["1998"], "image": "documents/a.png"},
    ]
    file = document(tmp_path / "val_v1.0_withQT.json", {"data": rows})
    picture(tmp_path / "documents/a.png")
    benchmark = BENCHMARKS.build("docvqa", path=file)
    assert benchmark.items[0].prompt["images"] == [str(tmp_path / "documents/a.png")]
    # one letter of eleven is wrong; two of four are
    scores = values(benchmark, "ITC Linited", "1889")
    assert scores == [pytest.approx(1 - 1 / 11), 0.0]
    listed = samples.answers(
        lines(tmp_path / "a.jsonl", [{"questionId": 11, "answer": "ITC Limited"}]), benchmark.items
    )
    (score,) = benchmark.score(listed)
    assert score.value == 1 and score.parts == (("handwritten", 1.0), ("form", 1.0))


def test_parquet_rows_bring_their_pictures(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    data = picture(tmp_path / "a.png").read_bytes()
    table = pa.Table.from_pylist(
        [{"images": [{"bytes": data, "path": None}], "problem": "<image>x?", "answer": "3"}]
    )
    pq.write_table(table, tmp_path / "test-00000.parquet")
    benchmark = BENCHMARKS.build("geometry3k", path=tmp_path)
    assert benchmark.items[0].prompt["images"][0].size == (40, 30)


# Files of answers


@pytest.fixture
def docs(tmp_path):
    rows = [{"question": f"q{i}", "answers": [str(i)], "questionId": 100 + i} for i in range(3)]
    return BENCHMARKS.build("docvqa", path=document(tmp_path / "val.json", {"data": rows}))


def test_answers_come_in_many_forms(docs, tmp_path):
    forms = [
        [{"index": 2, "answer": "2"}, {"index": 0, "answer": "0"}],
        [{"question_id": 102, "prediction": "2"}, {"question_id": 100, "prediction": "0"}],
    ]
    for rows in forms:
        listed = samples.answers(lines(tmp_path / "a.jsonl", rows), docs.items)
        assert [(s.item.index, s.text) for s in listed] == [(2, "2"), (0, "0")]
    listed = samples.answers(lines(tmp_path / "a.jsonl", ['"0"', '"1"', '"2"']), docs.items)
    assert [s.item.index for s in listed] == [0, 1, 2]
    listed = samples.answers(document(tmp_path / "b.json", [{"pred": "a"}] * 3), docs.items)
    assert [s.text for s in listed] == ["a"] * 3
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/001-q.txt").write_text("one")
    assert samples.answers(tmp_path / "texts", docs.items)[0].item.index == 1


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"answer": "0"}], "1 answers without an index for 3 questions"),
        (
            [{"index": 9, "answer": "0"}],
            "a.jsonl:1: no question of the benchmark is called index=9",
        ),
        ([{"index": 0}], "a.jsonl:1: no answer; expected one of answer"),
        (["{broken"], "a.jsonl:1: broken JSON"),
        ([[1]], "a.jsonl:1: expected an object with an answer, got list"),
    ],
)
def test_answers_that_fit_no_question_are_named(docs, tmp_path, rows, why):
    with pytest.raises(UserError, match=why):
        samples.answers(lines(tmp_path / "a.jsonl", rows), docs.items)


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("refcoco", {"image": "a.png", "bbox": [0, 0, 5, 5]}, "none of caption, expression"),
        ("refcoco", {"image": "a.png", "caption": "x", "bbox": [1, 2]}, "is not .x, y, width"),
        ("screenspot", {"instruction": "x"}, "none of bbox"),
        ("geometry3k", {"problem": "x"}, "none of answer"),
        ("chartqa", {"label": "x"}, "none of text"),
        ("docvqa", {"question": "x"}, "none of answers"),
        ("clevr", [1], "not a row of CLEVR"),
    ],
)
def test_a_broken_row_is_named_with_its_place(tmp_path, name, row, why):
    file = lines(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=f"rows.jsonl:1: not a row of .*{why}|rows.jsonl:1.*{why}"):
        BENCHMARKS.build(name, path=file)


def test_a_folder_without_questions_is_named(tmp_path):
    with pytest.raises(UserError, match="no .json, .jsonl or .parquet file; expected ChartQA"):
        BENCHMARKS.build("chartqa", path=tmp_path)
