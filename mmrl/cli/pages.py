"""Shows the pages of the documentation on the terminal: ``mmrl docs``."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from mmrl.core.errors import UserError, suggest
from mmrl.core.paths import shipped_pages

FIRST = ("start", "index", "configuration", "extending", "api", "data", "rewards", "models")


def pages() -> dict[str, Path]:
    """Return the pages by name, such as ``methods/advantages``, in reading order."""
    folder = shipped_pages()
    files = {p.relative_to(folder).with_suffix("").as_posix(): p for p in folder.rglob("*.md")}
    order = [*(name for name in FIRST if name in files), *sorted(set(files) - set(FIRST))]
    return {name: files[name] for name in order}


def show_page(name: str | None) -> None:
    """Print a page, on a terminal through its pager, or the list of pages. Raises UserError for an
    unknown page."""
    known = pages()
    if name is None:
        print("\n".join(listed(known)))
        return
    short = name.removeprefix("docs/").removesuffix(".md")
    if short not in known:
        raise UserError(f"no page {name!r}; {suggest(short, known)}")
    text = known[short].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))


def listed(known: dict[str, Path]) -> Iterator[str]:
    """Yield a line for each page: its name and its title."""
    width = max(map(len, known), default=0)
    for name, path in known.items():
        with path.open(encoding="utf-8") as lines:
            title = next((line[2:].strip() for line in lines if line.startswith("# ")), "")
        yield f"{name:{width}}  {title}"
    yield f"\nmmrl docs PAGE shows one of them, as text files they are in {shipped_pages()}"
    yield from (f"on the web: {address}" for address in addresses())


def addresses() -> list[str]:
    """List the addresses of the source that pyproject.toml gives."""
    try:
        urls = importlib.metadata.metadata("multimodal-rl").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [url.partition(", ")[2] for url in urls if url.startswith(("Source, ", "Documentation"))]
