"""docs/methods says what the registry says."""

from functools import cache

from mmrl.core.registry import ALL, load_built_in
from tests.fixtures.programs import load

load_built_in()
methods = load("methods")


@cache
def pages():
    """The pages as they should be, made when the first test asks: collecting tests stays quick."""
    return methods.pages()


def test_every_page_is_there_and_up_to_date():
    known = {path.name: path.read_text(encoding="utf-8") for path in methods.FOLDER.iterdir()}
    assert set(known) == set(pages())
    stale = [name for name, text in pages().items() if known[name] != text]
    assert not stale, f"run python scripts/dev/methods.py: {stale}"


def test_every_method_is_on_one_page():
    for registry in sorted({family.registry for family in methods.FAMILIES}):
        families = [family for family in methods.FAMILIES if family.registry == registry]
        names = [name for family in families for name in methods.entries(family)]
        built_in = {n for n, entry in ALL[registry].items() if not methods._outside(entry)}
        assert len(names) == len(set(names)) and set(names) == built_in, registry


def section(page, name):
    return pages()[page].partition(f"## `{name}`")[2].partition("\n## ")[0]


def test_every_option_is_in_a_table_with_what_it_does():
    """Of a method, or of one that it extends."""
    for family in methods.FAMILIES:
        page = f"{family.slug}.md"
        silent = [t for t in pages()[page].splitlines() if t.startswith("`") and t.endswith("| ")]
        assert not silent, f"{family.slug}: declare them as `name: text` in the docstring"
        for name, entry in methods.entries(family).items():
            missing = [key for key in methods.options(entry) if f"`{key}`" not in pages()[page]]
            assert not missing or "Also: [" in section(page, name), f"{name}: {missing}"
