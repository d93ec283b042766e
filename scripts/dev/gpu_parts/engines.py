"""The part of gpu_check.py on vLLM in the policy's process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from gpu_parts.savings import allocated
from gpu_parts.setting import Report, Setting, free
from mmrl.policies.vlm.engines.vllm_options import VLLMOptions
from mmrl.policies.vlm.policy import VLM
from samplers.noise import Rng

MISSING = "not installed"
LITTLE = {"enforce_eager": True, "max_model_len": 1024, "gpu_memory_utilization": 0.1}
TOKENS = 32


def vllm(setting: Setting) -> Report:
    """Sample a small Qwen2.5-VL by mmrl's engine and, if installed, by vLLM: the gap of its
    log-probs to those of transformers before and after the weights are changed, seconds of a
    rollout and of sending the weights, bytes on the device while it sleeps and while it is awake.
    """
    from tests.fixtures import vllm_models

    path = str(vllm_models.folder())
    report: Report = {"own": _sampled(setting, _policy(path))}
    free()
    if find_spec("vllm") is None:
        return report | {"vllm": MISSING}
    for sync, rank in (("weights", None), ("lora", 8)):
        policy = _policy(path, engine="vllm", vllm=VLLMOptions(sync=sync, **LITTLE), lora=rank)
        report[f"vllm, sync {sync}"] = _sampled(setting, policy)
        del policy
        free()
        if not setting.has_time():
            break
    return report


def _policy(path: str, **options: Any) -> VLM:
    torch.manual_seed(0)
    policy = VLM(path, max_new_tokens=TOKENS, coordinate_space="original", **options)
    policy.net.to("cuda" if torch.cuda.is_available() else "cpu")
    return policy


@torch.no_grad()
def _sampled(setting: Setting, policy: VLM) -> Report:
    """Sample before and after the trained weights move."""
    from tests.fixtures import tiny_vlms

    prompts = [{"text": "what is it?", "images": [tiny_vlms.image(70, 60, 0)]}, {"text": "hello"}]
    report: Report = {}
    for name in ("before", "after"):
        rollout = policy.rollout(prompts, setting.scale.copies, Rng.of(name))
        report[name] = policy.measures()
        sampled = rollout.provenance.sampler_logprob
        if sampled is not None:
            report[name]["gap"] = float((sampled - rollout.logprob)[rollout.mask].abs().max())
        _shake(policy)
    report["seconds"] = min(
        setting.times(lambda: policy.rollout(prompts, setting.scale.copies, Rng.of("timed")))
    )
    if policy.outside is not None and policy.outside.sleeps:
        report["asleep, bytes"] = allocated()
        used = _used()
        policy.outside.llm.wake_up()
        report["given back while it sleeps, bytes"] = _used() - used
        policy.outside.llm.sleep(level=1)
    return report


def _used() -> int:
    """Return the used bytes of the device, by any allocator."""
    free_bytes, total = torch.cuda.mem_get_info()
    return int(total - free_bytes)


def _shake(policy: VLM) -> None:
    generator = torch.Generator().manual_seed(5)
    for p in policy.net.parameters():
        if p.requires_grad:
            p.add_(0.02 * torch.randn(p.shape, generator=generator).to(p))
