"""docs/options says what the declarations say, and leaves no option without a text."""

from dataclasses import dataclass
from functools import cache

import pytest

from mmrl.config.sections import SECTIONS
from mmrl.core.registry import GRIDS, OPTIMIZERS, POLICIES, SOLVERS, STAGES, load_built_in, options
from tests.fixtures.programs import load

load_built_in()
option_pages = load("option_pages")
option_docs = load("option_docs")


@cache
def pages():
    """The pages as they should be, made when the first test asks."""
    return option_pages.pages()


def test_the_pages_are_up_to_date():
    known = {path.name: path.read_text(encoding="utf-8") for path in option_pages.FOLDER.iterdir()}
    assert known == pages(), "run python scripts/dev/option_pages.py"


@pytest.mark.parametrize(
    ("page", "registry"),
    [
        ("train.md", SECTIONS),
        ("train.md", OPTIMIZERS),
        ("stages.md", {n: e for n, e in STAGES.items() if not STAGES.unfit(e)}),
        ("policies.md", POLICIES),
        ("policies.md", GRIDS),
        ("policies.md", SOLVERS),
    ],
)
def test_every_name_and_option_is_on_its_page(page, registry):
    """Asked of the registry, not of the generator."""
    text = pages()[page]
    own = dict(option_pages.own(registry))
    missing = [name for name in own if name not in text]
    missing += [f"{n}.{o}" for n, e in own.items() for o in options(e) if f"`{o}`" not in text]
    assert own and not missing


def test_every_option_says_what_it_does():
    silent = [
        f"{page}: {line}"
        for page, text in pages().items()
        for line in text.splitlines()
        if line.startswith("`") and len(line.rpartition("| ")[2]) < 3
    ]
    assert not silent, "declare it as `name: text` in the docstring, or by a comment on its line"


@dataclass
class Base:
    """Does this.

    first: what it is; more. second, third: two of one
    kind. Not an option: this.
    """

    first: int = 1
    second: int = 2
    third: int = 3
    fourth: str = "#"  # in the line
    # above it,
    # in two lines
    fifth: int = 5


class Child(Base):
    """Does that. ``first``: something else."""


def test_texts_are_read_from_docstrings_and_comments():
    texts = {
        "first": "what it is; more",
        "second": "two of one kind",
        "third": "two of one kind",
        "fourth": "in the line",
        "fifth": "above it, in two lines",
    }
    assert option_docs.described(Base) == texts
    assert option_docs.described(Child) == texts | {"first": "something else"}
    assert option_docs.prose(Base) == "Does this."
    assert option_docs.beside(Child, [Base]) == ({"first": ("`1`", "something else")}, {})
