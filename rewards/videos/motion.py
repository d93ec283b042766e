"""Measures the amount and smoothness of motion in a video by optical flow.

The flow is OpenCV's DIS (Kroeger et al. 2016, arXiv:1603.03590) on grey frames, on the CPU and
without weights, or torchvision's RAFT (Teed and Deng 2020, arXiv:2003.12039) with a weights file.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as nnf
from annotated_types import Ge
from numpy import ndarray
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from mmrl.core.weight_files import read_tensors
from rewards.base.clip import pick_device
from rewards.base.media import to_uint8
from rewards.base.precision import own_precision
from rewards.base.tensors import fetch
from rewards.card import card
from rewards.videos.consistency import moving

Flow = Literal["dis", "raft_small", "raft_large"]
SOURCE = "OpenCV's DIS, or torchvision's RAFT by a weights file"
LEAST = 128  # minimum side in pixels for RAFT's pyramid
SHARPEST = 0.05  # share of a frame whose motion VBench counts


class MotionReward:
    """Computes the flow between neighbouring frames, for both rewards.

    Args:
        flow: ``dis``, or RAFT small or large.
        weights: RAFT's file, as torchvision publishes it, or ``hub id/file``.
        batch_size: pairs of frames in one forward pass of RAFT.
        device: for RAFT; ``auto`` is CUDA if there is one.
    """

    def __init__(
        self,
        flow: Flow = "dis",
        weights: str | None = None,
        batch_size: Annotated[int, Ge(1)] = 8,
        device: str = "auto",
    ):
        self.flow = load_dis() if flow == "dis" else Raft(flow, weights, batch_size, device)

    def flows(self, media: Tensor, reward: str, least: int) -> tuple[Tensor, Tensor]:
        """Return flows [B, F - 1, 2, H, W] on the CPU, in shares of the shorter side, and which
        samples [B] are not finite."""
        stack = moving(media, reward, least)
        broken = ~stack.isfinite().flatten(1).all(1).cpu()
        with own_precision(media.device.type):
            flows = self.flow(stack.float().nan_to_num(0.0, 0.0, 0.0))
        return flows / min(stack.shape[-2:]), broken


@card(
    media="video",
    low=0,
    source=SOURCE,
    licence="Apache-2.0 (OpenCV), BSD-3-Clause (torchvision)",
    scaling="mean motion; fastest: of the fastest 5 % of a frame, as VBench's dynamic degree",
)
@REWARDS.register("motion_amount")
class MotionAmount(MotionReward):
    """Measure the optical flow from frame to frame, in shares of the shorter side: 0 is a still.

    Args:
        flow: ``dis``, or RAFT small or large.
        weights: RAFT's file, as torchvision publishes it, or ``hub id/file``.
        of: ``mean`` of all pixels, or of the ``fastest`` 5 % as in VBench's dynamic degree.
        most: upper bound, so that flicker does not pay; None: no bound.
        batch_size: pairs of frames in one forward pass of RAFT.
        device: for RAFT; ``auto`` is CUDA if there is one.
    """

    def __init__(
        self,
        flow: Flow = "dis",
        weights: str | None = None,
        of: Literal["mean", "fastest"] = "mean",
        most: Annotated[float, Ge(0)] | None = None,
        batch_size: Annotated[int, Ge(1)] = 8,
        device: str = "auto",
    ):
        super().__init__(flow, weights, batch_size, device)
        self.of = of
        self.most = math.inf if most is None else most

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] in 0..1, two frames or more -> [B] float32 on the CPU."""
        flows, broken = self.flows(media, "motion_amount", 2)
        lengths: Tensor = flows.norm(dim=2).flatten(2)  # [B, F - 1, H W]
        if self.of == "fastest":
            lengths = lengths.topk(max(1, int(SHARPEST * lengths.shape[2])), dim=2).values
        return lengths.mean((1, 2)).clamp(max=self.most).masked_fill(broken, torch.nan)


@card(
    media="video", high=0, source=SOURCE, licence="Apache-2.0 (OpenCV), BSD-3-Clause (torchvision)"
)
@REWARDS.register("motion_smoothness")
class MotionSmoothness(MotionReward):
    """Negate the mean change of the optical flow between pairs of frames, in shares of the shorter
    side.

    0 for a still and for a steady pan, negative for jerks and flicker. (VBench's motion smoothness
    instead compares dropped frames with those of an interpolation network.)
    """

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] in 0..1, three frames or more -> [B] float32 on the CPU."""
        flows, broken = self.flows(media, "motion_smoothness", 3)
        changes: Tensor = flows.diff(dim=1).norm(dim=2)
        return -changes.flatten(1).mean(1).masked_fill(broken, torch.nan)


class Dis:
    """Runs OpenCV's dense inverse search at its medium setting."""

    def __init__(self, cv2: Any):
        self.cv2 = cv2

    def __call__(self, stack: Tensor) -> Tensor:
        """Compute the flow of [B, F, 3, H, W] in 0..1 -> [B, F - 1, 2, H, W] pixels, right and
        down."""
        frames = to_uint8(stack).permute(0, 1, 3, 4, 2).contiguous().numpy()
        return torch.stack([torch.stack(self.pairs(video)) for video in frames])

    def pairs(self, video: ndarray) -> list[Tensor]:
        greys = [self.cv2.cvtColor(frame, self.cv2.COLOR_RGB2GRAY) for frame in video]
        flows = []
        for before, after in zip(greys, greys[1:], strict=False):
            # keeps no previous flow
            search = self.cv2.DISOpticalFlow_create(self.cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
            flows.append(torch.from_numpy(search.calc(before, after, None)).permute(2, 0, 1))
        return flows


def load_dis() -> Dis:
    try:
        import cv2
    except ImportError as error:
        raise UserError(
            "optical flow by DIS needs OpenCV: pip install opencv-python-headless (it "
            "comes with multimodal-rl[ocr] too), or "
            "choose flow: raft_large with weights"
        ) from error
    return Dis(cv2)


class Raft:
    """Runs torchvision's RAFT; frames are padded to a multiple of 8 pixels, and its last estimate
    is used."""

    def __init__(self, kind: str, weights: str | None, batch_size: int, device: str):
        from torchvision.models import optical_flow

        if weights is None:
            raise UserError(
                f"flow: {kind} needs `weights`: the file of torchvision's {kind}, e.g. "
                f"raft_large_C_T_SKHT_V2"
            )
        file = fetch(weights, "RAFT")
        with torch.random.fork_rng(devices=[]):
            self.network = getattr(optical_flow, kind)(weights=None)
        try:
            self.network.load_state_dict(read_tensors(file))
        except RuntimeError as error:
            raise UserError(f"{file} is not a checkpoint of torchvision's {kind}") from error
        self.network.eval().requires_grad_(False).to(pick_device(device))
        self.batch_size = batch_size

    def __call__(self, stack: Tensor) -> Tensor:
        """Compute the flow of [B, F, 3, H, W] in 0..1 -> [B, F - 1, 2, H, W] pixels, right and
        down."""
        height, width = stack.shape[-2:]
        if min(height, width) < LEAST:
            raise UserError(
                f"RAFT needs frames of {LEAST} pixels a side or more, got {width} x "
                f"{height}; use flow: dis"
            )
        where = next(self.network.parameters()).device
        edges = (0, -width % 8, 0, -height % 8)
        padded = nnf.pad(2 * stack.flatten(0, 1).to(where) - 1, edges, mode="replicate").unflatten(
            0, stack.shape[:2]
        )
        before = padded[:, :-1].flatten(0, 1)
        after = padded[:, 1:].flatten(0, 1)
        parts = zip(before.split(self.batch_size), after.split(self.batch_size), strict=True)
        pairs = torch.cat([self.network(a, b)[-1] for a, b in parts])[..., :height, :width]
        flows: Tensor = pairs.unflatten(0, (len(stack), -1))
        return flows.cpu()
