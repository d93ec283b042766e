"""Defines ``svg``, which compares an SVG drawing with the picture."""

from __future__ import annotations

import base64
import io
import re
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt, Reward
from rewards.answers.coords import Unscorable
from rewards.answers.reading import Status, final
from rewards.answers.sandbox import Broken, Sandbox
from rewards.answers.verifiable import Verdict, Verifiable, tagged
from rewards.base.files import open_picture
from rewards.card import card

# What could read files, run forever, or multiply one shape a million times.
REFUSED = re.compile(
    r"<!|<\?xml-stylesheet|<\s*(?:image|script|foreignObject|filter|style)\b"
    r"|@import|url\(\s*(?!['\"]?#)",
    re.I,
)
LINKS = re.compile(r"href\s*=\s*[\"'](?!#)", re.I)
USES = 8  # <use> elements; nested ones multiply
TALLEST = 16  # height over width of a drawing
WORKER = Sandbox("png", seconds=5.0, memory=2 * 2**30)  # one for all rewards of this process
NUMBER = r"\s*([-+.\deE]{1,20})"


def find_svg(text: str) -> tuple[str | None, Status]:
    """Find the last ``<svg>`` element of the final answer; an unclosed one is closed
    ("repaired")."""
    answer = final(text)
    start = answer.value.rfind("<svg")
    if start < 0:
        return None, "unparseable"
    body, closed, _ = answer.value[start:].partition("</svg>")
    if REFUSED.search(body) or LINKS.search(body) or len(re.findall(r"<\s*use\b", body)) > USES:
        return None, "out_of_range"
    if aspect(body) > TALLEST:
        return None, "out_of_range"
    if not closed:
        body = body[: body.rfind(">") + 1]
    body = (
        body
        if "xmlns=" in body
        else body.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    )
    return body + "</svg>", answer.status if closed else "repaired"


def aspect(body: str) -> float:
    """Return the height over the width of a drawing, from its first tag; 1 if not given."""
    tag = body.partition(">")[0]
    sides = {
        side: match
        for side in ("width", "height")
        if (match := re.search(rf"\b{side}\s*=\s*[\"']{NUMBER}", tag))
    }
    box = re.search(rf"\bviewBox\s*=\s*[\"']{NUMBER}[\s,]{NUMBER}[\s,]{NUMBER}[\s,]{NUMBER}", tag)
    pairs = [(sides["height"][1], sides["width"][1])] if len(sides) == 2 else []
    pairs += [(box[4], box[3])] if box else []
    ratios = []
    for height, width in pairs:
        try:
            ratios.append(float(height) / float(width))
        except (ValueError, ZeroDivisionError):
            ratios.append(float("inf"))
    return max(ratios, default=1.0)


def render(svg: str, size: int) -> Tensor | None:
    """Render [3, size, size] in 0..1 on white, squashed to a square; None if resvg cannot draw
    it."""
    from PIL import Image

    try:
        encoded = WORKER.ask("png", svg, size)
    except Broken:  # it took too much time or memory
        return None
    if encoded is None:
        return None
    png = base64.b64decode(encoded)
    with Image.open(io.BytesIO(png)) as image:
        return _pixels(image, size) if max(image.size) <= 16 * size else None


def _pixels(image: Any, size: int) -> Tensor:
    shown = image.convert("RGB").resize((size, size), 2)
    return torch.from_numpy(np.asarray(shown, dtype=np.float32).copy() / 255).permute(2, 0, 1)


def explained(drawn: Tensor, right: Tensor) -> float:
    """Compute 1 - |drawn - right|^2 / |white - right|^2: the share of the picture's ink that is
    explained; an empty sheet has 0."""
    ink = float((1 - right).square().sum())
    error = float((drawn - right).square().sum())
    return max(0.0, 1 - error / ink) if ink > 0 else float(error == 0)


def mse(drawn: Tensor, right: Tensor) -> float:
    """Compute 1 - mean squared error. An empty sheet scores high on a white picture."""
    return 1 - float((drawn - right).square().mean())


def standardised(drawn: Tensor, right: Tensor) -> float:
    """Compute RLRF's 1 - mean squared difference of the standardised pictures, clipped to -1..1,
    here moved to 0..1."""
    a, b = ((x - x.mean()) / x.std().clamp(min=1e-6) for x in (drawn, right))
    return (float((1 - (a - b).square().mean()).clamp(-1, 1)) + 1) / 2


def ssim(drawn: Tensor, right: Tensor) -> float:
    """Compute structural similarity (Wang et al. 2004): Gaussian window of 11, deviation 1.5,
    clipped at 0."""
    line = torch.exp(-((torch.arange(11) - 5.0) ** 2) / (2 * 1.5**2)).double()
    window = (line[:, None] * line / line.sum() ** 2).expand(3, 1, 11, 11)
    a = drawn[None].double()
    b = right[None].double()

    def blur(x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, window, groups=3)

    mean_a = blur(a)
    mean_b = blur(b)
    var_a = blur(a * a) - mean_a**2
    var_b = blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    top = (2 * mean_a * mean_b + 0.01**2) * (2 * covariance + 0.03**2)
    return max(
        0.0, float((top / ((mean_a**2 + mean_b**2 + 0.01**2) * (var_a + var_b + 0.03**2))).mean())
    )


MEASURES = {"explained": explained, "mse": mse, "standardised": standardised, "ssim": ssim}


@REWARDS.register("svg")
@card(
    media="text",
    pictures="images image",
    low=0,
    high=1,
    source="RLRF (arXiv:2505.20793); rendered by resvg",
)
class Svg(Verifiable):
    """Compare the rendered SVG of the answer with the picture (``svg``, else the prompt's first
    image).

    Args:
        measure: "explained": share of the ink that is right, an empty sheet has 0; "mse";
            "standardised": RLRF's L2; "ssim".
        size: pixels of the square both are compared in.
        also: a reward of images, such as clip_image or dino, applied to the rendered drawing.
        weight: of ``also``; the pixels get the rest. Its values are clipped to 0..1.

    Drawings that load files or other documents, hold scripts, filters or style sheets, or many
    ``<use>``, or are more than 16 times as high as wide, are refused ("out_of_range", 0): the
    policy must not read the picture from disk, nor hang the renderer. Rendering runs in a worker
    process, which is killed and replaced if a drawing takes more than 5 s of CPU time or 2 GiB.
    """

    def __init__(
        self,
        measure: Literal["explained", "mse", "standardised", "ssim"] = "explained",
        size: Annotated[int, Ge(16), Le(2048)] = 256,
        also: Annotated[Reward, REWARDS] | None = None,
        weight: Annotated[float, Ge(0), Le(1)] = 0.5,
    ):
        self.measure = MEASURES[measure]
        self.size = size
        self.also = also
        self.weight = weight

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = self._target(prompt)
        svg, status = find_svg(text)
        drawn = render(svg, self.size) if svg else None
        if drawn is None:
            return Verdict(0.0, status if svg is None else "unparseable")
        score = self.measure(drawn, right)
        if self.also is not None:
            added = float(self.also(drawn[None], [dict(prompt)])[0])
            score = (1 - self.weight) * score + self.weight * min(max(added, 0.0), 1.0)
        return Verdict(score, status)

    def _target(self, prompt: Prompt) -> Tensor:
        if prompt.get("svg") is not None:
            svg, _ = find_svg(str(prompt["svg"]))
            picture = render(svg, self.size) if svg else None
            if picture is None:
                raise Unscorable('"svg" cannot be rendered')
            return picture
        images = prompt.get("images") or [prompt.get("image")]
        try:
            return _pixels(_open(images[0]), self.size)
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise Unscorable(
                f'it has neither "svg" nor an image that can be read: {error}'
            ) from error

    def ground_truth(self, prompt: Prompt) -> str:
        if prompt.get("svg") is None:
            raise Unscorable('it has no "svg": only a picture, which cannot be written down')
        return tagged(str(prompt["svg"]))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        sheet = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10">{}</svg>'
        return {
            "an empty sheet": tagged(sheet.format("")),
            "a black sheet": tagged(sheet.format('<rect width="10" height="10"/>')),
            "a file": tagged(sheet.format('<image href="/etc/hostname" width="10" height="10"/>')),
        }


def _open(image: Any) -> Any:
    return open_picture(image) if isinstance(image, str) else image
