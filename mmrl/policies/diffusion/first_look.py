"""Checks once, when a flow first samples, what sampling and scoring rely on: one row of conditions
per prompt, and rows that are independent of each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl.core.contract import returned
from mmrl.core.distributed import StopAll, all_max
from mmrl.policies.base import rows_of, without_empty
from samplers.noise import Rng

if TYPE_CHECKING:
    from mmrl.policies.diffusion.flow_passes import FlowPasses

RNG = Rng.of("first look")
# relative to the velocity: passes of one width are bit-equal, others differ by rounding
ALLOWED = 1e-3
OTHER_WIDTH = 0.05


def check_conditions(policy: FlowPasses, cond: Mapping[str, Any], prompts: int) -> None:
    """Raise UserError unless ``encode`` returned one row per prompt, and one for the empty
    prompt."""
    for name, value in without_empty(dict(cond)).items():
        _check_rows(policy, name, value, prompts)
    _check_rows(policy, "uncond", cond.get("uncond"), 1)


def _check_rows(policy: FlowPasses, name: str, value: Any, rows: int) -> None:
    if isinstance(value, Mapping):
        for inner, part in value.items():
            _check_rows(policy, f"{name}.{inner}", part, rows)
    if isinstance(value, Tensor):
        shape = (rows, *value.shape[1:])
        returned(value, f"{type(policy).__name__}.encode ({name})", P_features=shape)


@torch.no_grad()
def check_independence(policy: FlowPasses, cond: Mapping[str, Any], prompts: int) -> None:
    """Compare the velocity of a row in a batch of two with that of the row alone; a collective call
    of sharded networks. Raises UserError where they differ, since log-probs would depend on which
    rows share a pass, and where one is not finite.
    """
    two = torch.arange(2, device=policy.device)
    rows = rows_of(without_empty(dict(cond)), two * (prompts - 1))
    x = policy.begin(RNG.normal(two, policy.shape, 0, policy.dtype), rows)
    t = policy.times[:1].to(policy.dtype).to(policy.device).expand(2)
    beside = policy._pass(x, t, rows)[0]
    alone, again = (policy._pass(x[:1], t[:1], rows_of(rows, two[:1]))[0] for _ in range(2))
    size = alone.abs().max().clamp(min=1e-6)
    far = [(v - alone).abs().max() / size for v in (beside, again)]
    broken = (~alone.isfinite()).any().to(size)
    apart, random, broken = all_max(torch.stack([*far, broken])).tolist()
    if broken:
        raise StopAll(
            f"{type(policy).__name__}.velocity gave NaN or infinity in the first pass, at time "
            f"{float(t[0]):g}: its weights, its arithmetic (train.precision, policy option dtype), "
            f"or what its code divides by or takes the logarithm of are at fault"
        )
    allowed = ALLOWED if policy.pass_sizes.width() else OTHER_WIDTH
    together = policy.pass_sizes.width() != 1  # rows share passes
    # for a random network the check of log-probs decides
    if together and apart > allowed >= random:
        name = type(policy).__name__
        raise StopAll(
            f"{name}.velocity must treat rows independently; a row beside another comes out "
            f"{apart:.1%} different from the row alone, so log-probs would depend on which rows "
            f"share a pass. Remove what looks along the first dimension, such as a mean over the "
            f"batch or batch normalisation, or pass single rows (train.micro_batch_size: 1)"
        )
