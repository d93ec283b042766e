"""Every command of docs/start.md in its order, in a new folder, as a reader types it; runs are made
short."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.test_docs import DOCS, blocks, check_comparison
from tests.fixtures.command import mmrl

pytestmark = pytest.mark.slow
SHORT = (
    "train.evaluate_every=0 train.save_every=0 evaluate.prompts=2 evaluate.num_samples=2 "
    "train.prompts_per_iteration=2 train.group_size=2 train.train_batch_size=4 "
    "train.micro_batch_size=null train.iterations=1 policy.path=world:digits/sd3-test "
    "evaluate.guidance=[] evaluate.reward={}"
).split()
COMMANDS = [
    line
    for block in blocks(DOCS / "start.md")
    if block.kind == "sh"
    for line in block.text.splitlines()
]


def shortened(words: list[str]) -> list[str]:
    """The same command at a size that takes seconds."""
    if words[0] == "train" and "--dry-run" not in words:
        return [*words, *SHORT]
    if words[0] == "train":  # tests/dry_run look at large models
        return [*words, "policy.path=world:digits/sd3-test", "policy.size=32"]
    small = ["--samples", "8", "data.scenes=40", "data.held_out_scenes=4"]
    return [*words, *small] if words[0] == "check-reward" else words


def test_the_first_hour_works_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(DOCS / "start.md"):
        if block.name:
            (tmp_path / block.name).write_text(block.text)
    for line in COMMANDS:
        program, *words = shlex.split(line)
        assert program == "mmrl", line
        if words[0] == "compare":  # up to its first run; tests/notebooks go to the end
            check_comparison([program, *words])
            continue
        mmrl(*shortened(words), cwd=tmp_path)
    assert (tmp_path / "runs/first/report.html").is_file()
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 4
    assert "reward/redness" in (tmp_path / "runs/red/metrics.jsonl").read_text()


def test_readme_and_start_page_promise_what_there_is():
    readme = (Path(DOCS).parent / "README.md").read_text()
    for page in ("README.md", "AGENTS.md", "CONTRIBUTING.md"):
        text = (DOCS.parent / page).read_text()
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert (DOCS.parent / target).exists(), f"{page} leads to {target}"
    lines = readme.splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 120, "a stranger reads it in three minutes"
