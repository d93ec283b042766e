"""The trainer on a CUDA device: exact first steps, the samples of the CPU, resuming to the bit."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.registry import locate
from mmrl.core.types import tree_map
from mmrl.experiment import checkpoint, state
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.diffusion.sd3 import SD3
from samplers.kernels import dance_sde
from samplers.noise import Rng
from tests.fixtures import loads, toys
from tests.gpu import DEVICE

TEXTS = [{"text": text} for text in ("a red seven", "a blue two", "a green zero")]
SD3_CASES = {
    "guided": {"guidance_scale": 3.0},
    "stopgrad": {"guidance_scale": 3.0, "logprob_guidance": "guided_stopgrad_uncond"},
    "dance": {"sde_type": dance_sde, "noise_level": 0.3},
    "half weights": {"dtype": "bfloat16", "lora": 4},
}


def toy(family, **options):
    """A toy whose conditions follow it to the device."""
    policy = toys.make(family, **options)
    encode = policy.encode
    policy.encode = lambda prompts: tree_map(lambda x: x.to(policy.device), encode(prompts))
    return policy


def tiny_sd3(**options):
    torch.manual_seed(0)
    place = str(loads.once(Path(locate("world:digits/sd3-test"))))
    return SD3(place, size=32, **{"steps": 4} | options)


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def trainer_of(policy, prompts, reward, kl=0.1, **options):
    sizes = {"prompts_per_iteration": 3, "group_size": 8, "train_batch_size": 12, "iterations": 8}
    objective, optimizer = PolicyGradient(clip_range=1e-2, kl=kl), partial(adamw, lr=1e-3)
    scorer, options = Scorer({"reward": reward}), TrainOptions(**(sizes | options))
    return Trainer(policy, prompts, scorer, advantages.flow_grpo, objective, optimizer, options)


def of_toy(family, **options):
    return trainer_of(toy(family), toys.prompts(6), toys.reward, **options)


def of_sd3(case, **options):
    sizes = {"group_size": 4, "train_batch_size": 12}
    return trainer_of(tiny_sd3(**SD3_CASES[case]), TEXTS, brightness, **(sizes | options))


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *((case, precision) for case in toys.POLICIES for precision in ("fp32", "bf16")),
        *(("guided", "bf16"), ("stopgrad", "fp32"), ("dance", "bf16"), ("half weights", "bf16")),
    ],
)
def test_the_first_step_is_exactly_on_policy(case, precision):
    make = of_toy if case in toys.POLICIES else of_sd3
    trainer = make(case, precision=precision, group_size=4, train_batch_size=12)
    metrics = trainer.iterate()
    assert trainer.policy.device.type == DEVICE
    assert metrics["ratio/max_deviation"] == 0.0
    assert metrics["clip_fraction"] == 0.0 and metrics["kl"] == 0.0 and metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    "precision", [*(pytest.param(p, marks=pytest.mark.gpu) for p in ("fp16", "bf16")), "fp32"]
)
def test_sd3_trains_in_every_precision(precision):
    trainer = of_sd3("guided", precision=precision, gradient_checkpointing=True, ema=0.9)
    before = trainer.policy.weights.full()
    metrics = trainer.iterate()
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["reward/mean"])
    after = trainer.policy.weights.full()
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


@pytest.mark.parametrize("family", toys.POLICIES)
def test_the_device_takes_the_decisions_of_the_cpu(family):
    rollouts = []
    for device in ("cpu", DEVICE):
        policy = toy(family, double=True)
        policy.net.to(device)
        with torch.no_grad():
            rollouts.append(policy.rollout(toys.prompts(4), 4, Rng.of(3)).to("cpu"))
    torch.testing.assert_close(rollouts[0].sample, rollouts[1].sample, atol=1e-9, rtol=0)
    torch.testing.assert_close(rollouts[0].logprob, rollouts[1].logprob, atol=1e-9, rtol=0)


@pytest.fixture
def deterministic():
    """Attention by its definition; operations without a deterministic kernel only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("kind", [*toys.POLICIES, pytest.param("sd3", marks=pytest.mark.gpu)])
def test_2n_iterations_equal_n_stop_resume_n_to_the_bit(kind, tmp_path, deterministic):
    make = partial(of_sd3, "guided") if kind == "sd3" else partial(of_toy, kind)
    whole, first, second = (make(ema=0.9) for _ in range(3))
    for _ in range(2):
        whole.iterate()
    first.iterate()
    path = checkpoint.save(tmp_path, first.iteration, *state.capture(first))
    state.restore(second, *checkpoint.load(path))
    second.iterate()
    arrays = state.capture(second)[0]
    known = state.capture(whole)[0]
    for part, tensors in known.items():
        for name, value in tensors.items():
            assert torch.equal(arrays[part][name], value), (part, name)
