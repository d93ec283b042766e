"""Hooks of mkdocs: completes the navigation, and adds pages for repository files that pages link
to.

A page may link to ``../configs/digits/rebel.yaml``, outside docs/; the site gets a page of that
file, so that the link works in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?P<target>(?:\.\./)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}
MORE = "Guides"  # section of pages that are not in the navigation


def on_config(config: Any) -> Any:
    """Expand ``folder/*`` in the navigation, and add the missing pages."""
    docs = Path(config["docs_dir"])
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    named = {page for page in _leaves(config["nav"]) if not page.endswith("/*")}
    config["nav"] = _written_out(config["nav"], sorted(pages - named))
    rest = sorted(pages - set(_leaves(config["nav"])))
    for section in config["nav"]:
        if MORE in section:
            section[MORE] = [*section[MORE], *rest]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page links to."""
    linked = set()
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            linked.add(outside(page.src_uri, match["target"]))
    for name in sorted(name for name in linked if name):
        language = LANGUAGES.get(Path(name).suffix, "text")
        text = (ROOT / name).read_text(encoding="utf-8")
        content = f"# {name}\n\n````{language}\n{text}\n````\n"
        files.append(File.generated(config, f"source/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Redirect links out of docs/ to the pages of their files."""

    def led(match: re.Match[str]) -> str:
        name = outside(page.file.src_uri, match["target"])
        if not name:
            return match[0]
        folder = posixpath.dirname(page.file.src_uri)
        return f"]({posixpath.relpath(f'source/{name}.md', folder or '.')})"

    return LINK.sub(led, markdown)


def outside(page: str, target: str) -> str:
    """Return a link's file, from the repository's root, if it is one outside docs/; else ''."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    inside = name.startswith(("docs/", "../"))
    return "" if inside or not (ROOT / name).is_file() else name


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in _leaves(part)]


def _written_out(nav: Any, pages: list[str]) -> Any:
    if isinstance(nav, dict):
        return {name: _written_out(part, pages) for name, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    entries = []
    for part in nav:
        if isinstance(part, str) and part.endswith("/*"):
            entries += [page for page in pages if posixpath.dirname(page) == part[:-2]]
        else:
            entries.append(_written_out(part, pages))
    return entries
