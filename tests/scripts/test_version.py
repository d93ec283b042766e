"""The version is in one place; copies of it agree."""

from pathlib import Path

import yaml

from mmrl import __version__

ROOT = Path(__file__).parents[2]


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == __version__
