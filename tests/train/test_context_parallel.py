"""Sequences split inside of copies, and shards inside of copies, on four processes (gloo) do what
one process does; what does not divide is a sentence before anything is loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config.options import ContextParallel, TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment.build import check_started, read
from mmrl.policies.diffusion import context_parallel
from mmrl.train.device import check_mesh
from tests.fixtures import context_worker as worker
from tests.fixtures import warm

CONFIG = Path(__file__).parents[2] / "configs" / "sd3" / "flow_grpo.yaml"
SIZES = {
    "prompts_per_iteration": 4,
    "group_size": 2,
    "train_batch_size": 4,
    "iterations": 1,
}


def equal(one: Path, many: Path, cases):
    """In samples, log-probs, rewards, gradients (of weights and of inputs) and weights after a
    step."""
    for case in cases:
        single, split = (load_file(at / f"{case}.safetensors") for at in (one, many))
        assert single.keys() == split.keys()
        assert single["input_gradient"].abs().max() > 0.1
        assert single["metric/grad_norm"] > 0
        for name in single:
            torch.testing.assert_close(
                single[name],
                split[name],
                atol=1e-10,
                rtol=0,
                msg=lambda m, n=name, c=case: f"{c}, {n}: {m}",
            )


@pytest.mark.slow
def test_split_sequences_and_shards_inside_copies_equal_one_process(tmp_path):
    """Two groups of two that split them; two copies of two shards each."""
    words = ["-m", "tests.fixtures.context_worker", tmp_path]
    for ended in (warm.run(words), warm.ranks([*words, "--four"], count=4)):
        assert ended.returncode == 0, ended.stderr[-6000:]
    one = tmp_path / "one"
    equal(one, tmp_path / "split", worker.CASES)
    equal(one, tmp_path / "shards", ["flux"])


def test_meshes_that_do_not_divide_are_refused(monkeypatch):
    split = TrainOptions(**SIZES, context_parallel=ContextParallel(ulysses_degree=2))
    with pytest.raises(UserError, match=r"train.context_parallel: 3 processes .* groups of 2"):
        check_mesh(split, 3)
    check_mesh(split, 1)  # one process computes whole sequences
    check_mesh(split, 4)
    shards = TrainOptions(**SIZES, shard_size=2)
    with pytest.raises(UserError, match="nothing is sharded; launch with --use_fsdp"):
        check_mesh(shards, 4)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_mesh(shards, 4)
    with pytest.raises(UserError, match=r"train.shard_size: 5 processes do not divide"):
        check_mesh(shards, 5)


def test_families_without_a_plan_are_refused_before_anything_is_loaded(monkeypatch):
    load_built_in()
    with_plan = {
        name for name, policy in POLICIES.items() if context_parallel.unsupported(policy) is None
    }
    families = "flux flux2 flux_kontext ltx qwen_edit qwen_image wan wan_i2v"
    assert with_plan == set(families.split())
    assert "serves its image and video" in str(context_parallel.unsupported(POLICIES.find("vlm")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    configuration = read(CONFIG, ["train.context_parallel={ulysses_degree: 2}"])
    options = configuration.section("train", TrainOptions)
    sentence = "no plan to split the sequences of SD3Transformer2DModel"
    with pytest.raises(UserError, match=f"train.context_parallel: diffusers has {sentence}"):
        check_started(configuration, options)


def test_backends_that_cannot_exchange_are_refused():
    assert "xformers" in str(context_parallel.unfit("xformers", 1))
    assert "log-sum-exp" in str(context_parallel.unfit("auto", 2))
    assert context_parallel.unfit("auto", 1) is context_parallel.unfit("flash", 2) is None
