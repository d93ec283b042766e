"""docs/options says what the declarations say, and leaves no option without a text."""

from functools import cache

from mmrl.core.registry import load_built_in
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


def test_every_option_says_what_it_does():
    silent = [
        f"{page}: {line}"
        for page, text in pages().items()
        for line in text.splitlines()
        if line.startswith("`") and len(line.rpartition("| ")[2]) < 3
    ]
    assert not silent, "declare it as `name: text` in the docstring, or by a comment on its line"
