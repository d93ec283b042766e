"""docs/methods says what the registry says."""

import re
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


def test_the_line_of_configuration_chooses_the_method():
    for family in methods.FAMILIES:
        for name in methods.entries(family):
            assert methods._named(methods.example(family, name), family.key) == {name}
            assert f"## `{name}`" in pages()[f"{family.slug}.md"]


def test_presets_and_configurations_are_listed():
    gspo = pages()["surrogates.md"].partition("## `gspo`")[2].partition("\n## ")[0]
    assert "`trl/gspo`" in gspo and "`clip_low`, `clip_high` | " in gspo
    nft = pages()["forward_process.md"].partition("## `nft`")[2].partition("\n## ")[0]
    assert "`digits/nft`" in nft and "flow and diffusion models" in nft


def test_every_option_is_in_a_table_with_what_it_does():
    """Of a method, or of one that it extends."""
    for family in methods.FAMILIES:
        text = pages()[f"{family.slug}.md"]
        silent = [t for t in text.splitlines() if t.startswith("`") and t.endswith("| ")]
        assert not silent, f"{family.slug}: declare them as `name: text` in the docstring"
        for name, entry in methods.entries(family).items():
            missing = [key for key in methods.options(entry) if f"`{key}`" not in text]
            own = text.partition(f"## `{name}`")[2].partition("\n## ")[0]
            assert not missing or "Also: [" in own, f"{name}: {missing}"


def test_what_was_measured_stands_with_the_method_that_differs():
    """GSPO was compared with PPO's clip on image tokens: that tells something of GSPO, nothing of
    the objective, which both have."""
    gspo = pages()["surrogates.md"].partition("## `gspo`")[2].partition("\n## ")[0]
    assert "[GSPO against GRPO](../results/compare_image_tokens.md)" in gspo
    assert (
        "](surrogates.svg)" in pages()["surrogates.md"]
        and "GSPO against" in pages()["surrogates.svg"]
    )
    plain = (
        pages()["policy_gradients.md"].partition("## `policy_gradient`")[2].partition("\n## ")[0]
    )
    assert "Measured" not in plain
    # AWM samples without noise, Flow-GRPO with: the objective differs, so nothing is said of steps
    assert "AWM" in pages()["forward_process.svg"] and "sde_types.svg" not in pages()


def test_a_figure_shows_intervals_around_zero():
    rows = [row for row in methods.measured.comparisons() if row.page == "compare_best.md"]
    text = methods.measured.figure(rows)
    assert text.count("<circle") == len(rows) > 1 and "mmrl/best against Flow-GRPO" in text


def test_a_page_says_when_to_choose_what_and_names_what_there_is():
    for family in methods.FAMILIES:
        chosen_by(family)


def chosen_by(family):
    known = set(methods.entries(family)) | {"sft"}
    others = {name for entries in ALL.values() for name in entries}
    named = set(re.findall(r"`([^`]+)`", family.choose))
    assert named <= known | others and (named & known or family.slug == "data")
    assert family.choose in pages()[f"{family.slug}.md"].replace("\n", " ")
