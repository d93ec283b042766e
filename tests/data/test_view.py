"""`mmrl data` shows what will be trained on; training and dry runs say the same and refuse the
same."""

import json
import re

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.page import lines
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.experiment import build

CONFIG = """
policy: {{vlm: {{path: world:digits/vlm, max_new_tokens: 8}}}}
data: {{vision: {{path: {path}, held_out: 0.3{more}}}}}
reward: {{{reward}: 1.0}}
objective: policy_gradient
advantage: grpo
optimizer: {{adamw: {{lr: 1e-4}}}}
train: {{prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = []
    for i in range(8):
        Image.new("RGB", (60, 40), (i, 0, 0)).save(tmp_path / f"{i}.png")
        row = {"text": f"<b>where</b> is {i}?", "image": f"{i}.png", "bbox": [1, 2, 30, 20]}
        rows.append(row | {"n": i})
    (tmp_path / "cut.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    rows[4]["image"] = "cut.png"
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def config(folder, more="", reward="grounding", path="q.jsonl"):
    file = folder / "c.yaml"
    file.write_text(CONFIG.format(path=folder / path, more=more, reward=reward))
    return file


def shown(file, *words):
    done = CliRunner().invoke(app, ["data", str(file), "--out", "data.html", *words])
    assert done.exit_code == 0, done.exception
    return done.output, (file.parent / "data.html").read_text()


def test_the_page_and_the_terminal_show_all_there_is(folder):
    text, page = shown(config(folder, ", broken: skip, filters: {n: {min: 1}}"), "--samples", "5")
    assert "8 rows read, 1 broken and left out, 1 left out by filters" in text
    assert "q.jsonl:5: " in text and "cut.png: " in text and "filter n min 1: 1" in text
    assert re.search(
        r"train: \d prompts, \d of them distinct; \d pictures, 0 videos, \d boxes", text
    )
    assert "words of a text: 3" in text and "pixels of a longer side: 60" in text
    assert "problem" not in text
    pictures = re.findall(r'<img src="data:image/jpeg;base64,[A-Za-z0-9+/=]+"', page)
    assert 5 <= len(pictures) <= 6 and "&lt;b&gt;where&lt;/b&gt; is" in page
    assert "cut.png" in page and "n min 1" in page
    assert not re.search(r"(src|href)=\"(?!data:)|<script|url\(", page), "it loads nothing"


def test_a_mixture_shows_its_sources_and_weights(folder):
    source = f"{{vision: {{path: {folder}/q.jsonl, broken: skip}}}}"
    mixed = f"{{sources: {{a: {source}, b: {source}}}, weights: {{a: 3, b: 1}}}}"
    file = folder / "mixed.yaml"
    file.write_text(f"data: {{mixture: {mixed}}}\n")
    text, page = shown(file)
    assert "drawn in iteration 1: a 75.0%, b 25.0%" in text and "sources: a " in text
    assert text.count("8 rows read") == 2 and "a 75.0 %" in page


@pytest.mark.parametrize(
    "more, reward, path, sentence",
    [
        ("", "grounding", "q.jsonl", "1 of 8 rows are broken"),
        (", broken: skip", "classification", "q.jsonl", "needs the field 'answer' of every prompt"),
        (", columns: {text: caption}", "grounding", "q.csv", "no column 'caption' (columns.text)"),
        (", broken: skip, space: rel1", "grounding", "q.jsonl", "set space: original"),
    ],
)
def test_a_dry_run_refuses_what_training_would_and_the_page_lists_it(
    folder, more, reward, path, sentence
):
    (folder / "q.csv").write_text("text,image\na?,0.png\n")
    file = config(folder, more, reward, path)
    with pytest.raises(UserError) as error:
        dry_run(file)
    assert sentence in str(error.value)
    if "column" not in sentence and "space" not in sentence:
        text, page = shown(file)
        assert "problem: " in text and sentence in text and 'class="problem"' in page


def test_a_dry_run_and_training_say_how_the_data_is_split(folder):
    file = config(folder, ", broken: skip")
    (line,) = (line for line in lines(dry_run(file)) if line.startswith("data"))
    assert "8 rows read, 1 broken and left out" in line
    assert "(30 % by a hash of the picture)" in line
    _, summaries = build.read_data(build.read(file, []))
    assert summaries[0].lines()[0] == line.removeprefix("data").strip()
