"""Replaces a pipeline's random draws by known noise, and silences diffusers, during a replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmrl.zoo.models.any_pipeline.replay_starts import in_posterior
from samplers.noise import Rng

DECODING = Rng.of("noise of decoders")


class Draws(TorchFunctionMode):
    """Replaces the first draw of as many normal numbers as ``noise`` has by these; of several
    noises each is used once, and none by an autoencoder that encodes a picture."""

    def __init__(self, noise: Tensor | Sequence[Tensor]):
        super().__init__()
        self.noises = [noise] if isinstance(noise, Tensor) else list(noise)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.randn or not self.noises:
            return func(*args, **kwargs)
        shape = kwargs.get("size", args[0] if len(args) == 1 else args)
        drawn = torch.Size([shape] if isinstance(shape, int) else shape)
        for place, noise in enumerate(self.noises):
            if drawn.numel() == noise.numel() and not in_posterior():
                if kwargs.get("generator") is not None:  # what it draws later shall be the same
                    like = {name: kwargs.get(name) for name in ("dtype", "device")}
                    torch.empty(drawn, **like).normal_(generator=kwargs["generator"])
                return self.noises.pop(place).reshape(drawn)
        return func(*args, **kwargs)


class LateDraws(TorchFunctionMode):
    """Answers draws of normal numbers for a batch of rows, once ``begun()``, with noise of the
    rows' own: decoders that denoise, or see noisy latents, are then the same for a row wherever it
    is decoded."""

    def __init__(self, row: Tensor, begun: Callable[[], bool]):
        super().__init__()
        self.row = row
        self.begun = begun
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.randn or not self.begun():
            return func(*args, **kwargs)
        shape = kwargs.get("size", args[0] if len(args) == 1 else args)
        drawn = torch.Size([shape] if isinstance(shape, int) else shape)
        if len(drawn) < 2 or drawn[0] != len(self.row):
            return func(*args, **kwargs)
        noise = DECODING.normal(self.row, tuple(drawn[1:]), self.count, torch.float32)
        self.count += 1
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return noise.to(device=kwargs.get("device"), dtype=dtype)


class Quiet(logging.Filter):
    """Silences diffusers in a block: its warnings about a prompt would be repeated in every step.
    Setting levels would be slower, as every logger's cache would be reset."""

    depth = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.depth or record.levelno >= logging.ERROR

    def __enter__(self) -> None:
        self.depth += 1
        for handler in logging.getLogger("diffusers").handlers:
            handler.addFilter(self)  # once, however often

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


QUIET = Quiet()
