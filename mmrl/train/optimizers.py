"""Builds optimizers by name."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import nn

from mmrl.core.registry import OPTIMIZERS
from mmrl.train.whole import WholeSteps

NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Decay = Annotated[float, Ge(0), Lt(1)]
# why an optimizer is not used on shards (FSDP2); all others were compared with one process
WHOLE_ONLY = {
    "prodigy": "its learning rate comes from sums over all weights, which prodigyopt sums over "
    "each process's part alone, so that processes would step by different rates",
}
Made = TypeVar("Made", bound=Callable[..., Any])


def requires(package: str) -> Callable[[Made], Made]:
    """Mark what needs a package of the extra ``low-memory``; the configuration's check reads the
    mark, before anything is loaded."""

    def marked(entry: Made) -> Made:
        entry.needs_package = package  # type: ignore[attr-defined]
        return entry

    return marked


class WholeAdafactor(WholeSteps, torch.optim.Adafactor):
    """Takes means over rows and columns of whole matrices, also where processes hold shards."""


@OPTIMIZERS.register("adamw")
def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-4,
    weight_decay: NotNegative = 1e-4,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)


@OPTIMIZERS.register("sgd")
def sgd(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-2,
    momentum: NotNegative = 0.0,
    weight_decay: NotNegative = 0.0,
) -> torch.optim.Optimizer:
    """Build stochastic gradient descent."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)


@OPTIMIZERS.register("adamw_8bit")
@requires("bitsandbytes")
def adamw_8bit(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-4,
    weight_decay: NotNegative = 1e-4,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    min_8bit_size: Annotated[int, Ge(0)] = 4096,
) -> torch.optim.Optimizer:
    """Build AdamW whose two moments are kept in 8 bits by blocks (Dettmers et al. 2022).

    It is bitsandbytes' ``AdamW8bit``; parameters of fewer than ``min_8bit_size`` numbers keep
    moments in 32 bits.
    """
    return _adamw_8bit(parameters, lr, weight_decay, betas, eps, min_8bit_size)


@OPTIMIZERS.register("paged_adamw_8bit")
@requires("bitsandbytes")
def paged_adamw_8bit(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-4,
    weight_decay: NotNegative = 1e-4,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
    min_8bit_size: Annotated[int, Ge(0)] = 4096,
) -> torch.optim.Optimizer:
    """Build ``adamw_8bit`` with moments that a CUDA device short of memory moves to the host.

    Dettmers et al. 2023, "QLoRA".
    """
    paged = torch.cuda.is_available()  # a CPU has nothing to page out
    return _adamw_8bit(parameters, lr, weight_decay, betas, eps, min_8bit_size, is_paged=paged)


def _adamw_8bit(
    parameters: Iterable[nn.Parameter],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    min_8bit_size: int,
    **options: bool,
) -> torch.optim.Optimizer:
    from mmrl.train.adamw_8bit import WholeAdamW8bit

    make: Any = WholeAdamW8bit  # bitsandbytes has no types
    built: torch.optim.Optimizer = make(
        parameters,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        min_8bit_size=min_8bit_size,
        **options,
    )
    return built


@OPTIMIZERS.register("adafactor")
def adafactor(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-2,
    weight_decay: NotNegative = 0.0,
    beta2_decay: Annotated[float, Le(0)] = -0.8,
    clip_threshold: Positive = 1.0,
) -> torch.optim.Optimizer:
    """Build Adafactor (Shazeer and Stern 2018), which keeps rows and columns of the second moment.

    It is torch's: a step is ``lr`` times the size of the parameter, at most 1 / sqrt(step).
    """
    return WholeAdafactor(
        parameters, lr=lr, weight_decay=weight_decay, beta2_decay=beta2_decay, d=clip_threshold
    )


@OPTIMIZERS.register("muon")
def muon(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-4,
    weight_decay: NotNegative = 1e-4,
    momentum: Decay = 0.95,
    nesterov: bool = True,
    ns_steps: Annotated[int, Ge(1)] = 5,
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
) -> torch.optim.Optimizer:
    """Build Muon (Jordan et al. 2024) for matrices, and AdamW for all other parameters.

    ``match_rms_adamw`` scales Muon's steps to the size of AdamW's (Liu et al. 2025), so that both
    take the same ``lr``.
    """
    from mmrl.train.muon import MuonWithAdamW

    matrix = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_steps": ns_steps,
        "adjust_lr_fn": adjust_lr_fn,
    }
    rest = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
    return MuonWithAdamW(parameters, lr, matrix, rest)


@OPTIMIZERS.register("prodigy")
@requires("prodigyopt")
def prodigy(
    parameters: Iterable[nn.Parameter],
    *,
    lr: Positive = 1.0,
    weight_decay: NotNegative = 0.0,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: Positive = 1e-8,
    d0: Positive = 1e-6,
    d_coef: Positive = 1.0,
    growth_rate: Annotated[float, Gt(1)] = float("inf"),
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
) -> torch.optim.Optimizer:
    """Build Prodigy (Mishchenko and Defazio 2024), which finds its learning rate; ``lr`` scales it.

    It is prodigyopt's.
    """
    from prodigyopt import Prodigy

    with contextlib.redirect_stdout(io.StringIO()):  # it prints that its weight decay is decoupled
        built: torch.optim.Optimizer = Prodigy(
            parameters,
            lr=lr,
            weight_decay=weight_decay,
            betas=betas,
            eps=eps,
            d0=d0,
            d_coef=d_coef,
            growth_rate=growth_rate,
            use_bias_correction=use_bias_correction,
            safeguard_warmup=safeguard_warmup,
        )
    return built


def unshardable(name: str) -> str | None:
    """Say why an optimizer of this name cannot step on shards of the weights; None if it can, or is
    unknown."""
    if name not in WHOLE_ONLY:
        return None
    return f"{WHOLE_ONLY[name]}; use another optimizer, or launch copies (--multi_gpu)"
