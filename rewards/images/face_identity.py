"""Compares the face in a picture with that of a reference picture of the same person."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as nnf
from annotated_types import Ge, Interval
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.pretrained import load_timm as load_timm_model
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.clip import pick_device
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import DTYPES, Precision, missing, place_of
from rewards.base.prompt import picture_of
from rewards.card import card_with
from rewards.images.detector import Detection, Detector
from rewards.images.similarity import beside_reference, embed_each

FACES = ("human face",)  # query of an open-vocabulary detector


@beside_reference(
    source="a face recognition model of timm (CosFace, ArcFace), a detector of transformers",
    licence="of the model; MS1MV3, which it was trained on, is for research only",
    scaling="cosine of the two faces; a picture without a face scores `missing`",
)
@REWARDS.register("face_identity")
class FaceIdentity(FrameReward):
    """Compare the largest face of the picture with that of the prompt's reference by the cosine of
    their embeddings.

    Embeddings are those of face recognition (CosFace, arXiv:1801.09414; ArcFace, arXiv:1801.07698).
    Faces are cut out as squares around the detector's boxes, without alignment by landmarks, which
    the published accuracies rely on. For a video, the mean over its frames.

    Args:
        model: a face recognition model of timm, hub id or folder: it embeds a picture of its input
            size.
        detector: finds faces. OWLv2 or OWL-ViT, queried for a human face, or an object detection
            model of transformers with a class whose name has "face" in it.
        field: the field of a prompt that holds the reference: a file, a PIL image or a tensor [3,
            H, W].
        threshold: faces below this score of the detector do not count.
        margin: share of the larger side of a box, added on all sides.
        missing: the score of a picture without a face.
        dtype: of both models.

    Raises:
        UserError: a model that cannot be loaded; a reference picture without a face.
    """

    name = "face_identity"

    def __init__(
        self,
        model: str = "gaunernst/vit_small_patch8_gap_112.cosface_ms1mv3",
        detector: str = "google/owlv2-base-patch16-ensemble",
        field: str = "reference",
        threshold: Annotated[float, Interval(ge=0, le=1)] = 0.2,
        margin: Annotated[float, Ge(0)] = 0.1,
        missing: Annotated[float, Interval(ge=-1, le=1)] = 0.0,
        batch_size: BatchSize = 16,
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.detector = Detector(detector, self.device, dtype, FACES)
        check_finds_faces(self.detector, detector)
        self.network = load_timm(model, self.device, dtype)
        about: Any = self.network.pretrained_cfg
        self.side = tuple(about["input_size"][-2:])
        shape = (1, 3, 1, 1)
        self.mean, self.std = (
            torch.tensor(about[key], device=self.device).view(shape) for key in ("mean", "std")
        )
        self.field = field
        self.threshold = threshold
        self.margin = margin
        self.missing = missing
        self.card = card_with(type(self), {"field": field})

    def conditions(self, prompts: list[Prompt]) -> Tensor:
        """Return [B, E], the embeddings of the references."""
        pictures = [picture_of(prompt, self.field, self.name) for prompt in prompts]
        return embed_each(pictures, self._reference)

    def score(self, pictures: Tensor, references: Tensor) -> Tensor:
        """Score pictures [n, 3, H, W] by reference embeddings [n, E] -> [n]."""
        boxes = [self.face(row) for row in self.detector(pictures)]
        scores = torch.full((len(pictures),), self.missing, device=references.device)
        faces = {
            place: self.cut(pictures[place], box)
            for place, box in enumerate(boxes)
            if box is not None
        }
        if faces:
            shown = list(faces)
            embeddings = self.embed(torch.cat(list(faces.values())))
            scores[shown] = (embeddings * references[shown]).sum(-1)
        return scores

    def face(self, found: list[Detection]) -> Tensor | None:
        """Return the box [4] of the largest face; None if there is none."""
        faces = [
            detection.box
            for detection in found
            if "face" in detection.name and detection.score >= self.threshold
        ]
        sizes = [float((box[2:] - box[:2]).clamp(min=0).prod()) for box in faces]
        return faces[sizes.index(max(sizes))] if sizes and max(sizes) > 0 else None

    def cut(self, picture: Tensor, box: Tensor) -> Tensor:
        """Crop the square around a box from a picture [3, H, W] -> [1, 3, h, w] in the model's
        size, with edge padding."""
        side = float((box[2:] - box[:2]).max()) * (1 + 2 * self.margin)
        centre = (box[:2] + box[2:]) / 2
        left, top = (int(x) for x in (centre - side / 2).floor())
        right, bottom = (int(x) for x in (centre + side / 2).ceil())
        height, width = picture.shape[-2:]
        rows = torch.arange(top, bottom, device=picture.device).clamp(0, height - 1)
        columns = torch.arange(left, right, device=picture.device).clamp(0, width - 1)
        square = picture.index_select(-2, rows).index_select(-1, columns)[None]
        return nnf.interpolate(
            square, self.side, mode="bilinear", align_corners=False, antialias=True
        ).clamp(0, 1)

    def embed(self, faces: Tensor) -> Tensor:
        """Embed faces [N, 3, h, w] in 0..1 -> [N, E] unit vectors."""
        moved = (faces.to(self.mean.device) - self.mean) / self.std
        weight = next(self.network.parameters())
        return nnf.normalize(self.network(moved.to(weight.dtype)).float(), dim=-1)

    def _reference(self, pictures: Tensor) -> Tensor:
        """Embed the face of a reference picture [1, 3, H, W] -> [1, E]."""
        box = self.face(self.detector(pictures)[0])
        if box is None:
            height, width = pictures.shape[-2:]
            raise UserError(
                f"reward {self.name!r}: no face was found in a picture of {width} x {height} "
                f"pixels in the field {self.field!r} of a prompt: give another one, or lower the "
                f"threshold ({self.threshold:g})"
            )
        return self.embed(self.cut(pictures[0], box))


def check_finds_faces(detector: Detector, model: str) -> None:
    """Raise UserError if no class of a detector is a face."""
    names = list(detector.names.values())
    if not any("face" in name for name in names):
        raise UserError(
            f"reward 'face_identity': the detector {model!r} knows no faces, but "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}; take one with a class "
            f'whose name has "face" in it, or OWLv2'
        )


def load_timm(path: str, device: str | torch.device, dtype: Precision) -> nn.Module:
    """Load a frozen model of timm from a folder or the hub. Raises UserError for anything else."""
    place = place_of(path)
    source = "local-dir" if Path(place).is_dir() else "hf-hub"
    try:
        model = load_timm_model(f"{source}:{place}")
    except Exception as error:  # timm, the hub and safetensors raise a dozen types for it
        raise UserError(missing("model of timm", place, error)) from error
    module: nn.Module = model.eval().requires_grad_(False)
    return module.to(pick_device(device), DTYPES[dtype])
