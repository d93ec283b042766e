"""Supports the API in several processes started by torchrun or accelerate: all get the same samples
and runs, and one of them writes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.sharding import is_sharded
from mmrl.core.types import Media, Prompt
from mmrl.policies.base import Policy as Model


def writes() -> bool:
    """Tell whether this process is the one that writes files."""
    return distributed.is_main()


def meet() -> None:
    """Wait for all processes, so that files written by one exist for all; a collective call."""
    distributed.any_of(False)


def whole(
    media: Media, repeated: Sequence[Prompt], prompts: Sequence[Prompt], num_samples: int
) -> tuple[Media, list[Prompt]]:
    """Gather the samples that each process drew for its share of the ``prompts``; a collective
    call.

    ``repeated``: the prompt of each of this process's samples. Raises UserError for samples that
    are neither tensors nor texts.
    """
    if distributed.world()[1] == 1:
        return media, list(repeated)
    every = [prompt for prompt in prompts for _ in range(num_samples)]
    if isinstance(media, Tensor):
        return distributed.all_gather_rows(media), every
    with distributed.together():
        if not all(isinstance(item, str) for item in media):
            raise UserError("samples of several kinds are drawn by one process: start only one")
    return distributed.all_gather_json(media), every


def check_whole(model: Model, remedy: str) -> None:
    """Raise UserError with a remedy if the weights are sharded: such a network can neither be
    written by one process nor be prepared for another training."""
    if any(is_sharded(parameter) for parameter in model.net.parameters()):
        raise UserError(f"each process holds a part of this policy's weights (FSDP2): {remedy}")


def check_alone(name: str) -> None:
    """Raise UserError for a call that starts processes, in one of several."""
    if (size := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise UserError(
            f"{name}: this is one of {size} processes, and {name} starts its own; call it from a "
            f"script that is started once"
        )
