"""Trackers: what they are sent can be read back, and none of them can stop a training.

The libraries themselves are asked, offline. W&B and MLflow are not in the test environment, since
they would downgrade other packages: their tests skip where they are missing.
"""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.config.sections import LogOptions
from mmrl.core.errors import UserError
from mmrl.experiment.lifecycle import train
from mmrl.monitoring import trackers
from mmrl.monitoring.log import RunLog
from mmrl.monitoring.report.pictures import data_uri
from mmrl.monitoring.trackers import Lane, Table, flat, markdown

RED = Image.new("RGB", (4, 4), "red")
ANSWERS = [
    {"text": "three", "rewards": {"exact": 0.0}, "advantage": -1.0, "tokens": 1},
    {"text": "3", "rewards": {"exact": 1.0}, "advantage": 1.0, "tokens": None},
]
GROUP = {"prompt": "How many? | <b>", "right": "3", "answers": ANSWERS, "picture": data_uri(RED)}


def write(folder, first, last, resume=False, **options):
    """Log iterations, a preview and answers, as a run does."""
    chosen = LogOptions(project="mmrl-test", **{"tensorboard": False, **options})
    config = {"train": {"lr": 0.1, "names": ["a"]}}
    with RunLog(folder, resume, start=first, options=chosen, config=config) as log:
        for i in range(first, last):
            log.metrics(i, {"reward/mean": i / 4, "bad": float("nan")})
        log.images(f"iter-{last - 1:06d}", torch.rand(2, 3, 4, 4), ["a red seven", "a blue one"])
        log.answers(last - 1, [GROUP])


def warnings(folder):
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["message"] for line in lines]


class Broken:
    """A tracker whose server has gone away."""

    def __init__(self, place):
        self.calls = 0

    def scalars(self, iteration, values):
        self.calls += 1
        raise ConnectionError("the server is gone")

    image = table = scalars

    def close(self):
        raise SystemExit(1)


def test_tensorboard_holds_curves_pictures_and_tables(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, 5, tensorboard=True, every=2)
    write(tmp_path, 3, 7, resume=True, tensorboard=True, every=2)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    points = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert points == [(0, 0.0), (2, 0.5), (4, 1.0), (6, 1.5)]
    assert events.Tags()["scalars"] == ["reward/mean"]  # not what is NaN
    assert [e.step for e in events.Images("samples")] == [6]  # 4 came again and is taken back
    table = events.Tensors("tables/answers/text_summary")[-1]
    text = table.tensor_proto.string_val[0].decode()
    assert "three" in text and "data:image/png" in text and "<b>" not in text
    assert not warnings(tmp_path)


def test_a_broken_tracker_stops_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Broken)
    write(tmp_path, 0, 12, report_to=["mlflow"])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 12
    messages = warnings(tmp_path)
    assert "mlflow failed (ConnectionError: the server is gone)" in messages[0]
    assert any("switched off" in message for message in messages) and len(messages) == 3
    assert "training goes on" in capsys.readouterr().err


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    gate = threading.Event()
    messages = []

    class Hanging(Broken):
        def scalars(self, iteration, values):
            gate.wait(600)

    lane = Lane("trackio", lambda: Hanging(None), messages.append)
    for i in range(2 * trackers.WAITING):
        lane.scalars(i, {"x": 1.0})
    lane.started.wait()
    lane.close()
    gate.set()
    assert "does not keep up" in messages[0] and "is left behind" in messages[1]


def test_a_start_that_never_returns_holds_nothing_up(tmp_path, monkeypatch, capsys):
    """MLflow behind a firewall that drops packets: the run neither waits nor ends by it."""
    monkeypatch.setattr(trackers, "START", 0.2)
    gate = threading.Event()
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda place: gate.wait(600) and Broken(place))
    write(tmp_path, 0, 3, report_to=["mlflow"])
    gate.set()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    (message,) = warnings(tmp_path)
    assert "mlflow has not started in 0 s" in message and "MLFLOW_TRACKING_URI" in message
    assert "training goes on" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "swanlab"])
def test_a_tracker_that_is_not_installed_is_a_mistake_of_the_configuration(
    tmp_path, monkeypatch, name
):
    """Said by training and the dry run, with file and line, before there is a folder."""
    monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    words = [f"run={tmp_path}/run", f"log={{report_to: [{name}]}}"]
    for call in (train, dry_run):
        with pytest.raises(UserError, match=rf"log.*pip install 'multimodal-rl\[{name}\]'"):
            call(Path("configs/digits/flow_grpo.yaml"), words)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_start_is_one_sentence(tmp_path, monkeypatch):
    def refused(place):
        raise RuntimeError("No API key\n configured.")

    closed = []
    monkeypatch.setitem(trackers.TRACKERS, "wandb", refused)
    monkeypatch.setattr(Broken, "close", lambda self: closed.append(1))
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Broken)
    write(tmp_path, 0, 1, report_to=["mlflow", "wandb"])
    (message,) = [text for text in warnings(tmp_path) if text.startswith("wandb")]
    assert "did not start (No API key configured.)" in message and "wandb login" in message
    assert closed


def test_texts_of_models_are_no_markup():
    text = markdown(Table(("a", "b"), [["x|y <i>\n[z](u)", None], [0.123456, RED]]))
    assert text.count("\n") == 3 and "<i>" not in text and "x\\|y" in text and "0.1235" in text
    assert flat({"a": {"b": 1, "c:d": []}, "e": {}}) == {"a.b": 1, "a.c_d": [], "e": {}}


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not in the shared environment")


def write_twice(folder, name):
    write(folder, 0, 4, report_to=[name])
    write(folder, 4, 6, resume=True, report_to=[name])
    assert not warnings(folder)


def test_mlflow_for_true(tmp_path, monkeypatch):
    mlflow = library("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    write_twice(tmp_path / "first", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("mmrl-test").experiment_id])
    assert run.data.params["train.lr"] == "0.1"
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(p.step, p.value) for p in points] == [(i, i / 4) for i in range(6)]
    place = client.download_artifacts(run.info.run_id, "tables/answers.json", str(tmp_path))
    table = json.loads(Path(place).read_text())
    rows = [dict(zip(table["columns"], row)) for row in table["data"]]
    answers = [(row["iteration"], row["answer"]) for row in rows]
    assert answers == [(i, text) for i in (3, 5) for text in ("three", "3")]
    assert rows[0]["picture"]["type"] == "image"
    files = [f.path for f in client.list_artifacts(run.info.run_id, "images")]
    assert any("samples" in path for path in files)


def test_wandb_for_true(tmp_path, monkeypatch):
    library("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_twice(tmp_path / "first", "wandb")
    runs = list((tmp_path / "first" / "wandb").glob("offline-run-*"))
    number = json.loads((tmp_path / "first" / "trackers.json").read_text())["wandb"]
    assert len(runs) == 2 and all(run.name.endswith(number) for run in runs)
    names = [path.name for run in runs for path in run.rglob("*") if path.is_file()]
    assert all(any(name.endswith(end) for name in names) for end in (".table.json", ".png"))
