"""The live view without a browser: what it reads, what it refuses, what ratings become."""

import json
import re
import shutil
import socket

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from typer.testing import CliRunner

from mmrl.apps.view import command
from mmrl.apps.view.folders import Runs
from mmrl.apps.view.pairs import Pairs
from mmrl.apps.view.server import application, is_safe_host
from mmrl.cli.app import app
from mmrl.config.sections import LogOptions
from mmrl.core.errors import UserError
from mmrl.monitoring.log import RunLog
from mmrl.zoo.stages.answers import of_file
from rewards.heads.ratings import load_frames, read_ratings
from tests.view.runs import HOSTILE, picture_run, text_run


def client(*places, rate=None):
    runs = Runs(places)
    pairs = Pairs(runs, rate) if rate else None
    return TestClient(application(runs, pairs), base_url="http://127.0.0.1:7007")


def token(web):
    return {"X-Token": re.search(r'data-token="([^"]+)"', web.get("/rate").text)[1]}


def snapshot(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_a_run_is_followed_while_it_is_written(tmp_path):
    run = tmp_path / "run"
    picture_run(run, 3, finished=False)
    web = client(run)
    first = web.get("/")
    assert first.url.path == "/runs/run"  # one run: its page
    tag = {"If-None-Match": first.headers["etag"]}
    assert web.get("/runs/run", headers=tag).status_code == 304
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "curious": 0.98')
        file.flush()
        torn = web.get("/runs/run", headers=tag)
        assert torn.status_code == 200 and "curious" not in torn.text and "torn" not in torn.text
        file.write('7}\n{"iteration": 5, "reward/mean": 0.5}\n')
    page = web.get("/runs/run", headers=tag)
    assert page.status_code == 200 and "curious" in page.text and "0.987" in page.text


def test_texts_of_models_are_escaped_and_nothing_comes_from_elsewhere(tmp_path):
    picture_run(tmp_path / "a")
    text_run(tmp_path / "b")
    web = client(tmp_path)
    for path in ("/", "/runs/a", "/runs/b", "/static/view.js", "/static/report.css"):
        answer = web.get(path)
        assert answer.status_code == 200
        assert not re.search(r"https?://(?!www\.w3\.org)", answer.text)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        if path.startswith("/runs") or path == "/":
            assert HOSTILE not in answer.text and "<script>" not in answer.text
            assert not re.search(r"<[^>]+ style=", answer.text)  # the policy forbids it
    assert "onerror" in web.get("/runs/b").text  # as text


def test_runs_are_listed_with_galleries_over_time_and_answers(tmp_path):
    picture_run(tmp_path / "a")
    text_run(tmp_path / "b")
    web = client(tmp_path)
    page = web.get("/runs/a").text
    labels = json.loads(re.search(r"data-labels='([^']+)'", page)[1])
    assert labels == ["before", "iteration 2", "iteration 4", "iteration 6", "after"]
    address = re.search(r'<img src="(/runs/a/sheets/after/0\?v=[0-9a-f]+)"', page)[1]
    picture = web.get(address)
    assert picture.headers["content-type"] == "image/png" and "immutable" in str(picture.headers)
    answers = web.get("/runs/b?answers=1").text
    assert "how many?" in answers and "data:image/png" in answers
    picture_run(tmp_path / "deep" / "a curious name", seed=1)
    page = web.get("/").text
    assert all(place in page for place in ("/runs/a", "/runs/b", "/runs/deep-a-curious-name"))
    assert 'class="line' not in page


def test_films_are_played_and_rated(tmp_path):
    """Tiles and files of `mmrl sample` are sent as .mp4, in parts where a browser asks for them."""
    run = tmp_path / "runs" / "a"
    clips = torch.rand(2, 3, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    with RunLog(run, options=LogOptions(tensorboard=False)) as log:
        for name in ("before", "after"):
            log.images(name, clips if name == "after" else 1 - clips, ["one", "two"], fps=16)
    (run / "config.yaml").touch()
    web = client(tmp_path / "runs", rate=tmp_path / "ratings.jsonl")
    page = web.get("/runs/a").text
    address = re.search(r'<video src="(/runs/a/sheets/after/0\?v=[0-9a-f]+)"', page)[1]
    whole = web.get(address)
    assert whole.headers["content-type"] == "video/mp4" and whole.content[4:8] == b"ftyp"
    part = web.get(address, headers={"Range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    assert part.headers["content-range"] == f"bytes 4-7/{len(whole.content)}"
    assert web.get(address, headers={"Range": "bytes=99999999-"}).status_code == 416
    assert web.get("/runs/a/sheets/after").content[4:8] == b"ftyp"
    pair = web.get("/rate/pair").json()["pair"]
    left, right = pair["sides"]
    assert left["film"] and web.get(left["picture"]).headers["content-type"] == "video/mp4"
    web.post(f"/rate/pairs/{pair['number']}/1", headers=token(web))
    (rated,) = map(json.loads, (tmp_path / "ratings.jsonl").read_text().splitlines())
    better, worse = rated["answers"]
    assert rated["chosen"] == better["video"] and worse["video"].endswith(".mp4")
    known = of_file(tmp_path / "ratings.jsonl")({"text": pair["prompt"]})
    assert [each.media().shape for each in known] == [(3, 3, 16, 32)] * 2
    ((file, _),) = read_ratings(tmp_path / "ratings.jsonl").samples
    assert load_frames(file).shape == (3, 3, 16, 32)


OUTSIDE = [
    "/runs/a/sheets/../../secret",
    "/runs/a/sheets/..%2f..%2fsecret",
    "/runs/a/sheets/%2e%2e%2fsecret",
    "/runs/a/sheets/link",
    "/runs/a/sheets/after/99",
    "/runs/a/sheets/after/-1",
    "/runs/nobody",
    "/static/../server.py",
    "/static/page.py",
    "/rate",
]


def test_nothing_outside_the_run_is_read_and_nothing_written(tmp_path):
    run = picture_run(tmp_path / "runs" / "a")
    Image.new("RGB", (4, 4)).save(tmp_path / "secret.png")
    (run / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    before = snapshot(run)
    web = client(tmp_path / "runs")
    for path in OUTSIDE:
        answer = web.get(path)
        assert answer.status_code in (404, 422), path
        assert not answer.content.startswith(b"\x89PNG"), path
    for path in ("/", "/runs/a", "/runs/a/sheets/after/0"):
        assert web.get(path).status_code == 200
    for method in ("post", "put", "delete", "patch"):
        assert getattr(web, method)("/rate/undo").status_code == 405
    assert snapshot(run) == before


def test_a_run_may_be_deleted_while_it_is_looked_at(tmp_path):
    picture_run(tmp_path / "a")
    picture_run(tmp_path / "b")
    web = client(tmp_path, rate=tmp_path / "ratings.jsonl")
    assert "/runs/a" in web.get("/").text
    shutil.rmtree(tmp_path / "a")
    assert web.get("/runs/a").status_code == 404 and "/runs/a" not in web.get("/?run=a").text
    assert web.get("/runs/a/sheets/after/0").status_code == 404
    assert web.get("/rate/pair").json()["pair"] is not None
    (tmp_path / "b" / "config.yaml").write_text("a: [torn")
    (tmp_path / "b" / "evaluation.json").write_text('{"rows": 3}')
    (tmp_path / "b" / "samples" / "captions.json").write_text("[]")
    (tmp_path / "b" / "samples" / "after.png").write_bytes(b"\x89PNG torn")
    assert web.get("/runs/b").status_code == 200
    assert web.get("/runs/b/sheets/after").status_code == 404


def test_hosts():
    allowed = {"localhost", "box"}
    for good in ("localhost:7007", "127.0.0.1:7007", "[::1]:7007", "192.168.0.3", "BOX:1", "box."):
        assert is_safe_host(good, allowed)
    for bad in ("evil.example:7007", "", "localhost.evil.example", "127.0.0.1.nip.io", "[x"):
        assert not is_safe_host(bad, allowed)


def test_a_foreign_name_or_page_is_refused(tmp_path):
    web = client(picture_run(tmp_path / "run"), rate=tmp_path / "r.jsonl")
    assert web.get("/", headers={"Host": "evil.example"}).status_code == 421
    secret = token(web)
    path = f"/rate/pairs/{web.get('/rate/pair').json()['pair']['number']}/1"
    assert web.post(path).status_code == 403
    assert web.post(path, headers={"X-Token": b"\xc3\xa9"}).status_code == 403
    foreign = secret | {"Origin": "http://evil.example"}
    assert web.post(path, headers=foreign).status_code == 403
    assert (tmp_path / "r.jsonl").read_text() == ""
    assert web.post(path, headers=secret | {"Origin": "http://127.0.0.1:7007"}).status_code == 200


def test_ratings_of_pictures_are_demonstrations(tmp_path):
    run = picture_run(tmp_path / "run")
    file = tmp_path / "new" / "ratings.jsonl"
    web = client(run, rate=file)
    before = snapshot(run)
    secret = token(web)
    for choice in ("1", "2", "0"):
        pair = web.get("/rate/pair").json()["pair"]
        assert set(pair) == {"number", "prompt", "picture", "sides"}  # blind
        sides = [web.get(side["picture"]).content for side in pair["sides"]]
        assert "run" not in json.dumps(pair["sides"]) and sides[0] != sides[1]
        path = f"/rate/pairs/{pair['number']}/{choice}"
        assert web.post(path, headers=secret).status_code == 200
        assert web.post(path, headers=secret).status_code == 409
        record = json.loads(file.read_text().splitlines()[-1])
        contents = [(file.parent / a["image"]).read_bytes() for a in record["answers"]]
        rewards = {"1": [1.0, 0.0], "2": [0.0, 1.0], "0": [0.5, 0.5]}[choice]
        assert contents == sides and [a["reward"] for a in record["answers"]] == rewards
        if choice == "2":
            assert record["chosen"] == record["answers"][1]["image"]
            answers = of_file(file)({"text": record["prompt"]})
            assert answers[-1].reward == 1.0 and answers[-1].media().shape == (3, 8, 8)
    lines = file.read_text().splitlines()
    assert web.post("/rate/undo", headers=secret).json() == {"undone": True, "rated": 2}
    assert file.read_text().splitlines() == lines[:2]
    assert len(Pairs(Runs([run]), file).rated) == 2  # a later session goes on
    assert snapshot(run) == before


def test_every_pair_comes_once(tmp_path):
    file = tmp_path / "r.jsonl"
    web = client(text_run(tmp_path / "run"), rate=file)
    secret = token(web)
    first = web.get("/rate/pair").json()
    assert first["total"] == 1 and first["pair"]["picture"].startswith("data:image/png")
    assert {side["text"] for side in first["pair"]["sides"]} == {"3", HOSTILE}
    assert web.post(f"/rate/pairs/{first['pair']['number']}/9", headers=secret).status_code == 422
    web.post(f"/rate/pairs/{first['pair']['number']}/1", headers=secret)
    assert web.get("/rate/pair").json() == {"pair": None, "rated": 1, "total": 1}
    assert client(tmp_path / "run", rate=file).get("/rate/pair").json()["pair"] is None


def test_files_of_mmrl_sample_are_rated_too(tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    for i, colour in enumerate(("red", "green")):
        Image.new("RGB", (4, 4), colour).save(folder / f"{i}.png")
    lines = [{"file": f"{i}.png", "prompt": "p"} for i in (0, 1)]
    lines += [{"file": "../secret.png", "prompt": "p"}, {"prompt": "p"}]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\ntorn")
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "secret.png")
    answer = client(folder, rate=tmp_path / "r.jsonl").get("/rate/pair").json()
    assert answer["total"] == 1 and answer["pair"]["prompt"] == "p"


def test_mistakes_are_one_sentence(tmp_path, capsys):
    run = picture_run(tmp_path / "run")
    for argument, options, message in [
        ("rum", [], "no run folder"),
        ("run/config.yaml", [], "is a file"),
        ("run", ["--rate", str(run / "r.jsonl")], "only read"),
        ("run", ["--rate", str(tmp_path / "r.txt")], ".jsonl"),
        ("run", ["--host", "203.0.113.7"], "cannot listen"),
    ]:
        done = CliRunner().invoke(app, ["view", str(tmp_path / argument), *options])
        assert isinstance(done.exception, UserError) and message in str(done.exception)
        assert "\n" not in str(done.exception)
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match=r"other.jsonl:1: this is not a rating"):
        Pairs(Runs([run]), tmp_path / "other.jsonl")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="in use.*--port"):
            command.view([run], None, "127.0.0.1", taken.getsockname()[1])
