"""Rows of every kind of file and folder become the same prompts; what is hostile is refused."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from mmrl.core.registry import load_built_in
from mmrl.data.captions import Captions
from mmrl.data.prompts import Prompts
from mmrl.data.sources import folders, text_files
from mmrl.data.sources.folders import Tree, inside
from mmrl.data.sources.reader import rows_of
from mmrl.data.vision.source import Vision
from tests.fixtures import tiny_vlms
from tests.fixtures.mistakes import message

ROWS = [
    {"question": f"what is {i}, or not?", "image": f"pics/{i}.png", "bbox": [1, 2, 20 + i, 20]}
    | {"n": i}
    for i in range(6)
]
load_built_in()
TEXTS = [row["question"] for row in ROWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    (folder / "pics").mkdir()
    for i in range(6):
        tiny_vlms.image(40, 30, i).save(folder / "pics" / f"{i}.png")
    return folder


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


def table(path: Path, rows: list[dict], kind: str = ".parquet") -> Path:
    pa = pytest.importorskip("pyarrow")
    whole = pa.Table.from_pylist(rows)
    if kind == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(whole, path)
        return path
    make = pa.ipc.new_file if kind == ".file.arrow" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, whole.schema) as writer:
        writer.write_table(whole)
    return path


def parts(write) -> None:
    """Two files of four rows and of two."""
    for n, numbers in enumerate((range(4), range(4, 6))):
        write(n, numbers)


KINDS = {  # how the six rows are written, by the end of the file's name
    ".jsonl": lambda path, at: path.write_bytes(lines()),
    ".json": lambda path, at: path.write_text(json.dumps(ROWS)),
    ".data.json": lambda path, at: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    ".jsonl.gz": lambda path, at: path.write_bytes(compressed(lines(), ".gz")),
    ".jsonl.zst": lambda path, at: path.write_bytes(compressed(lines(), ".zst")),
    ".csv": lambda path, at: separated(path, ","),
    ".tsv": lambda path, at: separated(path, "\t"),
    ".semicolon.csv": lambda path, at: separated(path, ";"),
    ".csv.gz": lambda path, at: path.write_bytes(
        compressed(separated(at / "plain.csv", ",").read_bytes(), ".gz")
    ),
    ".parquet": lambda path, at: table(path, with_bytes(at)),
    ".arrow": lambda path, at: table(path, with_bytes(at), ".arrow"),
    ".file.arrow": lambda path, at: table(path, with_bytes(at), ".file.arrow"),
    ".tar": lambda path, at: tar(path, samples(at)),
    ".tar.gz": lambda path, at: tar(path, samples(at), "w:gz"),
    "-*.tar": lambda path, at: parts(lambda n, some: tar(at / f"rows-{n}.tar", samples(at, some))),
    "-{0..1}.parquet": lambda path, at: parts(
        lambda n, some: table(at / f"rows-{n}.parquet", [with_bytes(at)[i] for i in some])
    ),
}


def written(folder: Path, kind: str) -> Path:
    """Write the six rows as a kind of file; the path to give as ``path``."""
    path = folder / f"rows{kind}"
    KINDS[kind](path, folder)
    return path


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


@pytest.mark.parametrize("kind", [".csv", ".parquet", ".tar"])
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
    ):
        rows = Prompts(str(path), 0.0, key="question", filters=filters).train
        assert [prompt["n"] for prompt in rows] == numbers
    assert len(Prompts(str(path), 0.0, key="question", limit=4).train) == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "gone.csv"}, "no such file or folder: gone.csv; relative paths start at"),
        ({"path": "*.none"}, "no file matches *.none"),
        ({"columns": {"text": "caption"}}, "no column 'caption' (columns.text); it has question,"),
        ({"filters": {"m": 1}}, "filters.m: no row has this column; rows have"),
        ({"filters": {"n": {"least": 1}}}, "filters.n.least: known are min, max, in"),
        ({"filters": {"n": {"matches": "("}}}, "filters.n.matches: not a regular expression"),
        ({"filters": {"question": {"max_length": 3}}}, "all rows are left out by filters"),
        ({"streaming": True}, "streaming needs the option limit"),
        ({"split": "train"}, "is one file, which has no splits"),
    ],
)
def test_what_is_asked_wrongly_is_a_sentence(folder, monkeypatch, options, sentence):
    monkeypatch.chdir(folder)
    path = str(separated(folder / "asked.csv", ","))
    named = {} if "columns" in options else {"key": "question"}
    assert sentence in message(Prompts, **{"path": path, "held_out": 0.0} | named | options)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("t.csv", b"text,a\nx,1\ny,2,3\n", "t.csv:3: 3 cells, and the header has 2 columns"),
        ("t.csv", b"text,text\nx,1\n", "t.csv:1: the column 'text' stands twice"),
        ("t.csv", b"text\ncaf\xe9\n", "t.csv:2: byte 0xe9 is not UTF-8"),
        ("t.csv", b'text,a\n"x,1\n', "broken csv"),
        ("t.csv", b"", "is empty; expected a header"),
        ("d.jsonl", b'{"text": "a", "b": 1, "b": 2}', "the key 'b' stands twice in one object"),
        ("b.jsonl.gz", gzip.compress(b"a" * 10**6), "unpacks to more than 200 times its size"),
        ("b.jsonl.gz", gzip.compress(lines())[:-20], "damaged or cut off"),
        ("b.jsonl.zst", b"no zst", "damaged or cut off"),
        ("t.tar", b"0001.txt".ljust(700, b"x"), "the tar file is damaged or cut off"),
    ],
)
def test_what_is_broken_is_a_sentence(tmp_path, monkeypatch, name, content, sentence):
    monkeypatch.setattr(text_files, "SMALL", 1000)
    (tmp_path / name).write_bytes(content)
    for source in (Prompts, Vision):
        assert sentence in message(source, str(tmp_path / name))


# what a csv holds is written back as it stands
CELLS = "007 1.0 1e5 +1 1_000 0x10 inf nan None NA yes 2024-01-02 1/2 -0 .5 5. 12 -3".split()


def test_a_csv_knows_types_and_keeps_what_is_written(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('text,a,b,c,d\n"two\nlines",1,1.5,true,007\nx,,-2e3,False,8\n')
    first, second = (row for _, row in rows_of(path))
    assert first == {"text": "two\nlines", "a": 1, "b": "1.5", "c": True, "d": "007"}
    assert second == {"text": "x", "a": None, "b": "-2e3", "c": False, "d": "8"}
    for cell in (*CELLS, "9" * 30, "1" + "0" * 17 + ".5", " 5", "7 "):
        path.write_text(f"text,answer,more\nq,{cell},{cell}\nr,{cell},12\n")
        for row in (row for _, row in rows_of(path)):
            assert str(row["answer"]) == cell and str(row["more"]) in (cell, "12")


def test_members_of_a_tar_stay_in_memory_and_pickles_are_refused(folder, tmp_path):
    path = tmp_path / "t.tar"
    picture = content(folder, 0)
    outside = {"../../outside.png": picture, "../../outside.txt": b"a caption"}
    tar(path, outside | {"/etc/absolute.png": picture, "/etc/absolute.txt": b"another"})
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("0003.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    source = Captions(str(path), 0.0)
    assert [prompt["text"] for prompt in source.train] == ["a caption", "another"]
    assert sorted(tmp_path.iterdir()) == [path] and not (tmp_path.parent / "outside.png").exists()
    tar(path, {"1.png": picture, "1.txt": b"x", "1.pkl": b"cos\nsystem\n", "2.png": picture})
    assert "1.pkl is a pickle, which may run code when read" in message(Captions, str(path))
    tar(path, {"1.mp4": b"\x00video", "1.txt": b"when?"})
    assert "not a video that can be read" in message(Vision, str(path))
    two = {"a.left.png": picture, "a.right.png": picture, "a.txt": b"which?", "a.cls": b"3"}
    (prompt,) = Vision(str(tar(path, two)), held_out=0.0).train
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
    (tmp_path / "deep" / ".cache").mkdir()
    (tmp_path / "deep" / ".cache" / "metadata.jsonl").write_text('{"text": "hidden"}')
    (nested / "x.png").write_bytes(content(folder, 2))
    (nested / "metadata.jsonl").write_text('{"file_name": "x.png", "text": "nested"}')
    (prompt,) = Captions(tmp_path / "deep", 0.0).train
    assert prompt["answer"] == str(nested / "x.png")


def test_parts_and_splits_of_a_folder_have_their_names(folder, tmp_path):
    names = {"train": ["train-00000-of-00002.parquet", "train-1.jsonl"], "test": ["dev.csv.gz"]}
    for name in sum(names.values(), []):
        (tmp_path / name).write_bytes(b"")
    for part, files in names.items():
        assert [file.name for file in inside(Tree(tmp_path), part)] == files
    assert inside(Tree(tmp_path), "other") is None
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{**row, "image": str(folder / row["image"])} for row in ROWS]
    whole = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    saved = {"train": whole.select(range(4)), "validation": whole.select([4]), "extra": whole}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved")
    source = Vision(tmp_path / "saved")
    texts = [[prompt["text"] for prompt in side] for side in (source.train, source.held_out)]
    assert texts == [TEXTS[:4], TEXTS[4:5]]
    assert source.train[0]["images"][0].size == (40, 30), "the pictures are in memory"
    gone = message(Vision, tmp_path / "saved", split="tests")
    assert "no split 'tests'; it has: extra, train, validation" in gone
    whole.save_to_disk(tmp_path / "one")
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    assert "this part of the saved data set is not there" in message(Vision, tmp_path / "one")


def test_a_home_folder_is_refused_before_it_is_searched_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MOST_STRANGERS", 20)
    for i in range(15):
        (tmp_path / f"{i}.png").touch()
        (tmp_path / "deep" / f"folder {i}").mkdir(parents=True)
    assert len(Tree(tmp_path).media) == 15, "few others are no matter"
    for i in range(15):
        (tmp_path / f"{i}.log").touch()
    for kind in (Prompts, Captions, Vision):
        assert "name the folder that holds the pictures or tables" in message(kind, tmp_path)


def test_pictures_inside_rows(folder, tmp_path):
    path = tmp_path / "q.jsonl"
    address = f"data:image/png;base64,{base64.b64encode(content(folder, 1)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "a?"}]
    talk = {"messages": [{"role": "user", "content": parts}]}
    cell = {"text": "c?", "image": address.partition(",")[2]}  # as in VLMEvalKit's tables
    path.write_bytes(lines([{"text": "b?", "image": address}, talk, cell]))
    first, second, third = Vision(path, held_out=0.0).train
    assert first["images"][0].size == third["images"][0].size == (40, 30)
    assert second["messages"][0]["content"][0]["image"].size == (40, 30)
    path.write_bytes(lines([{"text": "b?", "image": "data:image/png;base64,????"}]))
    assert "broken base64" in message(Vision, path)
    raw = table(tmp_path / "raw.parquet", [{"text": "c?", "image": b"no picture"}])
    assert "not a picture that can be read" in message(Vision, raw)


def test_nothing_in_an_arrow_file_is_unpickled(tmp_path):
    pa = pytest.importorskip("pyarrow")
    target = tmp_path / "ran"
    payload = f"cos\nsystem\n(S'touch {target}'\ntR.".encode()
    about = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": payload}
    kinds = [pa.field("text", pa.string()), pa.field("extra", pa.binary(), metadata=about)]
    whole = pa.Table.from_pylist([{"text": "a?", "extra": payload}], schema=pa.schema(kinds))
    arrow = str(tmp_path / "x.arrow")
    with pa.OSFile(arrow, "wb") as sink, pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    pytest.importorskip("pyarrow.parquet").write_table(whole, tmp_path / "x.parquet")
    for name in ("x.arrow", "x.parquet"):
        (prompt,) = Prompts(str(tmp_path / name), 0.0).train
        assert prompt["extra"] == payload and not target.exists()
