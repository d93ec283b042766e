"""Chooses the modules that FSDP2 gathers one by one, where a network's class names them wrongly or
not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from mmrl.core.sharding import whole_blocks

SHARE = 0.1  # of a network's weights that a list of modules holds, to be worth gathering in parts


def shard_classes(net: nn.Module, whole: Sequence[nn.Module] = ()) -> list[str]:
    """Name the classes of the modules that are gathered one by one, in alphabetical order: those
    of the network's ``_no_split_modules`` that it has, but for those inside of ``whole`` modules,
    which are not sharded.

    Where it lacks one of them, or its class names none, the classes in its large lists of modules
    are added. accelerate refuses a list with a class that the network lacks, and many have one:
    HunyuanVideo of diffusers names the blocks of both its variants, LLaVA of transformers the text
    embeddings of a CLIP of which it has only the vision tower.
    """
    present = {type(module).__name__ for module in net.modules()}
    named = set(whole_blocks(net))
    if not named:  # a wrapper around networks that name them
        named = {name for module in net.modules() for name in whole_blocks(module)}
    excluded = _around_embedding(net)
    excluded |= {type(module).__name__ for part in whole for module in part.modules()}
    named -= excluded
    classes = named & present
    if classes == named and named:
        return sorted(classes)
    least = SHARE * sum(p.numel() for p in net.parameters())
    return sorted(classes | _listed(net, classes, least) - excluded)


@contextmanager
def ties_kept(net: nn.Module) -> Iterator[None]:
    """Let accelerate gather the token embedding and the head with the rest of a network in this
    block, if they share a weight with another module, as BERT's head shares its bias: torch refuses
    a weight in two units, and accelerate makes a unit of these two."""
    ends = _ends(net)
    weights = {id(p) for end in ends for p in end.parameters()}
    around = (module for module in net.modules() if not any(module is end for end in ends))
    held = (p for module in around for p in module.parameters(recurse=False))
    if not any(id(p) in weights for p in held):
        yield
        return
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(net, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(net, name)


def _ends(net: nn.Module) -> list[nn.Module]:
    """List a network's token embedding and its head, as far as its class names them."""
    known = (getattr(net, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
    return [end for end in known if end is not None]


def _around_embedding(net: nn.Module) -> set[str]:
    """Name the classes of the modules that hold a weight of the token embedding or of the head,
    which is mostly tied to it: accelerate gathers these two itself."""
    weights = {id(p) for end in _ends(net) for p in end.parameters()}
    return {
        type(module).__name__
        for module in net.modules()
        if any(id(p) in weights for p in module.parameters())
    }


def _listed(module: nn.Module, classes: set[str], least: float) -> set[str]:
    """Return the classes of the modules in the outermost lists of at least ``least`` weights,
    without those inside of ``classes``."""
    listed: set[str] = set()
    for child in module.children():
        if type(child).__name__ in classes or sum(p.numel() for p in child.parameters()) < least:
            continue
        if isinstance(child, nn.ModuleList) and not any(
            isinstance(x, nn.ModuleList) for x in child
        ):
            listed |= {type(block).__name__ for block in child if _is_block(block)} - classes
        else:
            listed |= _listed(child, classes, least)
    return listed


def _is_block(module: nn.Module) -> bool:
    """Tell whether a module's class belongs to the model: torch's and adapters' classes are used
    everywhere."""
    return not hasattr(nn, type(module).__name__)
