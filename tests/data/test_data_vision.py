"""Questions about images from every format in use, their broken rows, and the split by picture."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from PIL import Image

from mmrl.config import build
from mmrl.core.registry import DATA
from mmrl.data.vision.source import Vision, in_messages
from tests.fixtures import tiny_vlms
from tests.fixtures.films import film
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


def test_plain_rows_under_the_names_in_use(folder):
    rows = [
        {"question": " what? ", "image": "pics/0.png", "answer": 3, "tag": "x"},
        {
            "problem": "where?",
            "images": ["pics/1.png", "pics/2.png"],
            "bbox": [1, 2, 30, 20],
            "solution": "there",
        },
        {"text": "when?", "video": "clip.mp4", "spans": [[1, 2]]},
        {"prompt": "why?"},
    ]
    prompts = every(written(folder, "q.jsonl", rows), space="rel1000", system="be brief")
    assert [p["text"] for p in prompts] == [" what? ", "where?", "when?", "why?"]
    assert (
        prompts[0]["images"] == [str(folder / "pics/0.png")]
        and prompts[0]["answer"] == 3
        and prompts[0]["tag"] == "x"
    )
    assert (
        prompts[1]["boxes"] == [[1, 2, 30, 20]]
        and prompts[1]["answer"] == "there"
        and len(prompts[1]["images"]) == 2
    )
    assert prompts[2]["video"] == str(folder / "clip.mp4") and "images" not in prompts[3]
    assert [p["origin"] for p in prompts] == [f"{folder / 'q.jsonl'}:{i}" for i in range(1, 5)]
    assert {p["space"] for p in prompts} == {"rel1000"} and {p["system"] for p in prompts} == {
        "be brief"
    }


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
    del rows[0]["fps"], part[0]["sample_fps"]
    said = message(every, written(folder, "q.jsonl", rows))
    assert "q.jsonl:1: its video: it is given as frames" in said and "1 more rows like it" in said


def test_fields_say_what_is_called_how(folder):
    path = written(
        folder, "q.jsonl", [{"q": "what?", "pic": "0.png", "gold": "a", "classes": ["dog"]}]
    )
    fields = {"text": "q", "images": "pic", "answer": "gold", "labels": "classes"}
    (prompt,) = every(path, images=folder / "pics", columns=fields)
    assert (
        prompt["text"] == "what?"
        and prompt["answer"] == "a"
        and prompt["labels"] == ["dog"]
        and "q" not in prompt
    )
    assert "q.jsonl:1: no column 'no' (columns.text); it has q, pic, gold, classes" in message(
        every, path, columns={"text": "no"}
    )


def test_conversations_of_all_makes(folder):
    image = "pics/0.png"
    parts = [{"type": "image", "image": "pics/1.png"}, {"type": "text", "text": "and this?"}]
    rows = [
        {
            "id": 1,
            "image": image,
            "conversations": [
                {"from": "human", "value": "<image>\nwhat?"},
                {"from": "gpt", "value": "a dog"},
            ],
        },
        {
            "images": [image],
            "messages": [
                {"role": "system", "content": "short"},
                {"role": "user", "content": "<image>what?"},
                {"role": "assistant", "content": "a cat"},
            ],
        },
        {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [{"type": "text", "text": "7"}]},
            ]
        },
        {
            "conversations": [
                {"role": "user", "content": "a?"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c?"},
            ],
            "answer": "d",
        },
    ]
    llava, share, qwen, long = every(written(folder, "c.json", rows))
    assert (
        llava["text"] == "<image>\nwhat?" and llava["answer"] == "a dog" and "messages" not in llava
    )
    assert (
        share["system"] == "short"
        and share["text"] == "<image>what?"
        and share["answer"] == "a cat"
    )
    assert qwen["messages"][0]["content"][0]["image"] == str(folder / "pics/1.png")
    assert qwen["text"] == "and this?" and qwen["answer"] == "7"
    assert [turn["role"] for turn in long["messages"]] == ["user", "assistant", "user"] and long[
        "answer"
    ] == "d"


def test_rows_as_other_frameworks_write_them(folder):
    ask = {"role": "user", "content": "<image>how many?"}
    image = str(folder / "pics/0.png")
    rows = [
        # TRL: the conversation is the prompt, pictures beside it; in parts, or by a mark
        {
            "prompt": [
                {"role": "system", "content": "short"},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "why?"}]},
            ],
            "images": [image],
            "solution": "so",
        },
        # verl: the ground truth is in a separate column
        {
            "data_source": "geo3k",
            "prompt": [ask],
            "images": [{"path": image}],
            "reward_model": {"style": "rule", "ground_truth": "4"},
        },
        # ms-swift: the answer is the last turn, pictures and clips beside the turns
        {"messages": [ask, {"role": "assistant", "content": "2"}], "images": [image]},
        # LLaMA-Factory: Alpaca's columns
        {"instruction": "translate", "input": "ja", "output": "yes", "images": [image]},
        {"instruction": "say yes", "input": "", "output": "yes"},
        {"prompt": "a question still", "answer": "x"},
        # ms-swift: its own names for question and answer; turns by their roles
        {"query": "<image>why?", "response": "so", "images": [image], "history": []},
        {"conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]},
        # The Cauldron, FineVision: exchanges about the pictures, with their source
        {"images": [image], "texts": [{"user": "q", "assistant": "r", "source": "AI2D"}]},
    ]
    read = every(written(folder, "others.jsonl", rows))
    trl, verl, swift, alpaca, short, plain, query, talk, exchange = read
    assert (query["text"], query["answer"], query["images"]) == ("<image>why?", "so", [image])
    assert [turn["content"] for turn in talk["messages"]] == ["a", "b", "c"]
    assert talk["answer"] == "d" and (exchange["text"], exchange["answer"]) == ("q", "r")
    assert (trl["system"], trl["answer"], trl["images"]) == ("short", "so", [image])
    assert trl["messages"][-1]["content"][0] == {"type": "image"}
    assert (verl["text"], verl["answer"], verl["images"]) == ("<image>how many?", "4", [image])
    assert (swift["text"], swift["answer"]) == ("<image>how many?", "2")
    assert (alpaca["text"], alpaca["answer"], alpaca["images"]) == ("translate\nja", "yes", [image])
    assert (short["text"], short["answer"]) == ("say yes", "yes")
    assert plain["text"] == "a question still" and "messages" not in plain


def _base64(file):
    return base64.b64encode(file.read_bytes()).decode()


def test_rows_of_published_sets_and_trainers_with_ways_of_their_own(folder):
    """Each as its maker writes it: MathVista, VLMEvalKit's tables, Video-R1, MM-Eureka,
    LLaVA-Video, MiniCPM-V, Phi's numbered pictures, ScreenSpot, LLaMA-Factory's and TRL's compared
    answers."""
    image, other = str(folder / "pics/0.png"), str(folder / "pics/1.png")
    turn = {"role": "user", "content": [{"type": "image", "image": f"file://{image}"}]}
    turn["content"].append({"type": "text", "text": "how many?"})
    said = {"from": "gpt", "value": "good"}, [{"role": "assistant", "content": "bad"}]
    rows = [
        {"question": "q<image1>", "image": "images/1.jpg", "decoded_image": {"path": image}},
        {"question": "q", "image": _base64(folder / "pics/0.png")},
        {"problem": "q", "data_type": "image", "path": image, "options": []},
        {
            "problem": "q",
            "data_type": "video",
            "path": "clip.mp4",
            "solution": "<answer>A</answer>",
        },
        {"message": json.dumps([turn]), "answer": "3"},
        {"conversations": [{"from": "human", "value": "<image>\nq"}], "video": "clip.mp4"},
        {
            "image": {"<image_00>": image, "<image_01>": other},
            "conversations": [{"role": "user", "content": "a <image_00> or <image_01>?"}],
        },
        {"question": "<|image_1|>\nq", "image": image},
        {"instruction": "close", "img_filename": "pics/0.png", "bbox": [1, 2, 3, 4]},
        {"prompt": [turn], "chosen": said[0], "rejected": said[1]},
    ]
    read = every(written(folder, "own.jsonl", rows))
    vista, table, still, clip, eureka, video, mini, phi, screen, pair = read
    assert (vista["text"], vista["images"]) == ("q<image>", [image])
    assert table["images"][0].size == Image.open(image).size
    assert still["images"] == [image] and clip["video"] == str(folder / "clip.mp4")
    assert clip["answer"] == "A" and eureka["messages"][0]["content"][0]["image"] == image
    assert (eureka["text"], video["text"]) == ("how many?", "<video>\nq")
    assert (mini["text"], mini["images"]) == ("a <image> or <image>?", [image, other])
    assert phi["text"] == "<image>\nq" and screen["images"] == [image]
    assert (pair["chosen"], pair["rejected"]) == ("good", "bad")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"text": "where is <ref-object>?", "objects": {"ref": ["dog"], "bbox": [[1, 2, 3, 4]]}},
            "in whose place ms-swift puts what objects hold",
        ),
        (
            {"instruction": "and?", "output": "x", "history": [["a", "b"]]},
            "write the turns as messages",
        ),
        ({"prompt": [{"role": "judge", "content": "x"}]}, "turn 0 is by 'judge'"),
        ({"query": "c", "response": "d", "history": [["a", "b"]]}, "write the turns as messages"),
        # ScienceQA: 1 is the second choice
        ({"question": "which?", "choices": ["a", "b"], "answer": 1}, "the place of one of its"),
        # AI2D: the same as a text
        ({"question": "which?", "options": ["a", "b"], "answer": "1"}, "the place of one of its"),
        # Video-R1, MMBench, SEED-Bench: options that the model is not shown
        (
            {
                "problem": "which?",
                "options": ["A. cat", "B. dog"],
                "solution": "<answer>A</answer>",
            },
            "a letter of its options, which the question does not show",
        ),
        ({"question": "which?", "A": "cat", "B": "dog", "answer": "B"}, "its columns A, B, which"),
        (
            {"question": "which?", "choice_a": "cat", "choice_b": "dog", "answer": "A"},
            "a letter of its columns choice_a, choice_b",
        ),
        # multimodal-open-r1: the right answer is in another column
        ({"problem": "why?", "solution": "<think>a</think><answer>B</answer>"}, "with a thought"),
        # ms-swift: marks in turns
        (
            {
                "messages": [{"role": "user", "content": "where is <ref-object>?"}],
                "objects": {"ref": ["dog"], "bbox": [[1, 2, 3, 4]]},
            },
            "in whose place ms-swift puts what objects hold",
        ),
        # MMMU: the second picture is not the first
        ({"question": "<image 2>?", "images": ["pics/0.png"]}, "its text numbers pictures (2)"),
        # geometry3k: a picture under a name that is not read
        ({"question": "x?", "img_diagram": "pics/0.png"}, "img_diagram would not be read"),
        # MMMU, imagefolder: pictures under names that are not read
        ({"question": "<image 1>?", "image_1": "pics/0.png"}, "image_1 would not be read"),
        ({"question": "new?", "before_file_name": "pics/0.png"}, "columns: {images: before_file"),
        ({"query": {"de": "was?", "en": "what?"}}, "its question holds de, en, expected one"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": [1, 2]}]},
            "turn 1 holds 1, expected text",
        ),
    ],
)
def test_what_cannot_be_understood_of_other_frameworks_is_said(folder, row, said):
    assert said in message(every, written(folder, "odd.jsonl", [row]))


COCO = {
    "images": [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 30} for i in range(3)],
    "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "cat"}],
    "annotations": [
        {"id": 10, "image_id": 0, "category_id": 1, "bbox": [5, 6, 10, 4], "iscrowd": 0},
        {"id": 11, "image_id": 0, "category_id": 2, "bbox": [0, 0, 2, 2]},
        {"id": 12, "image_id": 1, "category_id": 2, "bbox": [0, 0, 9, 9], "iscrowd": 1},
    ],
}


def test_coco_annotations_are_questions_for_boxes(folder):
    path = written(folder, "instances.json", COCO)
    (prompt,) = every(path, images=folder / "pics")
    assert prompt["boxes"] == [[5, 6, 15, 10], [0, 0, 2, 2]] and prompt["labels"] == ["dog", "cat"]
    assert (
        "dog, cat" in prompt["text"]
        and prompt["width"] == 40
        and prompt["origin"] == f"{path}: image 0"
    )
    assert every(path, images=folder / "pics", question="{labels}?")[0]["text"] == "dog, cat?"


def test_referring_expressions(folder):
    expressions = [
        dict(COCO["annotations"][0], caption="the left dog"),
        dict(COCO["annotations"][1], sentences=[{"sent": "a cat"}, {"sent": "it"}]),
    ]
    found = every(
        written(folder, "refs.json", COCO | {"annotations": expressions}), images=folder / "pics"
    )
    assert [p["text"] for p in found] == [
        "Give the box of the left dog.",
        "Give the box of a cat.",
        "Give the box of it.",
    ]
    assert found[0]["boxes"] == [[5, 6, 15, 10]] and found[1]["boxes"] == found[2]["boxes"] == [
        [0, 0, 2, 2]
    ]
    rows = [{"image": "pics/0.png", "expression": "the dog", "bbox": [5, 6, 10, 4]}]
    (found,) = every(
        written(folder, "r.jsonl", rows), format="refcoco", question="where is {expression}?"
    )
    assert found["text"] == "where is the dog?" and found["boxes"] == [[5, 6, 15, 10]]


def test_all_broken_rows_are_counted_and_the_first_named(folder):
    rows = [
        {"text": "fine"},
        {"text": ""},
        {"text": "a", "image": "gone.png"},
        {"text": "b", "boxes": [[5, 5, 1, 9]]},
        {"text": "c", "boxes": [[1, 2, 3]]},
        {"text": "d", "boxes": [[0, 0, 1, 1]], "labels": ["x", "y"]},
        ["e"],
        {"text": "<image> f"},
        {"text": "g", "images": ["pics/0.png", None]},
        {"text": "h", "images": [["pics/0.png"]]},
        {"text": "i", "video": "pics.mp4"},
    ]
    path = written(folder, "q.jsonl", rows)
    path.write_text(path.read_text() + "\n{broken\n")
    (folder / "pics.mp4").write_bytes((folder / "clip.mp4").read_bytes()[:500])
    complaint = message(every, path)
    assert complaint.startswith("11 of 12 rows are broken:") and "broken: skip" in complaint
    reasons = ("no text", "gone.png", "box", "box", "labels", "list", "<image>", "null", "a list")
    for number, why in enumerate((*reasons, "pics.mp4", "JSON"), start=2):
        (line,) = (each for each in complaint.splitlines() if f"q.jsonl:{number}: " in each)
        assert why in line
    for number, why in (
        (2, "no text (the question)"),
        (3, f"no file {folder / 'gone.png'}; the option images names"),
        (4, "box [5, 5, 1, 9] is empty or inverted"),
        (5, "is not four numbers"),
        (6, "2 labels for 1 boxes"),
    ):
        assert f"{path}:{number}: " in complaint and why in complaint
    with pytest.warns(UserWarning, match="11 of 12 rows are broken"):
        assert [p["text"] for p in every(path, broken="skip")] == ["fine"]


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_of_a_json_list_have_their_line(folder, indent):
    path = written(folder, "q.json", [{"text": "a"}, {"text": "b", "image": "gone.png"}], indent)
    line = 1 if indent is None else 5
    assert f"{path}:{line}: no file" in message(every, path)
    path.write_text('[{"text": "a"},\n {"text": ]')
    assert message(every, path).startswith(f"{path}:2: broken JSON")


@pytest.mark.parametrize(
    "turns, said",
    [
        ([], "conversations is empty"),
        ([{"from": "robot", "value": "x"}], "turn 0 is by 'robot'"),
        ([{"from": "gpt", "value": "x"}], "no question of a user"),
        ([{"from": "human"}], "turn 0 has no text"),
        ("x", "conversations is str, expected a list"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "a part of a message is 'audio'"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "https://a/b.png"}]}],
            "download it first",
        ),
    ],
)
def test_broken_conversations_say_why(folder, turns, said):
    assert said in message(every, written(folder, "c.jsonl", [{"conversations": turns}]))


def test_what_is_held_out_is_decided_by_the_picture(folder):
    rows = [{"text": f"question {i % 3}", "image": f"pics/{i % 6}.png"} for i in range(60)]
    path = written(folder, "q.jsonl", rows)
    source = Vision(path, held_out=0.4)
    assert source.train and source.held_out and len(source.train) + len(source.held_out) == 60
    assert not {p["images"][0] for p in source.train} & {p["images"][0] for p in source.held_out}
    parts = [{"type": "image", "image": "pics/0.png"}, {"type": "text", "text": "how many?"}]
    talks = [
        {
            "messages": [
                {"role": "user", "content": [{**parts[0], "image": f"pics/{i % 6}.png"}, parts[1]]}
            ]
        }
        for i in range(12)
    ]
    source = Vision(written(folder, "talks.jsonl", talks), held_out=0.4)
    sides = [{in_messages(p)[0] for p in side} for side in (source.train, source.held_out)]
    assert all(sides) and not sides[0] & sides[1]
    smaller = written(folder, "other.jsonl", rows[:5])
    assert (
        len(Vision(path, held_out=smaller).held_out) == 5
        and len(Vision(path, held_out=smaller).train) == 60
    )


def test_a_folder_has_its_parts(folder):
    written(folder, "train.jsonl", [{"text": "a", "image": "pics/0.png"}])
    written(folder, "test.json", [{"text": "b", "image": "pics/1.png"}])
    source = build({"vision": {"path": str(folder)}}, DATA, "data")
    assert [p["text"] for p in source.train] == ["a"] and [p["text"] for p in source.held_out] == [
        "b"
    ]
    assert "no caption; write it into 0.txt" in message(Vision, folder / "pics")
    assert "rows are read from" in message(Vision, folder / "clip.mp4")


def test_parquet_and_saved_data_sets(folder):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    png = (folder / "pics/0.png").read_bytes()
    picture = {"bytes": png, "path": "0.png"}
    rows = [
        {"problem": "what?", "image": picture, "solution": "a"},
        {"problem": "why?", "image": picture, "solution": None},
    ]
    (folder / "set" / "data").mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "set" / "data" / "train-00000-of-00001.parquet")
    pq.write_table(table.slice(0, 1), folder / "set" / "data" / "test-00000-of-00001.parquet")
    source = Vision(folder / "set")
    assert [p["text"] for p in source.train] == ["what?", "why?"] and len(source.held_out) == 1
    assert source.train[0]["images"][0].size == (40, 30) and "answer" not in source.train[1]
    assert source.train[1]["origin"].endswith("train-00000-of-00001.parquet: row 2")
    (folder / "disk" / "train").mkdir(parents=True)
    arrow = str(folder / "disk" / "train" / "data-00000-of-00001.arrow")
    with pa.OSFile(arrow, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    assert [p["text"] for p in every(folder / "disk")] == ["what?", "why?"]


def test_tables_without_their_library_say_what_to_install(folder, monkeypatch):
    (folder / "t.parquet").write_bytes(b"x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs pyarrow: pip install pyarrow" in message(every, folder / "t.parquet")
