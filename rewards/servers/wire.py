"""Encodes samples and prompts for a reward server and back: JSON with PNG, lossless WebP or
safetensors.

Nothing here can run a sender's code: there is no pickle. ``pack`` is the client's half, ``unpack``
the server's; both ends of a conversation import this file, so they cannot disagree. F frames
(videos), B samples.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt
from rewards.base.media import frames, to_uint8
from rewards.card import Sums
from rewards.servers.wire_prompts import headers as prompt_headers
from rewards.servers.wire_prompts import marked_texts, marks_of, opened
from rewards.servers.wire_sound import sound_fields, sounded

Format = Literal["png", "webp", "tensor"]
FORMATS: tuple[Format, ...] = ("png", "webp", "tensor")
KINDS = ("images", "videos", "texts", "tensor")
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # of PIL, 8 bits a channel or fewer
DEPTH = 32  # nesting depth of a prompt
KEYS = 1000  # of an object in a prompt
STRIP = 2**18  # pixels converted to floats at a time


class BadInput(Exception):
    """Says what is wrong with a request; ``field`` is where."""

    def __init__(self, field: str, problem: str):
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True)
class Limits:
    """Sets what one request may hold, and how its pictures may be encoded."""

    samples: int = 1024
    pixels: float = 64e6  # of all pictures in all, decoded
    formats: Sequence[str] = FORMATS
    pictures: tuple[str, ...] = ()  # picture fields of prompts, besides image and images
    values: float = 2e6  # of the JSON: commas and brackets, also inside texts


@dataclass
class Parts:
    """Holds the content of a request; exactly one of images, videos, texts, tensor."""

    prompts: Any
    # encoded pictures, a list of them for each video, texts, or the bytes of a safetensors file
    media: Any
    kind: str
    rewards: Any = None
    marks: Any = None  # recorded values of texts: null or {tokens, finished, logprob} for each
    ids: Any = None  # names of the samples
    sound: Any = None  # of videos, the bytes of a safetensors file
    sampling_rate: Any = None


# --------------------------------------------------------------------------------------------------
# sending


def pack(
    media: Media,
    prompts: Sequence[Prompt],
    kind: Format,
    names: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
) -> bytes:
    """Write the JSON body of a request. Pictures are floats in 0..1; PNG and WebP round them to 8
    bits. ``ids``: names of the samples, which the answer repeats.

    Raises:
        UserError: prompts that JSON cannot represent, or media that are neither pictures nor texts.
    """
    body: dict[str, Any] = {"prompts": check_prompts(prompts)}
    if names is not None:
        body["rewards"] = list(names)
    if ids is not None:
        body["ids"] = list(ids)
    if isinstance(media, list):
        marks = marks_of(check_texts(media))
        body |= {} if marks is None else {"marks": marks}
        body["texts"] = [str(text) for text in media]
    elif kind == "tensor":
        from safetensors.torch import save

        plain = media.detach().cpu().contiguous().as_subclass(Tensor)
        body["tensor"] = to_base64(save({"media": plain}))
    else:
        stack = to_uint8(frames(media, "remote"))  # [B, F, 3, H, W]
        videos = [[to_base64(picture_bytes(p, kind)) for p in video] for video in stack]
        if media.ndim == 4:
            body["images"] = [video[0] for video in videos]
        else:
            body["videos"] = videos
    body |= sound_fields(media)
    return json.dumps(body, allow_nan=False).encode()


def to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def check_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts, if JSON can represent them."""
    for prompt in prompts:
        for key, value in prompt.items():
            try:
                json.dumps({key: value}, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"reward 'remote' sends prompts as JSON, which cannot hold {key!r} of "
                    f"the prompt "
                    f"{prompt.get('text', '')!r} ({error}); name the keys that the server "
                    f"needs in `fields`"
                ) from error
    return list(prompts)


def check_token(token: str | None) -> str | None:
    """Return a token that fits into a header. Raises UserError."""
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise UserError("token: expected printable ASCII characters")
    return token


def check_texts(texts: list[Any]) -> list[str]:
    for text in texts:
        if not isinstance(text, str):
            raise UserError(
                f"reward 'remote' sends pictures and texts, but the policy made "
                f"{type(text).__name__}"
            )
    return texts


def picture_bytes(picture: Tensor, kind: str) -> bytes:
    """Encode a uint8 picture [3, H, W] as a file that gives back the same bytes."""
    from PIL import Image

    options = {
        "png": {"compress_level": 1},
        "webp": {"lossless": True, "quality": 20, "method": 0},
    }[kind]
    buffer = io.BytesIO()
    Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(
        buffer, format=kind.upper(), **options
    )
    return buffer.getvalue()


# --------------------------------------------------------------------------------------------------
# receiving


def parse_json(content: bytes | bytearray, field: str, values: float = math.inf) -> Any:
    """Parse strict JSON: NaN and infinity are refused, and more than ``values`` values."""
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > values:
        raise BadInput(
            field, f"holds more than {values:.0f} values (commas and brackets); send fewer samples"
        )
    try:
        return json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadInput(field, f"is not JSON: {error or 'nested too deeply'}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def unpack(parts: Parts, limits: Limits) -> tuple[Tensor | list[str], list[Prompt]]:
    """Return media and prompts as the arguments of a reward: floats [B, 3, H, W] or [B, F, 3, H, W]
    in 0..1, or texts.

    Raises:
        BadInput: anything malformed, with the name of the field.
    """
    prompts = parts.prompts
    if not isinstance(prompts, list) or not all(isinstance(prompt, dict) for prompt in prompts):
        raise BadInput("prompts", "expected a list of objects")
    if not 1 <= len(prompts) <= limits.samples:
        raise BadInput("prompts", f"expected 1 to {limits.samples} of them, got {len(prompts)}")
    check_ids(parts.ids, len(prompts))
    check_shape(prompts)
    check_lists(parts, limits)
    check_pixels(parts, limits)
    media = _media(parts, limits)
    if len(media) != len(prompts):
        raise BadInput("prompts", f"{len(prompts)} of them for {len(media)} samples")
    if parts.sound is not None:
        try:
            media = sounded(media, parts.sound, parts.sampling_rate, limits.pixels)
        except ValueError as error:
            raise BadInput("sound", str(error)) from error
    try:
        return media, opened(prompts, limits.pixels, limits.pictures)
    except ValueError as error:
        raise BadInput("prompts", str(error)) from error


def check_ids(ids: Any, count: int) -> None:
    """Refuse sample ids unless they are distinct short texts, one per sample.

    Raises:
        BadInput: they are not.
    """
    if ids is None:
        return
    short = isinstance(ids, list) and all(isinstance(i, str) and len(i) <= 64 for i in ids)
    if not short or len(ids) != count or len(set(ids)) != count:
        raise BadInput("ids", f"expected {count} different texts of at most 64 characters")


def check_shape(prompts: list[Any]) -> None:
    """Refuse prompts that are nested too deep, or have too many keys in an object.

    Raises:
        BadInput: they do.
    """
    level: list[Any] = prompts
    for _ in range(DEPTH):
        if any(len(item) > KEYS for item in level if isinstance(item, dict)):
            raise BadInput("prompts", f"expected at most {KEYS} keys in an object")
        level = [
            part
            for item in level
            for part in (item.values() if isinstance(item, dict) else item)
            if isinstance(part, (dict, list))
        ]
        if not level:
            return
    raise BadInput("prompts", f"are nested more than {DEPTH} deep")


def check_lists(parts: Parts, limits: Limits) -> None:
    """Refuse media that are not a list, or videos that are not lists of equally many frames.

    Raises:
        BadInput: they are not.
    """
    if parts.kind == "tensor":
        return
    if not isinstance(parts.media, list) or not 1 <= len(parts.media) <= limits.samples:
        raise BadInput(parts.kind, f"expected a list of 1 to {limits.samples}")
    if parts.kind == "videos":
        counts = {len(video) if isinstance(video, list) else -1 for video in parts.media}
        if len(counts) != 1 or min(counts) < 1:
            raise BadInput("videos", "expected lists of frames, the same number of frames in each")


def check_pixels(parts: Parts, limits: Limits) -> None:
    """Refuse pictures that have more pixels than ``limits`` allow, by their headers.

    Raises:
        BadInput: they have.
    """
    left = limits.pixels
    pictures = _named(parts) if parts.kind in ("images", "videos") else ()
    for name, content in (*pictures, *prompt_headers(parts.prompts, limits.pictures)):
        width, height = size_of(content) if isinstance(content, bytes) else (0, 0)
        left -= width * height
        if left < 0:
            raise BadInput(
                name, f"{width} x {height} pixels are more than this server takes in one request"
            )


def size_of(content: bytes) -> tuple[int, int]:
    """Read width and height in the header of a PNG or WebP file; 0, 0 if it is neither."""
    if content[:8] == b"\x89PNG\r\n\x1a\n" and content[12:16] == b"IHDR":
        return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
    if content[:4] != b"RIFF" or content[8:12] != b"WEBP":
        return 0, 0
    number = partial(int.from_bytes, byteorder="little")
    if content[12:16] == b"VP8X":  # the canvas
        return number(content[24:27]) + 1, number(content[27:30]) + 1
    if content[12:16] == b"VP8L":
        bits = number(content[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return number(content[26:28]) & 0x3FFF, number(content[28:30]) & 0x3FFF


def _media(parts: Parts, limits: Limits) -> Tensor | list[str]:
    if parts.kind == "tensor":
        return _tensor(parts.media, limits)
    if parts.kind == "texts":
        if not all(isinstance(text, str) for text in parts.media):
            raise BadInput("texts", "expected a list of texts")
        try:
            return marked_texts(parts.media, parts.marks)
        except ValueError as error:
            raise BadInput("marks", str(error)) from error
    return _pictures(parts, limits)


def _pictures(parts: Parts, limits: Limits) -> Tensor:
    """Decode files of one size to [B, 3, H, W] or [B, F, 3, H, W] float32."""
    named = list(_named(parts))
    stack = None
    size = (0, 0)
    for place, (name, content) in enumerate(named):
        with _decoder(name, content, limits.formats) as picture:
            if stack is None:
                size = picture.size
                stack = torch.empty(len(named), 3, size[1], size[0])
            if picture.size != size:
                raise BadInput(
                    name,
                    f"is {picture.size[0]} x {picture.size[1]} pixels, the first is {size[0]} x "
                    f"{size[1]}: send one size",
                )
            _fill(stack[place], picture)
    assert stack is not None
    return stack if parts.kind == "images" else stack.unflatten(0, (len(parts.media), -1))


def _fill(floats: Tensor, picture: Any) -> None:
    """Write a picture to [3, H, W] in 0..1, a strip at a time."""
    import numpy as np

    width, height = picture.size
    rows = max(1, STRIP // width)
    for top in range(0, height, rows):
        strip = np.array(picture.crop((0, top, width, min(top + rows, height))).convert("RGB"))
        floats[:, top : top + rows] = torch.from_numpy(strip).permute(2, 0, 1)
    floats /= 255


def _named(parts: Parts) -> Iterator[tuple[str, Any]]:
    for i, item in enumerate(parts.media):
        if parts.kind == "images":
            yield f"images[{i}]", item
        else:
            yield from ((f"videos[{i}][{f}]", frame) for f, frame in enumerate(item))


@contextmanager
def _decoder(name: str, content: Any, formats: Sequence[str]) -> Iterator[Any]:
    """Open a file as a PIL picture and decode it, if its size is that of its header."""
    from PIL import Image

    allowed = [kind.upper() for kind in formats if kind != "tensor"]
    if not isinstance(content, bytes):
        raise BadInput(name, "expected the bytes of a picture")
    if not allowed:
        raise BadInput(name, f"pictures are not taken here, only {', '.join(formats)}")
    try:
        if not all(size_of(content)):
            raise ValueError("no header")
        with Image.open(io.BytesIO(content), formats=allowed) as picture:
            if picture.size != size_of(content):
                raise ValueError("two sizes")
            if picture.mode not in MODES:
                raise BadInput(name, f"is of mode {picture.mode}; send 8-bit RGB")
            yield picture
    except BadInput:
        raise
    except Exception as error:  # whatever a decoder raises on untrusted bytes
        kind = type(error).__name__
        raise BadInput(
            name, f"cannot be read as {' or '.join(allowed)} ({kind}; {len(content)} bytes)"
        ) from error


def _tensor(content: Any, limits: Limits) -> Tensor:
    """Read the tensor called media of a safetensors file, in float32 if it was stored in a smaller
    type."""
    from safetensors.torch import load

    if "tensor" not in limits.formats:
        raise BadInput("tensor", f"is not taken here, only {', '.join(limits.formats)}")
    if not isinstance(content, bytes):
        raise BadInput("tensor", "expected the bytes of a safetensors file")
    try:
        media = load(content)["media"]
    except Exception as error:  # whatever a decoder raises on untrusted bytes
        raise BadInput(
            "tensor",
            f"is not a safetensors file with a tensor called media ({type(error).__name__})",
        ) from error
    shape = list(media.shape)
    if (
        media.ndim not in (4, 5)
        or media.shape[-3] != 3
        or not media.is_floating_point()
        or not media.numel()
    ):
        raise BadInput(
            "tensor", f"expected floats [B, 3, H, W] or [B, F, 3, H, W], got {media.dtype} {shape}"
        )
    if len(media) > limits.samples or media.numel() / 3 > limits.pixels:
        raise BadInput("tensor", f"{shape} is more than this server takes in one request")
    return media.float()


# --------------------------------------------------------------------------------------------------
# answers


class Read(NamedTuple):
    """Holds what an answer says: ``values`` [B] float32, NaN if there is none; ``applies`` [B]:
    False if the reward does not apply; sums and counts of sub-scores by name."""

    values: Tensor
    applies: Tensor
    parts: dict[str, Sums]

    @classmethod
    def nothing(cls, count: int) -> Read:
        return cls(torch.full((count,), torch.nan), torch.ones(count, dtype=torch.bool), {})

    def joined(self, other: Read) -> Read:
        """Concatenate both."""
        keys = dict.fromkeys([*self.parts, *other.parts])
        parts = {k: self.parts.get(k, Sums()).plus(other.parts.get(k, Sums())) for k in keys}
        values, applies = (torch.cat(pair) for pair in zip(self[:2], other[:2]))
        return Read(values, applies, parts)


def read_answer(
    content: bytes, names: Sequence[str] | None, ids: Sequence[str], largest: float = math.inf
) -> Read:
    """Read an answer: the only requested reward, or the weighted sum of all, NaN for null. A sum
    skips rewards that do not apply, and does not apply if none does. ``ids`` [B]: as sent;
    ``largest``: bound of a value and of a weighted sum.

    Raises:
        ValueError: an answer that is not from an mmrl server, or to another request.
    """
    count = len(ids)
    try:
        answer = json.loads(content, parse_constant=_no_constant)
        values = {name: _values(row, count) for name, row in answer["rewards"].items()}
        weights = {name: float(answer["weights"][name]) for name in values}
        apart = {n: _rows(answer.get("does_not_apply", {}).get(n, []), count) for n in values}
        listed = answer.get("sub_scores", {})
        parts = {
            key if names is not None else f"{name}/{key}": _sums(pair)
            for name in values
            for key, pair in listed.get(name, {}).items()
        }
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        what = f"{type(error).__name__}: {str(error)[:60]!a}"
        raise ValueError(f"not an answer of a reward server ({what})") from error
    if not values or (names is not None and set(values) != set(names)):
        answered = ascii([name[:40] for name in list(values)[:10]])
        raise ValueError(f"asked for {names or 'rewards'}, answered {answered}")
    check_order(answer.get("ids"), ids)
    counted = names or [name for name in values if weights[name]]
    total = torch.zeros(count)
    for name in counted:
        weight = 1.0 if names is not None else weights[name]
        total = total + weight * values[name].masked_fill(apart[name], 0.0)
    applies = ~torch.stack([apart[name] for name in counted]).all(0) if counted else total == total
    total = total.masked_fill(~applies, math.nan)
    if (high := float(total.nan_to_num(0.0, math.inf, math.inf).abs().max())) > largest:
        raise ValueError(f"a value of {high:g} is more than `largest` allows ({largest:g})")
    return Read(total, applies, parts)


def _sums(pair: Any) -> Sums:
    """Read the sum and the count of a sub-score's values."""
    if not isinstance(pair, list) or [type(v) in (int, float) for v in pair] != [True, True]:
        raise ValueError("expected two numbers of a sub-score")
    sums = Sums(*map(float, pair))
    if not all(map(math.isfinite, sums)):
        raise ValueError("infinity is not a sub-score")
    return sums


def _rows(numbers: Any, count: int) -> Tensor:
    """Read the numbers of samples as a mask [B]."""
    if not isinstance(numbers, list) or not all(
        type(number) is int and 0 <= number < count for number in numbers
    ):
        raise ValueError("expected the numbers of samples")
    mask = torch.zeros(count, dtype=torch.bool)
    mask[numbers] = True
    return mask


def check_order(answered: Any, ids: Sequence[str]) -> None:
    """Refuse an answer that is not for these samples in this order.

    Raises:
        ValueError: says what is wrong.
    """
    if answered is None:
        raise ValueError("it does not repeat the ids of the samples: another version's server")
    if not isinstance(answered, list) or not all(isinstance(i, str) for i in answered):
        raise ValueError("the ids of the samples are no list of texts")
    if answered == list(ids):
        return
    if sorted(answered) == sorted(ids):
        raise ValueError("the samples are in another order than they were sent")
    raise ValueError("it is about other samples than were sent, such as an earlier request's")


def _values(row: Any, count: int) -> Tensor:
    if not isinstance(row, list) or len(row) != count:
        raise ValueError(f"expected {count} values")
    if not all(value is None or type(value) in (int, float) for value in row):
        raise ValueError("expected numbers or null")
    values = torch.tensor(
        [float("nan") if value is None else float(value) for value in row], dtype=torch.float32
    )
    if values.isinf().any():
        raise ValueError("infinity is not a reward")
    return values


def message_of(content: bytes) -> str:
    """Return the message of an error answer, shortened: of ``{"error": text}``, OpenAI's
    ``{"error": {"message": text}}`` or anything else. It is untrusted text."""
    try:
        text = json.loads(content)["error"]
        text = text["message"] if isinstance(text, dict) else text
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content.decode("utf-8", "replace")
    return ascii(str(text)[:500])[1:-1] or "no message"
