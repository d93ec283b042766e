"""The run folder's record: whole after crashes, never double, never a flood."""

import io
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl import __version__
from mmrl.config.sections import LogOptions
from mmrl.core.errors import UserError
from mmrl.core.machine import machine
from mmrl.monitoring import progress
from mmrl.monitoring.log import RunLog, read_captions
from mmrl.monitoring.report.pictures import Layout, sheet, tiles

QUIET = LogOptions(tensorboard=False)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def write(folder, first, last, **options):
    with RunLog(folder, options=QUIET, **options) as log:
        for i in range(first, last):
            log.metrics(i, {"reward/mean": i / 10})


def test_metrics_are_valid_json_at_once(tmp_path):
    with RunLog(tmp_path / "run", options=QUIET) as log:
        log.metrics(0, {"a": float("nan"), "b": math.inf, "c": torch.tensor(0.5), "d": 3})
        # flushed, though the log is still open
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {"iteration": 0, "a": None, "b": None, "c": 0.5, "d": 3}


def test_resume_writes_no_iteration_twice(tmp_path):
    write(tmp_path, 0, 7)
    write(tmp_path, 4, 9, resume=True, start=4)
    assert [line["iteration"] for line in lines(tmp_path)] == list(range(9))


TORN = ['{"iteration": 3, "rew', '{"iteration": 3}garbage', "\x00\x00", "[1, 2]"]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_is_dropped_and_named(tmp_path, torn):
    write(tmp_path, 0, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path, 3, 5, resume=True, start=3)
    assert [line["iteration"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]
    (event,) = lines(tmp_path, "events.jsonl")
    assert event["kind"] == "warning" and "line 4" in event["message"]


def test_other_processes_write_nothing(tmp_path, capsys):
    with RunLog(tmp_path / "run", active=False) as log, log.progress(3) as bar:
        log.metrics(0, {"a": 1.0})
        log.event("kind", "message")
        log.images("before", torch.rand(2, 3, 4, 4))
        bar.update(1, 0.5)
    assert not (tmp_path / "run").exists() and not capsys.readouterr().out


def test_images_can_be_cut_out_again(tmp_path):
    images = torch.rand(5, 3, 6, 4, generator=torch.Generator().manual_seed(0))
    with RunLog(tmp_path, options=QUIET) as log:
        log.images("iter-0003", images, [f"picture <{i}>" for i in range(5)])
        log.images("before", images[:2], ["one", "two"])
    known = read_captions(tmp_path)["sheets"]["iter-0003"]
    layout = Layout(**{key: known[key] for key in ("count", "columns", "width", "height", "gap")})
    cut = tiles(Image.open(tmp_path / "samples" / "iter-0003.png"), layout)
    for tile, image in zip(cut, images, strict=True):
        pixels = torch.from_numpy(np.array(tile))
        assert torch.equal(pixels, (image * 255).round().permute(1, 2, 0).byte())
    assert known["captions"][4] == "picture <4>"
    assert read_captions(tmp_path)["captions"] == ["one", "two"]


def test_sheets_survive_bad_values_and_bad_shapes_and_names_are_refused(tmp_path):
    picture, _ = sheet(torch.tensor([float("nan"), 2.0, -1.0]).view(1, 3, 1, 1).repeat(1, 1, 2, 2))
    assert picture.getpixel((0, 0)) == (0, 255, 0)
    for shape in ((0, 3, 2, 2), (2, 1, 2, 2)):
        with pytest.raises(ValueError, match="N, 3, H, W"):
            sheet(torch.zeros(shape))
    with RunLog(tmp_path, options=QUIET) as log:
        for name in ("../outside", "a/b", ""):
            with pytest.raises(ValueError, match="file name"):
                log.images(name, torch.zeros(1, 3, 2, 2))
    write(tmp_path / "used", 0, 1)
    with pytest.raises(UserError, match="--resume"):
        RunLog(tmp_path / "used", options=QUIET)


def test_plain_progress_is_a_line_now_and_then(capsys):
    now = iter([0.0] + [float(i) for i in range(1, 101)])
    bar = progress._Lines("training", seconds=30.0, clock=lambda: next(now))
    bar.begin(total=100, start=0)
    for i in range(1, 101):
        bar.update(i, reward=i / 100)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["1/100", "31/100", "61/100", "91/100", "100/100"]
    assert "reward 0.310" in shown[1] and "1:09 left" in shown[1]


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_of_any_kind_and_width_shows_every_stretch(monkeypatch, term):
    """Where the cursor does not move back, lines; nothing is wider than the terminal."""
    for name, value in (("TERM", term), ("COLUMNS", "40"), ("LINES", "20")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen())
    bar = progress.progress_for("training")
    bar.begin(200, 0)
    for i in (1, 200):
        bar.update(i, 0.25)
    if term == "xterm":
        bar.bar.refresh()
    bar.end()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sys.stdout.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all(len(line) <= 40 for line in lines) and "200/200" in lines[-1]
    assert all("reward 0.250" in line for line in lines if "/200" in line and "0/200" not in line)
    assert isinstance(bar, progress._Lines) == (term == "dumb")
    if term == "dumb":
        assert lines[0].startswith("training 1/200")


def test_the_machine_describes_itself_in_json():
    facts = json.loads(json.dumps(machine()))
    assert facts["cores"] >= 1 and facts["cpu"] and facts["versions"]["torch"] and facts["command"]
    # its distribution is multimodal-rl: "mmrl" on the index is another project
    assert facts["versions"]["mmrl"] == __version__
