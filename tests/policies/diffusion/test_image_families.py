"""Families of image models: pictures that are edited, and rewards followed through a consistency
model's steps. Against diffusers' own pipelines they are in test_folder_families."""

from __future__ import annotations

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.core.registry import load_built_in
from mmrl.experiment.build import Session, read
from rewards.card import card
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion.test_folder_families import CASES, make

load_built_in()


@pytest.mark.parametrize("name", ["flux_kontext", "qwen_edit"])
def test_an_image_is_a_file_or_in_memory_and_must_be_there(name, tmp_path):
    policy = make(name)
    prompts = CASES[name].prompts
    files = []
    for i, prompt in enumerate(prompts):
        prompt["image"].save(tmp_path / f"{i}.png")
        files.append(prompt | {"image": str(tmp_path / f"{i}.png")})
    one = policy.encode(prompts)
    two = policy.encode(files)
    assert one["image"].shape[0] == 2
    assert all(torch.equal(one[key], two[key]) for key in ("image", "text"))
    assert not torch.equal(one["image"][0], one["image"][1])
    with pytest.raises(
        UserError, match="'a red seven': this model edits the one image under 'image', and got 0"
    ):
        policy.encode([{"text": "a red seven"}])
    with pytest.raises(UserError, match="cannot read the image"):
        policy.encode([{"text": "a red seven", "image": str(tmp_path / "none.png")}])
    with pytest.raises(UserError, match="image_size 33 is not a multiple of 4"):
        make(name, image_size=33)


@card(differentiable=True)
def bright(media, prompts):
    return media.flatten(1).mean(1)


def test_rocm_follows_the_reward_through_the_steps_of_a_real_consistency_model():
    """configs/lcm/rocm on a small LatentConsistencyModelPipeline. The steps that the objective
    takes again are those of a rollout with the same noise under the current weights, also when
    these have moved since."""
    policy = {"path": tiny_diffusers.folder("lcm"), "size": 16, "steps": 3, "fixed_batch_rows": 4}
    sizes = {"prompts_per_iteration": 4, "train_batch_size": 4, "micro_batch_size": 4}
    recipe = read(
        find_config("lcm/rocm"),
        [
            *(f"policy.lcm.{name}={value}" for name, value in policy.items()),
            *(f"train.{name}={value}" for name, value in sizes.items()),
            "policy.lcm.lora={rank: 2, alpha: 4}",
            "reward={tests.policies.diffusion.test_image_families:bright: 1.0}",
            "optimizer.adamw.lr=1e-2",
        ],
    )
    assert recipe["objective"] == {"draft": {"last": None, "kl": 0.1, "divergence": "kl"}}
    session = Session.of(recipe)
    trainer, policy = session.trainer(), session.policy
    objective = trainer.objective
    prompts = list(session.source.train[:4])

    def sampled():
        with torch.no_grad():
            rollout = policy.rollout(prompts, 1, Rng.of("same"))
            return rollout, bright(policy.decode(rollout), None)

    trainer.iterate()
    before, reward = sampled()
    trainer.iterate()
    trainer.iterate()
    (point,) = objective.points(policy, before, Rng.of(0))
    noisy = before.latents.noise_level[0] > 0
    assert point.state.shape[1] == 4 and noisy.tolist() == [True, True, False]
    now, wanted = sampled()
    assert (now.sample - before.sample).abs().max() > 1e-3
    objective.kl = 0.0
    torch.testing.assert_close(-objective.loss(policy, point)[:, 0], wanted, atol=1e-5, rtol=0)
    assert wanted.mean() > reward.mean() + 1e-4  # two iterations raised it, of the same noise
