"""The parts of gpu_check.py on saving memory: bases in 8 and 4 bits, the optimizer in 8 bits, and
models that are offloaded between the phases of an iteration."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import bench_iteration as bench
import random_models as models
import torch

from gpu_parts.kernels import half
from gpu_parts.setting import NotInstalled, Report, Setting, free, peak_of, trainer_of
from mmrl.core.handling import Handling
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.text_encoding import PromptCache
from mmrl.scoring.handling import Handled
from mmrl.train.minibatches import passes
from mmrl.train.optimizers import adamw, adamw_8bit
from samplers.noise import Rng

KINDS = (None, "8bit", "nf4")
ROWS = 4  # rows of a pass: activations are not the point here


def quantized(setting: Setting) -> Report:
    """Run iterations on a frozen base, unquantised, in 8 and in 4 bits: the gap of log-probs of the
    same samples to the unquantised base before training, the first ratio, seconds, bytes of the
    weights, memory."""
    _require_bitsandbytes()
    report: Report = {}
    rollout: Any = None
    for kind in KINDS:
        policy = models.sd3(setting.scale, quantization=kind)
        policy.net.to(models.device())
        policy.pass_sizes.rows = ROWS
        if rollout is None:
            with torch.no_grad(), half():
                rollout = policy.rollout(bench.PROMPTS[:2], 2, Rng.of(0))
        gaps = _gaps(policy, rollout)
        trainer = trainer_of(policy, setting.work(ROWS, copies=max(2, setting.scale.copies // 2)))
        metrics = trainer.iterate()
        report[kind or "as it is"] = {
            "gap, mean": float(gaps.mean()),
            "gap, max": float(gaps.max()),
            "ratio/max_deviation": metrics["ratio/max_deviation"],
            "weights, bytes": sum(p.nbytes for p in policy.net.parameters()),
            "seconds": min(setting.times(trainer.iterate)),
            "peak_bytes": peak_of(trainer.iterate),
        }
        del policy, trainer
        free()
    return report


@torch.no_grad()
def _gaps(policy: FlowPolicy, rollout: Any) -> torch.Tensor:
    """Score a rollout; return the distance of each decision's log-prob from the recorded one."""
    with half():
        return torch.cat(
            [
                (policy.dist(part).log_prob(part.target) - part.logprob).abs().flatten()
                for part in (p.to(models.device()) for p in passes(policy.path(rollout), ROWS))
            ]
        ).cpu()


def optimizer_8bit(setting: Setting) -> Report:
    """Run two iterations by AdamW and by AdamW in 8 bits, from the same weights: bytes of the
    moments, how far the weights moved and differ afterwards, seconds. (The first step of Adam is
    the sign of the gradient, whatever the dtype of the moments.)"""
    _require_bitsandbytes()
    report: Report = {}
    changes = {}
    for name, optimizer in (("adamw", adamw), ("adamw_8bit", adamw_8bit)):
        policy = models.sd3(setting.scale)
        with mock.patch.object(bench, "adamw", optimizer):
            trainer = trainer_of(policy, setting.work(ROWS, copies=2))
        before = policy.weights.full()
        metrics = trainer.iterate()
        trainer.iterate()
        after = policy.weights.full()
        changes[name] = {key: (after[key] - before[key]).cpu() for key in after}
        report[name] = {
            "ratio/max_deviation": metrics["ratio/max_deviation"],
            "moments, bytes": _moments(trainer.update.optimizer),
            "moved": max(float(x.abs().max()) for x in changes[name].values()),
            "seconds": min(setting.times(trainer.iterate)),
        }
        del policy, trainer
        free()
    apart = [(changes["adamw_8bit"][key] - x).abs().max() for key, x in changes["adamw"].items()]
    return report | {"apart": float(max(apart))}


def _moments(optimizer: Any) -> int:
    slots = (slot for state in optimizer.state.values() for slot in state.values())
    return sum(x.nbytes for x in slots if isinstance(x, torch.Tensor))


def _require_bitsandbytes() -> None:
    if find_spec("bitsandbytes") is None:
        raise NotInstalled("bitsandbytes")


def sleep(setting: Setting) -> Report:
    """Measure bytes on the device before, during and after a phase: text encoders at every
    placement, a reward's network with ``offload``, the path of samples with
    ``offload_trajectory``."""
    report: Report = {"text encoders": {}, "paths": {}}
    for placement in ("keep", "offload", "release", "cpu"):
        report["text encoders"][placement] = _encoders(setting, placement)
        free()
    report["reward, offload"] = _reward(setting)
    free()
    for offload in (False, True):
        report["paths"]["offload" if offload else "keep"] = _path(setting, offload)
        free()
    return report


def allocated() -> int:
    """Return the bytes on the device; 0 for a CPU, where nothing is offloaded."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def encoder(setting: Setting) -> torch.nn.Module:
    """Build T5's encoder with random weights, of the size of T5-large, on the CPU."""
    from transformers import T5Config, T5EncoderModel

    large = {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16}
    small = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    with torch.device(models.device()):
        net = T5EncoderModel(T5Config(**small if setting.small else large)).to(torch.bfloat16)
    return net.to("cpu")


def _encoders(setting: Setting, placement: Any) -> Report:
    """Encode two texts, then a cached and a new one."""
    during: list[int] = []

    def encode(net: Any, texts: list[Any], device: torch.device) -> dict[str, torch.Tensor]:
        during.append(allocated())
        ids = torch.tensor([[len(text), 1] for text in texts], device=device)
        return {"text": net(input_ids=ids).last_hidden_state}

    net = encoder(setting)
    cache = PromptCache(partial(encoder, setting), encode, placement, limit=8)
    weights = sum(p.nbytes for p in net.parameters())
    del net
    free()
    before = allocated()
    first = cache(["a red one", "a blue two"], torch.device(models.device()))
    free()
    between = allocated()
    again = cache(["a red one", "a green three"], torch.device(models.device()))
    free()
    return {
        "weights": weights,
        "before": before,
        "during": max(during),
        "after": between,
        "after the second": allocated(),
        "encoded twice": len(during),
        "known text is the same": torch.equal(first["text"][0], again["text"][0]),
    }


def _reward(setting: Setting) -> Report:
    """Score with a network that is offloaded to the CPU."""
    during: list[int] = []
    net = encoder(setting)

    def reward(media: torch.Tensor, prompts: list[Any]) -> torch.Tensor:
        during.append(allocated())
        ids = torch.ones(len(media), 2, dtype=torch.long, device=media.device)
        return net(input_ids=ids).last_hidden_state.float().mean((1, 2))

    handled = Handled.of(reward, Handling(device=models.device(), offload=True), "waiting")
    media = torch.rand(4, 3, 8, 8)
    placed = allocated()
    with handled.resident():
        handled(media, [{}] * 4)
    free()
    after = allocated()
    with handled.resident():
        handled(media, [{}] * 4)
    return {
        "weights": sum(p.nbytes for p in net.parameters()),
        "as built": placed,
        "during": max(during),
        "after": after,
    }


def _path(setting: Setting, offload: bool) -> Report:
    """Sample videos; their path stays on the device unless it is offloaded."""
    policy = models.wan(setting.scale, offload_trajectory=offload)
    policy.net.to(models.device())
    sample = partial(policy.rollout, bench.PROMPTS[:1], 2, Rng.of(0))
    with torch.no_grad(), half():
        sample()
        free()
        before = allocated()
        rollout = sample()
        free()
    return {"path": rollout.latents.states.nbytes, "left on the device": allocated() - before}
