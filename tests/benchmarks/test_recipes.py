"""The recipes of the field: the table is fresh and names what there is, and one learns for an
iteration on tiny models of the same classes, rewards included."""

from pathlib import Path

from mmrl.core.registry import BENCHMARKS, load_built_in, locate, options
from mmrl.experiment.build import Session, read
from scripts.dev import recipes_table as recipes
from tests.benchmarks.files import save_coco_yolos
from tests.fixtures.tiny_rewards import save_tiny_clip

ROOT = Path(__file__).resolve().parents[2]
TINY = """
policy.lora=2 policy.size=32 policy.steps=3 policy.dtype=float32 data.count=40 data.held_out=4
train.prompts_per_iteration=2 train.group_size=2 train.train_batch_size=4 train.iterations=1
train.micro_batch_size=null train.precision=fp32
"""


def test_a_recipe_learns_for_an_iteration_on_tiny_models(tmp_path):
    models = [f"policy.path={locate('world:digits/sd3-test')}"]
    models += [f"reward.geneval.detector={save_coco_yolos(tmp_path / 'yolos')}"]
    models += [f"reward.geneval.clip={save_tiny_clip(tmp_path / 'clip')}"]
    file = ROOT / "configs/benchmarks/sd3_flow_grpo_geneval.yaml"
    trainer = Session.of(read(file, [*TINY.split(), *models])).trainer()
    metrics = trainer.iterate()
    assert metrics["loss"] == metrics["loss"] and metrics["samples/excluded"] == 0
    assert metrics["samples/total"] == 4 and not trainer.scorer.failures


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
