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
    assert one["image"].shape[0] == 2 and all(
        torch.equal(one[key], two[key]) for key in ("image", "text")
    )
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
    small = [
        "size=16",
        "steps=3",
        "lora={rank: 2, alpha: 4}",
        f"path={tiny_diffusers.folder('lcm')}",
    ]
    recipe = read(
        find_config("lcm/rocm"),
        [
            *(f"policy.lcm.{override}" for override in small),
            "reward={tests.policies.diffusion.test_image_families:bright: 1.0}",
            "train.prompts_per_iteration=4",
            "policy.lcm.fixed_batch_rows=4",
            "train.train_batch_size=4",
            "train.micro_batch_size=4",
            "optimizer.adamw.lr=1e-2",
        ],
    )
    assert recipe["objective"] == {"draft": {"last": None, "kl": 0.1, "divergence": "kl"}}
    session = Session.of(recipe)
    trainer = session.trainer()
    policy = session.policy
    objective = trainer.objective
    trainer.iterate()
    prompts = list(session.source.train[:4])
    with torch.no_grad():
        before = policy.rollout(prompts, 1, Rng.of("same"))
        reward = bright(policy.decode(before), None)
    trainer.iterate()
    trainer.iterate()
    (point,) = objective.points(policy, before, Rng.of(0))
    assert point.state.shape[1] == 4 and (before.latents.noise_level[0] > 0).tolist() == [
        True,
        True,
        False,
    ]
    with torch.no_grad():
        now = policy.rollout(prompts, 1, Rng.of("same"))
        assert (now.sample - before.sample).abs().max() > 1e-3
        wanted = bright(policy.decode(now), None)
    objective.kl = 0.0
    torch.testing.assert_close(-objective.loss(policy, point)[:, 0], wanted, atol=1e-5, rtol=0)
    objective.kl = 0.1
    with torch.no_grad():
        assert (objective.loss(policy, point)[:, 0] > -wanted).all(), (
            "the divergence to the base counts"
        )
    assert wanted.mean() > reward.mean() + 1e-4, (
        "two iterations raised the reward of the same noise"
    )
