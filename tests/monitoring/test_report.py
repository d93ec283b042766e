"""The page: everything a run holds, nothing a run must not do to its reader."""

import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import av
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmrl.config.sections import LogOptions
from mmrl.core.errors import UserError
from mmrl.core.machine import machine
from mmrl.core.media.sound import with_sound
from mmrl.core.paths import config_names, find_config
from mmrl.monitoring.log import RunLog
from mmrl.monitoring.report.charts import Chart, Series
from mmrl.monitoring.report.evidence import read_evaluation, verdict
from mmrl.monitoring.report.page import before_after_picture, write_report
from mmrl.monitoring.report.pictures import data_uri, film_sheet, tiles
from mmrl.monitoring.report.runs import read_run

NASTY = "<script>alert('x')</script> & \"quoted\" </figcaption>"


def estimate(mean, width=0.03):
    return {"mean": mean, "low": mean - width, "high": mean + width, "n": 240}


def evaluated(model, guidance, clip, digits):
    rewards = {"clip": estimate(clip), "digits": estimate(digits)}
    return {"model": model, "guidance": guidance, "rewards": rewards}


ROWS = [
    evaluated("base", 1.0, 0.21, 0.33),
    evaluated("base, guidance 4", 4.0, 0.22, 0.45),
    evaluated("trained", 1.0, 0.30, 0.83),
]
EVALUATION = {"prompts": 60, "num_samples": 4, "rows": ROWS}
METRICS = {
    "seconds": 2.0,
    "reward/std": 0.2,
    "lr": 1e-4,
    "ratio/mean": 1.0,
    "ratio/max_deviation": 0.01,
    "loss": 0.0,
    "advantage/std": 1.0,
    "groups/flat": 1,
    "groups/total": 15,
    "samples/excluded": 0,
    "time/rollout": 1.0,
}


def make_run(folder, iterations=2, caption="a red seven"):
    captions = [caption, "a blue two", "a green nine", "three"]
    pictures = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with RunLog(folder, options=LogOptions(tensorboard=False)) as log:
        log.images("before", pictures, captions)
        for i in range(iterations):
            values = {"reward/mean": 0.3 + i / 60, "kl": i * 1e-5, "my own/metric": float(i)}
            values |= {"clip_fraction": i % 7 / 7, "grad_norm": math.nan if i == 5 else 1.0}
            log.metrics(i, METRICS | values)
            if i % 10 == 0:
                log.images(f"iter-{i:04d}", pictures, captions)
        log.images("after", pictures, captions)
        log.event("excluded", NASTY)
    (folder / "config.yaml").write_text(f"reward: {{digits: 1.0}}\n# {NASTY}\n")
    facts = machine() | {"command": f"mmrl train '{NASTY}'"}
    (folder / "machine.json").write_text(json.dumps(facts))
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    return folder


class Page(HTMLParser):
    """Tags, text outside scripts, and whether every tag is closed."""

    VOID = {"meta", "img", "br", "line", "circle", "polyline", "polygon"}

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.text = ""
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a-run", 30, NASTY)


def text_of(run):
    return Page(write_report(run).read_text(encoding="utf-8")).text


def test_the_page_shows_what_the_run_holds_and_needs_nothing_but_itself(run):
    content = write_report(run).read_text(encoding="utf-8")
    page = Page(content)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert attributes.get("src", "data:image/").startswith("data:image/")
        assert "href" not in attributes and "onerror" not in attributes
    assert not page.open, f"never closed: {page.open}"
    # nothing from prompts or configurations becomes markup
    assert page.count("script") == 1 and page.text.count("<script>alert('x')</script>") >= 4
    for sentence in (
        "Held-out digits: 0.33 [0.30, 0.36] before, 0.83 [0.80, 0.86] after (+0.50).",
        "best guidance scale (4) reaches 0.45 [0.42, 0.48]",
        "Not trained on, same pictures: clip 0.21 → 0.30.",
        *("KL to the reference", "Clip fraction", "Gradient norm", "Groups without variance"),
        "my own/metric",
    ):
        assert sentence in page.text
    assert page.count("img") == 4 * 2 + 4 * 3  # pairs, and four prompts at three iterations
    assert page.text.index("digits" + "trained on") < page.text.index("clip" + "not trained on")
    drawings = re.findall(r"<svg viewBox.*?</svg>", content)
    assert len(drawings) >= 12
    for drawing in drawings:
        assert "nan" not in drawing.lower() and ElementTree.fromstring(drawing).tag == "svg"


def test_the_before_after_picture(run):
    picture = Image.open(before_after_picture(run))
    assert picture.format == "PNG" and picture.width > 4 * 120 and picture.height > 2 * 120


FILES = "metrics.jsonl config.yaml machine.json evaluation.json samples events.jsonl".split()
FOREIGN = ["[]", "{}", '{"rows": 3}', '{"rows": [1, {}, {"model": "y", "rewards": []}]}']


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_torn_piece_is_left_out_with_a_note(tmp_path, name):
    for damage in ("torn", "missing"):
        run = make_run(tmp_path / damage)
        for file in (run / name).iterdir() if name == "samples" else [run / name]:
            half = file.read_bytes()[: file.stat().st_size // 2]
            file.unlink() if damage == "missing" else file.write_bytes(half)
        note = text_of(run).partition("Left out of this page")[2]
        if name not in ("samples", "events.jsonl") and (name, damage) != ("config.yaml", "torn"):
            assert name in note


def test_foreign_json_does_not_break_the_page(tmp_path):
    run = make_run(tmp_path / "run")
    for broken in FOREIGN:
        for name in ("evaluation.json", "machine.json", "samples/captions.json"):
            (run / name).write_text(broken)
        assert "Training reward" in text_of(run)


def test_a_run_that_just_began_and_one_without_evaluation(tmp_path):
    (tmp_path / "config.yaml").write_text("reward: digits\n")
    assert "No rewards are recorded yet." in text_of(tmp_path)
    run = make_run(tmp_path / "run")
    (run / "evaluation.json").unlink()
    text = " ".join(verdict(record := read_run(run), read_evaluation(record)))
    assert "Training reward" in text and "not a held-out measurement" in text
    assert f"mmrl evaluate {run}" in text


@pytest.mark.parametrize(
    ("interval", "sentence"),
    [
        (None, "intervals overlap, which does not say whether it changed"),
        ((0.01, 0.07), "0.37 [0.34, 0.40] after; +0.04 [+0.01, +0.07], paired over 60 prompts."),
        ((-0.01, 0.09), "paired over 60 prompts. That interval holds 0: no change is shown."),
        ((None, None), "after (+0.04). Scores that are all equal do not say how sure that is."),
    ],
)
def test_the_paired_interval_decides_where_those_of_the_means_overlap(tmp_path, interval, sentence):
    run = make_run(tmp_path / "run")
    after = {"rewards": {"digits": estimate(0.37)}}
    if interval:
        low, high = interval
        change = {"mean": 0.04, "low": low, "high": high, "p": 0.01, "prompts": 60}
        after["difference"] = {"digits": change}
    (run / "evaluation.json").write_text(json.dumps({"rows": [ROWS[0], ROWS[2] | after]}))
    said = verdict(record := read_run(run), read_evaluation(record))[0]
    assert sentence in said and ("overlap" in said) == (interval is None)
    assert ("no change" in said) == ("no change" in sentence)


def test_estimates_without_an_interval(tmp_path):
    """One prompt has no spread, a reward that always failed has no mean: Python writes Infinity and
    NaN."""
    run = make_run(tmp_path / "run")
    digits = {"mean": 0.5, "low": -math.inf, "high": math.inf, "n": 4}
    odd = {"digits": digits, "clip": estimate(math.nan)}
    rows = [{"model": model, "guidance": None, "rewards": odd} for model in ("base", "trained")]
    (run / "evaluation.json").write_text(json.dumps({"rows": rows}))
    text = text_of(run)
    assert "0.50 (no interval)" in text and "– [" not in text
    assert "nan" not in text.partition("How it was made")[0].lower()


def test_no_run_is_a_readable_message(tmp_path):
    make_run(tmp_path / "runs" / "digits-1")
    with pytest.raises(UserError, match=r"did you mean 'digits-1'"):
        write_report(tmp_path / "runs" / "digit-1")
    with pytest.raises(UserError, match=r"holds no run .*digits-1"):
        write_report(tmp_path / "runs")
    with pytest.raises(UserError, match="is a file"):
        write_report(tmp_path / "runs" / "digits-1" / "config.yaml")
    (tmp_path / "runs" / "digits-1" / "samples" / "after.png").unlink()
    with pytest.raises(UserError, match="mmrl evaluate"):
        before_after_picture(tmp_path / "runs" / "digits-1")


def test_a_resumed_line_wins_over_an_older_one(tmp_path):
    lines = [{"iteration": 1, "kl": 1.0}, {"iteration": 0, "kl": 0.0}, {"iteration": 1, "kl": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_run(tmp_path).column("kl") == [0.0, 2.0]


values = st.one_of(st.none(), st.floats(-1e9, 1e9), st.floats(-1e-9, 1e-9))


@given(st.lists(values, max_size=40), st.booleans(), st.booleans())
def test_any_curve_can_be_drawn(y, zero, wide):
    series = Series("a&b", list(range(len(y))), y, [1.0] * len(y), y)
    chart = Chart("<t>", [series], zero=zero, wide=wide)
    drawing = ElementTree.fromstring(f"<div>{chart.svg()}</div>")
    for line in drawing.iter("polyline"):
        for point in line.get("points").split():
            px, py = map(float, point.split(","))
            assert 0 <= px <= 1040 and 0 <= py <= 310
    chart.latest()


def test_configurations_are_found_by_path_and_by_name(tmp_path, monkeypatch):
    names = config_names()
    monkeypatch.chdir(tmp_path)
    for name in names:
        assert find_config(f"configs/{name}.yaml") == find_config(name)
    (tmp_path / "mine.yaml").write_text("train: {}\n")
    assert find_config("mine.yaml") == find_config(tmp_path / "mine.yaml").relative_to(tmp_path)
    family = names[0].partition("/")[0]
    with pytest.raises(UserError, match=f"did you mean '{names[0]}'"):
        find_config(f"{names[0]}x.yaml")
    (tmp_path / family).mkdir()
    with pytest.raises(UserError, match=f"folder.*{names[0]}"):
        find_config(family)


def test_videos_move_on_the_page(tmp_path):
    """Sheets of videos are .mp4 files: their frames come back, and page and picture play them. Each
    clip is a file too, at its own rate and with its sound."""
    shades = torch.arange(3 * 5).view(3, 5, 1, 1, 1) / 15
    videos = shades.expand(3, 5, 3, 17, 33)
    (tmp_path / "samples").mkdir()
    for name in ("samples/after.png", "before_after.png"):  # of an earlier version
        (tmp_path / name).touch()
    with RunLog(tmp_path, options=LogOptions(tensorboard=False)) as log:
        for name in ("before", "iter-0001"):
            log.images(name, videos, ["one", "two", "three"], fps=25)
        heard = with_sound(videos, torch.zeros(3, 1, 1600), 8000)
        log.images("after", heard, ["one", "two", "three"], fps=25)
        log.images("single", videos[:, :1], fps=25)
        log.metrics(1, {"reward/mean": 0.5})
    for tile, video in zip(read_run(tmp_path).sample_tiles("after"), videos, strict=True):
        assert tile.pace == pytest.approx(40) and tile.size == (33, 17)  # an odd sheet of 67 x 36
        for frame, pixels in zip(tile.frames, video, strict=True):
            assert abs(frame.getpixel((16, 8))[0] - float(pixels[0, 8, 16]) * 255) <= 4
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    shown = [attributes for tag, attributes in page.tags if tag == "video"]
    assert len(shown) == 2 * 3 + 3  # before and after, and one moment of the film
    for attributes in shown:
        assert {"muted", "loop", "autoplay", "playsinline"} <= set(attributes)
        content = base64.b64decode(attributes["src"].partition("data:video/mp4;base64,")[2])
        with av.open(io.BytesIO(content)) as file:
            stream = file.streams.video[0]
            assert stream.average_rate == 25 and sum(1 for _ in file.decode(video=0)) == 5
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("**/*.png"))
    assert files == ["samples/single.png", *(f"samples/single/{i:03d}.png" for i in range(3))]
    assert (tmp_path / "before_after.mp4").is_file()
    for name, sounds in (("before", 0), ("after", 1)):
        with av.open(str(tmp_path / "samples" / name / "002.mp4")) as file:
            assert file.streams.video[0].average_rate == 25 and len(file.streams.audio) == sounds


def test_long_and_large_videos_are_shrunk():
    """Films that leave frames out take as long as the clips."""
    video = torch.linspace(0, 1, 257).view(1, 257, 1, 1, 1).expand(2, 257, 3, 400, 601)
    film, layout = film_sheet(video[:, :, :, ::4, ::4], fps=24)
    assert len(film.frames) == 86 and film.pace == pytest.approx(3 * 1000 / 24)
    film, layout = film_sheet(video[:, :8])
    assert len(film.frames) == 8 and (layout.width, layout.height) == (150, 100)
    assert film.frames[7].getpixel((3, 3)) == (round(255 * 7 / 256),) * 3
    assert data_uri(tiles(film, layout)[0]).startswith("data:video/mp4;base64,")
