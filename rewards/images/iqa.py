"""Scores image quality without a reference by the metrics of pyiqa (MANIQA, MUSIQ, NIQE, TOPIQ,
...), an optional dependency."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS
from rewards.base.frames import BatchSize, FrameReward
from rewards.card import card


@card(
    media="image video",
    source="github.com/chaofengc/IQA-PyTorch, which downloads each metric's weights",
    licence="pyiqa: NTU S-Lab and CC BY-NC-SA (not for commercial use); weights: of each metric",
    scaling="a factor; metrics of which less is better count negative",
)
@REWARDS.register("iqa")
class IQA(FrameReward):
    """Score a picture by a no-reference metric of pyiqa; lower-is-better metrics are negated.

    For a video, the mean over its frames; the prompt is ignored.

    Args:
        metric: pyiqa's name, such as maniqa, musiq, niqe, topiq_nr.
        scale: factor of the metric.

    Raises:
        UserError: pyiqa is not installed, an unknown metric, one that needs a reference, weights
            that are not available.
    """

    name = "iqa"

    def __init__(
        self,
        metric: str = "maniqa",
        scale: float = 1.0,
        batch_size: BatchSize = 16,
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        try:
            import pyiqa
        except ImportError as error:
            raise UserError("reward 'iqa' needs pyiqa: pip install 'multimodal-rl[iqa]'") from error
        known = pyiqa.list_models(metric_mode="NR")
        if metric not in known:
            raise UserError(
                f"pyiqa has no metric without reference called {metric!r}; {suggest(metric, known)}"
            )
        try:
            self.metric = pyiqa.create_metric(metric, device=self.device).eval()
        except Exception as error:  # downloads and checkpoints fail in many ways
            raise UserError(
                f"pyiqa cannot make {metric!r}: {type(error).__name__}: {error}"
            ) from error
        self.sign = -scale if self.metric.lower_better else scale

    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        quality: Tensor = self.metric(pictures.float().clamp(0, 1))
        return self.sign * quality.flatten()
