"""Rows of every kind of file and folder become the same prompts; what is hostile is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from mmrl import config
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in
from mmrl.data.captions import Captions
from mmrl.data.prompts import Prompts
from mmrl.data.sources import folders, text_files
from mmrl.data.sources.folders import Tree, inside
from mmrl.data.sources.reader import rows_of
from mmrl.data.vision.source import Vision
from mmrl.experiment import changes
from tests.fixtures import tiny_vlms

ROWS = [
    {
        "question": f"what is {i}, or not?",
        "image": f"pics/{i}.png",
        "bbox": [1, 2, 20 + i, 20],
        "n": i,
    }
    for i in range(6)
]
RUN = {
    "policy": {"vlm": {"path": "world:digits/vlm"}},
    "reward": {"format": 1.0},
    "objective": "policy_gradient",
    "advantage": "grpo",
    "optimizer": {"adamw": {"lr": 1e-4}},
    "train": {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 1},
}
load_built_in()
TEXTS = [row["question"] for row in ROWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "pics").mkdir()
    for i in range(6):
        tiny_vlms.image(40, 30, i).save(folder / "pics" / f"{i}.png")
    return folder


def message(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert "Traceback" not in str(error.value)
    return str(error.value)


def separated(path: Path, mark: str, rows=ROWS) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=mark)
        writer.writerow(rows[0])
        for row in rows:
            cells = [json.dumps(v) if isinstance(v, list) else v for v in row.values()]
            writer.writerow(cells)
    return path


def lines(rows=ROWS) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def content(folder: Path, i: int) -> bytes:
    return (folder / "pics" / f"{i}.png").read_bytes()


def with_bytes(folder: Path) -> list[dict]:
    return [
        {**row, "image": {"bytes": content(folder, i), "path": None}} for i, row in enumerate(ROWS)
    ]


def tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def samples(folder: Path, numbers=range(6)) -> dict[str, bytes]:
    members = {}
    for i in numbers:
        members[f"{i:04d}.png"] = content(folder, i)
        rest = {key: value for key, value in ROWS[i].items() if key != "image"}
        members[f"{i:04d}.json"] = json.dumps(rest).encode()
    return members


def compressed(content: bytes, suffix: str) -> bytes:
    packed = gzip.compress if suffix == ".gz" else pytest.importorskip("zstandard").compress
    return packed(content)


def written(folder: Path, kind: str) -> Path:
    """Write the six rows as a kind of file; the path to give as ``path``."""
    path = folder / f"rows{kind}"
    tables = (".parquet", ".arrow", ".file.arrow")
    makers = {
        ".jsonl": lambda: path.write_bytes(lines()),
        ".json": lambda: path.write_text(json.dumps(ROWS)),
        ".data.json": lambda: path.write_text(json.dumps({"version": 1, "data": ROWS})),
        ".jsonl.gz": lambda: path.write_bytes(compressed(lines(), ".gz")),
        ".jsonl.zst": lambda: path.write_bytes(compressed(lines(), ".zst")),
        ".csv": lambda: separated(path, ","),
        ".tsv": lambda: separated(path, "\t"),
        ".semicolon.csv": lambda: separated(path, ";"),
        ".csv.gz": lambda: path.write_bytes(
            compressed(separated(folder / "plain.csv", ",").read_bytes(), ".gz")
        ),
        **{name: lambda: table(path, with_bytes(folder), kind) for name in tables},
        ".tar": lambda: tar(path, samples(folder)),
        ".tar.gz": lambda: tar(path, samples(folder), "w:gz"),
        "-*.tar": lambda: [
            tar(folder / f"rows-{n}.tar", samples(folder, range(4 * n, 4 + 2 * n))) for n in (0, 1)
        ],
        "-{0..1}.parquet": lambda: [
            table(folder / f"rows-{n}.parquet", with_bytes(folder)[4 * n : 4 + 2 * n], ".parquet")
            for n in (0, 1)
        ],
    }
    makers[kind]()
    return path


def table(path: Path, rows: list[dict], kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    whole = pa.Table.from_pylist(rows)
    if kind == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(whole, path)
        return
    make = pa.ipc.new_file if kind == ".file.arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, whole.schema) as writer:
        writer.write_table(whole)


KINDS = (
    ".jsonl .json .data.json .jsonl.gz .jsonl.zst .csv .tsv .semicolon.csv .csv.gz .parquet "
    ".arrow .file.arrow .tar .tar.gz -*.tar -{0..1}.parquet"
).split()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_questions(folder, kind):
    prompts = Vision(str(written(folder, kind)), held_out=0.0).train
    assert [prompt["text"] for prompt in prompts] == TEXTS
    assert [prompt["boxes"] for prompt in prompts] == [[row["bbox"]] for row in ROWS]
    assert [prompt["n"] for prompt in prompts] == list(range(6)), "numbers are numbers"
    pictures = [prompt["images"][0] for prompt in prompts]
    if isinstance(pictures[0], str):
        assert pictures == [str(folder / "pics" / f"{i}.png") for i in range(6)]
    else:
        assert {picture.size for picture in pictures} == {(40, 30)}


@pytest.mark.parametrize("kind", [".csv", ".parquet", ".tar", ".jsonl.gz"])
def test_prompts_and_captions_read_them_too(folder, kind):
    path = str(written(folder, kind))
    plain = Prompts(path, held_out=0.0, columns={"text": "question"}).train
    assert [prompt["text"] for prompt in plain] == TEXTS and plain[3]["n"] == 3
    captions = Captions(path, held_out=0.0, columns={"text": "question"}).train
    assert [prompt["text"] for prompt in captions] == TEXTS
    answer = captions[0]["answer"]
    assert answer == str(folder / "pics/0.png") or answer.size == (40, 30)


def test_columns_filters_and_limits(folder):
    path = separated(folder / "chosen.csv", ",")
    columns = {"text": "question", "level": "n"}
    source = Prompts(str(path), 0.0, columns=columns, filters={"level": {"min": 2, "max": 4}})
    assert [prompt["level"] for prompt in source.train] == [2, 3, 4]
    for filters, numbers in (
        ({"n": [1, 5]}, [1, 5]),
        ({"n": 3}, [3]),
        ({"n": {"not": [0, 1]}}, [2, 3, 4, 5]),
        ({"question": {"matches": "is [24],"}}, [2, 4]),
        ({"question": {"contains": "is 5"}, "n": {"min": 1}}, [5]),
        ({"question": {"max_length": 3}}, []),
    ):
        options = {"columns": {"text": "question"}, "filters": filters}
        if not numbers:
            assert "all rows are left out by filters" in message(Prompts, str(path), 0.0, **options)
            continue
        assert [p["n"] for p in Prompts(str(path), 0.0, **options).train] == numbers
    assert len(Prompts(str(path), 0.0, key="question", limit=4).train) == 4


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"columns": {"text": "caption"}}, "no column 'caption' (columns.text); it has question,"),
        ({"key": "question", "filters": {"m": 1}}, "filters.m: no row has this column; rows have"),
        ({"filters": {"n": {"least": 1}}}, "filters.n.least: known are min, max, in"),
        ({"filters": {"n": {"min": "x"}}}, "filters.n.min: expected a number"),
        ({"filters": {"n": {"matches": "("}}}, "filters.n.matches: not a regular expression"),
        ({"streaming": True}, "streaming needs the option limit"),
        ({"split": "train"}, "is one file, which has no splits"),
    ],
)
def test_what_is_asked_wrongly_is_a_sentence(folder, options, sentence):
    path = separated(folder / "asked.csv", ",")
    assert sentence in message(Prompts, str(path), 0.0, **options)


def test_a_csv_knows_types_and_says_what_is_broken(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('text,a,b,c,d\n"two\nlines",1,1.5,true,007\nx,,-2e3,False,8\n')
    first, second = (row for _, row in rows_of(path))
    assert first == {"text": "two\nlines", "a": 1, "b": "1.5", "c": True, "d": "007"}
    assert second == {"text": "x", "a": None, "b": "-2e3", "c": False, "d": "8"}
    path.write_text("text,a\nx,1\ny,2,3\n")
    assert "t.csv:3: 3 cells, and the header has 2 columns" in message(Prompts, str(path))
    with pytest.warns(UserWarning, match="1 of 2 rows are broken"):
        assert len(Prompts(str(path), 0.0, broken="skip").train) == 1
    path.write_text("text,text\nx,1\n")
    assert "t.csv:1: the column 'text' stands twice" in message(Prompts, str(path))
    path.write_bytes(b"text\ncaf\xe9\n")
    assert "t.csv:2: byte 0xe9 is not UTF-8" in message(Prompts, str(path))
    path.write_text('text,a\n"x,1\n')
    assert "broken csv" in message(Prompts, str(path))
    path.write_text("")
    assert "is empty; expected a header" in message(Prompts, str(path))


CELLS = "007 1.0 1e5 00501 +1 1_000 0x10 inf nan None NA yes 2024-01-02 1/2 -0 3.10 .5 5. 12 -3"


@pytest.mark.parametrize("cell", [*CELLS.split(), "9" * 30, "1" + "0" * 17 + ".5", " 5", "7 "])
def test_what_a_csv_holds_is_written_back_as_it_stands(tmp_path, cell):
    path = tmp_path / "t.csv"
    path.write_text(f"text,answer,more\nq,{cell},{cell}\nr,{cell},12\n")
    for row in (row for _, row in rows_of(path)):
        assert str(row["answer"]) == cell and str(row["more"]) in (cell, "12")


def test_spaces_around_a_text_stay(folder):
    text = "  two\n spaces "
    rows = [{"prompt": text, "image": "pics/0.png"}, {"prompt": "other", "image": "pics/1.png"}]
    paths = [separated(folder / "spaces.csv", ",", rows), folder / "spaces.jsonl"]
    paths[1].write_bytes(lines(rows))
    for path in paths:
        for source in (Prompts, Captions, Vision):
            assert source(str(path), held_out=0.0).train[0]["text"] == text


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_a_key_that_stands_twice_is_not_lost_in_silence(tmp_path, name):
    path = tmp_path / name
    row = '{"text": "a", "answer": "1", "answer": "2"}'
    path.write_text(row if name.endswith("l") else f"[{row}]")
    for source in (Prompts, Vision):
        assert "the key 'answer' stands twice in one object" in message(source, str(path))


def test_packed_files_are_bounded_and_whole(tmp_path, monkeypatch):
    path = tmp_path / "b.jsonl.gz"
    monkeypatch.setattr(text_files, "SMALL", 1000)
    path.write_bytes(gzip.compress(b'{"text": "' + b"a" * 10**6 + b'"}'))
    assert "unpacks to more than 200 times its size" in message(Prompts, str(path))
    path.write_bytes(gzip.compress(lines())[:-20])
    assert "damaged or cut off" in message(Prompts, str(path), key="question")
    path.write_bytes(b"no gzip")
    assert "damaged or cut off" in message(Prompts, str(path))
    zstandard = pytest.importorskip("zstandard")
    other = tmp_path / "b.jsonl.zst"
    other.write_bytes(zstandard.compress(lines())[:-9])
    assert "b.jsonl.zst" in message(Prompts, str(other), key="question")
    other.write_bytes(b"no zst")
    assert "damaged or cut off" in message(Prompts, str(other))


def test_members_of_a_tar_stay_in_memory_and_pickles_are_refused(folder, tmp_path):
    path = tmp_path / "t.tar"
    picture = content(folder, 0)
    members = {
        "../../outside.png": picture,
        "../../outside.txt": b"a caption",
        "/etc/absolute.png": picture,
        "/etc/absolute.txt": b"another",
    }
    tar(path, members)
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("0003.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    source = Captions(str(path), 0.0)
    assert [prompt["text"] for prompt in source.train] == ["a caption", "another"]
    assert sorted(tmp_path.iterdir()) == [path] and not (tmp_path.parent / "outside.png").exists()
    tar(path, {"1.png": picture, "1.txt": b"x", "1.pkl": b"cos\nsystem\n", "2.png": picture})
    assert "1.pkl is a pickle, which may run code when read" in message(Captions, str(path))
    path.write_bytes(path.read_bytes()[:700])
    assert "the tar file is damaged or cut off" in message(Captions, str(path))
    several = tar(
        tmp_path / "s.tar",
        {"a.left.png": picture, "a.right.png": picture, "a.txt": b"which?", "a.cls": b"3"},
    )
    (prompt,) = Vision(str(several), held_out=0.0).train
    assert len(prompt["images"]) == 2 and prompt["cls"] == 3 and prompt["text"] == "which?"


def test_folders_of_pictures_with_captions(folder, tmp_path):
    for i, kind in enumerate((".txt", ".caption")):
        (tmp_path / f"{i}.png").write_bytes(content(folder, i))
        (tmp_path / f"{i}{kind}").write_text(f"picture {i}")
    texts = ["picture 0", "picture 1"]
    assert [prompt["text"] for prompt in Captions(tmp_path, 0.0).train] == texts
    assert [prompt["text"] for prompt in Vision(tmp_path, held_out=0.0).train] == texts
    (tmp_path / "notes.csv").write_text("text,other\na,b\n")
    assert [prompt["text"] for prompt in Captions(tmp_path, 0.0).train] == texts
    (tmp_path / "metadata.csv").write_text("file_name,text,score\n0.png,first,7\n1.png,second,2\n")
    source = Captions(tmp_path, 0.0, filters={"score": {"min": 5}})
    assert [prompt["text"] for prompt in source.train] == ["first"]
    nested = tmp_path / "deep" / "train"
    nested.mkdir(parents=True)
    (nested / "x.png").write_bytes(content(folder, 2))
    (nested / "metadata.jsonl").write_text('{"file_name": "x.png", "text": "nested"}')
    (prompt,) = Captions(tmp_path / "deep", 0.0).train
    assert prompt["answer"] == str(nested / "x.png")


def test_folders_are_walked_once_and_hidden_ones_never(tmp_path, monkeypatch):
    (tmp_path / "train.csv").mkdir()  # a folder, whatever its name says
    (tmp_path / "train.csv" / "rows.csv").write_text("text\na\nb\n")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "metadata.jsonl").write_text('{"text": "hidden"}')
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nowhere")
    walk = folders.os.walk
    walks = []

    def counted(folder):
        for step in walk(folder):
            walks.append(str(step[0]))
            yield step

    monkeypatch.setattr(folders.os, "walk", counted)
    assert [prompt["text"] for prompt in Prompts(str(tmp_path), 0.0).train] == ["a", "b"]
    assert walks.count(str(tmp_path)) == 1 and not any(".cache" in place for place in walks)


def test_a_home_folder_is_refused_before_it_is_searched_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MOST_STRANGERS", 20)
    for i in range(15):
        (tmp_path / f"{i}.log").touch()
        (tmp_path / f"{i}.png").touch()
    assert len(Tree(tmp_path).media) == 15, "few others are no matter"
    for i in range(15):
        (tmp_path / "deep" / f"folder {i}").mkdir(parents=True)
    for kind in (Prompts, Captions, Vision):
        told = message(kind, str(tmp_path))
        assert "no data set: after 31 folders and files of other kinds (and 30 files" in told
        assert "name the folder that holds the pictures or tables" in told


def test_saved_data_sets_have_their_splits(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{**row, "image": str(folder / row["image"])} for row in ROWS]
    whole = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    parts = {"train": whole.select(range(4)), "validation": whole.select([4]), "extra": whole}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    source = Vision(tmp_path / "saved")
    assert [prompt["text"] for prompt in source.train] == TEXTS[:4]
    assert [prompt["text"] for prompt in source.held_out] == TEXTS[4:5]
    assert source.train[0]["images"][0].size == (40, 30), "the pictures are in memory"
    assert len(Vision(tmp_path / "saved", split="extra", held_out=0.0).train) == 6
    assert len(Vision(tmp_path / "saved", held_out="extra").held_out) == 6
    gone = message(Vision, tmp_path / "saved", split="tests")
    assert "no split 'tests'; it has: extra, train, validation" in gone
    whole.save_to_disk(tmp_path / "one")
    assert len(Vision(tmp_path / "one", held_out=0.0).train) == 6
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    assert "this part of the saved data set is not there" in message(Vision, tmp_path / "one")


def test_pictures_inside_rows(folder, tmp_path):
    import base64

    path = tmp_path / "q.jsonl"
    address = f"data:image/png;base64,{base64.b64encode(content(folder, 1)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "a?"}]
    talk = {"messages": [{"role": "user", "content": parts}]}
    path.write_bytes(lines([{"text": "b?", "image": address}, talk]))
    first, second = Vision(path, held_out=0.0).train
    assert first["images"][0].size == (40, 30)
    assert second["messages"][0]["content"][0]["image"].size == (40, 30)
    path.write_bytes(lines([{"text": "b?", "image": "data:image/png;base64,????"}]))
    assert "broken base64" in message(Vision, path)
    table(tmp_path / "raw.parquet", [{"text": "c?", "image": content(folder, 2)}], ".parquet")
    assert Vision(tmp_path / "raw.parquet", held_out=0.0).train[0]["images"][0].size == (40, 30)
    table(tmp_path / "raw.parquet", [{"text": "c?", "image": b"no picture"}], ".parquet")
    assert "not a picture that can be read" in message(Vision, tmp_path / "raw.parquet")


def test_answers_of_r1_data_are_unwrapped(tmp_path):
    path = tmp_path / "r1.jsonl"
    path.write_bytes(lines([{"problem": "which?", "solution": "<answer> B </answer>"}]))
    assert Vision(path, held_out=0.0).train[0]["answer"] == "B"
    row = {"problem": "where?", "solution": "<answer>[{'Position': [1, 2, 30, 40]}]</answer>"}
    path.write_bytes(lines([row]))
    (prompt,) = Vision(path, held_out=0.0, columns={"boxes": "solution"}).train
    assert prompt["boxes"] == [[1, 2, 30, 40]]


def test_names_of_parts_of_a_folder(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "dev.csv.gz"):
        (tmp_path / name).write_bytes(b"")
    assert [file.name for file in inside(Tree(tmp_path), "train")] == [
        "train-0.jsonl",
        "train-1.jsonl",
    ]
    assert [file.name for file in inside(Tree(tmp_path), "test")] == ["dev.csv.gz"]
    assert inside(Tree(tmp_path), "other") is None


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("gone.csv", "no such file or folder: gone.csv; relative paths start at"),
        ("deep/er/gone", "no such file or folder: deep/er/gone"),
        ("*.parquet", "no file matches *.parquet"),
        ("x" * 10_000 + "/y/z", "no such file or folder: xxx"),
    ],
)
def test_files_that_are_not_there(tmp_path, monkeypatch, path, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in message(Prompts, path)


def test_files_beside_a_configuration_are_found_from_anywhere(folder, tmp_path, monkeypatch):
    """And a run that goes on from its own folder finds them too."""
    written(folder, "-*.tar")
    (folder / "set").mkdir(exist_ok=True)
    (folder / "set" / "train.csv").write_text("question\na?\nb?\n")
    monkeypatch.chdir(tmp_path)
    for path, count in (("rows-*.tar", 6), ("rows-{0..1}.tar", 6), ("set", 2)):
        file = folder / "c.yaml"
        file.write_text(f"data: {{vision: {{path: '{path}', held_out: 0.0}}}}\n")
        first = config.load(file, required=("data",))
        assert len(first.build("data", DATA).train) == count
        again = tmp_path / "config.yaml"
        again.write_text(config.dump(first))
        second = config.load(again, required=("data",))
        assert len(second.build("data", DATA).train) == count
    assert config.anchored({"data": "set", "run": "set"}, folder) == {"data": "set", "run": "set"}


def test_a_resume_with_other_data_is_refused(folder):
    def loaded(**options):
        return config.Config(RUN | {"data": {"prompts": {"path": "a.csv", **options}}}, "c.yaml")

    assert not list(changes.changes(loaded(), loaded(broken="error", columns=None)))
    for options in ({"path": "b.csv"}, {"limit": 3}, {"filters": {"n": 1}}, {"revision": "abc"}):
        (change,) = changes.changes(loaded(), loaded(**options))
        assert change.effect == "refused"


def test_nothing_in_an_arrow_file_is_unpickled(tmp_path):
    pa = pytest.importorskip("pyarrow")
    target = tmp_path / "ran"
    payload = f"cos\nsystem\n(S'touch {target}'\ntR.".encode()
    about = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": payload,
    }
    kinds = [pa.field("text", pa.string()), pa.field("extra", pa.binary(), metadata=about)]
    whole = pa.Table.from_pylist([{"text": "a?", "extra": payload}], schema=pa.schema(kinds))
    arrow = str(tmp_path / "x.arrow")
    with pa.OSFile(arrow, "wb") as sink, pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    pytest.importorskip("pyarrow.parquet").write_table(whole, tmp_path / "x.parquet")
    for name in ("x.arrow", "x.parquet"):
        (prompt,) = Prompts(str(tmp_path / name), 0.0).train
        assert prompt["extra"] == payload and not target.exists()


def test_what_is_no_video_inside_a_tar_is_said(tmp_path):
    path = tar(tmp_path / "v.tar", {"1.mp4": b"\x00video", "1.txt": b"when?"})
    assert "not a video that can be read" in message(Vision, str(path))
