"""Starts the engine that a configuration names."""

from __future__ import annotations

from mmrl.policies.vlm.engines.external import Outside
from mmrl.policies.vlm.engines.vllm_options import Setup

EXTERNAL = ("vllm", "vllm-server")  # engines that sample by themselves


def started(engine: str, setup: Setup) -> Outside | None:
    """Start an engine that samples by itself; None for those that are the policy's own. UserError
    where it is absent, or cannot load the model."""
    if engine == "vllm":
        from mmrl.policies.vlm.engines.vllm_local import VLLM

        return VLLM(setup)
    if engine == "vllm-server":
        from mmrl.policies.vlm.engines.vllm_server import VLLMServer

        return VLLMServer(setup)
    return None
