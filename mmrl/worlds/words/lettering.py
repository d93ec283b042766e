"""Draws captions of the words world in real fonts, on plain or textured grounds.

The fonts are packages of the index under the SIL Open Font License or Apache-2.0 (extra ``words``);
only building the base model needs them.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.worlds.words.signs import COLORS
from samplers.noise import Rng

WIDTH, HEIGHT = 96, 32  # pixels
FONTS = {  # module: files
    "font_roboto": ("Roboto-Regular", "Roboto-Bold", "Roboto-Medium"),
    "font_lato": ("Lato-Regular", "Lato-Bold", "Lato-Black"),
    "font_manrope": ("Manrope-Medium", "Manrope-Bold", "Manrope-ExtraBold"),
    "font_source_sans_pro": ("SourceSansPro-Semibold", "SourceSansPro-Black"),
    "font_source_serif_pro": ("SourceSerifPro-Semibold", "SourceSerifPro-Bold"),
    "font_caladea": ("Caladea-Regular", "Caladea-Bold"),
    "font_hanken_grotesk": ("HankenGrotesk-Medium", "HankenGrotesk-Bold"),
    "font_fredoka_one": ("FredokaOne-Regular",),
}
CONTRAST = 0.4  # least distance in brightness between letters and ground
BRIGHTNESS = np.array([0.3, 0.59, 0.11], np.float32)  # of red, green and blue
SIZES = range(12, 29)  # of a font, pixels


@cache
def fonts(size: int) -> list[Any]:
    """Load every font at a size."""
    from PIL import ImageFont

    return [ImageFont.truetype(path, size) for path in font_files()]


@cache
def font_files() -> list[str]:
    """Find the files of FONTS, in their order. Raises UserError if a package is missing."""
    paths = []
    for module, names in FONTS.items():
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise UserError(
                f"drawing words needs the fonts of {module}: pip install 'multimodal-rl[words]'"
            )
        folder = Path(spec.origin).parent / "files"
        for name in names:
            files = sorted(folder.glob(f"{name}.[ot]tf"))
            if not files:
                raise UserError(f"{folder} has no {name}: pip install 'multimodal-rl[words]'")
            paths.append(str(files[-1]))
    return paths


def draw(prompts: list[Prompt], rng: Rng) -> Tensor:
    """Draw every prompt once -> [B, 3, 32, 96] in 0..1. Row i depends on ``rng`` and i alone."""
    draws = rng.uniform(rng.rows(len(prompts), 1), (9,)).tolist()
    noise = rng.fold("ground").uniform(rng.rows(len(prompts), 1), (HEIGHT, WIDTH)).float().numpy()
    pictures = [_picture(*row) for row in zip(prompts, draws, noise, strict=True)]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def _picture(prompt: Prompt, u: list[float], noise: Any) -> Any:
    """Draw one picture [H, W, 3] float32."""
    ground = _ground(prompt["ground"], prompt["color"], u[:4], noise)
    ink = _ink(prompt["color"], ground, u[4:6])
    letters = _letters(prompt["words"], u[6:9])[..., None]
    picture: Any = ground * (1 - letters) + ink * letters
    return picture.clip(0, 1).astype(np.float32)


def _letters(words: str, u: list[float]) -> Any:
    """Return the coverage [H, W] in 0..1 of words in one font, as large as fits or smaller."""
    from PIL import Image, ImageDraw

    number = int(u[0] * len(font_files()))
    fitting = bisect_left(SIZES, True, key=lambda s: not _fits(fonts(s)[number].getbbox(words)))
    size = SIZES[max(fitting - 1 - int(u[1] * min(4, fitting)), 0)]
    font = fonts(size)[number]
    left, top, right, bottom = font.getbbox(words)
    free = max(WIDTH - (right - left), 0), max(HEIGHT - (bottom - top), 0)
    # near the middle: up to a fourth of the free space to each side
    x = free[0] * (0.5 + 0.5 * (u[2] - 0.5)) - left
    y = free[1] / 2 - top
    page = Image.new("L", (WIDTH, HEIGHT))
    ImageDraw.Draw(page).text((round(x), round(y)), words, fill=255, font=font)
    return np.asarray(page, np.float32) / 255


def _fits(box: tuple[float, float, float, float]) -> bool:
    left, top, right, bottom = box
    return right - left <= WIDTH - 6 and bottom - top <= HEIGHT - 4


def _ground(name: str | None, color: str | None, u: list[float], noise: Any) -> Any:
    """Return a ground [H, W, 3]; where none is named, one colour and a shade, which contrasts with
    a named colour of the letters."""
    rows = np.arange(HEIGHT, dtype=np.float32)[:, None]
    columns = np.arange(WIDTH, dtype=np.float32)[None]
    if name is None:
        base = np.array(u[:3], np.float32)
        if color is not None and abs((base - COLORS[color]) @ BRIGHTNESS) < CONTRAST:
            dark = COLORS[color] @ BRIGHTNESS > 0.5
            base = 0.4 * base if dark else 1 - 0.4 * base
        return base + 0.25 * (u[3] - 0.5) * (columns / WIDTH - 0.5)[..., None] + 0 * rows[..., None]
    if name == "paper":
        return np.array([0.96, 0.93, 0.85], np.float32) - 0.05 * noise[..., None]
    if name == "wood":
        grain = np.sin(rows * 1.3 + 2 * np.sin(columns / 17 + 6 * u[0]) + 6 * u[1])
        shade = 0.08 * grain + 0.05 * (noise - 0.5)
        return np.array([0.62, 0.42, 0.24], np.float32) + shade[..., None]
    if name == "brick":
        course = (rows + int(8 * u[0])) // 8
        shifted = columns + 8 * (course % 2) + int(16 * u[1])
        joint = ((rows + int(8 * u[0])) % 8 < 1) | (shifted % 16 < 1)
        red = np.array([0.65, 0.27, 0.2], np.float32) + 0.08 * (noise[..., None] - 0.5)
        return np.where(joint[..., None], np.float32(0.75), red)
    blades = noise * (0.6 + 0.4 * np.sin(columns * 1.7 + 6 * u[0]))  # grass
    return np.array([0.12, 0.3, 0.08], np.float32) + blades[..., None] * np.array(
        [0.15, 0.35, 0.1], np.float32
    )


def _ink(name: str | None, ground: Any, u: list[float]) -> Any:
    """Return the letters' colour [3]: the named one, else one that contrasts with the ground."""
    if name is not None:
        return np.array(COLORS[name], np.float32)
    colors = np.array(list(COLORS.values()), np.float32)
    apart = np.abs(colors @ BRIGHTNESS - (ground @ BRIGHTNESS).mean()) >= CONTRAST
    return colors[np.flatnonzero(apart)[int(u[0] * apart.sum())]]
