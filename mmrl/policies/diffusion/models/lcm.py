"""Trains latent consistency models (Luo et al. 2023): Stable Diffusion distilled to a few steps,
guidance included."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.host import sent
from mmrl.core.registry import KERNELS, POLICIES, WINDOWS
from mmrl.core.types import Kernel
from mmrl.policies.diffusion.flow_policy import Window
from mmrl.policies.diffusion.models.stable_diffusion import SD
from samplers.kernels import consistency
from samplers.windows import all_but_last


@POLICIES.register("lcm")
class LCM(SD):
    """Trains latent consistency models from a folder or hub id of a LatentConsistencyModelPipeline.

    With ``sde_type: consistency`` a step is the pipeline's own: predict the data, add fresh noise.
    Its density is known, so a policy gradient on it is RLCM (Oertell et al. 2024). Evaluation keeps
    this noise, as a user's samples have it.
    """

    pipeline = "LatentConsistencyModelPipeline"
    scheduler_class = "LCMScheduler"
    renews = True

    def __init__(
        self,
        path: str,
        embedded_guidance: Annotated[float, Ge(1)] = 8.5,
        steps: int = 4,
        sde_type: Annotated[Kernel, KERNELS] = consistency,
        noise_window: Annotated[Window, WINDOWS] = all_but_last,
        **options: Any,
    ):
        """Extend the options of ``SD``. embedded_guidance: the guidance scale that the network
        takes as an input (``guidance_scale`` is on top of it)."""
        self.embedded_guidance = embedded_guidance
        super().__init__(path, steps=steps, sde_type=sde_type, noise_window=noise_window, **options)

    def time_condition(self, x: Tensor) -> Tensor:
        """Embed the guidance scale, [B, C] sines and cosines, by the pipeline's own function: the
        angles are large."""
        from diffusers import LatentConsistencyModelPipeline

        scale = torch.tensor([self.embedded_guidance - 1])
        wide = self.config.time_cond_proj_dim
        embedding = LatentConsistencyModelPipeline.get_guidance_scale_embedding(self, scale, wide)
        return self.cast(sent(embedding, x.device)).expand(len(x), -1)
