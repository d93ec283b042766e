"""Weighs the decisions of a row with two segments."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.core.types import Rollout

Weigh = Literal["token", "segment"]


def weights(
    rollout: Rollout, width: int, weigh: Weigh, share: float, branches: int
) -> Tensor | None:
    """Return weights [B, K] of the decisions, of which the first ``width`` are text; None: all
    count the same.

    "token": every decision alike. "segment": a row's loss is share times the mean over its text
    plus (1 - share) times the mean over its image; a row with one of them has that mean. A plan
    with several images is in the mask of one row only and counts ``branches`` times there, so that
    the sum over rows is that of rows without shared plans. With train.loss_agg_mode
    seq_mean_token_mean the loss is then the mean of these over rows; "token" is meant for
    token_mean.
    """
    if weigh == "token" and branches == 1:
        return None
    written = rollout.sample >= 0
    text = written[:, :width].sum(1)
    image = written[:, width:].sum(1)
    twins = torch.where((text > 0) & (image > 0), branches, 1)
    if weigh == "token":
        first = twins.to(rollout.logprob)
        second = torch.ones_like(twins).to(rollout.logprob)
    else:
        text_weight = torch.where(image > 0, torch.where(text > 0, share, 0.0), 1.0).to(
            rollout.logprob
        )
        length = rollout.mask.sum(1)  # the divisor of seq_mean_token_mean
        first = twins * text_weight * length / text.clamp_min(1)
        second = (1 - text_weight) * length / image.clamp_min(1)
    return torch.cat(
        [first[:, None].expand(-1, width), second[:, None].expand(-1, written.shape[1] - width)], 1
    )
