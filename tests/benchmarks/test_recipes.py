"""The recipes of the field: what is published of each is whole, the table is fresh, and one of each
family learns for an iteration on tiny models of the same classes, rewards included."""

from pathlib import Path

import pytest
import torch

from mmrl.core.registry import locate
from mmrl.experiment.build import Session, read
from scripts.dev import recipes_table as recipes
from tests.benchmarks.files import save_coco_yolos
from tests.fixtures import tiny_diffusers, tiny_vlms
from tests.fixtures.tiny_qwen_rewards import save_video_align
from tests.fixtures.tiny_rewards import save_tiny_clip

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs/benchmarks"
ITERATION = ["train.prompts_per_iteration=2", "train.group_size=2", "train.train_batch_size=4"]
ITERATION += ["train.micro_batch_size=null", "train.iterations=1", "train.precision=fp32"]
PIXELS = ["policy.size=32", "policy.steps=3", "policy.dtype=float32"]
FEW = ["data.count=40", "data.held_out=4"]


def sd3(tmp):
    return [f"policy.path={locate('world:digits/sd3-test')}", "policy.lora=2", *PIXELS]


def geneval(tmp):
    models = [f"reward.geneval.detector={save_coco_yolos(tmp / 'yolos')}"]
    return [*sd3(tmp), *FEW, *models, f"reward.geneval.clip={save_tiny_clip(tmp / 'clip')}"]


def flux(tmp):
    path = tiny_diffusers.folder("flux")
    sizes = ["policy.size=16", "policy.steps=4", "policy.dtype=float32", "policy.lora=2"]
    return [f"policy.path={path}", *sizes, f"reward.hpsv2.model={save_tiny_clip(tmp / 'clip')}"]


def branch(tmp):
    splits = ["policy.tree.splits=[0]", "policy.steps=3", "train.gradient_checkpointing=false"]
    return [*flux(tmp), *splits]


def wan(tmp):
    options = save_video_align(tmp)
    sizes = ["policy.size=16", "policy.frames=5", "policy.steps=3", "policy.dtype=float32"]
    models = [f"reward.video_align.{key}={value}" for key, value in options.items()]
    path = tiny_diffusers.folder("wan")
    return [f"policy.path={path}", *sizes, "policy.lora=2", *models]


def vlm(tmp):
    path = tiny_vlms.folder("qwen2_5_vl")
    sizes = ["policy.max_new_tokens=8", "policy.dtype=float32", "policy.budgets.max_pixels=3136"]
    return [f"policy.path={path}", *sizes, "reward.mean_logprob=0.01"]


LEARNING = {
    "sd3_flow_grpo_geneval": geneval,
    "flux_branch_grpo_hpsv2": branch,
    "wan_flow_grpo_motion": wan,
    "vlm_refcoco": vlm,
}


@pytest.mark.parametrize("name", LEARNING)
def test_a_recipe_learns_for_an_iteration_on_tiny_models(name, tmp_path):
    torch.manual_seed(0)
    changes = LEARNING[name](tmp_path)
    trainer = Session.of(read(FOLDER / f"{name}.yaml", [*ITERATION, *changes])).trainer()
    metrics = trainer.iterate()
    assert metrics["loss"] == metrics["loss"] and metrics["samples/excluded"] == 0
    assert trainer.iteration == 1 and metrics["samples/total"] == 4
    assert not trainer.scorer.failures


def test_every_recipe_says_all_that_is_published_of_it():
    table = recipes.recipes()
    assert len(table) >= 20 and {fields["level"] for fields in table.values()} == {"T"}
    for name, fields in table.items():
        assert all(text.strip() and "|" not in text for text in fields.values()), name
        assert fields["evaluate"].startswith("mmrl evaluate runs/NAME")


def test_the_table_of_the_page_is_fresh():
    page = (ROOT / "docs/recipes.md").read_text()
    assert recipes.renewed(page) == page, "run python scripts/dev/recipes_table.py"


def test_every_evaluation_names_a_benchmark_that_there_is():
    from mmrl.core.registry import BENCHMARKS, load_built_in, options

    load_built_in()
    for fields in recipes.recipes().values():
        words = fields["evaluate"].split()
        if "--benchmark" in words:
            name = words[words.index("--benchmark") + 1]
            keys = {
                w.removeprefix("benchmark.").partition("=")[0]
                for w in words
                if w.startswith("benchmark.")
            }
            assert keys <= set(options(BENCHMARKS[name]))
