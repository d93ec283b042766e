"""Scores frozen embeddings by small heads, alone or as an ensemble, which ``mmrl fit-head``
fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt
from rewards.base.frames import BatchSize
from rewards.base.precision import own_precision
from rewards.card import card, card_of
from rewards.heads.encoders import Features, Kind, Pool, load_encoder
from rewards.heads.head import Activation, load_head

WEIGHTS = "head.safetensors"
ABOUT = "head.json"


@REWARDS.register("fitted_head")
@card(
    differentiable=True,
    source="`mmrl fit-head`; [Sun et al. 2025](https://arxiv.org/abs/2502.04357); heads of several "
    "aspects: [Multi-objective GRPO](https://arxiv.org/abs/2503.21819)",
    licence="of the encoder and your ratings",
    scaling="that of the ratings; of pairs, log-odds of being preferred",
)
class FittedHead:
    """Score frozen embeddings by a head or an ensemble of heads that ``mmrl fit-head`` fitted.

    Images and videos (the mean of a video's frames is scored), or answers with their prompts. A
    head with several outputs rates several aspects; ``weights`` sums them. Several heads are
    combined as ``ensemble`` does: ``mean``, ``worst``, or ``uncertainty``: mean - penalty *
    variance.

    Args:
        path: the folder that ``mmrl fit-head`` wrote, whose ``head.json`` names the encoder; or
            files with a chain of linear layers, or ``org/repo/file``, on the encoder ``model``.
        model: of files: ``name/tag`` of open_clip, a folder or hub id.
        kind: of ``model``: ``clip`` (open_clip; None), ``vision`` or ``text`` (transformers).
        features: of ``model``: ``media`` (None), or ``media_and_text``: image x, prompt y and x * y
            joined (``clip``).
        pool: of a text ``model``: ``mean`` over tokens (None), or the ``last``.
        weights: of a head's outputs; None: their mean.
        how: see above.
        penalty: see above.
        activation: between the layers, for files that do not name one; None: from the file.
        scale: factor of the score.
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Raises:
        UserError: a folder or file without a head, or heads that do not fit the embeddings or each
            other.
    """

    def __init__(
        self,
        path: str | list[str],
        model: str | None = None,
        kind: Kind | None = None,
        features: Features | None = None,
        pool: Pool | None = None,
        weights: list[float] | None = None,
        how: Literal["mean", "worst", "uncertainty"] = "mean",
        penalty: Annotated[float, Ge(0)] = 1.0,
        activation: Activation | None = None,
        scale: float = 1.0,
        batch_size: BatchSize = 64,
        device: str = "auto",
    ):
        options = {"kind": kind, "features": features, "pool": pool}
        chosen = {key: value for key, value in options.items() if value is not None}
        encoder: dict[str, Any] = {"model": model, "kind": "clip"} | chosen
        files = [path] if isinstance(path, str) else list(path)
        if model is None:
            files, encoder = read_folder(files)
            if chosen:
                raise UserError(
                    f"reward 'fitted_head': {', '.join(chosen)} are of the encoder `model` of "
                    f"files; {ABOUT} of the folder says them: leave them out"
                )
        self.heads, self.width, outputs = load_heads(files, activation)
        if weights is not None and len(weights) != outputs:
            raise UserError(
                f"reward 'fitted_head': {len(weights)} weights for heads of {outputs} outputs"
            )
        self.weights = torch.tensor(weights or [1 / outputs] * outputs, dtype=torch.float64)
        self.how = how
        self.penalty = penalty
        self.scale = scale
        self.encoder = load_encoder(**encoder, batch_size=batch_size, device=device)
        self.check_width(encoder["model"])
        self.card = replace(
            card_of(type(self)),
            media=self.encoder.media,
            needs=("text",) if self.encoder.reads_prompt else (),
        )

    def check_width(self, model: str) -> None:
        """Refuse heads of another width than what the encoder makes of one sample."""
        sample: Media = ["a"] if "text" in self.encoder.media else torch.full((1, 3, 32, 32), 0.5)
        with torch.no_grad():
            width = self.encoder(sample, [{"text": "a"}]).shape[1]
        if width != self.width:
            raise UserError(
                f"reward 'fitted_head': the heads take embeddings of {self.width} numbers, {model} "
                f"makes {width}"
            )

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W], videos [B, F, 3, H, W] in 0..1, or B texts -> [B] float32 on
        the CPU."""
        embeddings = self.encoder(media, prompts).to(next(self.heads.parameters()).device)
        with own_precision(embeddings.device.type):
            each = torch.stack([head(embeddings) for head in self.heads])  # [N, B, K]
        return self.scale * self.combined(each.double().cpu() @ self.weights).float()

    def combined(self, scores: Tensor) -> Tensor:
        """Combine the scores [N, B] of N heads -> [B]."""
        if self.how == "worst":
            return scores.amin(0)
        spread = scores.var(0, correction=0) if self.how == "uncertainty" else 0.0
        return scores.mean(0) - self.penalty * spread


def load_heads(files: list[str], activation: Activation | None) -> tuple[nn.ModuleList, int, int]:
    """Load heads of one shape; returns them with their numbers of inputs and outputs."""
    if not files:
        raise UserError("reward 'fitted_head': `path` is empty; name a folder or at least one file")
    heads = [load_head(file, activation) for file in files]
    shapes = [(head.width, head.outputs) for head in heads]
    if len(set(shapes)) > 1:
        raise UserError(f"reward 'fitted_head': the heads differ: (inputs, outputs) {shapes}")
    return nn.ModuleList(heads), *shapes[0]


def read_folder(paths: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the files of heads and the encoder of the folder that ``mmrl fit-head`` wrote.
    UserError if it did not."""
    folder = Path(paths[0] if len(paths) == 1 else "").expanduser()
    file = folder / ABOUT
    if len(paths) != 1 or not file.is_file():
        raise UserError(
            f"reward 'fitted_head': {', '.join(paths) or '`path`'} is no folder with {ABOUT}; "
            f"`mmrl fit-head DATA --out FOLDER` writes one, and files of heads need `model`, their "
            f"encoder"
        )
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from error
    known = isinstance(about, dict) and about.get("kind") in get_args(Kind)
    if not known or not isinstance(about.get("model"), str):
        raise UserError(
            f"{file}: names no model; expected kind ({', '.join(get_args(Kind))}) and model"
        )
    encoder = {key: about[key] for key in ("kind", "model", "features", "pool") if key in about}
    return [str(folder / name) for name in about.get("heads", [WEIGHTS])], encoder
