"""Compiles the passes of a vision-language policy: of sampling the pass for one token, which writes
keys and values in place, and the draw; of scoring the pass over whole answers and their log-probs.

Each is one graph with symbolic numbers of rows, columns and tokens: rows may leave, be refilled and
grow without recompilation. A size of 1 would need a separate graph, so such passes run uncompiled.
Results equal those of the uncompiled passes up to rounding.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.policies import scores
from mmrl.policies.compiling import check_backend
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.caches import KV
from mmrl.policies.vlm.cascade import Cascade, Layout
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.prefixes import Prefix

# graphs of one function in a process, shared by its policies
GRAPHS = 64


class Continues(Protocol):
    """Defines what is compiled: a network that continues answers from a KV cache."""

    @property
    def text_config(self) -> Any:
        """Return the configuration of the language model."""

    def named_modules(self) -> Any:
        """Return the parts by name."""

    def continued(self, *arguments: Any, **options: Any) -> Tensor:
        """Return hidden states [B, L, H] of tokens after a cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [*, V] of hidden states [*, H]."""


class Compiled:
    """Holds the compiled passes of a network; graphs are built when they are first called."""

    def __init__(self, net: Continues, backend: str = "inductor"):
        """Raises UserError where torch has no such backend, or the network's attention is not
        supported here."""
        check_backend(backend)
        # it warns that it bypasses a cache of the warp's constants, which is right
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        self.backend = backend
        self.net = net
        self.answers = self.compile(_answers_of(net))
        self.state: Hashable = None  # of the network while answers are sampled
        self.tokens: dict[Hashable, Callable[..., tuple[Tensor, Any]]] = {}
        self.draws: dict[Hashable, Callable[..., Any]] = {}
        self.scores: dict[tuple[Warp, bool], Callable[..., Any]] = {}

    def compile(self, work: Callable[..., Any], trusts: bool = False) -> Callable[..., Any]:
        """Compile a function with separate graphs; ``trusts``: calls skip guards on the network,
        which is in the state that it was compiled in."""
        work = _apart(work)
        options: dict[str, Any] | None = (
            {"guard_filter_fn": partial(_of_arguments, work)} if trusts else None
        )
        compiled: Callable[..., Any] = torch.compile(
            work, fullgraph=True, dynamic=True, backend=self.backend, options=options
        )
        return compiled

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Assume that the network's state is fixed within the block: each call of a graph would
        check some hundred attributes, which takes longer than a small matrix product."""
        self.state = state_of(self.net)
        try:
            yield
        finally:
            self.state = None

    def samples(self, ids: Tensor, mask: Tensor, cascade: Cascade | None) -> bool:
        """Tell whether a step of tokens ids [B, L] after columns ``mask`` [B, S] has sizes that a
        graph supports."""
        several = cascade is None or cascade.layout.copies > 1
        return several and ids.shape[1] == 1 and len(ids) > 1 and mask.shape[1] > 0

    def step(
        self,
        ids: Tensor,
        places: Tensor,
        mask: Tensor,
        cache: Any,
        cascade: Cascade | None,
        then: tuple[Callable[..., Any], Warp, Tensor | None] | None = None,
    ) -> tuple[Tensor, Any]:
        """Return hidden states [B, 1, H] of tokens ids [B, 1] at positions ``places`` [B, 1] after
        the columns ``mask`` [B, S] of the cache, or of a cascade's answers; and the draw from them,
        if there is ``then``: a function of logits, the warp and random numbers [B]."""
        attended = F.pad(mask, (0, 1), value=True)[:, None, None]
        layout = None if cascade is None else cascade.laid_out()
        draw, warp, uniform = then or (None, None, None)
        kind = layout is None, warp, uniform is None
        key = (self.state or state_of(self.net), self.net.text_config._attn_implementation, kind)
        columns = caches.reserved(cache)
        if key not in self.tokens:
            self.tokens[key] = self.compile(_token_of(self.net, draw, warp), trusts=True)
            _fix_heads(columns, layout)
        stepped: tuple[Tensor, Any] = self.tokens[key](
            ids, places, columns, attended, layout, uniform
        )
        return stepped

    def draw(
        self,
        draw: Callable[..., Any],
        hidden: Tensor,
        warp: Warp,
        uniform: Tensor | None,
        place: Tensor,
    ) -> Any:
        """Return what ``draw`` returns of logits at hidden states [B, H]."""
        if len(hidden) < 2 or changes(warp):
            return draw(self.net.logits(hidden), warp, uniform, place)
        key = (self.state or state_of(self.net), warp, uniform is None)
        if key not in self.draws:
            self.draws[key] = self.compile(_draw_of(self.net, draw, warp), trusts=True)
        return self.draws[key](hidden, uniform)

    def scores_answers(self, prefix: Prefix, ids: Tensor) -> bool:
        """Tell whether a pass over answers ids [B, T] after prompts has sizes that a graph
        supports."""
        sizes: list[int] = [*ids.shape, prefix.mask.shape[1]]
        return min(sizes) > 1

    def score_answers(self, prefix: Prefix, rows: Tensor, ids: Tensor) -> Tensor:
        """Return hidden states [B, T, H] of the tokens ids [B, T] after the prompts of ``rows``
        [B]."""
        length = ids.shape[1]
        places = prefix.following[rows][:, None] + torch.arange(length, device=ids.device)
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        before = prefix.mask[rows][:, None].expand(-1, length, -1)
        attended = torch.cat([before, causal.expand(len(ids), -1, -1)], 2)[:, None]
        prompts = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in prefix.key_values]
        with symbolic():
            hidden: Tensor = self.answers(ids, places, prompts, attended)
        return hidden

    def chunk_of(self, warp: Warp, entropy: bool) -> scores.ScoreChunk | None:
        """Return what scores a chunk of tokens; None: it is not compiled."""
        if changes(warp):
            return None
        plain = _score_of(self.net, warp, entropy)
        key = (warp, entropy)
        if key not in self.scores:
            self.scores[key] = self.compile(plain)

        def score(hidden: Tensor, ids: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
            if len(hidden) < 2:
                return plain(hidden, ids)
            with symbolic():
                scored: tuple[Tensor, Tensor] = self.scores[key](hidden, ids)
            return scored

        return score


def state_of(net: Continues) -> Hashable:
    """Return all that a sampling graph may depend on except weights: types of modules and tensors,
    and every plain attribute (modes, adapter switches)."""
    parts: list[Hashable] = []
    for name, part in net.named_modules():
        plain = [(key, x) for key, x in vars(part).items() if _is_plain(x)]
        tensors = [*part._parameters.values(), *part._buffers.values()]
        kinds = [None if x is None else (type(x), x.dtype, x.device, x.shape) for x in tensors]
        parts.append((name, type(part), repr(plain), tuple(kinds), len(part._forward_hooks)))
    return hash(tuple(parts))


def _fix_heads(columns: Sequence[KV], layout: Layout | None) -> None:
    """Mark the numbers of heads and their sizes, which never change, as static in the next graph:
    each symbol is an argument of every call."""
    prompts = [] if layout is None else layout.prompts
    for pair in (*columns, *prompts):
        for tensor in pair:
            torch._dynamo.mark_static(tensor, [1, 3])


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_plain(x) for x in value)
    return isinstance(value, (bool, int, float, str))


def _apart(work: Callable[..., Any]) -> FunctionType:
    """Copy a function with its own code object: graphs are keyed by code, and every call of one
    policy would search those of all."""
    assert isinstance(work, FunctionType)
    code = work.__code__.replace(co_name=work.__name__)
    return FunctionType(code, work.__globals__, work.__name__, None, work.__closure__)


def _of_arguments(work: FunctionType, guards: Sequence[Any]) -> list[bool]:
    """Keep only guards on a function's arguments and on torch's modes; the others check closures
    and modules."""
    code = work.__code__
    arguments = set(code.co_varnames[: code.co_argcount])
    roots = [re.match(r"(?:L\[')?(\w+)", guard.name) for guard in guards]
    return [root is None or root[1] in arguments for root in roots]


def changes(warp: Warp) -> bool:
    """Tell whether the warp changes in every iteration, which would need a new graph each time."""
    return bool(warp.schedule or warp.adaptive)


def _token_of(
    net: Continues, draw: Callable[..., Any] | None, warp: Warp | None
) -> Callable[..., tuple[Tensor, Any]]:
    """Make the pass of one token per row, which also draws the next one if given a draw
    function."""

    def token(
        ids: Tensor,
        places: Tensor,
        columns: Sequence[KV],
        attended: Tensor,
        layout: Layout | None,
        uniform: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """``attended`` [B, 1, 1, n]: which columns are not padding."""
        cache = caches.Reserved(columns)
        if layout is None:
            hidden = net.continued(ids, places, attended, cache)
        else:
            hidden = net.continued(ids, places, ~attended, cache, cascade=layout)
        return hidden, None if draw is None else draw(net.logits(hidden[:, -1]), warp, uniform)

    return token


def _answers_of(net: Continues) -> Callable[..., Tensor]:
    """Make the pass over answers ids [B, T] after ``prompts`` of their rows."""

    def answers(ids: Tensor, places: Tensor, prompts: Sequence[KV], attended: Tensor) -> Tensor:
        """``attended`` [B, 1, T, S + T]: what each token attends to."""
        # made once: attention would convert a boolean mask to floats in every layer
        bias = torch.zeros_like(attended, dtype=prompts[0][0].dtype)
        bias = bias.masked_fill(~attended, -torch.inf)
        return net.continued(ids, places, bias, caches.PrefixCache(prompts))

    return answers


def _draw_of(net: Continues, draw: Callable[..., Any], warp: Warp) -> Callable[..., Any]:
    def drawn(hidden: Tensor, uniform: Tensor | None) -> Any:
        return draw(net.logits(hidden), warp, uniform)

    return drawn


def _score_of(
    net: Continues, warp: Warp, entropy: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def score(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return scores.scored(warp(net.logits(hidden), keep=ids), ids, entropy)

    return score


@contextmanager
def symbolic() -> Iterator[None]:
    """Keep sizes that happen to be equal as separate symbols, and allow a graph for each policy."""
    from torch.fx.experimental import _config

    shapes: Any = _config
    with (
        shapes.patch(use_duck_shape=False),
        # constants such as a norm's epsilon, otherwise tensor arguments of every call
        torch._dynamo.config.patch(recompile_limit=GRAPHS, specialize_float=True),
    ):
        yield
