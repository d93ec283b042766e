"""Writes the description that a package index shows: README.md, whose relative links and pictures
are dead there. They lead to the address ``Source`` of ``[project.urls]``; where there is none,
pictures are left out, and of links the text stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n?")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def description(readme: str, source: str) -> str:
    """Return the text of a README without dead links. ``source``: the address of a file's folder,
    such as https://example.org/mmrl/blob/main; empty: none."""
    if source:
        return re.sub(rf"(!?){LINK.pattern}", rf"\1[\2]({source.rstrip('/')}/\3)", readme)
    return LINK.sub(r"\1", PICTURE.sub("", readme))


class CustomMetadataHook(MetadataHookInterface):
    """Gives the description to the build."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        text = description(readme, source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
