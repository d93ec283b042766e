"""Runs Janus with both of its heads: text, then image tokens, in one causal sequence.

The head of a token is chosen by the token's own kind: what follows the image's start comes from the
generation head, everything before, that start included, from the language model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.divergences import Divergence
from mmrl.core.host import indices
from mmrl.policies import scores
from mmrl.policies.image_tokens import causal
from mmrl.policies.image_tokens.network import Inputs, beside
from mmrl.policies.scores import Scored
from mmrl.policies.vlm import caches
from mmrl.zoo.models.image_tokens.janus import JanusNet
from samplers.warp import Warp


@dataclass
class State:
    """Holds the decoding state of B rows. What a row did not decode is False in ``mask``, and has
    no position."""

    cache: Any
    mask: Tensor  # [B, S] bool
    place: Tensor  # [B] long: position of the next token
    whole: bool = False  # nothing is masked

    def select(self, rows: Tensor) -> None:
        """Keep ``rows`` [B'], repeated as often as each is named."""
        caches.select(self.cache, rows)
        self.mask = self.mask[rows]
        self.place = self.place[rows]
        self.whole = bool(self.mask.all())


class Part(NamedTuple):
    """Describes one pass of scoring: sequences of some rows."""

    rows: Tensor  # [b] long
    inputs: Inputs  # ids and mask [b, S], padded on the left; with pictures also pixels
    # [b] long: the hidden state that decides the first text token; None: no text to score here
    first: Tensor | None
    empty: Inputs | None = None  # for guidance, the unconditional texts [b, S]
    scale: Tensor | None = None  # [N] guidance scale of every image token
    draws: bool = False  # image tokens follow


class Ask(NamedTuple):
    """Names the decisions that one head scores, and how."""

    where: Tensor  # [B, W + N] bool
    warp: Warp
    entropy: bool


class UnifiedNet(JanusNet):
    """Wraps a JanusForConditionalGeneration that reads text and pictures and writes text and image
    tokens."""

    def read(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, State]:
        """Read the prompts of ``rows`` [B], each once; returns hidden states [B, H] after them."""
        cache = caches.recorded(self.config.text_config.num_hidden_layers)
        mask = inputs["mask"]
        places = causal.positions(mask)
        hidden = self.hf.model.language_model(
            inputs_embeds=self._embeddings(inputs),
            attention_mask=mask,
            position_ids=places,
            **caches.cache_kwargs(cache),
        ).last_hidden_state[:, -1]
        mask = mask[rows].bool()
        cache = caches.growing(caches.key_values(cache), rows)
        return hidden[rows], State(cache, mask, places[rows, -1] + 1, bool(mask.all()))

    def add_text(self, ids: Tensor, state: State, live: Tensor) -> Tensor:
        """Return hidden states [B, H] after text tokens ``ids`` [B]; those of rows that are not
        ``live`` [B] are masked out."""
        return self._advance(self.hf.get_input_embeddings()(ids[:, None]), state, live)

    def add_image(self, ids: Tensor, state: State) -> Tensor:
        """Return hidden states [B, H] after image tokens ``ids`` [B]."""
        live = torch.ones_like(ids, dtype=torch.bool)
        return self._advance(
            self.hf.prepare_embeddings_for_image_generation(ids[:, None]), state, live
        )

    def text_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [*, V] of the language model's head."""
        logits: Tensor = self.hf.lm_head(hidden.to(self.hf.lm_head.weight.dtype))
        return logits

    def score_parts(
        self, parts: list[Part], ids: Tensor, width: int, asks: dict[str, Ask]
    ) -> dict[str, tuple[Tensor, Scored]]:
        """Return features and log-probs of every head's decisions, ``asks``, of ids [B, W + N], W =
        ``width``."""
        texts = images = None
        image_row = torch.zeros_like(ids[:, 0])  # where each of the B rows is in ``images``
        for part in parts:
            hidden, drawn = self._pass(part, ids[:, width:])
            if part.first is not None and width:
                texts = _into(texts, part.rows, _from(hidden, part.first, width), len(ids))
            images = drawn if images is None else images
            if part.draws:
                numbers = torch.arange(len(part.rows), device=ids.device)
                image_row = image_row.index_copy(0, part.rows, numbers)
        scored = {}
        for name, ask in asks.items():
            at = indices(ask.where)
            row, column = at // ids.shape[1], at % ids.shape[1]
            text = name != "image"
            states = texts if text else images
            if states is None:
                features = hidden.new_zeros(0, self.hidden)
            else:
                place = (row, column) if text else (image_row[row], column - width)
                features = states[place]
            rescore = self.text_rescore if text else self.rescore
            scored[name] = features, rescore(features, ids[row, column], ask.warp, ask.entropy)
        return scored

    def text_rescore(self, features: Tensor, ids: Tensor, warp: Warp, entropy: bool) -> Scored:
        return scores.score(
            features, ids, self.text_logits, warp, self.config.text_config.vocab_size, entropy
        )

    def text_full(self, features: Tensor, warp: Warp) -> Tensor:
        return scores.full(features, self.text_logits, warp, self.config.text_config.vocab_size)

    def text_kl(self, features: Tensor, reference: Tensor, warp: Warp, by: Divergence) -> Tensor:
        return scores.kl(features, reference, self.text_logits, warp, by)

    def _pass(self, part: Part, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [b, S, H] of the texts, and features [b, N, *] of the image tokens
        that follow them."""
        if not part.draws:
            return self._through(part.inputs, None), None
        ids = images[part.rows].clamp_min(0)
        length = part.inputs["ids"].shape[1]
        if part.empty is None or part.scale is None:
            hidden = self._through(part.inputs, ids)
            return hidden, hidden[:, length - 1 :]
        if self.stopgrad:
            hidden = self._through(part.inputs, ids)
            with torch.no_grad():
                without = self._through(part.empty, ids)
        else:
            stacked_inputs = {
                name: torch.cat([part.inputs[name], part.empty[name]]) for name in ("ids", "mask")
            }
            hidden, without = self._through(stacked_inputs, torch.cat([ids, ids])).chunk(2)
        return hidden, beside(hidden[:, length - 1 :], without[:, length - 1 :], part.scale)

    def _through(self, inputs: Inputs, images: Tensor | None) -> Tensor:
        """Run one causal pass; returns hidden states [b, S (+ N - 1), H]."""
        embeddings = self._embeddings(inputs)
        mask = inputs["mask"]
        if images is not None:
            embeddings = torch.cat(
                [embeddings, self.hf.prepare_embeddings_for_image_generation(images[:, :-1])], 1
            )
            mask = F.pad(mask, (0, images.shape[1] - 1), value=1)
        places = causal.positions(mask)
        hidden: Tensor = self.hf.model.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=places, use_cache=False
        ).last_hidden_state
        return hidden

    def _embeddings(self, inputs: Inputs) -> Tensor:
        """Embed ids [b, S, H], with pictures in their places; the vision tower is frozen."""
        embeddings: Tensor = self.hf.get_input_embeddings()(inputs["ids"])
        if "pixels" not in inputs:
            return embeddings
        with torch.no_grad():
            pictures = self.hf.model.get_image_features(
                inputs["pixels"].to(self.hf.dtype)
            ).pooler_output
            pictures = pictures[inputs["pictures"]]
        is_picture = (inputs["ids"] == self.config.image_token_id)[..., None].expand_as(embeddings)
        return embeddings.masked_scatter(is_picture, pictures.to(embeddings.dtype))

    def _advance(self, embeddings: Tensor, state: State, live: Tensor) -> Tensor:
        state.mask = torch.cat([state.mask, live[:, None]], 1)
        mask = None if state.whole else state.mask.long()
        if mask is not None and self.config.text_config._attn_implementation == "sdpa":
            # the mask transformers would build after reading its values on the host
            mask = state.mask[:, None, None]
        hidden: Tensor = self.hf.model.language_model(
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=state.place[:, None],
            **caches.cache_kwargs(state.cache),
        ).last_hidden_state[:, -1]
        state.place = state.place + live
        return hidden


def together(first: State, second: State) -> State:
    """Join the rows of both states, the shorter ones padded on the left."""
    length = max(first.mask.shape[1], second.mask.shape[1])

    def padded(layer: Any, state: State) -> Iterator[Tensor]:
        front = length - state.mask.shape[1]
        return (F.pad(x[:, :, : layer.length], (0, 0, front, 0)) for x in layer.kv())

    key_values = []
    for above, below in zip(first.cache.layers, second.cache.layers):
        k, v = (torch.cat(pair) for pair in zip(padded(above, first), padded(below, second)))
        key_values.append((k, v))
    masks = [F.pad(state.mask, (length - state.mask.shape[1], 0)) for state in (first, second)]
    mask = torch.cat(masks)
    place = torch.cat([first.place, second.place])
    return State(
        caches.growing(key_values, torch.arange(len(mask), device=mask.device)),
        mask,
        place,
        bool(mask.all()),
    )


def _from(hidden: Tensor, first: Tensor, width: int) -> Tensor:
    """Return W hidden states [b, W, H] of [b, S, H] from ``first`` [b] on; behind the end the last
    one repeats."""
    at = first[:, None] + torch.arange(width, device=first.device)
    return hidden.gather(
        1, at.clamp(0, hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[2])
    )


def _into(texts: Tensor | None, rows: Tensor, hidden: Tensor, count: int) -> Tensor:
    """Write ``hidden`` [b, W, H] at ``rows`` of [B, W, H], made of zeros where ``texts`` is
    None."""
    texts = hidden.new_zeros(count, *hidden.shape[1:]) if texts is None else texts
    return texts.index_copy(0, rows, hidden)
