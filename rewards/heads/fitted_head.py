"""Scores pictures by a head that ``mmrl fit-head`` has fitted to your ratings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.clip import load_named
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import Eyes, load_model
from rewards.base.precision import own_precision
from rewards.card import card
from rewards.heads.embedding import load_head

Kind = Literal["clip", "vision"]
WEIGHTS = "head.safetensors"
ABOUT = "head.json"


class PictureFeatures:
    """Computes unit features [N, E] of pictures, by a model of open_clip (``clip``) or a vision
    model of transformers (``vision``): its pooled output if it has one, as CLIP and SigLIP do, else
    the first token, as for DINO. Differentiable."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        batch_size: int = 64,
        device: str | torch.device = "auto",
    ):
        self.kind = kind
        self.model = model
        self.batch_size = batch_size
        if kind == "clip":
            self.clip = load_named(model, device)
            return
        network = load_model("AutoModel", model, device)
        self.network: Any = getattr(network, "vision_model", network)
        self.eyes = Eyes(model)

    def __call__(self, pictures: Tensor) -> Tensor:
        """Embed [N, 3, H, W] in 0..1 -> [N, E] float32; NaN for a picture that is not finite."""
        if self.kind == "clip":
            return self.clip.embed_images(pictures, self.batch_size)
        parameter = next(self.network.parameters())
        rows = []
        with own_precision(parameter.device.type):
            for part in pictures.split(self.batch_size):
                broken = ~part.isfinite().flatten(1).all(1).to(parameter.device)
                pixels = self.eyes(part.nan_to_num(0.0, 0.0, 0.0), parameter.device)
                output = self.network(pixel_values=pixels.to(parameter.dtype))
                pooled = getattr(output, "pooler_output", None)
                values = output.last_hidden_state[:, 0] if pooled is None else pooled
                values = nnf.normalize(values.float(), dim=-1)
                rows.append(values.masked_fill(broken[:, None], torch.nan))
        return torch.cat(rows)


@REWARDS.register("fitted_head")
@card(
    media="image video",
    differentiable=True,
    source="`mmrl fit-head`, on a model of open_clip or transformers",
    licence="of the model and your ratings",
    scaling="that of the ratings; of pairs, log-odds of being preferred",
)
class FittedHead(FrameReward):
    """Score pictures by a head that ``mmrl fit-head`` fitted to your ratings or pairs.

    The prompt is ignored. For a video, the mean over its frames. ``head.json`` next to the weights
    names the features and the score on held-out ratings.

    Args:
        path: the folder that ``mmrl fit-head`` wrote.
        scale: factor of the score.
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Raises:
        UserError: a folder without a head, or a head that does not fit its features.
    """

    name = "fitted_head"

    def __init__(
        self,
        path: str,
        scale: float = 1.0,
        batch_size: BatchSize = 64,
        device: str = "auto",
    ):
        super().__init__(batch_size, device)
        folder = Path(path).expanduser()
        about = read_about(folder)
        self.scale = scale
        self.head: nn.Module = load_head(str(folder / WEIGHTS))
        self.features = PictureFeatures(about["kind"], about["model"], batch_size, self.device)
        probe = self.features(torch.full((1, 3, 32, 32), 0.5))
        if probe.shape[1] != self.head.width or self.head.outputs != 1:
            raise UserError(
                f"reward 'fitted_head': {folder} takes {self.head.width} numbers and gives "
                f"{self.head.outputs}; {about['model']} makes {probe.shape[1]}, and one is wanted"
            )
        self.head.to(probe.device)

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        return self.scale * super().__call__(media, prompts)

    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        scores: Tensor = self.head(self.features(pictures)).squeeze(-1)
        return scores


def read_about(folder: Path) -> dict[str, Any]:
    """Read a folder's ``head.json``. UserError if it is not one of mmrl."""
    file = folder / ABOUT
    if not file.is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(
            f"reward 'fitted_head': {folder} holds no {WEIGHTS} and {ABOUT}; `mmrl fit-head DATA "
            f"--out FOLDER` writes them"
        )
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not JSON: {error}") from error
    if (
        not isinstance(about, dict)
        or about.get("kind") not in ("clip", "vision")
        or not isinstance(about.get("model"), str)
    ):
        raise UserError(f"{file}: names no model; expected kind (clip or vision) and model")
    return about
