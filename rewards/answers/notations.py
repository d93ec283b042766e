"""Lists the notations of models for boxes and points: one table for the reader and for
docs/verifiable-rewards.md.

Every pattern begins with letters that are searched for first, and takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rewards.answers.reading import NUMBER, Status

_REF = (
    r"(?:(?:<\|object_ref_start\|>|<ref>|<\|ref\|>|<p>|<phrase>)(?P<label>[^<]{0,200})"
    r"(?:<\|object_ref_end\|>|</ref>|<\|/ref\|>|</p>|</phrase>)\s{0,40})?"
)
_NUMBERS = re.compile(NUMBER)
_EDGE = re.compile(r"[\[\]<>{}()\n;|]")
_AXIS = re.compile(r"\b[xy]\d?\s*=")
MOST = 500  # shapes of an answer
_SIDE = 32  # patches a side of Kosmos-2's grid


@dataclass(frozen=True)
class Shape:
    """Holds a box or a point. ``values``: x0, y0, x1, y1 of a box, or x, y of a point, not sorted.
    ``space``: only for a notation with its own space ("rel1024" of PaliGemma, "rel100" of Molmo,
    "yx1000" is converted to "rel1000"); None: the model's."""

    values: tuple[float, ...]
    label: str | None = None
    confidence: float | None = None
    space: str | None = None


def statuses(values: np.ndarray, extent: tuple[float, float] | None) -> list[Status]:
    """Return how the numbers [N, 4 or 2] of shapes can be read; ``extent``: width and height of the
    space, None if not known, with one unit of slack at its border."""
    slack = min(1.0, 0.01 * min(extent)) if extent else 0.0
    high = np.array(extent) + slack if extent else np.full(2, np.inf)
    pairs = values.reshape(len(values), -1, 2)
    finite = np.isfinite(values).all(1)
    inside = ((pairs >= -slack) & (pairs <= high)).all((1, 2)) & finite
    names = np.where(inside, "ok", "out_of_range")
    if values.shape[1] == 4:
        sides = pairs[:, 1] - pairs[:, 0]
        names = np.where(finite & (sides == 0).any(1), "degenerate", names)
        names = np.where(finite & (sides < 0).any(1), "inverted", names)
    listed: list[Status] = names.tolist()
    return listed


Read = Callable[[re.Match[str], int], Iterator[Shape]]


@dataclass(frozen=True)
class Notation:
    """Holds one way to write shapes.

    ``models``: which write it; ``box`` and ``point``: examples for the box (100, 200), (300, 400)
    and the point (200, 300) in a picture of 640 x 480 pixels, "" if there is none. ``mark``: a text
    without it has no match. ``read`` returns the shapes of one match, for 4 or 2 numbers.
    ``space``: what the numbers count in; "": what the model's view says.
    """

    models: str
    box: str
    point: str
    mark: str
    pattern: re.Pattern[str]
    read: Read
    space: str = ""
    sizes: tuple[int, ...] = field(default=(4, 2))

    def shapes(self, body: str, sizes: Iterable[int]) -> list[Shape]:
        """Return the shapes in this notation, for the first of ``sizes`` that has any."""
        if self.mark not in body:
            return []
        matches = [*islice(self.pattern.finditer(body), MOST + 1)]
        for size in filter(self.sizes.__contains__, sizes if matches else ()):
            if listed := [shape for match in matches for shape in self.read(match, size)]:
                return listed
        return []


def label_of(text: object) -> str | None:
    return str(text).strip(" \t\r\n:,.;-*\"'`") or None if isinstance(text, str) else None


def before(match: re.Match[str]) -> str | None:
    """Return the words in front of a match."""
    words = match.string[max(0, match.start() - 60) : match.start()]
    return label_of(_EDGE.split(words)[-1])


def numbers_in(text: str) -> list[float]:
    return [*map(float, _NUMBERS.findall(text))]


def cut(values: list[float], size: int) -> Iterator[tuple[float, ...]]:
    """Yield numbers in parts of ``size``; nothing if they cannot be divided evenly."""
    if values and len(values) % size == 0:
        for i in range(0, len(values), size):
            yield tuple(values[i : i + size])


def _tagged(match: re.Match[str], size: int) -> Iterator[Shape]:
    """Read the numbers inside a pair of tags, with the label in front of them."""
    label = label_of(match["label"])
    values = numbers_in(match["inside"])
    if size == 2 and len(values) % 4 == 0 and match["inside"].count("(") != len(values) // 2:
        return  # boxes
    if (
        size == 2
        and match["tag"] in ("bbox", "box", "|det|", "|box_start|")
        and len(values) % 4 == 0
    ):
        return
    for part in cut(values, size):
        yield Shape(part, label)


def _paligemma(match: re.Match[str], size: int) -> Iterator[Shape]:
    codes = [float(code) for code in re.findall(r"\d+", match["codes"])]
    if len(codes) == size:
        turned = [codes[i ^ 1] for i in range(size)]  # y first
        yield Shape(tuple(turned), label_of(match["label"]), space="rel1024")


def _florence(match: re.Match[str], size: int) -> Iterator[Shape]:
    middles = [float(code) + 0.5 for code in re.findall(r"\d+", match["codes"])]
    if size == 4 or len(middles) == 2:
        for part in cut(middles, size):
            yield Shape(part, before(match), space="rel1000")


def _kosmos(match: re.Match[str], size: int) -> Iterator[Shape]:
    for first, last in re.findall(r"<patch_index_(\d{4})><patch_index_(\d{4})>", match["inside"]):
        y0, x0 = divmod(int(first), _SIDE)
        y1, x1 = divmod(int(last), _SIDE)
        line = x0 == x1 or y0 == y1  # from border to border, else from middle to middle
        near, far = (0.0, 1.0) if line else (0.5, 0.5)
        corners = (x0 + near, y0 + near, x1 + far, y1 + far)
        yield Shape(tuple(v / _SIDE for v in corners), label_of(match["label"]), space="rel1")


def _molmo(match: re.Match[str], size: int) -> Iterator[Shape]:
    pairs = re.findall(
        rf"""\bx(\d*)\s*=\s*["']({NUMBER})["']\s+y\1\s*=\s*["']({NUMBER})["']""", match["inside"]
    )
    for _, x, y in pairs:
        yield Shape((float(x), float(y)), space="rel100")


def _molmo2(match: re.Match[str], size: int) -> Iterator[Shape]:
    """Read ``coords``: the number of a picture or a time, then number, x, y of every point; more
    pictures follow after a semicolon, comma, colon or tab."""
    for part in re.split(r"[;:,\t]", match["coords"]):
        values = numbers_in(part)
        for _, x, y in cut(values[1:], 3):
            yield Shape((x, y), space="rel1000")


def _minigpt(match: re.Match[str], size: int) -> Iterator[Shape]:
    for part in re.findall(r"\{<(\d+)><(\d+)><(\d+)><(\d+)>\}", match["inside"]):
        yield Shape(tuple(map(float, part)), label_of(match["label"]), space="rel100")


def _call(match: re.Match[str], size: int) -> Iterator[Shape]:
    for part in cut(numbers_in(_AXIS.sub("", match["inside"])), size):
        yield Shape(part)


def _several(match: re.Match[str], size: int) -> Iterator[Shape]:
    """Read ``[[1,2,3,4;5,6,7,8]]``, several boxes of one label."""
    for part in match["inside"].split(";"):
        for values in cut(numbers_in(part), size):
            yield Shape(values, before(match))


def _corners(match: re.Match[str], size: int) -> Iterator[Shape]:
    yield Shape(tuple(map(float, match.groups())))


_XY = rf"[^()\[\]\d;]{{0,30}}[(\[]\s{{0,4}}({NUMBER})\s{{0,4}},\s{{0,4}}({NUMBER})\s{{0,4}}[)\]]"


def _corner_words(first: str, last: str) -> re.Pattern[str]:
    """Return the pattern of two corners named by words."""
    return re.compile(rf"{first}{_XY}[^()\[\]]{{0,40}}{last}{_XY}", re.I)


_TAGS = r"(?P<tag>bbox|box|point|\|det\||\|box_start\||\|begin_of_box\|)"
_ENDS = r"(?:</(?:bbox|box|point)>|<\|/det\|>|<\|box_end\|>|<\|end_of_box\|>|$)"
_TAGGED = re.compile(rf"{_REF}<{_TAGS}>(?P<inside>[^<]{{0,400}}){_ENDS}")

NOTATIONS = (
    Notation(
        "Qwen2-VL, UI-TARS, OS-Atlas",
        "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(100,200),(300,400)<|box_end|>",
        "<|box_start|>(200,300)<|box_end|>",
        "<|box_start|>",
        _TAGGED,
        _tagged,
    ),
    Notation(
        "DeepSeek-VL2",
        "<|ref|>dog<|/ref|><|det|>[[100, 200, 300, 400]]<|/det|>",
        "",
        "<|det|>",
        _TAGGED,
        _tagged,
    ),
    Notation(
        "GLM-4.1V to GLM-4.6V",
        "<|begin_of_box|>[[100, 200, 300, 400]]<|end_of_box|>",
        "<|begin_of_box|>[200, 300]<|end_of_box|>",
        "<|begin_of_box|>",
        _TAGGED,
        _tagged,
    ),
    Notation(
        "InternVL, MiniCPM-V, Ovis",
        "<ref>dog</ref><box>[[100, 200, 300, 400]]</box>",
        "",
        "<box>",
        _TAGGED,
        _tagged,
    ),
    Notation("SmartPath-R1", "<bbox>[100, 200, 300, 400]</bbox>", "", "<bbox>", _TAGGED, _tagged),
    Notation(
        "any, in words",
        "top-left corner (100, 200), bottom-right corner (300, 400)",
        "",
        "ight",
        _corner_words(r"(?:top|upper)[-_ ]?left", r"(?:bottom|lower)[-_ ]?right"),
        _corners,
        sizes=(4,),
    ),
    Notation(
        "any, in Chinese or Japanese",
        "\u5de6\u4e0a\u89d2(100, 200)\uff0c\u53f3\u4e0b\u89d2(300, 400)",
        "",
        "\u53f3\u4e0b",
        _corner_words("\u5de6\u4e0a", "\u53f3\u4e0b"),
        _corners,
        sizes=(4,),
    ),
    Notation(
        "any, in German",
        "links oben (100, 200), rechts unten (300, 400)",
        "",
        "recht",
        _corner_words(
            r"(?:links oben|oben links|(?:obere|linke) (?:linke|obere))",
            r"(?:rechts unten|unten rechts|(?:untere|rechte) (?:rechte|untere))",
        ),
        _corners,
        sizes=(4,),
    ),
    Notation(
        "any, in French",
        "coin sup\u00e9rieur gauche (100, 200), coin inf\u00e9rieur droit (300, 400)",
        "",
        "droit",
        _corner_words(
            r"(?:sup\u00e9rieur gauche|haut (?:\u00e0 |de )?gauche)",
            r"(?:inf\u00e9rieur droit|bas (?:\u00e0 |de )?droite?)",
        ),
        _corners,
        sizes=(4,),
    ),
    Notation(
        "any, in Spanish",
        "esquina superior izquierda (100, 200), esquina inferior derecha (300, 400)",
        "",
        "inferior",
        _corner_words("superior (?:izquierda|esquerdo)", "inferior (?:derecha|direito)"),
        _corners,
        sizes=(4,),
    ),
    Notation(
        "UI-TARS 1.5, OS-Atlas, Ovis",
        "",
        "<point>200 300</point>",
        "<point>",
        _TAGGED,
        _tagged,
    ),
    Notation(
        "PaliGemma",
        "<loc0427><loc0160><loc0853><loc0480> dog",
        "<loc0640><loc0320> dog",
        "<loc0",
        re.compile(r"(?P<codes>(?:<loc\d{4}>){1,4})[ \t]{0,9}(?P<label>[^;<]{0,200})"),
        _paligemma,
        "y first, 0 to 1023",
    ),
    Notation(
        "Florence-2",
        "dog<loc_156><loc_416><loc_468><loc_833>",
        "dog<loc_312><loc_625>",
        "<loc_",
        re.compile(r"(?P<codes>(?:<loc_\d{1,4}>)+)"),
        _florence,
        "0 to 999",
    ),
    Notation(
        "Kosmos-2",
        "<phrase>dog</phrase><object><patch_index_0420><patch_index_0847></object>",
        "",
        "<patch_index_",
        re.compile(
            rf"{_REF}<object>"
            r"(?P<inside>(?:<patch_index_\d{4}>|</delimiter_of_multi_objects/>)+)"
        ),
        _kosmos,
        "patches of a grid of 32 x 32",
        (4,),
    ),
    Notation(
        "Molmo",
        "",
        '<point x="31.25" y="62.5" alt="dog">dog</point>',
        "<point",
        re.compile(r"<points?\s(?P<inside>[^<>]{0,8000})>"),
        _molmo,
        "0 to 100",
        (2,),
    ),
    Notation(
        "Molmo 2",
        "",
        '<points coords="1 1 312 625">dog</points>',
        "coords=",
        re.compile(
            r"""<(?:points|tracks)\b[^<>]{0,200}?\bcoords=["'](?P<coords>[^"'<>]{0,8000})["']"""
        ),
        _molmo2,
        "0 to 1000",
        (2,),
    ),
    Notation(
        "MiniGPT-v2",
        "<p>dog</p> {<16><42><47><83>}",
        "",
        "{<",
        re.compile(rf"{_REF}(?P<inside>\{{<\d[^}}]{{0,40}}\}}(?:<delim>\{{<[^}}]{{0,40}}\}})*)"),
        _minigpt,
        "0 to 100",
        (4,),
    ),
    Notation(
        "agents: UI-TARS, pyautogui, ShowUI, CogAgent, Holo",
        "CLICK(box=[[100,200,300,400]])",
        "pyautogui.click(x=200, y=300)",
        "(",
        re.compile(
            r"(?i:\b(?=[cdhlmprst])(?:pyautogui\.)?(?:(?:left|right|double|triple|long)_?)?"
            r"(?:click|tap|press|moveto|hover|select|drag|scroll))\((?:start_box|point|box|"
            r"coordinate|position)?\s{0,4}=?\s{0,4}(?P<inside>[^)A-WZa-wz]{1,120})\)?"
        ),
        _call,
    ),
    Notation(
        "CogVLM, Shikra",
        "dog[[100,200,300,400]]",
        "",
        "[[",
        re.compile(r"\[\[(?P<inside>[-+.\d,;\s]{1,400})\]\]"),
        _several,
    ),
)


def table() -> str:
    """Return the notations as the table of docs/verifiable-rewards.md."""
    rows = ["| models | box | point | numbers |", "|---|---|---|---|"]
    for each in NOTATIONS:
        box, point = (
            f"`{text}`".replace("|", "\\|") if text else "" for text in (each.box, each.point)
        )
        rows.append(f"| {each.models} | {box} | {point} | {each.space} |")
    return "\n".join(rows)
