"""Splits the sequence of a diffusers network over processes by diffusers' own context parallelism
(Ulysses and ring attention), for videos and images whose activations do not fit on one device.

The processes of a group hold the same rows and the same weights. Each computes a part of every
sequence, and all get the whole output, so that samples and log-probs are those of one process.
Gradients are parts: summed over the group they are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.errors import UserError, called
from mmrl.core.libraries import find_class
from mmrl.policies.diffusion.attention_backends import quiet

UNEVEN = "must be divisible by mesh size"  # of diffusers' assertion


def unsupported(policy: Any) -> str | None:
    """Return why a policy (an object, a class, or a factory) cannot split its sequences; None where
    it can. Loads nothing."""
    name = called(policy)
    network = getattr(policy, "network", None)
    if not isinstance(network, str):
        return (
            f"{name} is not run by diffusers' context parallelism, which serves its image and "
            f"video transformers only; leave it out"
        )
    cls = find_class("diffusers", network)
    if getattr(cls, "_cp_plan", None) is None:
        return f"diffusers has no plan to split the sequences of {network} ({name}); leave it out"
    return None


def unfit(attention: str, ring_degree: int) -> str | None:
    """Return why an attention backend cannot exchange parts of a sequence; None where it can."""
    if attention == "xformers":
        return "policy.attention xformers cannot exchange parts of a sequence; use auto or sdpa"
    if ring_degree > 1 and attention != "flash":
        return (
            "ring_degree joins parts of attention by their log-sum-exp, which torch's SDPA does "
            "not return; use ulysses_degree, or policy.attention: flash on CUDA"
        )
    return None


def split_sequences(net: nn.Module, ulysses_degree: int, ring_degree: int) -> None:
    """Split the sequences of every transformer in ``net`` over groups of neighbouring processes; a
    collective call, before the network is wrapped.

    Raises UserError where the attention heads cannot be divided. Sequences that cannot raise
    UserError at the first pass.
    """
    from torch.distributed.device_mesh import init_device_mesh

    groups = distributed.process()[1] // (ulysses_degree * ring_degree)
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator and torch.accelerator.is_available() else "cpu"
    mesh = init_device_mesh(
        kind, (groups, ring_degree, ulysses_degree), mesh_dim_names=("rows", "ring", "ulysses")
    )
    for transformer in net.modules():
        if getattr(type(transformer), "_cp_plan", None) is not None:
            _split(transformer, mesh["ring", "ulysses"], ulysses_degree, ring_degree)


def _split(net: Any, mesh: Any, ulysses_degree: int, ring_degree: int) -> None:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    heads = getattr(net.config, "num_attention_heads", ulysses_degree)
    if heads % ulysses_degree:
        raise UserError(
            f"train.context_parallel.ulysses_degree {ulysses_degree}: the {heads} attention heads "
            f"of {type(net).__name__} cannot be divided among as many processes; use a divisor of "
            f"{heads}"
        )
    config = ParallelConfig(
        context_parallel_config=ContextParallelConfig(
            ulysses_degree=ulysses_degree, ring_degree=ring_degree, mesh=mesh
        )
    )
    rank, size = distributed.process()
    config.setup(rank, size, next(net.parameters()).device, mesh=mesh)
    # diffusers (0.42) divides by the number of accelerators, 0 on CPUs
    net._parallel_config, net._resolve_parallel_config = None, lambda known: known
    with quiet():  # warns that this is experimental
        net.enable_parallelism(config=config, cp_plan=_plan(net))
    del net._resolve_parallel_config
    net._parallel_config = config
    _attend_to_whole_texts(net)
    net.register_forward_pre_hook(_with_whole_gradients, with_kwargs=True)
    net.forward = _explained(net.forward, type(net).__name__)


def _plan(net: Any) -> dict[str, Any]:
    """Return diffusers' plan, but keep texts whole where they are cross-attended (LTX): backward
    through Ulysses' exchange (0.42) assumes as many keys as queries."""
    plan = dict(net._cp_plan)
    if _cross_attentions(net) and "" in plan:
        plan[""] = {k: v for k, v in plan[""].items() if not str(k).startswith("encoder_")}
    return plan


def _cross_attentions(net: Any) -> list[Any]:
    """List the cross-attention layers to texts in the blocks of a network."""
    blocks = getattr(net, "transformer_blocks", ())
    return [block.attn2 for block in blocks if hasattr(block, "attn2")]


def _attend_to_whole_texts(net: Any) -> None:
    for layer in _cross_attentions(net):
        layer.processor._parallel_config = None


def _with_whole_gradients(net: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Make gradients of the network's inputs those of the whole sequence, for rewards
    differentiated through several passes."""

    def joined(x: Any) -> Any:
        is_differentiated = isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
        return distributed.joined_gradient(x) if is_differentiated else x

    return tuple(joined(x) for x in args), {name: joined(x) for name, x in kwargs.items()}


def _explained(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Turn diffusers' assertion about an indivisible length into a UserError."""

    @wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except AssertionError as error:
            if UNEVEN not in str(error):
                raise
            lengths = sorted({x.shape[1] for x in (*args, *kwargs.values()) if _is_sequence(x)})
            shown = " or ".join(map(str, lengths))
            raise UserError(
                f"train.context_parallel: a sequence of {name} cannot be cut into equal parts "
                f"(lengths of this pass: {shown}, before patches); choose policy.size, frames or "
                f"text_length so that the tokens of a sample, and of a text, divide by the "
                f"processes of a group"
            ) from error

    return explained


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 3
