"""Scores frozen embeddings by small heads, alone or as an ensemble, which
``rewards.heads.fit_heads`` fits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as nnf
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt
from mmrl.core.weight_files import metadata, read_tensors
from rewards.base.clip import load_named
from rewards.base.frames import BatchSize
from rewards.base.hf import POOLER, load_model, load_processor
from rewards.base.media import frames
from rewards.base.precision import own_precision
from rewards.base.prompt import texts_of
from rewards.base.tensors import fetch
from rewards.card import Card, card

Activation = Literal["none", "relu", "gelu", "silu"]
Features = Literal["media", "media_and_text"]
Pool = Literal["mean", "last"]
ACTIVATIONS = {"none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Head(nn.Module):
    """Maps standardised embeddings [..., E] -> [..., K] by linear layers with an activation between
    them."""

    mean: Tensor
    std: Tensor

    def __init__(self, layers: Sequence[nn.Linear], activation: Activation = "none"):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.activation = ACTIVATIONS[activation]()
        self.kind = activation
        self.width = layers[0].in_features
        self.outputs = layers[-1].out_features
        self.register_buffer("mean", torch.zeros(self.width))
        self.register_buffer("std", torch.ones(self.width))

    def forward(self, embeddings: Tensor) -> Tensor:
        x = (embeddings.float() - self.mean) / self.std
        for i, layer in enumerate(self.layers):
            x = layer(self.activation(x) if i else x)
        return x

    def save(self, file: Path) -> None:
        """Write a safetensors file for ``load_head``, with the activation in its metadata."""
        from safetensors.torch import save_file

        tensors = {name: value.detach().cpu().contiguous() for name, value in self.named_tensors()}
        save_file(tensors, file, metadata={"activation": self.kind})

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.named_parameters(), *self.named_buffers()]


def load_head(where: str, activation: Activation | None = None) -> Head:
    """Read the linear layers of a head from a file, in the order of their numbers.

    Takes any ``.safetensors`` or ``.pth`` of weights [out, in], with or without biases; consecutive
    layers must fit. ``activation`` None: the one in the file, else none.

    Raises:
        UserError: no such file, or tensors that are not a chain of linear layers.
    """
    file = fetch(where, "head")
    tensors = read_tensors(file)
    names = sorted(
        (name for name, value in tensors.items() if name.endswith("weight") and value.ndim == 2),
        key=lambda name: [int(n) for n in re.findall(r"\d+", name)] or [0],
    )
    shapes = [tuple(tensors[name].shape) for name in names]
    chained = all(a[0] == b[1] for a, b in zip(shapes, shapes[1:], strict=False))
    if not names or not chained:
        listed = ", ".join(f"{name} {list(value.shape)}" for name, value in tensors.items())
        raise UserError(f"{file} holds no chain of linear layers: {listed[:200] or 'nothing'}")
    head = Head(linear_layers(tensors, names), activation or _activation_in(file))
    for name, values in (("mean", head.mean), ("std", head.std)):
        if name in tensors:
            if tensors[name].shape != values.shape:
                raise UserError(f"{file}: {name} must hold {head.width} numbers, one an input")
            values.copy_(tensors[name])
    return head.eval().requires_grad_(False)


def linear_layers(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[nn.Linear]:
    """Build float32 layers from the weights [out, in] of these names, with biases if present."""
    layers = []
    for name in names:
        bias = tensors.get(name.removesuffix("weight") + "bias")
        outputs, inputs = tensors[name].shape
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias is not None)
        layer.weight.data = tensors[name].float()
        if bias is not None:
            layer.bias.data = bias.float()
        layers.append(layer)
    return layers


def _activation_in(file: Path) -> Activation:
    """Return the activation named in a file written by mmrl; none for other files."""
    if file.suffix != ".safetensors":
        return "none"
    name = metadata(file).get("activation", "none")
    if name not in ACTIVATIONS:
        raise UserError(f"{file} names the activation {name!r}; {suggest(name, ACTIVATIONS)}")
    known: dict[str, Activation] = {"none": "none", "relu": "relu", "gelu": "gelu", "silu": "silu"}
    return known[name]


class Encoder:
    """Computes frozen embeddings [B, E] of samples: pictures by CLIP, answers by a text model.

    ``features``: ``media_and_text`` joins image x, prompt y and x * y. A video is the mean of its
    frames. An answer is encoded with its prompt; the last hidden states are averaged (``mean``), or
    the last token's is taken (``last``).
    """

    def __init__(
        self,
        clip: str | None = None,
        text_model: str | None = None,
        features: Features = "media",
        pool: Pool = "mean",
        batch_size: int = 64,
        device: str = "auto",
    ):
        if (clip is None) == (text_model is None):
            raise UserError(
                "embeddings are made by `clip` (of images and videos) or by `text_model` (of "
                "texts): give one of the two"
            )
        if text_model is not None and features != "media":
            raise UserError("features: media_and_text joins a picture and its text: it needs clip")
        self.joined = features == "media_and_text"
        self.pool = pool
        self.batch_size = batch_size
        self.clip = None if clip is None else load_named(clip, device)
        self.network: nn.Module | None = None
        if text_model is not None:
            self.network = load_model("AutoModel", text_model, device, unread=POOLER)
            self.tokenizer = load_processor("AutoTokenizer", text_model)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        if self.network is not None:
            return self._texts(self.network, media, prompts)
        if not isinstance(media, Tensor):
            raise UserError("embeddings by `clip` are of images or videos; texts need `text_model`")
        assert self.clip is not None  # one of the two is there
        stack = frames(media, "embedding_head")
        flat = self.clip.embed_images(stack.flatten(0, 1), self.batch_size)
        images: Tensor = flat.unflatten(0, stack.shape[:2]).mean(1)
        if not self.joined:
            return images
        words = self.clip.embed_texts(texts_of(prompts, "embedding_head"), self.batch_size)
        return torch.cat([images, words, images * words], 1)

    @torch.no_grad()
    def _texts(self, network: nn.Module, media: Media, prompts: list[Prompt]) -> Tensor:
        if isinstance(media, Tensor):
            raise UserError(
                "embeddings by `text_model` are of texts; images and videos need `clip`"
            )
        device = next(network.parameters()).device
        rows = []
        with own_precision(device.type):
            for answer, prompt in zip(media, prompts, strict=True):  # unpadded: batches are alike
                text = "\n".join([str(prompt.get("text", "")), str(answer)])
                inputs = self.tokenizer(text, return_tensors="pt", truncation=True).to(device)
                hidden = network(**inputs).last_hidden_state[0].float()  # [T, E]
                rows.append(hidden.mean(0) if self.pool == "mean" else hidden[-1])
        embeddings = torch.stack(rows) if rows else torch.zeros(0, 1)
        return nnf.normalize(embeddings, dim=-1)


@REWARDS.register("embedding_head")
@card(
    source="[Sun et al. 2025](https://arxiv.org/abs/2502.04357); heads of several aspects: "
    "[Multi-objective GRPO](https://arxiv.org/abs/2503.21819)",
    licence="of the encoder and the heads",
    scaling="that of the heads",
)
class EmbeddingHead:
    """Score frozen embeddings by a fitted head or an ensemble of heads (Reusing Embeddings).

    Sun et al. 2025: reward models as small heads on cached embeddings. The program ``python -m
    mmrl.rewards.heads.fit_heads`` fits heads to preferences or ratings; any file with a chain of
    linear layers works. A head with several outputs rates several aspects; ``weights`` sums them
    (Multi-objective GRPO's multi-label regression). Several heads are combined as ``ensemble``
    does: ``mean``, ``worst``, or ``uncertainty``: mean - penalty * variance.

    Args:
        heads: files, or ``org/repo/file``; more than one is an ensemble.
        clip: ``name/tag`` of open_clip, a folder or hub id: embeds images and videos.
        text_model: a text model of transformers, folder or hub id: embeds answers with their
            prompts.
        features: ``media``, or ``media_and_text``: image x, prompt y and x * y joined.
        pool: of a text model: ``mean`` over tokens, or the ``last``.
        weights: of a head's outputs; None: their mean.
        how: see above.
        penalty: see above.
        activation: between the layers, for files that do not name one; None: from the file.
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Raises:
        UserError: a file without a head, or heads that do not fit the embeddings or each other.
    """

    def __init__(
        self,
        heads: str | list[str],
        clip: str | None = None,
        text_model: str | None = None,
        features: Features = "media",
        pool: Pool = "mean",
        weights: list[float] | None = None,
        how: Literal["mean", "worst", "uncertainty"] = "mean",
        penalty: Annotated[float, Ge(0)] = 1.0,
        activation: Activation | None = None,
        batch_size: BatchSize = 64,
        device: str = "auto",
    ):
        files = [heads] if isinstance(heads, str) else list(heads)
        if not files:
            raise UserError("reward 'embedding_head': `heads` is empty; name at least one file")
        self.heads = nn.ModuleList(load_head(file, activation) for file in files)
        shapes = [(head.width, head.outputs) for head in self.heads if isinstance(head, Head)]
        if len(set(shapes)) > 1:
            raise UserError(
                f"reward 'embedding_head': the heads differ: (inputs, outputs) {shapes}"
            )
        self.width, outputs = shapes[0]
        if weights is not None and len(weights) != outputs:
            raise UserError(
                f"reward 'embedding_head': {len(weights)} weights for heads of {outputs} outputs"
            )
        self.weights = torch.tensor(
            [1 / outputs] * outputs if weights is None else weights, dtype=torch.float64
        )
        self.how = how
        self.penalty = penalty
        self.encoder = Encoder(clip, text_model, features, pool, batch_size, device)
        needs = ("text",) if features == "media_and_text" or text_model else ()
        self.card = Card(media=("text",) if text_model else ("image", "video"), needs=needs)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W], videos [B, F, 3, H, W] in 0..1, or B texts -> [B] float32 on
        the CPU."""
        embeddings = self.encoder(media, prompts)
        if len(prompts) and embeddings.shape[1] != self.width:
            raise UserError(
                f"reward 'embedding_head': the heads take embeddings of {self.width} numbers, the "
                f"encoder makes {embeddings.shape[1]}"
            )
        embeddings = embeddings.to(next(self.heads.parameters()).device)
        with own_precision(embeddings.device.type):
            each = torch.stack([head(embeddings) for head in self.heads])  # [N, B, K]
        return self.combined(each.double().cpu() @ self.weights).float()

    def combined(self, scores: Tensor) -> Tensor:
        """Combine the scores [N, B] of N heads -> [B]."""
        if self.how == "worst":
            return scores.amin(0)
        spread = scores.var(0, correction=0) if self.how == "uncertainty" else 0.0
        return scores.mean(0) - self.penalty * spread
