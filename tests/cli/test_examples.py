"""Holds the single-file examples to the library: the same samples for a seed, the same log-probs,
advantages and losses."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.advantages import flow_grpo, grpo
from mmrl.core.types import Rewards
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.policies.vlm.policy import VLM
from mmrl.worlds import artifacts
from mmrl.worlds.asking import Questions
from mmrl.worlds.data import Digits
from mmrl.zoo.models.diffusion.sd3 import SD3
from mmrl.zoo.models.masked.amused import Amused
from mmrl.zoo.objectives.mask_estimators import mask_grpo
from mmrl.zoo.objectives.masked import Masked
from samplers.noise import Rng

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "examples"
GROUP = 3
RNG = Rng.of(0, 0, "rollout")
REWARDS = torch.tensor([0.1, 0.9, 0.4, 0.2, 0.2, 0.8])
NEAR = {"atol": 1e-6, "rtol": 1e-6}


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def repeated(prompts: list[Any]) -> list[Any]:
    return [prompt for prompt in prompts for _ in range(GROUP)]


def moved(net: torch.nn.Module) -> None:
    """Change weights a little, the same way in every copy, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in sorted(net.named_parameters()):
            p.add_(1e-3 * torch.randn(p.shape, generator=generator))


def test_the_flow_example_samples_and_scores_as_the_library() -> None:
    from diffusers import StableDiffusion3Pipeline

    module = example("grpo_flow")
    folder = str(artifacts.base_test())
    prompts = Digits().train[:2]
    first_two = lambda steps, iteration, rng: torch.arange(steps) < 2  # noqa: E731
    policy = SD3(folder, size=32, steps=4, noise_level=0.7, noise_window=first_two)
    rollout = policy.rollout(prompts, GROUP, RNG)
    own = module.FlowGRPO(StableDiffusion3Pipeline.from_pretrained(folder), 32, steps=4, noisy=2)
    rows = torch.arange(len(rollout))
    made = own.sample(repeated(prompts), rows, RNG)
    torch.testing.assert_close(made.states[:, -1], rollout.sample, **NEAR)
    torch.testing.assert_close(made.logprob, rollout.logprob, **NEAR)
    torch.testing.assert_close(own.decode(rollout.sample), policy.decode(rollout), **NEAR)

    advantage = flow_grpo(Rewards({"reward": REWARDS}), rollout)
    torch.testing.assert_close(module.advantages(REWARDS, GROUP)[:, None], advantage.float())
    rollout = rollout.replace(advantage=advantage.float())
    objective = PolicyGradient(clip_range=1e-3, advantage_clip=5.0)
    moved(policy.net)
    moved(own.net)
    for k, point in enumerate(objective.points(policy, rollout, RNG)):
        loss = own.loss(made, advantage[:, 0].float(), rows, k)
        torch.testing.assert_close(loss[:, None], objective.loss(policy, point), **NEAR)
    assert k == 1


def test_the_vlm_example_answers_and_scores_as_the_library() -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    module = example("grpo_vlm")
    folder = str(artifacts.answers_test())
    prompts = Questions(kinds=["count"], scenes=40, held_out="test", held_out_scenes=4).train[:2]
    policy = VLM(path=folder, max_new_tokens=4)
    rollout = policy.rollout(prompts, GROUP, RNG)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    end = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [end, 0]  # several, as released checkpoints have
    own = module.GRPO(model, AutoProcessor.from_pretrained(folder))
    asked = repeated(prompts)
    ids, mask = own.sample(asked, torch.arange(len(rollout)), RNG)
    assert torch.equal(mask, rollout.mask) and torch.equal(ids[mask], rollout.sample[mask])
    assert own.decode(ids, mask) == policy.decode(rollout)
    old = own.log_prob(asked, ids, mask).detach()
    torch.testing.assert_close(old, rollout.logprob, **NEAR)

    advantage = grpo(Rewards({"reward": REWARDS}), rollout).float()
    torch.testing.assert_close(module.advantages(REWARDS, GROUP)[:, None], advantage)
    objective = PolicyGradient(clip_range=0.2)
    moved(policy.net.hf)
    moved(model)
    (point,) = objective.points(policy, rollout.replace(advantage=advantage), RNG)
    loss = own.loss(own.log_prob(asked, ids, mask), old, advantage[:, 0])
    torch.testing.assert_close(loss[mask], objective.loss(policy, point)[mask], **NEAR)


def test_the_masked_example_samples_and_scores_as_the_library() -> None:
    from diffusers import AmusedPipeline

    module = example("mask_grpo")
    folder = str(artifacts.masked_test())
    prompts = Digits().train[:2]
    policy = Amused(folder, steps=4, sampler="emerge")
    rollout = policy.rollout(prompts, GROUP, RNG)
    own = module.MaskGRPO(AmusedPipeline.from_pretrained(folder))
    rows = torch.arange(len(rollout))
    cond = own.encode(repeated(prompts))
    ids = own.sample(cond, rows, RNG)
    assert torch.equal(ids, rollout.sample)
    torch.testing.assert_close(own.decode(ids), policy.decode(rollout), **NEAR)

    advantage = flow_grpo(Rewards({"reward": REWARDS}), rollout).float()
    torch.testing.assert_close(module.advantages(REWARDS, GROUP)[:, None], advantage)
    rollout = rollout.replace(advantage=advantage)
    objective = Masked(lambda *given: mask_grpo(*given, updates=2, draws=2))
    policy.weights.keep("old")
    hidden = own.masks(rows, RNG, 2)
    olds = [own.log_prob(ids, hide, cond).detach() for hide in hidden]
    moved(policy.net)
    moved(own.net)
    objective.start_epoch(0)
    points = list(objective.points(policy, rollout, RNG))
    assert len(points) == 2
    for point, hide, old in zip(points, hidden, olds, strict=True):
        assert torch.equal(point.mask, hide)
        loss = own.loss(own.log_prob(ids, hide, cond), old, advantage[:, 0])
        expected = objective.loss(policy, point)
        torch.testing.assert_close(loss[hide], expected[hide], **NEAR)


WORLDS = {
    "grpo_flow": artifacts.base_test,
    "grpo_vlm": artifacts.answers_test,
    "mask_grpo": artifacts.masked_test,
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_example_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--model {WORLDS[name]()} --iterations 1 --prompts 2 --group-size 2"
    (reward,) = example(name).main(words.split())
    assert 0 <= reward <= 1 and "held-out reward after" in capsys.readouterr().out
