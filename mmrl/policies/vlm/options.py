"""Refuses options of a vision-language policy that exclude each other or that its network does not
support, and yields warnings for the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmrl.core.errors import UserError
from mmrl.core.sharding import sharded
from mmrl.policies.draft_verification import SHARDED
from mmrl.policies.vlm.caches import divisible, shareable
from mmrl.policies.vlm.compiled import Compiled
from mmrl.policies.vlm.engines.choice import EXTERNAL
from mmrl.policies.vlm.families import FAMILIES
from mmrl.policies.vlm.packing import enable
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from mmrl.policies.vlm.routing import Routing

if TYPE_CHECKING:
    from mmrl.policies.vlm.scoring import Passes


def refuse_tree(policy: Passes, net: SharedPrefix) -> None:
    """Raise UserError where answers are to branch and cannot."""
    if policy.tree is None or policy.engine == "own" and net.share and divisible(net.hf):
        return
    raise UserError(
        f"policy option tree: answers that branch are written by mmrl's own engine, on a "
        f"prompt that is read once: leave out engine and prefix_sharing, or the tree; this "
        f"is engine {policy.engine} and {net.config.model_type}"
    )


def refuse_together(policy: Passes, replays_routing: bool, both_trained: bool) -> None:
    """Raise UserError for options that exclude each other; ``both_trained``: lora and train."""
    if policy.engine in EXTERNAL and (policy.anneal or policy.warp.adaptive):
        raise UserError(
            f"policy options anneal and adaptive_temperature: engine = {policy.engine} takes one "
            "temperature; use own or hf"
        )
    if policy.refill != "none" and (policy.engine != "own" or policy.sharing == "none"):
        raise UserError(
            "policy option refill needs engine own and prompts that are shared (not "
            "prefix_sharing: none)"
        )
    if both_trained:
        raise UserError(
            "policy options lora and train exclude each other; write train: {language: lora, ...}"
        )
    in_pieces = replays_routing or policy.anneal is not None or policy.refill != "none"
    if policy.tree is not None and in_pieces:
        raise UserError(
            "policy option tree: leave out anneal, refill and replay_routing, which go by the "
            "places of tokens in answers that are written in one piece"
        )


def refuse_drafts(policy: Passes) -> None:
    """Raise UserError where answers cannot continue prefixes of others."""
    if policy.plainly or policy.outside is not None or not divisible(policy.net.hf):
        raise UserError(
            "train.stages.speculative and train.stages.partial_rollout: only the policy's own "
            "sampler goes on from a draft; set policy.vlm.engine: own, for a family whose prompts "
            "can be shared and whose layers keep keys and values"
        )
    if policy.net.routing is not None:
        raise UserError(
            "train.stages.speculative and train.stages.partial_rollout: experts are replayed of "
            "tokens that are drawn, not of those that are kept: leave out policy.vlm.replay_routing"
        )
    if sharded(policy.net):
        raise UserError(SHARDED)


def replay_experts(policy: Passes, net: SharedPrefix) -> None:
    """Record and replay the experts of tokens. Raises UserError where that is impossible."""
    if policy.engine != "own" or not net.share or net.packed:
        raise UserError(
            "policy option replay_routing needs engine own, prompts that are shared (not "
            "prefix_sharing: none) and padding (remove_padding: false)"
        )
    net.routing = Routing(net.hf)


def pack_batches(
    policy: Passes, net: SharedPrefix, attention: str, packed: bool | None, branches: bool
) -> None:
    """Turn on packed batches where options choose them; UserError where the model does not support
    them."""
    if packed and (attention not in ("sdpa", "xformers") or not net.share or not divisible(net.hf)):
        raise UserError(
            "policy option remove_padding needs attention sdpa or xformers, prompts that are "
            "shared (not share: none), and "
            "a family that can share them, none of whose layers keeps a state or attends to "
            "pictures alone; this is "
            f"attention {attention} and {net.config.model_type}"
        )
    net.fused = attention == "xformers"
    net.branches = branches
    able = net.share and divisible(net.hf)
    by_default = net.fused or branches and attention == "sdpa"
    net.packed = packed or packed is None and by_default and able
    by_itself = packed is None and attention == "sdpa" and net.config.model_type in FAMILIES
    net.packs_sparse = by_itself and able and policy.engine == "own"
    if net.packed or net.packs_sparse:
        enable(net.hf)


def compile_passes(policy: Passes, net: SharedPrefix, compile: bool | str) -> None:
    """Compile the passes of a policy by torch.compile, ``compile`` True or the name of a backend.
    Raises UserError where that is impossible."""
    if not compile:
        return
    experts = getattr(net.text_config, "num_experts", None) or getattr(
        net.text_config, "n_routed_experts", None
    )
    if not net.plain or experts:
        raise UserError(
            f"policy option compile: the passes of {net.config.model_type} are compiled only where "
            "every layer attends to all tokens before, by attention sdpa, and has no experts; "
            "leave it out"
        )
    if not net.head.plain:
        raise UserError(
            f"policy option compile: {net.config.model_type} changes its logits behind its head, "
            "by a function that graphs do not take in; leave it out"
        )
    if policy.engine != "own" or not net.share or net.packed or policy.tree is not None:
        raise UserError(
            "policy option compile needs engine own, prompts that are shared (not prefix_sharing: "
            "none) and padding (remove_padding: false), and no tree"
        )
    net.compiled = Compiled(net, "inductor" if compile is True else compile)
    policy.compiled = True


def refuse_shards(net: SharedPrefix) -> None:
    """Raise UserError where compiled passes would have to gather sharded weights."""
    if net.compiled is not None and sharded(net):
        raise UserError(
            "policy option compile: weights that processes share are gathered layer by layer, "
            "which a graph of all layers does not do; leave it out, or the sharding"
        )


def warnings_of(policy: Passes, hf: Any) -> Iterator[str]:
    """Yield warnings for the log."""
    if policy.sharing == "auto" and not shareable(hf):
        yield f"prompts of {hf.config.model_type} are read once for every answer, not once a group"
    if policy.outside is not None:
        yield from policy.outside.notes
        yield (
            f"{policy.engine} samples with other kernels than the policy scores with: "
            f"watch engine/gap, and set the "
            "objective's importance_sampling, which corrects for it"
        )
