"""Defines how data become noise, x_t = alpha(t) x_0 + sigma(t) e, and how x_0 and e follow from a
network's output.

t in [0, 1] everywhere, 1 is noise and 0 is data. Tensors are [B, *]; times [B] or scalars.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

Number = Tensor | float
Prediction = Literal["epsilon", "v_prediction", "sample"]


class Process(Protocol):
    """Defines a noising process; ``output`` is what the network gives at x_t."""

    def scales(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (alpha, sigma) at t, each [B, 1, ...] for states ``like`` [B, *]."""

    def clean(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        """Predict x_0 [B, *]."""

    def noise(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        """Predict e [B, *]."""

    def target(self, clean: Tensor, noise: Tensor, t: Number) -> Tensor:
        """Compute the output [B, *] that a perfect network would give."""

    def snap(self, t: Tensor) -> Tensor:
        """Round times [B] above 0 up to those that the network was trained on."""

    def gain(self, t: Number, like: Tensor) -> Tensor:
        """Compute the derivative of the predicted x_0 by the output, [B, 1, ...]."""


def per_row(value: Number, like: Tensor) -> Tensor:
    """Shape a time or a scale to [B, 1, ...] in the dtype (at least float32) and on the device of
    ``like`` [B, *]."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    shape = (len(like), *[1] * (like.ndim - 1))
    return (
        torch.as_tensor(value, dtype=dtype, device=like.device)
        .reshape(-1, *shape[1:])
        .expand(shape)
    )


def noised(process: Process, clean: Tensor, noise: Tensor, t: Number) -> Tensor:
    """Compute the state [B, *] at t of a clean sample with this noise."""
    if isinstance(process, Flow):
        return torch.lerp(clean, noise, per_row(t, clean).to(clean))
    alpha, sigma = process.scales(t, clean)
    return alpha * clean + sigma * noise


@dataclass(frozen=True)
class Flow:
    """Implements rectified flow: alpha = 1 - t, sigma = t; the network gives the velocity e - x_0
    (Liu et al. 2022)."""

    def scales(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        t = per_row(t, like)
        return 1 - t, t

    def clean(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        return x - per_row(t, x) * output

    def noise(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        return x + (1 - per_row(t, x)) * output

    def target(self, clean: Tensor, noise: Tensor, t: Number) -> Tensor:
        return noise - clean

    def snap(self, t: Tensor) -> Tensor:
        return t

    def gain(self, t: Number, like: Tensor) -> Tensor:
        return per_row(t, like)


def scaled_linear(steps: int = 1000, start: float = 0.00085, end: float = 0.012) -> Tensor:
    """Return the cumulative alphas of Stable Diffusion 1 and XL, [steps] float64."""
    beta = torch.linspace(start**0.5, end**0.5, steps, dtype=torch.float64).square()
    return (1 - beta).cumprod(0)


@dataclass(frozen=True)
class Diffusion:
    """Implements discrete variance-preserving diffusion: alpha^2 = ``alphas`` [T] cumulative,
    sigma^2 = 1 - alpha^2.

    Time (i + 1) / T is timestep i; 0 is the state after the last step, where alpha^2 is ``final``:
    1, or alphas[0] for schedulers with ``set_alpha_to_one: false``. Ho et al. 2020; Salimans and Ho
    2022 for v.
    """

    prediction: Prediction = "epsilon"
    alphas: Tensor = field(default_factory=scaled_linear, compare=False)
    final: float = 1.0
    tables: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def timestep(self, t: Number) -> Tensor:
        """Return the timestep i of a time above 0, -1 for 0, long."""
        return (torch.as_tensor(t, dtype=torch.float64) * len(self.alphas)).round().long() - 1

    def scales(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        index = self.timestep(t) + 1
        bar = self._table(index.device)[index]
        return per_row(bar.sqrt(), like), per_row((1 - bar).sqrt(), like)

    def _table(self, device: torch.device) -> Tensor:
        """Return alpha^2 by timestep + 1, [T + 1], on the device of the times, moved only once."""
        if device not in self.tables:
            with torch.inference_mode(False):
                table = torch.cat([self.alphas.new_tensor([self.final]), self.alphas])
                self.tables[device] = table.to(device)
        return self.tables[device]

    def clean(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        alpha, sigma = self.scales(t, x)
        if self.prediction == "sample":
            return output
        return (
            (x - sigma * output) / alpha
            if self.prediction == "epsilon"
            else alpha * x - sigma * output
        )

    def noise(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        alpha, sigma = self.scales(t, x)
        if self.prediction == "epsilon":
            return output
        return (
            (x - alpha * output) / sigma
            if self.prediction == "sample"
            else alpha * output + sigma * x
        )

    def target(self, clean: Tensor, noise: Tensor, t: Number) -> Tensor:
        alpha, sigma = self.scales(t, clean)
        return {"epsilon": noise, "sample": clean, "v_prediction": alpha * noise - sigma * clean}[
            self.prediction
        ]

    def snap(self, t: Tensor) -> Tensor:
        return (t * len(self.alphas)).ceil().clamp(1, len(self.alphas)) / len(self.alphas)

    def gain(self, t: Number, like: Tensor) -> Tensor:
        alpha, sigma = self.scales(t, like)
        return {"epsilon": sigma / alpha, "sample": torch.ones_like(sigma), "v_prediction": sigma}[
            self.prediction
        ]


@dataclass(frozen=True)
class Consistent(Diffusion):
    """Implements a latent consistency model: the predicted x_0 is c_skip x_t + c_out x_0(output),
    at timestep 0 x_t itself.

    Luo et al. 2023, "Latent Consistency Models", section 4.1: with tau = ``scaling`` times the
    timestep, c_skip = d^2 / (tau^2 + d^2), c_out = tau / sqrt(tau^2 + d^2) and d = 0.5.
    """

    scaling: float = 10.0

    def clean(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        skip, keep = self._boundary(t, x)
        return skip * x + keep * super().clean(x, output, t)

    def gain(self, t: Number, like: Tensor) -> Tensor:
        return self._boundary(t, like)[1] * super().gain(t, like)

    def _boundary(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        tau = per_row(self.scaling * self.timestep(t), like)
        return 0.25 / (tau**2 + 0.25), tau / (tau**2 + 0.25).sqrt()


@dataclass(frozen=True)
class TrigFlow:
    """Implements TrigFlow: alpha = cos(angle), sigma = ``deviation`` sin(angle), angle = ``end`` t;
    the network gives the derivative of the state by the angle.

    Lu and Song 2024, "Simplifying, stabilizing and scaling continuous-time consistency models",
    section 3. ``deviation`` is that of the data; ``end``, where a path begins, is that of
    SCMScheduler in diffusers, 4e-6 beyond a right angle.
    """

    deviation: float = 0.5
    end: float = 1.5708

    def scales(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self._rotation(t, like)
        return cosine, self.deviation * sine

    def clean(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        cosine, sine = self._rotation(t, x)
        return cosine * x - sine * output

    def noise(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        cosine, sine = self._rotation(t, x)
        return (sine * x + cosine * output) / self.deviation

    def target(self, clean: Tensor, noise: Tensor, t: Number) -> Tensor:
        cosine, sine = self._rotation(t, clean)
        return cosine * self.deviation * noise - sine * clean

    def snap(self, t: Tensor) -> Tensor:
        return t

    def gain(self, t: Number, like: Tensor) -> Tensor:
        return self._rotation(t, like)[1]

    def _rotation(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.end * per_row(t, like)
        return angle.cos(), angle.sin()
