"""Finds objects in a picture by a detector of transformers: boxes, scores, names, and masks if the
model has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor

from rewards.base.hf import Eyes, Precision, load_model, load_processor, to_pil

MOST = 100  # objects of a picture before thresholds
INSTANCES = ("mask2former",)
OPEN = ("owlvit", "owlv2")  # open-vocabulary: they search for given names
QUERY = "a photo of a {name}"
# COCO's 80 classes, as GenEval calls them
OBJECTS = tuple(
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,"
    "backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,baseball bat,"
    "baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,fork,knife,spoon,"
    "bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,"
    "potted plant,bed,dining table,toilet,tv,laptop,computer mouse,tv remote,computer keyboard,"
    "cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,"
    "hair drier,toothbrush".split(",")
)
GENEVAL_NAMES = {  # COCO's names in the detectors -> GenEval's
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "hair dryer": "hair drier",
    "television": "tv",
}


@dataclass(frozen=True)
class Detection:
    """Holds one object: ``box`` [4] as left, top, right, bottom in pixels, ``mask`` [H, W] bool or
    None."""

    name: str
    score: float
    box: Tensor
    mask: Tensor | None = None


class Detector:
    """Finds objects with Mask2Former (as GenEval's), any object detection model (DETR, ...)
    or an open-vocabulary one given ``names`` (OWL-ViT, OWLv2), hub id or folder."""

    def __init__(
        self,
        model: str,
        device: str | torch.device = "auto",
        dtype: Precision = "float32",
        names: Sequence[str] = OBJECTS,
    ):
        config = load_processor("AutoConfig", model)
        self.masks = config.model_type in INSTANCES
        self.asks = config.model_type in OPEN
        kind = "AutoModelForUniversalSegmentation" if self.masks else "AutoModelForObjectDetection"
        kind = "AutoModelForZeroShotObjectDetection" if self.asks else kind
        self.model = load_model(kind, model, device, dtype)
        if self.asks:
            self.processor = load_processor("AutoProcessor", model)
            self.names = dict(enumerate(names))
            return
        self.processor = Eyes(model, "pil").processor
        labels = {place: name.lower() for place, name in config.id2label.items()}
        self.names = {place: GENEVAL_NAMES.get(name, name) for place, name in labels.items()}

    @torch.no_grad()
    def __call__(self, pictures: Tensor) -> list[list[Detection]]:
        """Find the objects of pictures [N, 3, H, W] in 0..1, best first, not thresholded."""
        height, width = pictures.shape[-2:]
        size = (height, width)
        if self.asks:
            return self.asked(pictures, size)
        inputs = self.processor(images=to_pil(pictures), return_tensors="pt").to(self.model.device)
        pixels = {name: inputs[name] for name in ("pixel_values", "pixel_mask") if name in inputs}
        pixels["pixel_values"] = pixels["pixel_values"].to(self.model.dtype)
        outputs = self.model(**pixels)
        if self.masks:
            classes = outputs.class_queries_logits.float()
            masks = outputs.masks_queries_logits.float()
            return [
                self.instances(*row, size)
                for row in zip(classes, masks, shown(pixels), strict=True)
            ]
        rows = self.processor.post_process_object_detection(
            outputs, threshold=0.0, target_sizes=[size] * len(pictures)
        )
        return [self.boxes(row, size) for row in rows]

    def asked(self, pictures: Tensor, size: tuple[int, int]) -> list[list[Detection]]:
        """Detect the names with an open-vocabulary model."""
        queries = [QUERY.format(name=name) for name in self.names.values()]
        inputs = self.processor(
            text=[queries] * len(pictures), images=to_pil(pictures), return_tensors="pt"
        ).to(self.model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        rows = self.processor.post_process_grounded_object_detection(
            self.model(**inputs), threshold=0.0, target_sizes=[size] * len(pictures)
        )
        return [self.boxes(row, size) for row in rows]

    def boxes(self, row: dict[str, Tensor], size: tuple[int, int]) -> list[Detection]:
        scores, labels = row["scores"].cpu(), row["labels"].tolist()  # one wait each, not per box
        order = scores.argsort(descending=True)[:MOST].tolist()
        limit = torch.tensor([size[1], size[0]] * 2)
        boxes = row["boxes"].cpu().clamp(min=0).minimum(limit)
        return [Detection(self.names[int(labels[i])], float(scores[i]), boxes[i]) for i in order]

    def instances(
        self, classes: Tensor, masks: Tensor, part: tuple[float, float], size: tuple[int, int]
    ) -> list[Detection]:
        """Score instances by Mask2Former's rule: class probability times the mean probability
        inside the mask (arXiv:2112.01527, A.2).

        Args:
            classes: [Q, C + 1] logits, the last class is "nothing".
            masks: [Q, h, w] logits, over the picture and its padding.
            part: share of height and width of ``masks`` that is the picture.
            size: height and width of the picture.
        """
        chances = classes.softmax(-1)[:, :-1]  # [Q, C]
        scores, places = chances.flatten().topk(min(MOST, chances.numel()))
        queries = places // chances.shape[1]
        labels = places % chances.shape[1]
        whole = (round(size[0] / part[0]), round(size[1] / part[1]))
        full = nnf.interpolate(masks[None], whole, mode="bilinear", align_corners=False)[
            0, :, : size[0], : size[1]
        ]
        instances = []
        for score, query, label in zip(
            scores.tolist(), queries.tolist(), labels.tolist(), strict=True
        ):
            inside = full[query] > 0
            if inside.any():
                sure = full[query][inside].sigmoid().sum() / (inside.sum() + 1e-6)
                instances.append(
                    Detection(self.names[label], score * float(sure), box_of(inside), inside.cpu())
                )
        return sorted(instances, key=lambda detection: -detection.score)


def shown(inputs: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Return each picture's share of the padded height and width."""
    height, width = inputs["pixel_values"].shape[-2:]
    if "pixel_mask" not in inputs:
        return [(1.0, 1.0)] * len(inputs["pixel_values"])
    masks = inputs["pixel_mask"].bool()
    return [(int(m.any(1).sum()) / height, int(m.any(0).sum()) / width) for m in masks]


def box_of(mask: Tensor) -> Tensor:
    """Return the box [4] of a mask [H, W]: left, top, right, bottom; right and bottom are one past
    the last pixel."""
    rows = mask.any(1).nonzero()[:, 0]
    columns = mask.any(0).nonzero()[:, 0]
    return torch.tensor(
        [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1],
        dtype=torch.float32,
    )
