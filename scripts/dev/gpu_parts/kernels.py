"""The parts of gpu_check.py on attention: kernels alone, in a pass, in sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

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
from samplers.noise import Rng

CANNOT = (
    UserError,
    RuntimeError,
    ValueError,
    TypeError,
)  # exceptions of a backend that does not run


KERNELS = {
    "torch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(setting: Setting) -> Iterator[Report]:
    """Test every kernel of SDPA, at the sizes of Stable Diffusion 3.5 medium, of a VLM's update and
    of its next token: milliseconds; whether an output's bits depend on requires_grad, or on the
    other rows of the batch; NaN in gradients; and milliseconds of the first call of a new length.
    """
    scale = setting.scale
    many, few = (3, 2) if setting.small else (28, 4)
    shapes = {
        "image": (scale.sd3_heads, scale.tokens + (scale.size // 16) ** 2, scale.sd3_heads, None),
        "update": (many, 64 if setting.small else 1024, few, None),
        "next token": (many, 1, few, 96 if setting.small else 1024),
    }
    report: Report = {}
    for name, (heads, queries, key_heads, keys) in shapes.items():
        drawn = partial(torch.randn, device=models.device(), dtype=torch.bfloat16)
        grouped = heads // key_heads * key_heads
        q = drawn(8, grouped, queries, 64 if name == "image" else 128)
        k, v = (drawn(8, key_heads, keys or queries, q.shape[-1]) for _ in range(2))
        report[name] = {}
        for kernel, backend in KERNELS.items():
            with nullcontext() if backend is None else sdpa_kernel(backend):
                report[name][kernel] = _kernel(q, k, v, causal=name == "update")
            yield report


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Report | str:
    def attend(*tensors: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=causal, enable_gqa=True
        )

    def forward_and_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves).float().square().sum(), leaves)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    order = torch.randperm(len(q), device=q.device)
    try:
        plain = attend(q, k, v)
        gradients = forward_and_backward()
    except RuntimeError as error:
        return f"does not run: {first_line(error)}"
    longer = [torch.cat([x, x[:, :, :3]], 2) for x in (k, v)]
    return {
        "forward": 1000 * min(measuring.seconds(lambda: attend(q, k, v)) for _ in range(9)),
        "forward and backward": 1000 * min(map(measuring.seconds, [forward_and_backward] * 9)),
        "first call of a new length": 1000 * measuring.seconds(lambda: attend(q, *longer)),
        "bits with a gradient": torch.equal(attend(*leaves).detach(), plain),
        "bits in another order": torch.equal(attend(*(x[order] for x in (q, k, v))), plain[order]),
        "gradients are finite": all(bool(x.isfinite().all()) for x in gradients),
    }


def backends(setting: Setting) -> Report:
    """Run whole networks on every backend of the option ``attention``: largest difference of the
    velocity from SDPA's, relative to its largest value, and milliseconds of a pass; and the choice
    of ``auto``."""
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
    policy.pass_sizes.rows = copies
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
    """Compute as in bf16 training."""
    with torch.autocast(models.device(), torch.bfloat16):
        yield


def rescored(policy: FlowPolicy, rollout: Rollout, width: int) -> float:
    """Return the largest |scored again - recorded log-prob|, in passes of ``width`` rows."""
    parts = [part.to(models.device()) for part in passes(policy.path(rollout), width)]
    return max(float((policy.dist(p).log_prob(p.target) - p.logprob).abs().max()) for p in parts)
