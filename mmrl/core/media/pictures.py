"""Opens pictures for policies and rewards: upright, 8-bit RGB, first frame.

Files in the wild are grey, CMYK, 16-bit, transparent, rotated by EXIF, animated, huge or broken.
PIL alone clips 16 bits to white, drops transparency to the colour beneath, and raises on a picture
that is too large.
"""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MOST_PIXELS = 178_956_970  # PIL's default limit for decompression bombs
# what PIL raises on files that are not pictures, or are truncated
BROKEN = (OSError, ValueError, TypeError, SyntaxError, EOFError, IndexError, struct.error)
WIDE_MODES = ("I", "F")  # and "I;16", "I;16B" ...: more than 8 bits a value
FULL_SIZE = "mmrl_full_size"  # info key of a picture decoded at a reduced size
RANGES = (255, 1023, 4095, 16383, 65535)  # largest values of sensors with 8 to 16 bits


PIXELS = re.compile(r"\((\d+) pixels\)")  # PIL's error for a picture it refuses


class PictureError(ValueError):
    """Says why a picture cannot be used."""


class TooLarge(PictureError):
    """Signals a picture with more pixels than the limit."""


def rgb_picture(source: Any, enough: int | None = None) -> Any:
    """Open a path, bytes, {bytes, path}, an array or a PIL image as 8-bit RGB, upright, first
    frame.

    Grey becomes three equal channels, CMYK is converted by the file's colour profile if it has one,
    transparency is composited on white, 16 bits are scaled by their range (``eight_bits``).
    ``enough``: number of pixels needed; a JPEG of more than ``MOST_PIXELS`` is then decoded at a
    half, a quarter or an eighth of its sides (``full_size`` keeps the original). Raises
    PictureError for what cannot be read completely, or is larger than ``limit``.
    """
    from PIL import Image, ImageOps

    try:
        image = source if isinstance(source, Image.Image) else opened(source)
        check_size(image)
        whole = upright_size(image)
        drafted = enough is not None and math.prod(whole) > MOST_PIXELS and _draft(image, enough)
        image.load()
        picture = as_rgb(ImageOps.exif_transpose(image))
        if drafted:
            picture.info[FULL_SIZE] = whole
        return picture
    except PictureError:
        raise
    except (*BROKEN, MemoryError) as error:
        raise PictureError(reason(error)) from error


def opened(source: Any) -> Any:
    """Open a path, bytes, {bytes, path} as data sets hold pictures, or an array uint8 [H, W, 3] as
    a PIL image, lazily. Raises PictureError."""
    from PIL import Image

    if isinstance(source, Mapping):
        content = source.get("bytes")
        source = source.get("path") if content is None else content
    if isinstance(source, np.ndarray):
        return _of_array(source)

    _without_bomb_warnings()
    try:
        whole = isinstance(source, (bytes, bytearray, memoryview))
        return Image.open(io.BytesIO(source) if whole else Path(source))
    except Image.DecompressionBombError as error:
        count = PIXELS.search(str(error))
        pixels = f"of {int(count[1]):,} pixels" if count else "of too many pixels"
        raise TooLarge(_too_large(f"a picture {pixels}", limit())) from error
    except BROKEN as error:
        raise PictureError(reason(error)) from error


def _of_array(values: np.ndarray) -> Any:
    """Return an array as a PIL image. Raises PictureError for one whose layout or range would have
    to be guessed."""
    from PIL import Image

    channels = values.shape[2] if values.ndim == 3 else 1
    if values.dtype != np.uint8 or values.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise PictureError(
            f"an array of {values.dtype} {list(values.shape)}; expected uint8 [height, width, 3]"
        )
    return Image.fromarray(values[..., 0] if values.ndim == 3 and channels == 1 else values)


def limit() -> int:
    """Return the maximum pixels of a picture that is decoded in this process."""
    from PIL import Image

    known = Image.MAX_IMAGE_PIXELS  # PIL warns above it, and refuses above twice as much
    return MOST_PIXELS if known is None else max(MOST_PIXELS, 2 * known)


def raise_limit(pixels: int) -> None:
    """Let pictures of up to that many pixels be decoded in this process, by PIL's global setting,
    since policies, rewards and reports open what a data source has accepted."""
    from PIL import Image

    if pixels > limit():
        Image.MAX_IMAGE_PIXELS = (pixels + 1) // 2


def check_size(image: Any, most: int | None = None) -> None:
    """Raise TooLarge for a picture of more than ``most`` pixels; by default ``limit``."""
    width, height = image.size
    most = limit() if most is None else most
    if width * height > most:
        size = f"a picture of {width} x {height} = {width * height:,} pixels"
        raise TooLarge(_too_large(size, most))


def full_size(image: Any) -> tuple[int, int]:
    """Return the original (width, height) of a picture decoded at a reduced size."""
    width, height = image.info.get(FULL_SIZE, image.size)
    return width, height


def _draft(image: Any, enough: int) -> bool:
    """Decode a JPEG at a fraction of its sides, with at least ``enough`` pixels; tell whether it
    is."""
    width, height = image.size
    scale = math.sqrt(min(1.0, enough / (width * height)))
    sides = (math.ceil(width * scale), math.ceil(height * scale))
    image.draft(None, sides)
    return bool(image.size != (width, height))


def upright_size(image: Any) -> tuple[int, int]:
    """Return (width, height) after EXIF rotation, from the header."""
    turned = image.getexif().get(0x0112) in (5, 6, 7, 8)
    width, height = image.size
    return (height, width) if turned else (width, height)


def as_rgb(image: Any) -> Any:
    """Convert a loaded PIL image of any mode to RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.partition(";")[0] in WIDE_MODES:
        from PIL import Image

        return Image.fromarray(eight_bits(np.asarray(image))).convert("RGB")
    if image.mode == "CMYK" and (profile := image.info.get("icc_profile")):
        return _by_profile(image, profile)
    if image.has_transparency_data:
        from PIL import Image

        clear = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, clear).convert("RGB")
    return image.convert("RGB")


def eight_bits(values: np.ndarray) -> np.ndarray:
    """Scale values [H, W] of more than 8 bits to uint8 by the range they use.

    Integers: by the smallest of 8, 10, 12, 14 and 16 bits that holds the maximum, so that a
    sensor's 12 bits are not black; beyond 16 bits, or below 0, from minimum to maximum. Floats: 0
    to 1 if they lie in it, else from minimum to maximum.
    """
    is_float = np.issubdtype(values.dtype, np.floating)
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low = float(values.min())
    high = float(values.max())
    ranges = (1,) if is_float and low >= 0 and high <= 1 else RANGES
    top: float = next((limit for limit in ranges if high <= limit), 0)
    if low < 0 or not top:
        values = values - low
        top = max(high - low, 1e-12)
    scaled: np.ndarray = (values * (255 / top)).round().clip(0, 255).astype(np.uint8)
    return scaled


def is_pil(value: Any) -> bool:
    """Tell whether a value is an image of PIL, which need not be imported for this."""
    return hasattr(value, "convert")


def frame_count(image: Any) -> int:
    """Return the number of frames of an image of PIL, 1 unless it is animated."""
    return int(getattr(image, "n_frames", 1))


def note_of(image: Any) -> str:
    """Describe conversions of a picture that its owner may not expect; "" if none."""
    if image.mode.partition(";")[0] in WIDE_MODES:
        return "more than 8 bits a value, scaled by their range"
    if frame_count(image) > 1:
        return "animated: the first frame is taken"
    if image.getexif().get(0x0112, 1) not in (0, 1):
        return "turned as EXIF says; boxes are of the turned picture"
    return ""


def reason(error: BaseException) -> str:
    """Describe why PIL could not read a picture."""
    text = str(error).strip() or type(error).__name__
    if "cannot identify image file" in text:
        return "not a picture that can be read; expected PNG, JPEG, WebP, TIFF, GIF or BMP"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the caller adds
    return "the picture is larger than memory" if isinstance(error, MemoryError) else text


def _too_large(what: str, most: int) -> str:
    return (
        f"{what} is larger than data.max_pixels, {most:,} (a small file may claim any size, to "
        f"exhaust memory); scale it down, or raise data.max_pixels"
    )


def _by_profile(image: Any, profile: bytes) -> Any:
    """Convert CMYK by its ICC profile; without it if it is damaged."""
    from PIL import ImageCms

    try:
        embedded = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return ImageCms.profileToProfile(
            image, embedded, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError):
        return image.convert("RGB")


def _without_bomb_warnings() -> None:
    """Silence PIL's warning for large pictures below the limit. Repeated each time, since
    catch_warnings resets filters; the filter is stored once."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
