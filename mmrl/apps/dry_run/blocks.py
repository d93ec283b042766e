"""Spares a rehearsal the blocks of a network that are equal: a few of them are passed through, the
others are stood in for, and what they take is that of an equal one.

A stand-in has the inputs, outputs and gradients of its block, in shape, type and storage, and
nothing between. ``Tracker`` knows where each block begins, on the way there and on the way back,
and puts what an equal block took in the place of every stand-in, operation for operation. A block
is stood in for only after two others of the same call, with equal modules and equal inputs, did
the same operations and left the same bytes behind; if their ways back differ, or a stand-in's
surroundings do, ``Uneven`` is raised and the network has to be passed through whole. On the way
back the block after a stand-in gets gradients that lie in other storages than a real one's; what it
takes is replaced by its equal's as well, so three equal blocks in a row come before a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mmrl.apps.dry_run.timeline import Mark, Timeline

FEWEST = 6  # blocks in a row, of which the first four and the last are passed through
NUMBERED = ("idx", "index", "layer_id", "name")  # attributes that may hold a block's place
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@contextmanager
def sparing(nets: Sequence[nn.Module], timeline: Timeline) -> Iterator[None]:
    """Let the equal blocks of ``nets`` be stood in for while ``timeline`` is written."""
    rows = [Row(blocks, timeline) for net in nets for blocks in rows_of(net)]
    wrapped = [
        (block, "forward" in vars(block), block.forward) for row in rows for block in row.blocks
    ]
    try:
        for row in rows:
            row.wrap()
        yield
    finally:
        for block, was_own, forward in wrapped:
            if was_own:
                block.forward = forward
            else:
                del block.forward


def rows_of(net: nn.Module) -> list[list[nn.Module]]:
    """Find the outermost lists of blocks in a network."""
    if isinstance(net, nn.ModuleList) and len(net) >= FEWEST:
        return [list(net)]
    return [row for child in net.children() for row in rows_of(child)]


class Row:
    """Holds blocks that are called one after another, perhaps several times a pass."""

    def __init__(self, blocks: list[nn.Module], timeline: Timeline):
        self.blocks = blocks
        self.timeline = timeline
        self.kinds = [_kind(block, place) for place, block in enumerate(blocks)]
        self.turn = 0  # how often the row was begun
        self.last = -1
        self.passed: dict[Any, list[int]] = {}  # places of blocks passed through, by key
        self.keys: dict[int, Any] = {}  # of this turn's blocks passed through, by place
        self.looks: dict[Any, Look] = {}

    def wrap(self) -> None:
        """Put ``call`` before the forward of every block."""
        for place, block in enumerate(self.blocks):
            block.forward = _called(self, place, block.forward)

    def call(self, place: int, forward: Callable[..., Any], args: Any, options: Any) -> Any:
        """Pass through a block, or stand in for it where two equal ones were seen."""
        if torch._C._current_graph_task_id() != -1:  # computed again on the way back
            return forward(*args, **options)
        if place <= self.last:
            self.turn += 1
            self.keys.clear()
        self.last = place
        leaves, _ = tree_flatten((args, options))
        key = (id(self), self.turn, self.kinds[place], tuple(_input(x, place) for x in leaves))
        mark = Mark("forward", (id(self), self.turn), place, key)
        self.timeline.mark(mark)
        inner = mark.inner = 0 < place < len(self.blocks) - 1
        if (
            inner
            and key in self.looks
            and self.timeline.repeated(key)
            and self._follows(key, place)
        ):
            mark.stands_in = True
            return self.looks[key].stand_in(leaves, mark, self.timeline)
        self.keys[place] = key
        if inner:
            self.passed.setdefault(key, []).append(place)
        written = Parts()
        first = len(self.timeline.casts)
        layer = _cache(leaves, place)
        before = _nodes([*leaves, *_held(layer)])
        with _spied(layer, written):
            output = forward(*args, **options)
        if inner:
            self._look(key, leaves, output, written, dict(self.timeline.casts[first:]), before)
        _mark_gradient(output, mark, self.timeline)
        return output

    def _look(
        self,
        key: Any,
        leaves: list[Any],
        output: Any,
        written: Parts,
        casts: dict[int, int],
        before: set[Any],
    ) -> None:
        """Remember what a block looks like, with what outlives it, until the way back or only until
        cache and autocast end: keys and values, and weights in half precision."""
        if not self.timeline.checkpointing and (casts or written.numbers):
            held = _saved(_nodes(tree_flatten(output)[0]), before)
            written.saved = frozenset(n for x, n in written.numbers.items() if x in held)
            casts = {x: size for x, size in casts.items() if x not in held}
        look = Look.of(leaves, output, written, sum(casts.values()))
        if look is not None:
            self.looks[key] = look

    def _follows(self, key: Any, place: int) -> bool:
        """Tell whether blocks were passed through by which the ways back of this one and, if it is
        no stand-in, of the one before can be known."""
        if not torch.is_grad_enabled():
            return True
        return all(self._known(x) for x in {key, self.keys.get(place - 1, key)})

    def _known(self, key: Any) -> bool:
        """Tell whether two blocks of a key were passed through, and those after them."""
        return sum(place + 1 in self.keys for place in self.passed.get(key, [])) > 1


def _called(row: Row, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return row.call(place, forward, args, options)

    return call


def _mark_gradient(output: Any, mark: Mark, timeline: Timeline) -> None:
    """Mark the moment when the first gradient of a block's outputs is known."""
    begun: list[bool] = []

    def hook(_: Tensor) -> None:
        if not begun:
            begun.append(True)
            timeline.mark(mark.backward())

    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)


def _kind(block: nn.Module, place: int) -> Any:
    """Describe a block by all that may decide what it computes; numbers that are its place in the
    row are the same in all."""
    parts = []
    for name, module in block.named_modules():
        attributes = [
            (key, _value(value, place, key))
            for key, value in sorted(vars(module).items())
            if key not in ("_parameters", "_buffers", "_modules") and "hook" not in key
        ]
        tensors = [
            (key, tuple(x.shape), x.stride(), x.dtype, x.requires_grad)
            for table in (module._parameters, module._buffers)
            for key, x in table.items()
            if x is not None
        ]
        parts.append((name, type(module), tuple(attributes), tuple(tensors)))
    return tuple(parts)


def _value(value: Any, place: int, name: str = "index") -> Any:
    """Describe an attribute or an argument that is no tensor; one of such a name may say the
    block's place."""
    numbered = any(word in name for word in NUMBERED)
    if isinstance(value, str) and numbered:  # peft notes a layer's whole name
        return ".".join("place" if word == str(place) else word for word in value.split("."))
    if isinstance(value, PLAIN):
        return "place" if numbered and type(value) is int and value == place else value
    if isinstance(value, dict):
        return tuple((str(key), _value(x, place, str(key))) for key, x in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_value(x, place, name) for x in value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _input(leaf: Any, place: int) -> Any:
    """Describe an input: of a fake tensor all that it has, of a real one which one it is, since
    its values may decide what is computed."""
    if isinstance(leaf, FakeTensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.untyped_storage().data_ptr())
    return _value(leaf, place)


@dataclass(frozen=True)
class Part:
    """Describes a tensor that a block makes, in the storage of number ``storage``."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    trained: bool


@dataclass
class Parts:
    """Holds tensors by what they look like, not the tensors, which are to end when they do."""

    parts: list[Any] = field(default_factory=list)  # ``Part``, or what is no tensor of its own
    storages: list[int] = field(default_factory=list)  # bytes
    numbers: dict[int, int] = field(default_factory=dict)
    saved: frozenset[int] = frozenset()  # storages that the way back holds

    def add(self, leaf: Tensor) -> None:
        """Look at a fake tensor."""
        storage = leaf.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.storages)
            self.storages.append(storage.nbytes())
        shape = tuple(leaf.shape)
        number = self.numbers[storage._cdata]
        part = Part(
            number, shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype, leaf.requires_grad
        )
        self.parts.append(part)


def _nodes(leaves: Sequence[Any]) -> set[Any]:
    """Return the nodes of autograd's graph that tensors come from."""
    return {x.grad_fn for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None}


def _saved(nodes: set[Any], before: set[Any]) -> set[int]:
    """Return the storages that ``nodes``, and those behind them as far as ``before``, have saved
    for the way back."""
    storages: set[int] = set()
    visited = set(before)
    waiting = list(nodes - before)
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        names = [name for name in dir(node) if name.startswith("_saved_")]
        values = [getattr(node, name) for name in names] + list(getattr(node, "saved_tensors", ()))
        storages |= {x.untyped_storage()._cdata for x in values if isinstance(x, Tensor)}
        waiting += [following for following, _ in node.next_functions if following is not None]
    return storages


@dataclass
class Look:
    """Holds what a block looks like from outside: which of its outputs are inputs (their number),
    what the others are, and what it writes into its cache."""

    spec: TreeSpec
    outputs: Parts
    written: Parts
    # bytes of weights in half precision that autocast alone keeps until it ends: of a pass that
    # saves activations those of biases, as the way back holds the others
    casts: int

    @classmethod
    def of(cls, leaves: list[Any], output: Any, written: Parts, casts: int) -> Look | None:
        """Look at a block that was passed through; None where no stand-in could be made."""
        results, spec = tree_flatten(output)
        inputs = {id(x): number for number, x in enumerate(leaves) if isinstance(x, Tensor)}
        taken = {x.untyped_storage()._cdata for x in leaves if isinstance(x, FakeTensor)}
        if not taken or len(written.parts) not in (0, 2):
            return None
        outputs = Parts()
        for leaf in results:
            if id(leaf) in inputs:
                outputs.parts.append(inputs[id(leaf)])
            elif isinstance(leaf, FakeTensor) and leaf.untyped_storage()._cdata not in taken:
                outputs.add(leaf)
            elif isinstance(leaf, PLAIN):
                outputs.parts.append((leaf,))
            else:
                return None
        return cls(spec, outputs, written, casts)

    def stand_in(self, leaves: list[Any], mark: Mark, timeline: Timeline) -> Any:
        """Return what a block returns for these inputs, and write into its cache what it writes."""
        inputs = [x for x in leaves if isinstance(x, FakeTensor)]
        if self.casts:
            _keep_casts(inputs[0], self.casts)
        if self.written.parts:
            written = _StandIn.apply(self.written, None, timeline, *inputs)
            inputs += _cache(leaves, mark.place).update(*written)  # what the block attends to
        fresh = iter(_StandIn.apply(self.outputs, mark, timeline, *inputs))
        outputs = [
            next(fresh) if isinstance(x, Part) else leaves[x] if isinstance(x, int) else x[0]
            for x in self.outputs.parts
        ]
        return tree_unflatten(outputs, self.spec)


@torch.no_grad()
def _keep_casts(some: Tensor, size: int) -> None:
    """Have autocast keep so many bytes until it ends, as it keeps a block's weights."""
    # of one number that is repeated, since autocast keeps what it converted as well
    weight = some.new_empty_strided(
        (1, size // 2 - 2), (0, 0), dtype=torch.float32
    ).requires_grad_()
    nn.functional.linear(weight.detach(), weight)


class _StandIn(torch.autograd.Function):
    """Makes tensors as a block makes them, and gradients of its inputs, of no operation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        described, mark, timeline, *inputs = arguments
        parts = [part for part in described.parts if isinstance(part, Part)]
        ctx.set_materialize_grads(False)
        ctx.marked = (mark, timeline)
        ctx.inputs = [
            (tuple(x.shape), x.stride(), x.dtype) if x.requires_grad else None for x in inputs
        ]
        buffers: dict[int, Tensor] = {}
        results = []
        for part in parts:
            if part.storage not in buffers:
                count = described.storages[part.storage] // part.dtype.itemsize
                buffers[part.storage] = inputs[0].new_empty(count, dtype=part.dtype)
            buffer = buffers[part.storage]
            with torch._C._AutoDispatchBelowAutograd():  # a view would keep its base
                results.append(buffer.as_strided(part.shape, part.stride, part.offset))
        ctx.save_for_backward(*(x for x, p in zip(results, parts) if p.storage in described.saved))
        ctx.mark_non_differentiable(*(x for x, p in zip(results, parts) if not p.trained))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mark, timeline = ctx.marked
        if mark is None:  # keys and values: gradients come from what the block attends to
            return (None,) * (3 + len(ctx.inputs))
        timeline.mark(mark.backward())
        some = next(x for x in gradients if x is not None)
        results = [x and some.new_empty_strided(x[0], x[1], dtype=x[2]) for x in ctx.inputs]
        return (None, None, None, *results)


def _cache(leaves: list[Any], place: int) -> Any:
    """Find the layer of a cache of transformers' that belongs to a block; None: it has none."""
    for leaf in leaves:
        layers = getattr(leaf, "layers", None)
        if isinstance(layers, list) and place < len(layers) and hasattr(layers[place], "update"):
            return layers[place]
    return None


def _held(layer: Any) -> list[Any]:
    """Return the keys and values that a layer of a cache holds."""
    return [getattr(layer, name, None) for name in ("keys", "values")]


@contextmanager
def _spied(layer: Any, written: Parts) -> Iterator[None]:
    """Note what a block writes into its layer of a cache, if it has one."""
    if layer is None:
        yield
        return
    update = layer.update

    def noted(keys: Tensor, values: Tensor, *args: Any, **options: Any) -> Any:
        written.add(keys)
        written.add(values)
        return update(keys, values, *args, **options)

    layer.update = noted
    try:
        yield
    finally:
        del layer.update
