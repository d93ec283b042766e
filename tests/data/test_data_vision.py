"""Questions about images from every format in use, their broken rows, and the split by picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.data.vision.source import Vision, in_messages
from tests.fixtures import tiny_vlms
from tests.fixtures.clips import film
from tests.fixtures.mistakes import message


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "pics").mkdir()
    for i in range(6):
        tiny_vlms.image(40, 30, i).save(tmp_path / "pics" / f"{i}.png")
    film(tmp_path / "clip.mp4")
    return tmp_path


def written(folder: Path, name: str, rows, indent: int | None = None) -> Path:
    lines = name.endswith("l")
    (folder / name).write_text(
        "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=indent)
    )
    return folder / name


def every(path: Path, **options) -> list[dict]:
    return Vision(path, held_out=0.0, **options).train


IMAGE, SHOWN, CLIP = "pics/0.png", ["pics/0.png"], "clip.mp4"
SEEN = {"type": "image", "image": IMAGE}
BRIEF = {"role": "system", "content": "short"}


def words(text):
    return {"type": "text", "text": text}


def user(*content):
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def reply(text):
    return {"role": "assistant", "content": text}


def turns(*values):
    """A conversation in LLaVA's form."""
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(values)]


ASK, WHY, BARE = user("<image>q"), user(SEEN, words("q")), user({"type": "image"}, words("q"))
LAYOUTS = [  # a row as its makers write it, and what of it is read
    (
        {"question": " what? ", "image": IMAGE, "answer": 3, "tag": "x"},
        {"text": " what? ", "images": SHOWN, "answer": 3, "tag": "x"},
    ),
    (
        {"problem": "where?", "images": SHOWN * 2, "bbox": [1, 2, 30, 20], "solution": "there"},
        {"text": "where?", "images": SHOWN * 2, "boxes": [[1, 2, 30, 20]], "answer": "there"},
    ),
    ({"text": "when?", "video": CLIP, "spans": [[1, 2]]}, {"video": CLIP, "spans": [[1, 2]]}),
    ({"prompt": "why?"}, {"text": "why?", "images": None, "messages": None}),
    # LLaVA, and LLaVA-Video
    (
        {"image": IMAGE, "conversations": turns("<image>\nq", "a dog")},
        {"text": "<image>\nq", "answer": "a dog", "images": SHOWN, "messages": None},
    ),
    ({"conversations": turns("<image>\nq"), "video": CLIP}, {"text": "<video>\nq"}),
    (
        {"conversations": turns("a?", "b", "c?"), "answer": "d"},
        {"messages": [user("a?"), reply("b"), user("c?")], "answer": "d"},
    ),
    # ms-swift
    (
        {"images": SHOWN, "messages": [BRIEF, ASK, reply("a cat")]},
        {"system": "short", "text": "<image>q", "answer": "a cat"},
    ),
    (
        {"query": "<image>why?", "response": "so", "images": SHOWN, "history": []},
        {"text": "<image>why?", "answer": "so", "images": SHOWN},
    ),
    (
        {"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]},
        {"messages": [user("a"), reply("b"), user("c")], "answer": "d"},
    ),
    # Qwen, and MM-Eureka
    ({"messages": [WHY, reply([words("7")])]}, {"messages": [WHY], "text": "q", "answer": "7"}),
    ({"message": json.dumps([WHY]), "answer": "3"}, {"text": "q", "messages": [WHY]}),
    # TRL: the conversation is the prompt, pictures beside it; answers that are compared
    (
        {"prompt": [BRIEF, BARE], "images": SHOWN, "solution": "so"},
        {"messages": [BARE], "system": "short", "answer": "so", "images": SHOWN},
    ),
    (
        {"prompt": [WHY], "chosen": turns("", "good")[1], "rejected": [reply("bad")]},
        {"chosen": "good", "rejected": "bad"},
    ),
    # verl
    (
        {"prompt": [ASK], "images": [{"path": IMAGE}], "reward_model": {"ground_truth": "4"}},
        {"text": "<image>q", "answer": "4", "images": SHOWN},
    ),
    # LLaMA-Factory: Alpaca's columns
    (
        {"instruction": "translate", "input": "ja", "output": "yes", "images": SHOWN},
        {"text": "translate\nja", "answer": "yes", "images": SHOWN},
    ),
    ({"instruction": "q", "input": "", "output": "yes"}, {"text": "q", "answer": "yes"}),
    # The Cauldron, FineVision
    (
        {"images": SHOWN, "texts": [{"user": "q", "assistant": "r", "source": "AI2D"}]},
        {"text": "q", "answer": "r"},
    ),
    # MathVista
    (
        {"question": "q<image1>", "image": "images/1.jpg", "decoded_image": {"path": IMAGE}},
        {"text": "q<image>", "images": SHOWN},
    ),
    # Video-R1
    ({"problem": "q", "data_type": "image", "path": IMAGE, "options": []}, {"images": SHOWN}),
    (
        {"problem": "q", "data_type": "video", "path": CLIP, "solution": "<answer>A</answer>"},
        {"video": CLIP, "answer": "A"},
    ),
    # MiniCPM-V, and Phi's numbered pictures
    (
        {"image": {"<image_0>": IMAGE}, "conversations": [user("a <image_0>?")]},
        {"text": "a <image>?", "images": SHOWN},
    ),
    ({"question": "<|image_1|>\nq", "image": IMAGE}, {"text": "<image>\nq"}),
    # ScreenSpot
    (
        {"instruction": "close", "img_filename": IMAGE, "bbox": [1, 2, 3, 4]},
        {"text": "close", "images": SHOWN},
    ),
]


def named(folder, value):
    """Files by their names in the folder."""
    if isinstance(value, str):
        return value.removeprefix(f"{folder}/")
    if isinstance(value, dict):
        return {key: named(folder, one) for key, one in value.items()}
    return [named(folder, one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("row", "expected"), LAYOUTS)
def test_rows_are_read_as_their_makers_write_them(folder, row, expected):
    path = written(folder, "q.jsonl", [row])
    (prompt,) = every(path, space="rel1000", **({} if "prompt" in row else {"system": "be brief"}))
    assert {key: named(folder, prompt.get(key)) for key in expected} == expected
    assert prompt["origin"] == f"{path}:1" and prompt["space"] == "rel1000"
    assert prompt.get("system") in ("be brief", "short", None)


def test_lists_of_pictures_are_clips_whose_rate_the_row_says(folder):
    two = ["pics/0.png", "pics/1.png"]
    whole = [str(folder / name) for name in two]
    part = [{"type": "video", "video": two, "sample_fps": 2.0}, {"type": "text", "text": "what?"}]
    rows = [
        {"text": "what?", "video": two, "fps": 2},
        {"text": "what?", "videos": [two, "clip.mp4"], "fps": 2},
        {"messages": [{"role": "user", "content": part}]},
    ]
    first, second, third = every(written(folder, "q.jsonl", rows))
    assert first["video"] == whole and second["video"] == [whole, str(folder / "clip.mp4")]
    assert third["messages"][0]["content"][0]["video"] == whole
    del rows[0]["fps"]
    said = message(every, written(folder, "q.jsonl", rows))
    assert "q.jsonl:1: its video: it is given as frames" in said


def test_fields_say_what_is_called_how(folder):
    row = {"q": "what?", "pic": "0.png", "gold": "a", "classes": ["dog"]}
    path = written(folder, "q.jsonl", [row])
    fields = {"text": "q", "images": "pic", "answer": "gold", "labels": "classes"}
    (prompt,) = every(path, images=folder / "pics", columns=fields)
    assert (prompt["text"], prompt["answer"], prompt["labels"]) == ("what?", "a", ["dog"])
    assert "q.jsonl:1: no column 'no' (columns.text); it has q, pic, gold, classes" in message(
        every, path, columns={"text": "no"}
    )


SWIFT = {"objects": {"ref": ["dog"], "bbox": [[1, 2, 3, 4]]}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        # ms-swift: marks in texts and turns
        (SWIFT | {"text": "where is <ref-object>?"}, "in whose place ms-swift puts what objects"),
        (SWIFT | {"messages": [user("<ref-object>?")]}, "in whose place ms-swift puts what obj"),
        ({"query": "c", "response": "d", "history": [["a", "b"]]}, "write the turns as messages"),
        ({"instruction": "and?", "output": "x", "history": [["a", "b"]]}, "turns as messages"),
        # ScienceQA: 1 is the second choice; AI2D: the same as a text
        ({"question": "which?", "choices": ["a", "b"], "answer": 1}, "the place of one of its"),
        ({"question": "which?", "options": ["a", "b"], "answer": "1"}, "the place of one of its"),
        # Video-R1, MMBench, SEED-Bench: options that the model is not shown
        (
            {"problem": "which?", "options": ["A. a", "B. b"], "solution": "<answer>A</answer>"},
            "a letter of its options, which the question does not show",
        ),
        ({"question": "which?", "A": "cat", "B": "dog", "answer": "B"}, "its columns A, B, which"),
        (
            {"question": "which?", "choice_a": "cat", "choice_b": "dog", "answer": "A"},
            "a letter of its columns choice_a, choice_b",
        ),
        # multimodal-open-r1: the right answer is in another column
        ({"problem": "why?", "solution": "<think>a</think><answer>B</answer>"}, "with a thought"),
        # MMMU: the second picture is not the first
        ({"question": "<image 2>?", "images": SHOWN}, "its text numbers pictures (2)"),
        # geometry3k, MMMU, imagefolder: pictures under names that are not read
        ({"question": "x?", "img_diagram": IMAGE}, "img_diagram would not be read"),
        ({"question": "<image 1>?", "image_1": IMAGE}, "image_1 would not be read"),
        ({"question": "new?", "before_file_name": IMAGE}, "columns: {images: before_file"),
        ({"query": {"de": "was?", "en": "what?"}}, "its question holds de, en, expected one"),
        ({"prompt": [{"role": "judge", "content": "x"}]}, "turn 0 is by 'judge'"),
        ({"conversations": turns("a", [1, 2])}, "turn 1 holds 1, expected text"),
        ({"conversations": []}, "conversations is empty"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 0 is by 'robot'"),
        ({"conversations": turns("", "x")[1:]}, "no question of a user"),
        ({"conversations": [{"from": "human"}]}, "turn 0 has no text"),
        ({"conversations": "x"}, "conversations is str, expected a list"),
        ({"conversations": [user({"type": "audio"})]}, "a part of a message is 'audio'"),
        (
            {"conversations": [user({"type": "image", "image": "https://a/b.png"})]},
            "download it first",
        ),
        ({"problem": "where?", "boxes": [[1, 2, 10**400, 3]]}, "is not four numbers"),
    ],
)
def test_what_cannot_be_understood_is_said(folder, row, said):
    complaint = message(every, written(folder, "odd.jsonl", [row]))
    assert said in complaint and "odd.jsonl:1: " in complaint


COCO = {
    "images": [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 30} for i in range(3)],
    "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}],
    "annotations": [
        {"id": 10, "image_id": 0, "category_id": 1, "bbox": [5, 6, 10, 4], "iscrowd": 0},
        {"id": 11, "image_id": 0, "category_id": 2, "bbox": [0, 0, 2, 2]},
        {"id": 12, "image_id": 1, "category_id": 2, "bbox": [0, 0, 9, 9], "iscrowd": 1},
    ],
}


def test_annotations_of_coco_are_questions_for_boxes(folder):
    path = written(folder, "instances.json", COCO)
    (prompt,) = every(path, images=folder / "pics")
    assert prompt["boxes"] == [[5, 6, 15, 10], [0, 0, 2, 2]] and prompt["labels"] == ["dog", "cat"]
    assert "dog, cat" in prompt["text"] and prompt["origin"] == f"{path}: image 0"
    first, second, _ = COCO["annotations"]
    expressions = [
        first | {"caption": "the left dog"},
        second | {"sentences": [{"sent": "a cat"}, {"sent": "it"}]},
    ]
    path = written(folder, "refs.json", COCO | {"annotations": expressions})
    found = every(path, images=folder / "pics")
    asked = ["the left dog", "a cat", "it"]
    assert [p["text"] for p in found] == [f"Give the box of {text}." for text in asked]
    assert [p["boxes"] for p in found] == [[[5, 6, 15, 10]], [[0, 0, 2, 2]], [[0, 0, 2, 2]]]
    rows = [{"image": "pics/0.png", "expression": "the dog", "bbox": [5, 6, 10, 4]}]
    options = {"format": "refcoco", "question": "where is {expression}?"}
    (found,) = every(written(folder, "r.jsonl", rows), **options)
    assert found["text"] == "where is the dog?" and found["boxes"] == [[5, 6, 15, 10]]


@pytest.mark.parametrize("kind", ["coco", "refcoco"])
def test_broken_annotations_are_refused_in_a_sentence(folder, kind):
    first = COCO["annotations"][0]
    for annotation in (
        None,
        [None],
        first | {"caption": 7},
        first | {"sentences": [1, None, {"sent": 3}]},
        first | {"bbox": [1, 2, 10**400, 3], "caption": "it"},  # beyond floats
        first | {"bbox": None, "caption": "it"},
    ):
        content = COCO | {"categories": [], "annotations": [annotation]}
        path = written(folder, "broken.json", content)
        assert "broken.json" in message(Vision, path, format=kind, images=folder / "pics")


def test_all_broken_rows_are_counted_and_the_first_named(folder):
    (folder / "cut.mp4").write_bytes((folder / CLIP).read_bytes()[:500])
    broken = [
        ({"text": ""}, "no text (the question)"),
        ({"text": "a", "image": "gone.png"}, "gone.png; the option images names"),
        ({"text": "b", "boxes": [[5, 5, 1, 9]]}, "box [5, 5, 1, 9] is empty or inverted"),
        ({"text": "c", "boxes": [[1, 2, 3]]}, "is not four numbers"),
        ({"text": "d", "boxes": [[0, 0, 1, 1]], "labels": ["x", "y"]}, "2 labels for 1 boxes"),
        (["e"], "list"),
        ({"text": "<image> f"}, "<image>"),
        ({"text": "g", "images": [IMAGE, None]}, "null"),
        ({"text": "h", "images": [[IMAGE]]}, "a list"),
        ({"text": "i", "video": "cut.mp4"}, "cut.mp4"),
    ]
    path = written(folder, "q.jsonl", [{"text": "fine"}, *(row for row, _ in broken)])
    path.write_text(path.read_text() + "\n{broken\n")
    complaint = message(every, path)
    assert complaint.startswith("11 of 12 rows are broken:") and "broken: skip" in complaint
    for number, why in enumerate([*(why for _, why in broken), "JSON"], start=2):
        (line,) = (each for each in complaint.splitlines() if f"{path}:{number}: " in each)
        assert why in line
    with pytest.warns(UserWarning, match="11 of 12 rows are broken"):
        assert [p["text"] for p in every(path, broken="skip")] == ["fine"]


def test_rows_of_a_json_list_have_their_line(folder):
    path = written(folder, "q.json", [{"text": "a"}, {"text": "b", "image": "gone.png"}], 1)
    assert f"{path}:5: no file" in message(every, path)
    path.write_text('[{"text": "a"},\n {"text": ]')
    assert message(every, path).startswith(f"{path}:2: broken JSON")


def test_what_is_held_out_is_decided_by_the_picture(folder):
    rows = [{"text": f"question {i % 3}", "image": f"pics/{i % 6}.png"} for i in range(60)]
    seen = [SEEN | {"image": f"pics/{i % 6}.png"} for i in range(12)]
    talks = [{"messages": [user(one, words("how many?"))]} for one in seen]
    path = written(folder, "q.jsonl", rows)
    talks = written(folder, "talks.jsonl", talks)
    for source in (Vision(path, held_out=0.4), Vision(talks, held_out=0.4)):
        sides = [
            {(p.get("images") or in_messages(p))[0] for p in side}
            for side in (source.train, source.held_out)
        ]
        assert all(sides) and not sides[0] & sides[1]


def test_tables_without_their_library_say_what_to_install(folder, monkeypatch):
    (folder / "t.parquet").write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pyarrow: pip install pyarrow" in message(every, folder / "t.parquet")
