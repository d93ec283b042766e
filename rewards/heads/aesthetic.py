"""Scores how much people would like a picture, about 1 to 10, by LAION's aesthetic predictor,
version 2.

The published head (``sac+logos+ava1-l14-linearMSE``,
github.com/christophschuhmann/improved-aesthetic-predictor) is five linear layers with nothing
between them but dropout: in use, an affine function of the unit CLIP embedding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from mmrl.core.weight_files import read_tensors
from rewards.base.clip import Clip, load_clip
from rewards.base.media import frame_mean, frames
from rewards.base.precision import own_precision
from rewards.card import card

HEAD = "~/.cache/mmrl/sac+logos+ava1-l14-linearMSE.pth"
SOURCE = "https://github.com/christophschuhmann/improved-aesthetic-predictor"
WIDTHS = (1024, 128, 64, 16, 1)
KINDS = ("weight", "bias")
PLACES = (0, 2, 4, 6, 7)  # of the linear layers in the published module, between its dropouts


@REWARDS.register("aesthetic")
@card(
    media="image video",
    differentiable=True,
    licence="see the source",
    scaling="about 1..10, open; 0.1 brings it near 0..1",
    source=f"head: [improved-aesthetic-predictor]({SOURCE}); CLIP as in `clip_score`",
)
class Aesthetic:
    """Score a picture by LAION's aesthetic predictor (about 1 to 10), times ``scale``.

    The prompt is not looked at. Of a video, the mean over its frames.

    Args:
        head: the published ``.pth`` (read with ``weights_only=True``) or the same tensors as
            ``.safetensors``.
        clip: ``name/tag`` of open_clip, ``hf-hub:org/repo``, or a local folder; the published head
            wants the embeddings of ``ViT-L-14/openai``. None loads no CLIP: then only
            ``head(embeddings)`` can be used.
        scale: what the score is multiplied by; 1 as published, 0.1 brings it near 0..1.
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``; the published scores went through PIL.
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Attributes:
        head: module, unit CLIP image embeddings [..., E] -> [...] raw scores.

    Raises:
        UserError: a missing or foreign head file, a missing CLIP, a CLIP whose embeddings have
            another width.
    """

    def __init__(
        self,
        head: str = HEAD,
        clip: str | None = "ViT-L-14/openai",
        scale: float = 1.0,
        preprocess: Literal["tensor", "pil"] = "tensor",
        batch_size: Annotated[int, Ge(1)] = 64,
        device: str = "auto",
    ):
        self.scale = scale
        self.exact = preprocess == "pil"
        self.batch_size = batch_size
        self.head = load_head(head)
        self.clip: Clip | None = None
        if clip is not None:
            self.clip = load_clip(*split_name(clip), device)
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
        """Score images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        if self.clip is None:
            raise UserError(
                "this aesthetic reward was built with clip: null and can only score embeddings"
            )
        stack = frames(media, "aesthetic")
        # [B F, E]
        images = self.clip.embed_images(stack.flatten(0, 1), self.batch_size, self.exact)
        with own_precision(images.device.type):
            scores = self.head(images)
        return self.scale * frame_mean(scores, stack.shape[1]).cpu()


class Head(nn.Module):
    """Maps E - 1024 - 128 - 64 - 16 - 1, linear all the way; named as in the published file without
    its dropouts."""

    def __init__(self, width: int = 768):
        super().__init__()
        sizes = (width, *WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map [..., E] unit vectors -> [...] scores."""
        for layer in self.layers:
            embeddings = layer(embeddings)
        return embeddings.squeeze(-1)


def load_head(path: str) -> Head:
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
    renamed = {
        f"layers.{i}.{kind}": f"layers.{place}.{kind}"
        for i, place in enumerate(PLACES)
        for kind in KINDS
    }
    if set(tensors) != set(renamed.values()) or tensors["layers.0.weight"].ndim != 2:
        raise UserError(
            f"{file} is not a LAION aesthetic head: it holds {brief(tensors)}; expected "
            f"layers.0.weight ..."
        )
    with torch.random.fork_rng(devices=[]):
        head = Head(tensors["layers.0.weight"].shape[1])
    try:
        head.load_state_dict({ours: tensors[theirs].float() for ours, theirs in renamed.items()})
    except RuntimeError as error:
        widths = "-".join(str(w) for w in (head.layers[0].in_features, *WIDTHS))
        raise UserError(
            f"{file} is not a LAION aesthetic head of widths {widths}: {brief(tensors)}"
        ) from error
    return head.eval().requires_grad_(False)


def brief(tensors: dict[str, Tensor]) -> str:
    shown = [f"{name} {list(value.shape)}" for name, value in list(tensors.items())[:3]]
    return (
        ", ".join(shown) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        if shown
        else "nothing"
    )


def split_name(clip: str) -> tuple[str, str]:
    """Split ``ViT-L-14/openai`` into name and tag; folders, hub and world ids have no tag."""
    place = Path(clip.removeprefix("local-dir:")).expanduser()
    if (
        clip.startswith(("hf-hub:", "world:", "local-dir:"))
        or place.is_dir()
        or place.is_absolute()
        or clip[0] in ".~"
    ):
        return clip, ""
    name, _, tag = clip.partition("/")
    return name, tag or "openai"
