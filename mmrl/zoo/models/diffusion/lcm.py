"""Trains latent consistency models (Luo et al. 2023): Stable Diffusion distilled to a few steps,
guidance included."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from mmrl.core.registry import KERNELS, POLICIES, WINDOWS
from mmrl.core.types import Kernel
from mmrl.policies.diffusion.flow_passes import Window
from mmrl.zoo.models.diffusion.stable_diffusion import SD
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
    mended: ClassVar[dict[str, Any]] = {}

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
        super().__init__(
            path,
            steps=steps,
            sde_type=sde_type,
            noise_window=noise_window,
            embedded_guidance=embedded_guidance,
            **options,
        )
