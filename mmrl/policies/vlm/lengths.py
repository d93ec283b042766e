"""Reads from a configuration the lengths beyond which a network computes differently.

Rotary embeddings use other factors for all tokens of a pass once a position exceeds a threshold
(longrope, dynamic); and some attention counts columns, padding included (Llama 4's temperature,
top-k sparse attention). Comparing short prompts would not show it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmrl.core.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Holds the thresholds of a text model; None: there is none. ``long``: positions from which
    longrope uses its long factors; ``dynamic``: from which factors change with every length;
    ``columns``: from which padding counts."""

    long: int | None = None
    dynamic: int | None = None
    columns: int | None = None

    @staticmethod
    def of(config: Any) -> Limits:
        """Read the thresholds of a text configuration."""
        ropes = list(_ropes(getattr(config, "rope_parameters", None)))
        whole = getattr(config, "max_position_embeddings", None)
        original = getattr(config, "original_max_position_embeddings", None) or whole

        def first(kind: str, known: int | None) -> int | None:
            thresholds = [
                rope.get("original_max_position_embeddings") or known
                for rope in ropes
                # HunyuanVL calls a fixed stretch by alpha dynamic
                if rope.get("rope_type") == kind and not rope.get("alpha")
            ]
            return min((each for each in thresholds if each), default=None)

        tuned = getattr(config, "attn_temperature_tuning", False)
        # only for models that count columns; others (Ministral) scale by positions
        floor = getattr(config, "floor_scale", None) if tuned else None
        blocks = getattr(config, "index_topk_blocks", None)  # of MiniMax M3
        chosen = blocks and blocks * config.index_block_size
        columns = [floor, chosen]
        columns += [getattr(config, name, None) for name in ("index_topk", "indexer_budget")]
        return Limits(
            first("longrope", original),
            first("dynamic", whole),
            min((int(each) for each in columns if each), default=None),
        )

    @property
    def some(self) -> bool:
        """Tell whether there is a threshold, so that prompts may differ in kind."""
        return self != Limits()

    def kind(self, prompt: dict[str, Tensor], answer: int) -> Hashable:
        """Return the key that prompts of a batch must share, with answers of ``answer`` tokens."""
        alone = self.pads(prompt, answer)
        return id(prompt["input_ids"]) if alone else None, self._is_long(prompt)

    def pads(self, prompt: dict[str, Tensor], answer: int) -> bool:
        """Tell whether padding would matter for a prompt with an answer of ``answer`` tokens."""
        length = prompt["input_ids"].shape[1]
        return self.columns is not None and length + answer > self.columns

    def _is_long(self, prompt: dict[str, Tensor]) -> bool:
        return self.long is not None and _reach(prompt) > self.long

    def check(self, prompt: dict[str, Tensor], answer: int, name: str, kind: str) -> None:
        """Raise UserError where an answer of ``answer`` tokens to the prompt ``name`` would cross a
        threshold."""
        reach = _reach(prompt)
        for limit, rule, crossed in (
            (self.long, "longrope", reach <= (self.long or 0) < reach + answer),
            (self.dynamic, "dynamic rope", reach + answer > (self.dynamic or 0)),
        ):
            if limit is not None and crossed:
                raise UserError(
                    f"{name}: its {reach} positions and {answer} of an answer go beyond {limit}, "
                    f"where the {rule} of {kind} changes the embedding of all tokens before, which "
                    "no answer that goes on from a prompt can follow; lower "
                    "policy.vlm.max_new_tokens, or set policy.vlm.budgets.prompt_tokens"
                )


def _reach(prompt: dict[str, Tensor]) -> int:
    """Return the position after the last of a prompt."""
    return int(prompt["places"].max()) + 1


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the rope parameters of every kind of layer."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        yield from _ropes(value)
