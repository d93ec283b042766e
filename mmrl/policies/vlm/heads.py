"""Computes logits as a model's own class does: by its head and whatever the class applies after it.

Classes scale or cap logits or cut the vocabulary (Granite, HyperCLOVA X, Cohere, Inkling), and an
outer class may omit what its text model alone would do. None of that is reimplemented here: the
class's own forward pass is called, with hidden states replacing its network's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mmrl.core.errors import UserError

# norms of the trial hidden states: a cap shows at the largest, an offset at the smallest
SIZES = (1.0, 30.0, 1000.0)
# attributes of language models that have their own head
WRITERS = ("language_model", "text_model", "text_decoder")


class Head:
    """Returns the logits of hidden states. ``plain``: the head is all that the class applies;
    ``vocabulary``: how many logits there are."""

    def __init__(self, hf: Any):
        """Raises UserError where a model has no head, or its class does not take hidden states."""
        self.hf = hf
        last = output_embeddings(hf)
        if last is None:
            raise UserError(
                f"policy.vlm.path: {hf.config.model_type} has no head over a vocabulary, so it "
                "writes no text; use a model that answers"
            )
        self.plain = True
        weight = last.weight
        self.vocabulary = int(hf.config.get_text_config().vocab_size)
        if weight.is_meta or isinstance(weight.data, FakeTensor):  # a dry run without weights
            return
        hidden = _tried(last, hf.dtype)
        with torch.no_grad():
            alone = last(hidden).float()
            try:
                whole = self._called(hidden).float()
            except (ValueError, TypeError, RuntimeError, AttributeError, KeyError) as error:
                raise UserError(
                    f"policy.vlm.path: what {hf.config.model_type} does behind its head cannot be "
                    f"called ({type(error).__name__}: {error}); use a family that docs/vlm.md names"
                ) from error
        self.vocabulary = whole.shape[-1]
        self.plain = torch.equal(alone, whole)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [*, V] of hidden states [*, H]."""
        logits: Tensor = output_embeddings(self.hf)(hidden) if self.plain else self._called(hidden)
        return logits

    def _called(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 1, hidden.shape[-1])
        with _having_read(self.hf, flat) as owner:
            logits: Tensor = owner.forward(
                input_ids=None, inputs_embeds=flat, use_cache=False, return_dict=True
            ).logits
        return logits.reshape(*hidden.shape[:-1], -1)


class _Read:
    """Replaces both the network and its output, with ``hidden`` [N, 1, H]; other attributes are the
    network's, or None for its output."""

    def __init__(self, network: Any, hidden: Tensor):
        self._network = network
        self._hidden = hidden

    def __call__(self, *_: Any, **__: Any) -> _Output:
        return _Output(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class _Output:
    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _having_read(hf: Any, hidden: Tensor) -> Iterator[Any]:
    """Yield the module that holds the head, whose network returns ``hidden`` within the block."""
    owner = writer(hf)
    name = _network(owner)
    # an attribute takes precedence over the submodule of that name
    owner.__dict__[name] = _Read(getattr(owner, name), hidden)
    try:
        yield owner
    finally:
        del owner.__dict__[name]


def writer(hf: Any) -> Any:
    """Return the module that holds the head: the model, or the language model inside it (Llama 4,
    Kosmos-2, Nemotron)."""
    if hf.base_model is not hf:
        return hf
    return next((inner for name in WRITERS if (inner := getattr(hf, name, None)) is not None), hf)


def network(owner: Any) -> Any:
    """Return the network that computes the input of ``owner``'s head."""
    return getattr(owner, _network(owner))


def _network(owner: Any) -> str:
    known: str = owner.base_model_prefix
    return known if known and hasattr(owner, known) else "model"


def output_embeddings(hf: Any) -> Any:
    """Return the last linear layer, from hidden states to logits; None: there is none."""
    return hf.get_output_embeddings() or writer(hf).get_output_embeddings()


def _tried(last: Any, dtype: torch.dtype) -> Tensor:
    """Return hidden states [n, H] of several norms, the same in every call."""
    width, weight = last.in_features, last.weight
    dtype = weight.dtype if weight.is_floating_point() else dtype
    place = weight.device  # whatever the default device is
    steps = torch.arange(width, dtype=torch.float64, device=place).mul(1.7).sin()
    sizes = torch.tensor(SIZES, dtype=torch.float64, device=place)
    hidden = torch.empty(len(sizes), width, dtype=dtype, device=place)
    return hidden.copy_(torch.outer(sizes, steps))
