"""The recipes of the field: the table is fresh and names what there is."""

from pathlib import Path

from mmrl.core.registry import BENCHMARKS, load_built_in, options
from scripts.dev import recipes_table as recipes

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_fresh_and_names_benchmarks_that_there_are():
    page = (ROOT / "docs/recipes.md").read_text()
    assert recipes.renewed(page) == page, "run python scripts/dev/recipes_table.py"
    load_built_in()
    for name, fields in recipes.recipes().items():
        assert all(text.strip() and "|" not in text for text in fields.values()), name
        words = fields["evaluate"].split()
        assert words[:3] == ["mmrl", "evaluate", "runs/NAME"]
        if "--benchmark" in words:
            benchmark = BENCHMARKS[words[words.index("--benchmark") + 1]]
            mine = [word for word in words if word.startswith("benchmark.")]
            keys = {word.removeprefix("benchmark.").partition("=")[0] for word in mine}
            assert keys <= set(options(benchmark))
