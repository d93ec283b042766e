"""Defines the interface of image-token networks: sampling passes, one teacher-forced pass, and
guided log-probs of both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.divergences import Divergence
from mmrl.core.errors import UserError
from mmrl.core.host import selected
from mmrl.policies import scores
from mmrl.policies.compiling import check_backend
from mmrl.policies.image_tokens.attention import Kernel
from mmrl.policies.scores import Scored
from mmrl.policies.tokens import places
from samplers.warp import Warp

Inputs = dict[str, Tensor]  # conditions, one row a prompt or a sample


class ImageNet(nn.Module, ABC):
    """Decides the T tokens of an image block by block: one token each, or a whole scale.

    A decision is represented by its *features*: the hidden state [H] that the head reads, or, with
    guidance, both hidden states and the scale side by side [2H + 1], so that logits over the
    vocabulary are made a chunk at a time.
    """

    turns: Sequence[int]  # tokens that each pass decides; their sum is T
    vocab: int
    hidden: int  # H
    stopgrad = False  # no gradient through the unconditional logits
    kernel: Kernel = "sdpa"  # of attention
    fixed = False  # sampling passes have fixed shapes, for compilation
    # the layers' pass for one token, which may be compiled; None: there is none
    token: Callable[..., Tensor] | None = None

    def forward(self, work: str, *arguments: Any) -> Any:
        """Call the method named ``work``: wrappers (DDP, FSDP2) see calls of the module only."""
        return getattr(self, work)(*arguments)

    def compile_token(self, backend: str = "inductor") -> None:
        """Compile one token's pass to one graph, on CUDA a CUDA graph, for fixed shapes. Raises
        UserError where there is no such pass or backend."""
        if self.token is None:
            raise UserError(
                "policy option compile: this model draws many tokens in a pass; leave it false"
            )
        check_backend(backend)
        replayed = torch.cuda.is_available() and backend == "inductor"
        self.token = torch.compile(
            self.token,
            fullgraph=True,
            dynamic=False,
            backend=backend,
            mode="reduce-overhead" if replayed else None,
        )
        self.fixed = True

    @abstractmethod
    def begin(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, Any]:
        """Read the prompts of ``rows`` [B]; returns the hidden states [B, n, H] of the first block,
        and the state of sampling."""

    @abstractmethod
    def step(self, ids: Tensor, state: Any) -> Tensor:
        """Return hidden states [B, n', H] of the next block after the tokens ``ids`` of the last
        one; changes ``state``.

        ``ids`` [B, n], or [B / m, n] where B rows are m blocks of the same tokens (conditional and
        unconditional).
        """

    @abstractmethod
    def extend(self, ids: Tensor, state: Any) -> Tensor:
        """Read all tokens ids [B, T] but those of the last block in one pass after ``begin``;
        returns the hidden states [B, T', H] of all blocks but the first; changes ``state``."""

    @abstractmethod
    def back(self, state: Any, rows: slice | Tensor, count: int, ids: Tensor) -> Any:
        """Return the extended ``state`` of these rows, truncated to ``count`` blocks of ids [B',
        T]. A slice of rows shares memory."""

    @abstractmethod
    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        """Return hidden states [B, T, H] at all T decisions of ids [B, T], in one pass; inputs of
        every row."""

    @abstractmethod
    def vocabulary(self, hidden: Tensor) -> Tensor:
        """Return logits [*, V] of hidden states [*, H]."""

    def lift(self, hidden: Tensor) -> Tensor:
        """Map hidden states [*, H] to [*, H'], of which ``affine`` makes logits."""
        return hidden

    # the head's last layer, if affine: vocabulary = affine(lift)
    affine: Callable[[Tensor], Tensor] | None = None

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [*, V] of features [*, H] or, guided, [*, 2H + 1]: z_u + s (z_c - z_u) (Ho
        and Salimans 2022).

        The weights 1 - s and s add up to 1, so an affine layer may come after the mixture: once,
        not twice.
        """
        dtype = next(self.parameters()).dtype
        if features.shape[-1] == self.hidden:
            return self.vocabulary(features.to(dtype))
        cond, empty, scale = torch.split(features, [self.hidden, self.hidden, 1], -1)
        if self.stopgrad or self.affine is None:
            z = self.vocabulary(cond.to(dtype)).to(scale)
            z_empty = self.vocabulary(empty.to(dtype)).to(scale)
            z_empty = z_empty.detach() if self.stopgrad else z_empty
            return z_empty + scale * (z - z_empty)
        h = self.lift(cond.to(dtype)).to(scale)
        h_empty = self.lift(empty.to(dtype)).to(scale)
        return self.affine((h_empty + scale * (h - h_empty)).to(dtype))

    def score(
        self,
        inputs: Inputs,
        empty: Inputs | None,
        ids: Tensor,
        where: Tensor,
        scale: Tensor,
        warp: Warp,
        entropy: bool,
    ) -> tuple[Tensor, Scored]:
        """Return features [N, *] and log-probs of the N tokens ``where`` [B, T] holds, of ids [B,
        T].

        ``empty`` are the unconditional inputs, None without guidance; ``scale`` [T] is that of
        every decision.
        """
        features = selected(self._features(inputs, empty, ids, scale), where)
        place = places(where) if warp.schedule else None
        return features, self.rescore(features, selected(ids, where), warp, entropy, place)

    def rescore(
        self, features: Tensor, ids: Tensor, warp: Warp, entropy: bool, place: Tensor | None = None
    ) -> Scored:
        """Score tokens ``ids`` [N] at features [N, *]."""
        return scores.score(features, ids, self.logits, warp, self.vocab, entropy, place)

    def full(self, features: Tensor, warp: Warp, place: Tensor | None = None) -> Tensor:
        """Return the log-probs of all tokens, [N, V]."""
        return scores.full(features, self.logits, warp, self.vocab, place)

    def kl(
        self,
        features: Tensor,
        reference: Tensor,
        warp: Warp,
        by: Divergence,
        place: Tensor | None = None,
    ) -> Tensor:
        """Compute the divergence [N] from another's log-probs [N, V]."""
        return scores.kl(features, reference, self.logits, warp, by, place)

    def _features(self, inputs: Inputs, empty: Inputs | None, ids: Tensor, scale: Tensor) -> Tensor:
        if empty is None:
            return self.teach(inputs, ids)
        if not self.stopgrad:
            features = self.teach(stacked(inputs, empty), torch.cat([ids, ids]))
            cond, without = features.chunk(2)
            return beside(cond, without, scale)
        with torch.no_grad():
            without = self.teach(empty, ids)
        return beside(self.teach(inputs, ids), without, scale)


def widened(x: Tensor, rows: int) -> Tensor:
    """Repeat x [B / m, *] m times, [B, *]."""
    return x if len(x) == rows else x.repeat(rows // len(x), *[1] * (x.dim() - 1))


def beside(cond: Tensor, empty: Tensor, scale: Tensor) -> Tensor:
    """Join hidden states [B, n, H] and the scale [n] of every decision to features [B, n, 2H + 1],
    at least float32."""
    kind = torch.promote_types(cond.dtype, torch.float32)
    scales = scale.to(cond.device, kind)[None, :, None].expand(*cond.shape[:2], 1)
    return torch.cat([cond.to(kind), empty.to(kind), scales], -1)


def stacked(inputs: Inputs, empty: Inputs) -> Inputs:
    """Stack conditional rows, then unconditional ones."""
    return {name: torch.cat([tensor, empty[name]]) for name, tensor in inputs.items()}


def spans(turns: Any) -> Iterator[slice]:
    """Yield the token positions of every pass, a slice each."""
    end = 0
    for count in turns:
        yield slice(end, end + count)
        end += count
