"""``mmrl docs``: the pages come with the package."""

import pytest
from typer.testing import CliRunner

from mmrl.cli.app import app
from mmrl.cli.pages import pages
from mmrl.core.errors import UserError
from tests.core.test_imports import ROOT


def test_pages_are_listed_and_shown():
    docs = ROOT / "docs"
    text = CliRunner().invoke(app, ["docs"]).output
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    files = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    assert files == set(pages()) <= set(names) and names[0] == "start"
    page = (docs / "start.md").read_text(encoding="utf-8")
    for name in ("start", "start.md", "docs/start.md"):
        assert CliRunner().invoke(app, ["docs", name]).output == page + "\n"
    with pytest.raises(UserError, match="no page 'starts'; did you mean 'start'"):
        CliRunner().invoke(app, ["docs", "starts"], catch_exceptions=False)


def test_help_and_the_doctor_name_the_documentation():
    assert "mmrl docs" in CliRunner().invoke(app, ["--help"]).output
    assert "mmrl docs" in CliRunner().invoke(app, ["doctor"]).output
