"""Builds say how far they are where no terminal shows a bar, and looking builds nothing."""

from __future__ import annotations

import pytest

from mmrl.worlds import cache
from mmrl.worlds.progress import Progress


def steps(capsys, seconds, total=100, **options):
    """What is printed about a build whose steps take so many seconds."""
    now = [0.0]
    progress = Progress("digits/new", clock=lambda: now[0], **options)
    for part in ("painter", "reader"):
        for _ in progress.steps(part, total):
            now[0] += seconds
    return capsys.readouterr().err.splitlines()


def test_lines_come_now_and_then(capsys):
    lines = steps(capsys, seconds=1.0)
    assert lines[0] == ("building digits/new, once: painter 3/100, about 97 s left of this part")
    assert len(lines) == 10 and "reader" in lines[-1]
    assert steps(capsys, seconds=0.01) == []  # over before anybody wonders
    assert steps(capsys, seconds=1.0, quiet=True) == []


def test_looking_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))

    def make():
        return cache.fetch("some/thing", "0" * 12, lambda folder: pytest.fail("built"))

    assert cache.built(make) is None and list(tmp_path.rglob("*")) == []

    def build(folder):
        (folder / "a").write_text("x")

    folder = cache.fetch("some/thing", "0" * 12, build)
    assert cache.built(make) == folder
