"""Starts the engine that a configuration names."""

from __future__ import annotations

from mmrl.policies.vlm.engines.external import Outside
from mmrl.policies.vlm.engines.vllm_options import Setup

EXTERNAL = ("vllm", "vllm-server")  # external engines


def started(engine: str, setup: Setup) -> Outside | None:
    """Start an external engine; None for the policy's own ones. UserError where it is not
    installed, or cannot load the model."""
    if engine == "vllm":
        from mmrl.policies.vlm.engines.vllm_local import VLLM

        return VLLM(setup)
    if engine == "vllm-server":
        from mmrl.policies.vlm.engines.vllm_server import VLLMServer

        return VLLMServer(setup)
    return None
