"""Detects digits in pictures by a small network: place, identity, colour, size.

Heat map and attributes on a grid, as in CenterNet (Zhou et al. 2019, "Objects as points"). It is
trained by ``mmrl.worlds.reading`` and stored as ``config.json`` (layout, names, regions) and
``model.safetensors``.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.weight_files import read_tensors


class Detections(NamedTuple):
    """Holds the M strongest peaks of every picture, strongest first."""

    confidence: Tensor  # [B, M] in 0..1, 0 where there is no peak
    digit: Tensor  # [B, M, 10] probabilities
    color: Tensor  # [B, M, colours] probabilities
    size: Tensor  # [B, M, sizes] probabilities
    center: Tensor  # [B, M, 2] x, y in pixels of the reader's canvas


class Reader(nn.Module):
    """Maps pictures [B, 3, S, S] in 0..1 to a grid of detections with 4 pixels a cell.

    ``config``: ``image_size``, ``channels`` (three widths), ``kernel`` (of the first convolution),
    ``pool`` (halve by average pooling instead of strides), ``digits``, ``colors``, ``sizes``
    (names) and ``places`` (name to region).
    """

    stride = 4

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        self.parts = [1, 2, len(config["digits"]), len(config["colors"]), len(config["sizes"])]
        a, b, c = config["channels"]
        stride, halve = (1, nn.AvgPool2d(2)) if config["pool"] else (2, nn.Identity())
        widths = [
            (3, a, config["kernel"], stride, halve),
            (a, b, 3, stride, halve),
            (b, c, 3, 1, nn.Identity()),
        ]
        body: list[nn.Module] = []
        for n_in, n_out, kernel, step, shrink in widths:
            body += [
                nn.Conv2d(n_in, n_out, kernel, step, kernel // 2),
                nn.GroupNorm(4, n_out),
                nn.SiLU(),
                shrink,
            ]
        for n_in, n_out in pairwise([c, c, c]):
            body += [nn.Conv2d(n_in, n_out, 3, 1, 1), nn.GroupNorm(4, n_out), nn.SiLU()]
        self.body = nn.Sequential(*body)
        self.head = nn.Conv2d(c, sum(self.parts), 1)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return logits on the grid, each [B, channels, S/4, S/4]: presence 1, offset 2, digit,
        colour, size."""
        logits: tuple[Tensor, ...] = self.head(self.body(2 * images - 1)).split(self.parts, dim=1)
        return logits

    def detect(self, images: Tensor, most: int = 5) -> Detections:
        """Return the ``most`` strongest peaks. Pictures of another size are resized; any float type
        is read as float32."""
        side = self.config["image_size"]
        images = images.float().clamp(0, 1)
        if images.shape[-2:] != (side, side):
            images = F.interpolate(images, (side, side), mode="bilinear", antialias=True)
        presence, offset, *names = self(images)
        heat = presence.sigmoid()
        heat = heat * (heat == F.max_pool2d(heat, 3, 1, 1))  # keep local maxima only
        confidence, cell = heat.flatten(1).topk(most)  # [B, M]

        def at(grid: Tensor) -> Tensor:
            """Gather a map [B, N, h, w] at the chosen cells, [B, M, N]."""
            index = cell[..., None].expand(-1, -1, grid.shape[1])
            return grid.flatten(2).transpose(1, 2).gather(1, index)

        corner = torch.stack([cell % heat.shape[-1], cell // heat.shape[-1]], -1)
        center = (corner + 0.5 + at(offset)) * self.stride
        digit, color, size = (at(logits).softmax(-1) for logits in names)
        return Detections(confidence, digit, color, size, center)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()},
            folder / "model.safetensors",
        )

    @classmethod
    def load(cls, folder: str | Path) -> Reader:
        """Load a reader; raises UserError if the folder is not one that ``save`` wrote."""
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise UserError(
                    f"{folder} is not a digit reader: it has no {name}; try 'world:digits/reader'"
                )
        try:
            reader = cls(json.loads((folder / "config.json").read_text()))
            reader.load_state_dict(read_tensors(folder / "model.safetensors"))
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{folder} is not a digit reader: {error}") from error
        return reader.eval().requires_grad_(False)
