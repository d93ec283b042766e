"""Scores the aesthetics of a picture, about 1 to 10, by LAION's aesthetic predictor, version 2.

The published head (``sac+logos+ava1-l14-linearMSE``,
github.com/christophschuhmann/improved-aesthetic-predictor) is five linear layers with only dropout
between them: at inference, an affine function of the unit CLIP embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from mmrl.core.weight_files import read_tensors
from rewards.base.clip import Clip, load_named
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import Preprocess
from rewards.card import card
from rewards.heads.head import Head, linear_layers

HEAD = "~/.cache/mmrl/sac+logos+ava1-l14-linearMSE.pth"
SOURCE = "https://github.com/christophschuhmann/improved-aesthetic-predictor"
WIDTHS = (1024, 128, 64, 16, 1)
PLACES = (0, 2, 4, 6, 7)  # of the linear layers in the published module, between its dropouts


@REWARDS.register("aesthetic")
@card(
    media="image video",
    differentiable=True,
    licence="see the source",
    scaling="about 1..10, open; 0.1 brings it near 0..1",
    source=f"head: [improved-aesthetic-predictor]({SOURCE}); CLIP as in `clip_score`",
)
class Aesthetic(FrameReward):
    """Score a picture by LAION's aesthetic predictor (about 1 to 10), times ``scale``.

    The prompt is ignored. For a video, the mean over its frames.

    Args:
        head: the published ``.pth`` (read with ``weights_only=True``) or the same tensors as
            ``.safetensors``.
        clip: ``name/tag`` of open_clip, ``hf-hub:org/repo``, or a local folder; the published head
            needs embeddings of ``ViT-L-14/openai``. None loads no CLIP: then only
            ``head(embeddings)`` can be used.
        scale: factor of the score; 1 as published, 0.1 brings it near 0..1.
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``; the published scores went through PIL.
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Attributes:
        head: module, unit CLIP image embeddings [..., E] -> [...] raw scores.

    Raises:
        UserError: a missing or foreign head file, a missing CLIP, a CLIP whose embeddings have
            another width.
    """

    name = "aesthetic"

    def __init__(
        self,
        head: str = HEAD,
        clip: str | None = "ViT-L-14/openai",
        scale: float = 1.0,
        preprocess: Preprocess = "tensor",
        batch_size: BatchSize = 64,
        device: str = "auto",
    ):
        super().__init__(batch_size, device)
        self.scale = scale
        self.exact = preprocess == "pil"
        self.head = load_head(head)
        self.clip: Clip | None = None
        if clip is not None:
            self.clip = load_named(clip, self.device)
            self.head.to(self.clip.device)
            width = self.clip.embed_images(torch.full((1, 3, 32, 32), 0.5)).shape[1]
            self._check_width(width, head, clip)

    def _check_width(self, width: int, head: str, clip: str) -> None:
        head_width = self.head.layers[0].in_features
        if width != head_width:
            raise UserError(
                f"the embeddings of CLIP {clip!r} have {width} numbers, the aesthetic "
                f"head {head} takes {head_width}; "
                "the published head goes with clip: ViT-L-14/openai"
            )

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        return self.scale * super().__call__(media, prompts)

    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        if self.clip is None:
            raise UserError(
                "this aesthetic reward was built with clip: null and can only score embeddings"
            )
        scores: Tensor = self.head(self.clip.embed_images(pictures, self.batch_size, self.exact))
        return scores


class ScalarHead(Head):
    """Maps [..., E] -> [...]."""

    def forward(self, embeddings: Tensor) -> Tensor:
        return super().forward(embeddings).squeeze(-1)


def load_head(path: str) -> ScalarHead:
    """Load the head in float32, frozen, on the CPU; its input width is read from the file (768 as
    published)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"no aesthetic head at {file}; download {Path(HEAD).name} from {SOURCE} and "
            f"put it there, "
            "or say where it is with `head`"
        )
    tensors = read_tensors(file)
    names = [f"layers.{place}.{kind}" for place in PLACES for kind in ("weight", "bias")]
    if set(tensors) != set(names) or tensors["layers.0.weight"].ndim != 2:
        raise UserError(
            f"{file} is not a LAION aesthetic head: it holds {brief(tensors)}; expected "
            f"layers.0.weight ..."
        )
    widths = (tensors["layers.0.weight"].shape[1], *WIDTHS)
    shapes = [shape for a, b in zip(widths, WIDTHS) for shape in ((b, a), (b,))]
    if [tuple(tensors[name].shape) for name in names] != shapes:
        listed = "-".join(map(str, widths))
        raise UserError(
            f"{file} is not a LAION aesthetic head of widths {listed}: {brief(tensors)}"
        )
    head = ScalarHead(linear_layers(tensors, names[::2]))
    return head.eval().requires_grad_(False)


def brief(tensors: dict[str, Tensor]) -> str:
    shown = [f"{name} {list(value.shape)}" for name, value in list(tensors.items())[:3]]
    return (
        ", ".join(shown) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        if shown
        else "nothing"
    )
