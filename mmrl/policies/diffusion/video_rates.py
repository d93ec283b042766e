"""Frame rates that published video models were trained on and are shown at, where no argument of
their pipelines gives it."""

from __future__ import annotations

from typing import Any

# read on 2026-11-27: in their authors' repositories where one is named, else in the examples of
# diffusers 0.42 (the pipelines' docstrings, Mochi's docs/source/en/api/pipelines/mochi.md)
RATES = {
    "AllegroTransformer3DModel": 15.0,  # rhymes-ai/Allegro, README: 6 seconds at 15 FPS
    "ChronoEditTransformer3DModel": 16.0,
    "CogVideoXTransformer3DModel": 8.0,  # THUDM/CogVideo, README: a table of both versions
    "ConsisIDTransformer3DModel": 8.0,
    "EasyAnimateTransformer3DModel": 8.0,  # aigc-apps/EasyAnimate, README: 49 frames at 8fps
    "HeliosTransformer3DModel": 24.0,
    "HunyuanVideo15Transformer3DModel": 24.0,
    "HunyuanVideoFramepackTransformer3DModel": 30.0,
    # Tencent-Hunyuan/HunyuanVideo, sample_video.py; diffusers' example writes it at 15
    "HunyuanVideoTransformer3DModel": 24.0,
    "Kandinsky5Transformer3DModel": 24.0,
    "LatteTransformer3DModel": 8.0,  # Vchitect/Latte, the sampling scripts
    "MochiTransformer3DModel": 30.0,
    "MotifVideoTransformer3DModel": 24.0,
    "SanaVideoTransformer3DModel": 16.0,
    "SkyReelsV2Transformer3DModel": 24.0,
    "WanAnimateTransformer3DModel": 30.0,
    "WanTransformer3DModel": 16.0,
    "WanVACETransformer3DModel": 16.0,
}
JOINED = 16.0  # for CogVideoX 1.5, whose tokens span frames
# of Wan 2.2 TI2V and derived models, by latent channels (Wan-Video/Wan2.2,
# wan/configs/wan_ti2v_5B.py: sample_fps)
TI2V = 24.0
TI2V_CHANNELS = 48


def rate_of(network: str, config: Any) -> float | None:
    """Return the frame rate of a network's class; None if unknown."""
    if network == "CogVideoXTransformer3DModel" and config.patch_size_t:
        return JOINED
    if network == "WanTransformer3DModel" and config.out_channels == TI2V_CHANNELS:
        return TI2V
    return RATES.get(network)
