"""Wraps the trained network: one forward pass reads each prompt once, images included, and
continues it with many answers.

Log-probs and gradients are those of separate passes of prompt and answer: keys and values of a
prompt do not depend on what follows it. Gradients flow from every answer through the shared keys
and values into the prompt's one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.divergences import Divergence
from mmrl.core.errors import UserError
from mmrl.core.host import on_host, remember, selected
from mmrl.core.sharding import sharded, whole_blocks
from mmrl.policies import scores
from mmrl.policies.lora import inject
from mmrl.policies.tokens import places
from mmrl.policies.vlm import caches, cross_attention_caches, features, packing
from mmrl.policies.vlm.cascade import Cascade, attending, fits
from mmrl.policies.vlm.compiled import Compiled, changes, symbolic
from mmrl.policies.vlm.families import CAUSAL, DIRECT
from mmrl.policies.vlm.heads import Head, network, output_embeddings, writer
from mmrl.policies.vlm.own_generate import run as run_generate
from mmrl.policies.vlm.positions import axes, following
from mmrl.policies.vlm.prefixes import Prefix
from mmrl.policies.vlm.routing import Routing
from samplers.warp import Warp

# share of padding after answers from which a pass is packed automatically; packing costs an index
# in every attention layer
SPARSE = 0.25


class SharedPrefix(nn.Module):
    """Wraps an image-text-to-text model of transformers. Every pass is a call of this module, so
    that wrappers see it."""

    def __init__(self, hf: Any, share: bool = True):
        super().__init__()
        self.hf = hf
        self.head = Head(hf)
        self.share = share
        # packed: batches without padding; fused: attention by xformers
        self.packed = self.fused = False
        self.packs_sparse = False  # so are scoring passes that would be largely padding
        self.routing: Routing | None = None  # records and replays the choice of experts

        self.compiled: Compiled | None = None  # passes as graphs
        self.cascades = True  # where layers attend by torch's own attention
        self.branches = False  # answers may share prefixes, which packed passes read once
        cross_attention_caches.skip_cross_attention_without_images(hf)
        if hf.config.model_type == "llama4":
            hf.language_model.register_forward_hook(_without_images)
        # accelerate wraps these one by one
        self._no_split_modules = whole_blocks(hf)

    @property
    def config(self) -> Any:
        return self.hf.config

    @property
    def plain(self) -> bool:
        """Tell whether every layer attends by torch's own attention to all tokens before."""
        config = self.text_config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        full = kinds == {"full_attention"} and not getattr(config, "sliding_window", None)
        by_sdpa = config._attn_implementation in ("sdpa", packing.NAME)
        # DeepSeek's layers cache the latents of keys and values
        latent = getattr(config, "kv_lora_rank", None) is not None
        return full and self.config.model_type in DIRECT and by_sdpa and not latent

    @cached_property
    def text_config(self) -> Any:
        return self.hf.config.get_text_config()

    def forward(self, work: str, *arguments: Any, **options: Any) -> Any:
        """Call the method named ``work``. Wrappers (DDP, FSDP2) see only calls of the module, so
        all passes go through it."""
        return getattr(self, work)(*arguments, **options)

    def read(self, inputs: dict[str, Tensor]) -> Prefix:
        """Read the prompts of one batch, left-padded; ``inputs`` hold ``position_ids`` [P, S] or
        [3, P, S] too."""
        routes = inputs.get("routes")
        inputs = {name: tensor for name, tensor in inputs.items() if name != "routes"}
        if self.packed and self.config.model_type in CAUSAL:
            packed = self._read_packed(inputs)
            key_values = packing.unsqueeze(packed.key_values, packed.lengths)
            return Prefix(
                packed.hidden, inputs["attention_mask"].bool(), packed.following, key_values
            )
        cache = caches.remembered(self.text_config)
        with self._routed(routes):
            hidden = self._base(**inputs, **caches.cache_kwargs(cache))
        return Prefix(
            hidden[:, -1],
            inputs["attention_mask"].bool(),
            following(inputs),
            cross_attention_caches.looking(
                caches.memories(cache), inputs.get("cross_attention_mask")
            ),
        )

    def state(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the hidden state [P, H] at the last token of every prompt of one batch."""
        return self.read(inputs).hidden.clone()  # FSDP2 hooks what is returned, if it is no view

    @contextmanager
    def sampling(self, cascade: Cascade | None) -> Iterator[None]:
        """Prepare for steps that sample, with a cascade or without."""
        with ExitStack() as stack:
            if cascade is not None:
                stack.enter_context(attending(self.text_config))
            if self.compiled is not None:
                stack.enter_context(symbolic())
                stack.enter_context(self.compiled.sampling())
            yield

    def cascade(self, prefix: Prefix, rows: Tensor) -> Cascade | None:
        """Start sampling answers to the prompts of ``rows`` [B] token by token, where a prompt's
        keys are read once for all its rows; None: each row has its own copy."""
        able = self.cascades and self.plain and fits(prefix.hidden, len(rows))
        return Cascade(prefix.key_values, prefix.mask, rows) if able else None

    def step(
        self,
        ids: Tensor,
        place: Tensor,
        mask: Tensor,
        cache: Any,
        whole: bool | None = None,
        routes: Tensor | None = None,
        cascade: Cascade | None = None,
    ) -> Tensor:
        """Return hidden states [B, L, H] of answer tokens ``ids`` [B, L] that begin at position
        ``place`` [B]; ``mask`` [B, S] covers all tokens before them.

        ``whole``: whether the mask is True everywhere; None: unknown, so transformers synchronises
        to find out. ``routes`` [B, L, R]: the experts that the tokens go to. ``cascade``: what the
        rows attend to, instead of ``cache``; the mask then covers answers only.
        """
        length = ids.shape[1]
        places = place[:, None] + torch.arange(length, device=ids.device)
        if self.compiled is not None and self.compiled.samples(ids, mask, cascade):
            return self.compiled.step(ids, places, mask, cache, cascade)[0]
        if cascade is not None:
            cascade.hide(None if whole else mask)
            return self.continued(ids, places, packing.anything(), cache, cascade=cascade)
        attended = torch.cat([mask, mask.new_ones(len(ids), length)], 1).long()
        if not self.cascades or not self.plain or length > 1 or whole is None:
            with self._routed(routes):
                return self.continued(ids, places, attended, cache)
        # the mask that transformers would build after a device synchronisation
        return self.continued(ids, places, None if whole else attended.bool()[:, None, None], cache)

    def step_and_draw(
        self,
        then: tuple[Callable[..., Any], Warp, Tensor | None],
        *step: Any,
    ) -> tuple[Tensor, Any]:
        """Return what ``step`` returns for one token per row, taking the same arguments, and, if
        compiled, the draw from it; ``then``: a function of logits, the warp and random numbers
        [B]."""
        ids, place, mask, cache, _whole, _routes, cascade = step
        able = self.compiled is not None and self.compiled.samples(ids, mask, cascade)
        if self.compiled is None or not able or changes(then[1]):
            return self.step(*step), None
        return self.compiled.step(ids, place[:, None], mask, cache, cascade, then)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [*, V] of hidden states [*, H]."""
        return self.head(hidden)

    def draw(
        self,
        draw: Callable[..., Any],
        hidden: Tensor,
        warp: Warp,
        uniform: Tensor | None,
        place: Tensor,
    ) -> Any:
        """Return what ``draw`` returns of logits at hidden states [B, H]."""
        if self.compiled is not None:
            return self.compiled.draw(draw, hidden, warp, uniform, place)
        return draw(self.logits(hidden), warp, uniform, place)

    def score(
        self,
        inputs: dict[str, Tensor],
        rows: Tensor,
        ids: Tensor,
        where: Tensor,
        warp: Warp,
        entropy: bool = False,
    ) -> tuple[Tensor, scores.Scored]:
        """Return hidden states [N, H] and log-probs of the N answer tokens ``where`` [B, T] holds,
        of ids [B, T].

        ``rows`` [B]: the prompt of each row among the collated ``inputs``.
        """
        answer_routes = inputs.get("answer_routes")
        inputs = {name: x for name, x in inputs.items() if name != "answer_routes"}
        ids, where, on_rows = self._trimmed(ids, where)
        if self.share:
            if self.packed or self._sparse(inputs["input_ids"].numel(), on_rows):
                hidden = self._packed(inputs, rows, ids, where)
            else:
                hidden = selected(self._shared(inputs, rows, ids, answer_routes), where)
        else:
            hidden = selected(self._apart(inputs, rows, ids), where)
        place = places(where) if warp.schedule else None
        compiled = None if self.compiled is None else self.compiled.chunk_of(warp, entropy)
        return hidden, scores.score(
            hidden,
            selected(ids, where),
            self.logits,
            warp,
            self.head.vocabulary,
            entropy,
            place,
            compiled,
        )

    def _trimmed(self, ids: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drop the columns after the last scored token; also returns ``where`` on the host."""
        on_rows = on_host(where)
        length = int(on_rows.any(0).nonzero().max()) + 1
        if self.share and sharded(self):  # gathered for prompts, then for answers of any length
            length = max(length, 2)
            ids, where, on_rows = (
                F.pad(x, (0, max(0, length - x.shape[1]))) for x in (ids, where, on_rows)
            )
        ids, where, on_rows = ids[:, :length], where[:, :length], on_rows[:, :length]
        remember(where, on_rows)
        return ids, where, on_rows

    def _sparse(self, of_prompts: int, where: Tensor) -> bool:
        """Tell whether a pass over ``of_prompts`` prompt tokens and answers ``where`` [B, T], on
        the host, is packed because a large share of it would be padding."""
        if not self.packs_sparse or self.routing is not None or sharded(self):
            return False
        tokens = of_prompts + where.numel()
        return where.numel() - int(where.sum()) > SPARSE * tokens

    def rescore(
        self, hidden: Tensor, ids: Tensor, warp: Warp, entropy: bool, place: Tensor | None = None
    ) -> scores.Scored:
        """Score other tokens ``ids`` [N], or return their entropy, at hidden states [N, H] that
        ``score`` returned."""
        return scores.score(hidden, ids, self.logits, warp, self.head.vocabulary, entropy, place)

    def full(self, hidden: Tensor, warp: Warp, place: Tensor | None = None) -> Tensor:
        """Return the log-probs of all tokens, [N, V]."""
        return scores.full(hidden, self.logits, warp, self.head.vocabulary, place)

    def kl(
        self,
        hidden: Tensor,
        reference: Tensor,
        warp: Warp,
        by: Divergence,
        place: Tensor | None = None,
    ) -> Tensor:
        """Compute the divergence [N] from another's log-probs [N, V]."""
        return scores.kl(hidden, reference, self.logits, warp, by, place)

    def look(self, encoded: dict[str, Tensor]) -> features.Looked:
        """Compute the features of the images of one prompt."""
        return features.look(self.hf, encoded)

    def generate(self, inputs: dict[str, Tensor], recorder: Any, synced: bool) -> None:
        """Sample by transformers' own ``generate``; ``recorder`` draws the tokens."""
        if "witness" in inputs and sharded(self):
            raise UserError(
                f"{self.config.model_type}: transformers' own generate passes prompts without "
                "pictures by some layers, whose weights other processes then wait for: leave out "
                "engine and prefix_sharing, or give every prompt a picture"
            )
        left_out = ("position_ids", "witness")
        taken = {name: x for name, x in inputs.items() if name not in left_out}
        run_generate(self.hf, taken, recorder, synced)

    def enable_gradient_checkpointing(self) -> None:
        """Turn on gradient checkpointing; it is safe with mmrl's caches, which do not change when
        recomputed.

        Raises UserError with a transformers whose layers would drop the cache.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        if self.share and not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache"):
            raise UserError(
                "train.gradient_checkpointing with prompts read once a group needs "
                "transformers >= 5.20, whose layers "
                "keep their cache; update it, or set prefix_sharing: none"
            )
        if self.routing is not None:
            raise UserError(
                "train.gradient_checkpointing and policy option replay_routing exclude each other: "
                "a layer that is computed again would not know its routes"
            )
        if self.compiled is not None:
            raise UserError(
                "train.gradient_checkpointing and policy option compile exclude each other: a "
                "graph of all layers does not compute one of them again; leave one of the two out"
            )
        caches.recompute(self.hf)

    def add_adapter(self, config: Any) -> None:
        inject(self.hf, config)

    @contextmanager
    def _routed(self, routes: Tensor | None) -> Iterator[None]:
        """Route the tokens of a pass along ``routes`` [*, R], where routing is replayed."""
        if self.routing is None:
            yield
            return
        with self.routing.replaying(routes):
            yield

    def _shared(
        self,
        inputs: dict[str, Tensor],
        rows: Tensor,
        ids: Tensor,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [B, T, H] at the T decisions of every row."""
        prefix = self.read(inputs)
        # a prompt without answers takes part in the backward pass too
        first = prefix.hidden[rows][:, None] + 0 * prefix.hidden.sum(0)
        if ids.shape[1] == 1:
            return first
        if self.compiled is not None and self.compiled.scores_answers(prefix, ids[:, :-1]):
            later = self.compiled.score_answers(prefix, rows, ids[:, :-1])
            return torch.cat([first, later], 1)
        cache = caches.continued(prefix.memory, rows)
        routes = None if routes is None else routes[:, : ids.shape[1] - 1]
        later = self.step(
            ids[:, :-1], prefix.following[rows], prefix.mask[rows], cache, None, routes
        )
        # as does a pass whose answers have no decision
        return torch.cat([first + 0 * later[:, :1], later], 1)

    def _packed(
        self,
        inputs: dict[str, Tensor],
        rows: Tensor,
        ids: Tensor,
        where: Tensor,
    ) -> Tensor:
        """Return hidden states [N, H] at the decisions ``where`` [B, T], of prompts and answers
        without padding."""
        prefix = self._read_packed(inputs)
        steps = torch.arange(ids.shape[1], device=ids.device)
        answers = (where * steps).amax(1)  # [B] tokens to read: all before the last decision
        if sharded(self) and not on_host(where)[:, 1:].any():
            answers[0] = 1
        each = torch.arange(len(ids), device=ids.device)[:, None]
        owner = packing.owners(rows, ids, answers) if self.branches else each.expand_as(ids)
        to_read = (steps < answers[:, None]) & (owner == each)
        numbers = (to_read.flatten().cumsum(0) - 1).view_as(to_read)
        token = numbers[owner, steps]  # [B, T] index among the tokens that are read
        # a prompt without answers takes part in the backward pass too
        hidden = prefix.hidden + 0 * prefix.hidden.sum(0)
        if to_read.any():
            places = (prefix.following[rows][:, None] + steps)[to_read][None]
            layout = packing.continued(
                prefix.lengths, rows, answers, self.fused, token, to_read.sum(1)
            )
            cache = caches.continued(prefix.key_values, rows.new_zeros(1))
            later = self._laid(
                layout, self.continued, ids=ids[to_read][None], places=places, cache=cache
            )
            hidden = torch.cat([hidden + 0 * later[0, :1], later[0]])
        at = len(prefix.hidden) + token.roll(1, 1)
        at[:, 0] = rows
        return hidden[at[where]]

    def _read_packed(self, inputs: dict[str, Tensor]) -> packing.Read:
        """Read the prompts of one left-padded batch; families with non-causal prompts keep their
        padding."""
        if self.config.model_type not in CAUSAL:
            return self.read(inputs).packed()
        packed, lengths = packing.pack(inputs)
        cache = caches.remembered(self.text_config)
        layout = packing.Layout(lengths, lengths, xformers=self.fused)
        hidden = self._laid(layout, self._base, **caches.cache_kwargs(cache), **packed)[0]
        return packing.Read(
            hidden[lengths.cumsum(0) - 1], lengths, following(inputs), caches.key_values(cache)
        )

    def _laid(
        self, layout: packing.Layout, work: Callable[..., Tensor], **arguments: Any
    ) -> Tensor:
        """Make a pass of packed tokens. Raises UserError where the layout does not reach every
        layer's attention."""
        device = layout.queries.device
        output = work(attention_mask=packing.anything().to(device), packing=layout, **arguments)
        if layout.calls < self.text_config.num_hidden_layers:
            raise UserError(
                f"policy option remove_padding: the layers of {self.config.model_type} attend in "
                f"a way of their own, which "
                "needs padding; set it to false"
            )
        return output

    def continued(
        self, ids: Tensor, places: Tensor, attention_mask: Tensor | None, cache: Any, **options: Any
    ) -> Tensor:
        """Return hidden states [B, L, H] after the tokens ids [B, L] at positions ``places`` [B,
        L], after the cached tokens."""
        if count := axes(self.hf):
            places = places.expand(count, -1, -1)
        direct = self.config.model_type in DIRECT
        base = language_model(self.hf) if direct else self.hf.base_model
        hidden: Tensor = base(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=places,
            **caches.cache_kwargs(cache),
            return_dict=True,
            **cross_attention_caches.looked_at(cache, ids.shape[1]),
            **options,
        ).last_hidden_state
        return hidden

    def _apart(self, inputs: dict[str, Tensor], rows: Tensor, ids: Tensor) -> Tensor:
        """Return what ``_shared`` does, by one pass of prompt and answer per row; ``inputs`` hold
        the rows' prompts in order, followed by those without an answer."""
        answered = len(ids)
        witnesses = len(inputs["input_ids"]) - answered
        if witnesses < 0:
            raise ValueError(
                f"{len(ids)} rows need as many prompts, not {len(inputs['input_ids'])}"
            )
        ids = torch.cat([ids, ids[:1].expand(witnesses, -1)])
        answer = ids[:, :-1]
        longer = self._lengthened(inputs, answer)
        places = inputs["position_ids"]
        start = following(inputs)[:, None]
        more_places = (start + torch.arange(answer.shape[1], device=ids.device)).expand(
            *places.shape[:-1], -1
        )
        longer["position_ids"] = torch.cat([places, more_places], -1)
        hidden = self._base(**inputs | longer, use_cache=False)
        hidden = hidden[:, hidden.shape[1] - ids.shape[1] :]
        return hidden[:answered] + 0 * hidden[answered:].sum(0) if witnesses else hidden

    def _lengthened(self, inputs: dict[str, Tensor], answer: Tensor) -> dict[str, Tensor]:
        """Return the inputs that have a value for every token, with those of answers [B, T]."""
        types = {name: 0 for name in inputs if name.endswith("token_type_ids")}
        if self.config.model_type == "paligemma":
            types["token_type_ids"] = 1  # suffix: attended causally
        longer = {
            name: torch.cat([inputs[name], torch.full_like(answer, value).to(inputs[name])], 1)
            for name, value in {"attention_mask": 1, **types}.items()
        }
        # an answer sees what the prompt's end sees
        if (crossed := inputs.get("cross_attention_mask")) is not None:
            last = crossed[:, -1:].expand(-1, answer.shape[1], *crossed.shape[2:])
            longer["cross_attention_mask"] = torch.cat([crossed, last], 1)
        longer["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
        return longer

    def own(self, prompt: dict[str, Tensor], ids: Tensor) -> Tensor:
        """Return the logits [1, T, V] at an answer ids [1, T] by the class's own pass over prompt
        and answer, as its processor encoded it, without any code of mmrl."""
        inputs = {name: x for name, x in prompt.items() if name not in ("places", "routes")}
        longer = inputs | self._lengthened(inputs, ids)
        count = ids.shape[1] + 1
        # logits of all tokens would be large, and a class's logits_to_keep may cut differently
        hook = output_embeddings(self.hf).register_forward_pre_hook(
            lambda _, given: (given[0][:, -count:], *given[1:])
        )
        try:
            logits: Tensor = self.hf(**longer, use_cache=False, return_dict=True).logits
        finally:
            hook.remove()
        return logits[:, -count:-1]

    def _base(self, witness: Any = None, **inputs: Any) -> Tensor:
        """Read tokens ``inputs``; ``witness``: an image that none of them attends to, where the
        cross-attention layers have to take part."""
        base = self.hf.base_model
        if witness is not None:
            inputs |= cross_attention_caches.unseen(self.hf, witness, len(inputs["input_ids"]))
        if base is not self.hf:
            hidden: Tensor = base(**inputs, return_dict=True).last_hidden_state
            return hidden
        # the head is inside its language model: take its input
        outputs: list[Any] = []
        hook = language_model(self.hf).register_forward_hook(lambda *call: outputs.append(call[2]))
        try:
            self.hf(**inputs, return_dict=True, logits_to_keep=1)
        finally:
            hook.remove()
        hidden = outputs[0].last_hidden_state
        return hidden


def _without_images(*call: Any) -> None:
    """Rename the output of Llama 4's language model as its caller expects: in transformers 5.24.0
    the model fails without it."""
    output = call[-1]
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None


def language_model(hf: Any) -> Any:
    """Return the language model without its head, for families of ``DIRECT`` and those whose head
    is inside the language model."""
    return network(writer(hf)) if hf.base_model is hf else hf.base_model.language_model
