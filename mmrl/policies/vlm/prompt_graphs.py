"""Keeps what sampling computed of prompts, and what answers attended to, so that the first
optimizer step does not compute it again (``train.reuse_rollout_graph``).

On that step the weights are those that sampled: keys and values of a prompt, its pictures seen, are
those that its answers were sampled behind. They are handed out as leaves, every pass of the update
puts its gradient on them, and at the end the one pass that read the prompts is gone back through.
The answers' own pass is made anew, since sampling made it token by token; of it, where a CPU
attends by code of our own, attention is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.host import on_host, sent
from mmrl.policies.rollout_graphs import RolloutGraphs, sampling_graphs
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.cascade import direct, fits
from mmrl.policies.vlm.cpu_attention import Kept
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from mmrl.policies.vlm.prefixes import Known, Prefix

Encoded = dict[str, Tensor]


@dataclass(frozen=True)
class Read:
    """Holds P prompts that were read in one pass, with its graph."""

    row_id: Tensor  # [B] of the rows that continue them
    cond: Sequence[Encoded]  # the prompts, [P]
    prefix: Prefix  # with the graph
    leaves: Prefix  # the same numbers, on which passes of the update put gradients


class Room:
    """Holds memory for what answers attend to, from one iteration to the next: pages that are new
    take longer than what is written into them."""

    def __init__(self) -> None:
        self.attended: Tensor | None = None
        self.lse: Tensor | None = None

    def take(self, rows: int, tokens: int, prefix: Prefix, heads: int) -> Kept:
        """Return room for so many answers of at most ``tokens`` tokens behind these prompts."""
        keys = prefix.key_values[0][0]
        shape = (len(prefix.key_values), tokens, rows, heads, keys.shape[-1])
        if self.attended is None or self.attended.shape != shape or self.lse is None:
            self.attended = keys.new_zeros(shape)
            self.lse = keys.new_empty(shape[:-1])
        self.lse.fill_(torch.inf)
        return Kept(self.attended, self.lse, torch.arange(rows, device=keys.device))

    def clear(self) -> None:
        """Free the memory."""
        self.attended = self.lse = None


class PromptGraphs(RolloutGraphs):
    """Records the passes that read prompts while a policy samples, and stands in for them in its
    first optimizer step. ``rows``: the names [n] of the rows of that step, on the CPU."""

    remedy = "take a smaller train_batch_size or train.gradient_checkpointing=true"
    recorded: list[Read]  # type: ignore[assignment]

    def __init__(self, rows: Tensor, room: Room):
        super().__init__(rows)
        self.room = room
        self.store: Kept | None = None  # what all answers of the rollout attended to
        self.ids: Tensor | None = None  # [N, T] of these answers
        # pass and prompt in it of every row that was sampled, and its number among the answers
        self.places: dict[int, tuple[int, int, int]] = {}

    def read(
        self, policy: Any, cond: Sequence[Encoded], group: Tensor, names: Tensor, total: int
    ) -> tuple[Prefix, Tensor, Kept | None]:
        """Read the prompts of the rows ``names`` [B], ``group`` [B] of ``cond``, with the graph if
        the step has some of them.

        Returns prompts without graph, the prompt of every row and where its tokens keep what they
        attend to. ``total``: rows of the whole rollout.
        """
        prefix: Prefix
        if not torch.isin(on_host(names), self.rows).any():
            prefix, rows = policy.read(cond, group)
            return prefix, rows, None
        with sampling_graphs(policy):
            prefix, rows = policy.read(cond, group)
        numbers = on_host(group).unique().tolist()
        first = len(self.places)
        pairs = zip(on_host(names).tolist(), on_host(rows).tolist(), strict=True)
        for i, (name, prompt) in enumerate(pairs):
            self.places[name] = len(self.recorded), prompt, first + i
        prompts = [cond[i] for i in numbers]
        # without a picture that is there for its gradient alone
        plain = prefix.detached().chosen([*range(len(prompts))], prefix.mask.shape[1])
        self.recorded.append(Read(names, prompts, prefix, prefix.leaves()))
        return plain, rows, self._room(policy.net, plain, rows, policy.ending.tokens, first, total)

    def _room(
        self, net: SharedPrefix, prefix: Prefix, rows: Tensor, tokens: int, first: int, total: int
    ) -> Kept | None:
        """Return where ``rows`` [B], the answers from ``first`` on, keep what they attend to; None:
        their update attends by other code."""
        able = net.compiled is not None and net.plain and fits(prefix.hidden, len(rows))
        if not able or direct(prefix.key_values, prefix.mask, rows) is None:
            return None
        if self.store is None:
            heads = net.text_config.num_attention_heads
            self.store = self.room.take(total, tokens, prefix, heads)
            self.ids = rows.new_zeros(total, tokens)
        return self.store._replace(rows=torch.arange(first, first + len(rows), device=rows.device))

    def wrote(self, names: Tensor, ids: Tensor) -> None:
        """Remember the tokens ids [B, T] of the answers named ``names`` [B]."""
        known = [i for i, name in enumerate(names.tolist()) if name in self.places]
        if self.ids is not None and known:
            rows = [self.places[name][2] for name in names[known].tolist()]
            self.ids[rows] = ids[known]

    def known(self, policy: Any, point: Any) -> Known | None:
        """Return what is known of the prompts and answers of a point of the update; None where a
        pass must read them: without gradient, by other weights, or for other prompts."""
        if not self.stands_in(policy):
            return None
        names = on_host(point.row_id).tolist()
        if not names or not all(name in self.places for name in names):
            return None
        places = [self.places[name] for name in names]
        for place, number in zip(places, on_host(point.group).tolist(), strict=True):
            read, prompt, _ = place
            if not same(point.cond[number], self.recorded[read].cond[prompt]):
                return None
        unique = sorted({place[:2] for place in places})
        number_of = {place: i for i, place in enumerate(unique)}
        rows = torch.tensor([number_of[place[:2]] for place in places])
        return Known(
            self._joined(unique),
            sent(rows, policy.device),
            self._store_of([place[2] for place in places], point),
        )

    def _joined(self, places: Sequence[tuple[int, int]]) -> Prefix:
        """Join prompts, each of a pass and a number in it, to one left-padded batch of leaves."""
        numbers = sorted({read for read, _ in places})
        width = max(self.recorded[read].leaves.mask.shape[1] for read in numbers)
        parts = []
        for number in numbers:
            leaves = self.recorded[number].leaves
            chosen = [prompt for read, prompt in places if read == number]
            parts.append(leaves.chosen(chosen, width))
        return parts[0] if len(parts) == 1 else Prefix.joined(parts)

    def _store_of(self, rows: list[int], point: Any) -> Kept | None:
        """Return what these answers attended to, if they are the tokens of the point and all that
        lies before a decision was kept: a row that was sampled alone attended by other code."""
        if self.store is None or self.ids is None:
            return None
        ids: Tensor = point.target
        numbers = torch.tensor(rows, device=ids.device)
        tokens = torch.arange(ids.shape[1], device=ids.device)
        needed = tokens < (point.mask * tokens).amax(1, keepdim=True)  # [B, T]
        written = self.store.lse[:, : len(tokens), numbers, 0].isfinite().all(0).T
        if not torch.equal(self.ids[numbers, : len(tokens)], ids) or bool(
            (needed & ~written).any()
        ):
            return None
        return self.store._replace(rows=numbers)

    def backward(self) -> None:
        """Go back through the passes that read the prompts, with what the losses have put on
        them, and forget them."""
        while self.recorded:
            read = self.recorded.pop(0)
            pairs = [
                (output, leaf.grad)
                for output, leaf in zip(read.prefix.tensors, read.leaves.tensors, strict=True)
                if output.requires_grad and leaf.grad is not None
            ]
            if pairs:
                outputs, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(outputs, gradients)
        self.forget()

    def give_up(self, policy: Any) -> None:
        super().give_up(policy)
        self.room.clear()

    def forget(self) -> None:
        super().forget()
        self.store = self.ids = None
        self.places = {}

    def _join(self) -> None:
        """Do nothing: leaves are made with the passes."""


def same(one: Encoded, other: Encoded) -> bool:
    """Tell whether two prompts are one: of the same tensors."""
    return one is other or (one.keys() == other.keys() and all(one[k] is other[k] for k in one))


def prompt_graphs(policy: Any, rows: Tensor) -> PromptGraphs:
    """Return what records the prompts of a rollout for the optimizer step on ``rows`` [n].

    Raises UserError where, by its options, what the policy samples behind is not what its update
    would read. A family whose prompts turn out not to be shareable has nothing recorded.
    """
    net = policy.net
    kind = net.config.model_type
    why = None
    if policy.sharing == "none" or policy.engine != "own":
        why = (
            "needs the policy's own sampler and prompts that are shared: leave out engine and "
            "prefix_sharing"
        )
    elif net.routing is not None:
        why = "and policy option replay_routing exclude each other: leave out one of the two"
    elif not caches.plain(net.text_config):
        why = f"{kind} keeps more of a prompt than keys and values: leave it out"
    elif policy.inputs.family.splits and distributed.world()[1] > 1:
        why = f"{kind} reads some prompts in passes of their own: it needs a single process"
    if why is not None:
        raise UserError(f"train.reuse_rollout_graph: {why}")
    return PromptGraphs(rows, policy.room)
