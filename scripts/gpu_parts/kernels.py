"""The parts of gpu_check.py about attention: kernels alone, in a pass, in sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import bench_iteration as bench
import measuring
import random_models as models
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_parts.setting import Report, Setting, first_line, free, peak_of
from mmrl.core.errors import UserError
from mmrl.core.types import Rollout
from mmrl.policies.diffusion import attention_backends
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.train.minibatches import passes
from mmrl.utils.machine import version
from samplers.noise import Rng

CANNOT = (UserError, RuntimeError, ValueError, TypeError)  # what a backend that does not run raises


def attention(setting: Setting) -> Report:
    """Measure milliseconds of forward and backward at SD3.5 medium's size, for each kernel that
    runs."""
    scale = setting.scale
    shape = (8, scale.sd3_heads, scale.tokens + (scale.size // 16) ** 2, 64)
    q = torch.randn(shape, device=models.device(), dtype=torch.bfloat16, requires_grad=True)
    chosen = {
        "torch's choice": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    milliseconds: Report = {}
    for name, kernel in chosen.items():
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            milliseconds[name] = _milliseconds(
                lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q), q
            )
    if version("xformers") and q.is_cuda:
        from xformers.ops import memory_efficient_attention

        rows = q.detach().transpose(1, 2).contiguous().requires_grad_()
        milliseconds["xformers"] = _milliseconds(
            lambda: memory_efficient_attention(rows, rows, rows), rows
        )
    return {"shape": list(shape), "milliseconds": milliseconds}


def _milliseconds(attend: Callable[[], Tensor], q: Tensor) -> float | str:
    def forward_and_backward() -> None:
        attend().sum().backward()
        q.grad = None

    try:
        forward_and_backward()
    except RuntimeError as error:
        return f"does not run: {first_line(error)}"
    return 1000 * sorted(measuring.seconds(forward_and_backward) for _ in range(9))[4]


def backends(setting: Setting) -> Report:
    """Run whole networks on every backend of the option ``attention``: largest difference of the
    velocity from SDPA's, relative to its largest value, and milliseconds of a pass; and what
    ``auto`` chooses."""
    return {
        "image": _backends(models.sd3(setting.scale), setting),
        "video": _backends(models.wan(setting.scale), setting),
    }


@torch.no_grad()
def _backends(policy: FlowPolicy, setting: Setting) -> Report:
    policy.net.to(models.device())
    rollout = policy.rollout(bench.PROMPTS[:1], 2, Rng.of(0))
    point = next(iter(policy.path(rollout))).to(models.device())

    def velocity() -> Tensor:
        return policy._velocities(point, guided=True)[0]

    report: Report = {"auto": policy.attending.used}
    attention_backends.use(policy.net, "sdpa")
    expected = velocity()
    for name in attention_backends.BACKENDS:
        try:
            attention_backends.check(name)
            attention_backends.use(policy.net, name)
            apart = float((velocity() - expected).abs().max() / expected.abs().max())
            report[name] = {
                "apart": apart,
                "milliseconds": 1000 * min(measuring.seconds(velocity) for _ in range(5)),
            }
        except CANNOT as error:
            report[name] = f"does not run: {first_line(error)}"
            attention_backends.use(policy.net, "sdpa")
    return report


def sampling(setting: Setting) -> Report:
    """Sample whole batches on every backend: seconds, memory, the largest difference of samples
    from SDPA's at equal noise, and the largest of log-probs when they are scored again."""
    return {
        "image": _sampling(models.sd3(setting.scale, attention="sdpa"), setting),
        "video": _sampling(models.wan(setting.scale, attention="sdpa"), setting),
    }


@torch.no_grad()
def _sampling(policy: FlowPolicy, setting: Setting) -> Report:
    policy.net.to(models.device())
    copies = setting.scale.copies
    policy.fixed_batch_rows = copies
    report: Report = {"rows": 2 * copies, "rows of a pass": copies}

    def sample() -> Rollout:
        return policy.rollout(bench.PROMPTS[:2], copies, Rng.of(0))

    with half():
        expected = sample().sample
        for name in attention_backends.BACKENDS:
            try:
                attention_backends.check(name)
                attention_backends.use(policy.net, name)
                rollout = sample()
                apart = (rollout.sample - expected).abs().max() / expected.abs().max()
                report[name] = {
                    "apart": float(apart),
                    "rescored": rescored(policy, rollout, copies),
                    "seconds": min(setting.times(sample)),
                    "peak_bytes": peak_of(sample),
                }
            except CANNOT as error:
                report[name] = f"does not run: {first_line(error)}"
    free()
    return report


@contextmanager
def half() -> Iterator[None]:
    """Compute as training in bf16 does."""
    with torch.autocast(models.device(), torch.bfloat16):
        yield


def rescored(policy: FlowPolicy, rollout: Rollout, width: int) -> float:
    """Return the largest |scored again - recorded log-prob|, in passes of ``width`` rows."""
    parts = [part.to(models.device()) for part in passes(policy.path(rollout), width)]
    return max(float((policy.dist(p).log_prob(p.target) - p.logprob).abs().max()) for p in parts)
