"""Knows the frames a second that published video models were trained on and are shown at, where no
argument of their pipelines says it."""

from __future__ import annotations

from typing import Any

RATES = {
    "AllegroTransformer3DModel": 15.0,
    "CogVideoXTransformer3DModel": 8.0,
    "ConsisIDTransformer3DModel": 8.0,
    "EasyAnimateTransformer3DModel": 8.0,
    "HunyuanVideoTransformer3DModel": 24.0,
    "LatteTransformer3DModel": 8.0,
    "MochiTransformer3DModel": 30.0,
    "SkyReelsV2Transformer3DModel": 24.0,
    "WanTransformer3DModel": 16.0,
}
JOINED = 16.0  # of CogVideoX 1.5, whose tokens join frames


def rate_of(network: str, config: Any) -> float | None:
    """Return the frames a second of a network's class; None for one that is not known."""
    if network == "CogVideoXTransformer3DModel" and config.patch_size_t:
        return JOINED
    return RATES.get(network)
