"""`mmrl data` shows what will be trained on, and a dry run refuses what training would."""

import json
import re

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.cli.app import app
from mmrl.core.errors import UserError

CONFIG = """
policy: {{vlm: {{path: world:digits/vlm, max_new_tokens: 8}}}}
data: {{vision: {{path: {path}, held_out: 0.3{more}}}}}
reward: grounding
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


def config(folder, more=""):
    file = folder / "c.yaml"
    file.write_text(CONFIG.format(path=folder / "q.jsonl", more=more))
    return file


def shown(file, *words):
    done = CliRunner().invoke(app, ["data", str(file), "--out", "data.html", *words])
    assert done.exit_code == 0, done.exception
    return done.output, (file.parent / "data.html").read_text()


def test_the_page_and_the_terminal_show_all_there_is(folder):
    text, page = shown(config(folder, ", broken: skip, filters: {n: {min: 1}}"), "--samples", "5")
    assert "8 rows read, 1 broken and left out, 1 left out by filters" in text
    assert "q.jsonl:5: " in text and "cut.png: " in text and "filter n min 1: 1" in text
    assert re.search(r"train: \d prompts, \d of them distinct; \d pictures, 0 videos, \d box", text)
    assert "words of a text: 3" in text and "pixels of a longer side: 60" in text
    pictures = re.findall(r'<img src="data:image/jpeg;base64,[A-Za-z0-9+/=]+"', page)
    assert 5 <= len(pictures) <= 6 and "&lt;b&gt;where&lt;/b&gt; is" in page
    assert "cut.png" in page and "n min 1" in page
    assert not re.search(r"(src|href)=\"(?!data:)|<script|url\(", page), "it loads nothing"


def test_a_dry_run_refuses_what_training_would_and_the_page_lists_it(folder):
    file = config(folder)
    with pytest.raises(UserError, match="1 of 8 rows are broken"):
        dry_run(file)
    text, page = shown(file)
    assert "problem: " in text and "1 of 8 rows are broken" in text and 'class="problem"' in page
