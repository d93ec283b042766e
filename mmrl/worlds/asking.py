"""Questions about the digits world as a data source: pictures and clips with text and ground
truth."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.worlds.album import SIDE, Style, album, clips
from mmrl.worlds.render import Split
from mmrl.worlds.scenes import COLORS, DIGITS, questions
from samplers.noise import Rng

Ask = Literal["box", "boxes", "count", "color", "digit", "left", "sum", "frame", "span"]
KINDS: tuple[Ask, ...] = get_args(Ask)
CROWD = 2  # digits from which a hasty person overlooks one
GRID = 2  # pixels: boxes are drawn to even coordinates
MARGIN = 0.35  # a hasty person pushes every side of a box out by this share of it
APART = 6  # pixels between centres from which "on the left" is unambiguous
STYLES = {
    "box": Style(1, 2, 15.0, 24.0),
    "boxes": Style(1, 3, 13.0, 18.0),
    "count": Style(1, 6, 9.0, 14.0),
    "color": Style(1, 3, 13.0, 20.0),
    "digit": Style(1, 3, 13.0, 20.0),
    "left": Style(2, 2, 13.0, 20.0),
    "sum": Style(1, 2, 14.0, 20.0),
}
Part = Literal["train", "development", "test"]
SCANS: dict[Part, Split] = {"train": "generator", "development": "reader", "test": "judge"}


@DATA.register("digits_questions")
class Questions:
    """Draw questions about pictures and clips of handwritten digits.

    kinds: box (where is the red seven?), boxes (where are the red digits?), count, color, digit,
    left (which digit is on the left?), sum; about clips: frame (in which frame is it?), span (from
    when to when?). scenes: training scenes a kind. held_out: development, for choices, or test, for
    results: each shows its own scans, and neither scan nor scene is ever trained on.
    held_out_scenes: a kind. pairs: rows hold a careful person's answer as ``chosen`` and a hasty
    one's as ``rejected``, for ``train.preferences``; questions that both answer alike are left out.

    seed: of all choices.
    """

    train: list[Prompt]
    held_out: list[Prompt]

    def __init__(
        self,
        kinds: list[Ask],
        scenes: int = 2000,
        held_out: Literal["development", "test"] = "test",
        held_out_scenes: int = 300,
        seed: int = 0,
        pairs: bool = False,
    ):
        if not kinds or min(scenes, held_out_scenes) < 1:
            raise UserError(
                "data.digits_questions needs at least one kind, one scene and one held-out scene"
            )
        self.train = [p for kind in kinds for p in ask(kind, scenes, "train", seed)]
        self.held_out = [p for kind in kinds for p in ask(kind, held_out_scenes, held_out, seed)]
        if pairs:
            self.train, self.held_out = _preferred(self.train), _preferred(self.held_out)
            if not self.train:
                raise UserError(
                    "data.digits_questions.pairs: hasty people answer these questions as careful "
                    "ones do; take kinds box, boxes or count"
                )


def _preferred(prompts: list[Prompt]) -> list[Prompt]:
    """Add a careful and a hasty answer to prompts; leave out those where they are equal."""
    sides = [
        {
            "chosen": answered(prompt["kind"], prompt, False, MARGIN),
            "rejected": answered(prompt["kind"], prompt, True, MARGIN),
        }
        for prompt in prompts
    ]
    return [
        prompt | pair
        for prompt, pair in zip(prompts, sides, strict=True)
        if pair["chosen"] != pair["rejected"]
    ]


def ask(kind: Ask, scenes: int, part: Part, seed: int = 0, wobble: float = 0.0) -> list[Prompt]:
    """Ask one question about each scene that allows one of this kind; pictures as PIL images, clips
    as uint8 [F, H, W, 3].

    A prompt holds ``text``, ``answer`` (as a model would write it), ``kind``, ``images`` or
    ``video`` with ``fps``, and where they are the answer ``boxes`` with ``labels`` in pixels of the
    picture, or ``spans`` in seconds.
    """
    rng = Rng.of(seed, "album", kind, part)
    if kind in ("frame", "span"):
        moving, shown = clips(scenes, rng, SCANS[part], wobble)
        media = [{"video": frames.numpy(), "fps": 1.0} for frames in moving]
    else:
        images, shown = album(scenes, rng, SCANS[part], STYLES[kind], wobble)
        media = [{"images": [picture(image)], "space": "original"} for image in images]
    picks = rng.fold("pick").uniform(rng.rows(scenes, 1)).tolist()
    prompts = []
    for scene, medium, pick in zip(shown, media, picks):
        if choices := questions_about(scene, kind):
            prompts.append({**choices[int(pick * len(choices))], "kind": kind, **medium})
    return prompts


def picture(image: Tensor) -> Any:
    """Make a PIL image of uint8 [H, W, 3]."""
    from PIL import Image

    return Image.fromarray(image.numpy())


def questions_about(scene: Prompt, kind: Ask) -> list[Prompt]:
    """Return the questions of one kind that a scene answers: ``text``, ``answer``, and ``boxes``,
    ``labels`` or ``spans``."""
    makers = {"box": _box, "boxes": _boxes, "left": _left, "frame": _frame, "span": _span}
    if kind in makers:
        return makers[kind](scene)
    return [
        {"text": q["question"], "answer": q["answer"]}
        for q in questions(scene)
        if q["type"] == kind
    ]


def written(boxes: list[list[int]]) -> str:
    """Write boxes as ``[3, 4, 20, 21]``, one after the other."""
    return " ".join(str(list(box)) for box in boxes)


def _box(scene: Prompt) -> list[Prompt]:
    return [
        {
            "text": f"where is the {name}?",
            "answer": written([box]),
            "boxes": [box],
            "labels": [name],
        }
        for name, box in zip(_names(scene), scene["boxes"])
        if _names(scene).count(name) == 1
    ]


def _boxes(scene: Prompt) -> list[Prompt]:
    questions = []
    for color in COLORS:
        boxes = sorted(b for o, b in zip(scene["objects"], scene["boxes"]) if o["color"] == color)
        if boxes:
            labels = [f"{color} digit"] * len(boxes)
            text = f"where are the {color} digits?"
            questions.append(
                {"text": text, "answer": written(boxes), "boxes": boxes, "labels": labels}
            )
    return questions


def _left(scene: Prompt) -> list[Prompt]:
    if len(scene["objects"]) != 2:
        return []
    middles = [(box[0] + box[2]) / 2 for box in scene["boxes"]]
    if abs(middles[0] - middles[1]) < APART:
        return []
    left = scene["objects"][middles.index(min(middles))]
    return [{"text": "which digit is on the left?", "answer": DIGITS[left["digit"]]}]


def _frame(scene: Prompt) -> list[Prompt]:
    return [
        {"text": f"in which frame is the {name}?", "answer": str(first + 1)}
        for name, first, last in _seen(scene)
        if last - first == 1
    ]


def _span(scene: Prompt) -> list[Prompt]:
    return [
        {
            "text": f"from when to when is the {name} there?",
            "answer": f"{first} to {last}",
            "spans": [[first, last]],
        }
        for name, first, last in _seen(scene)
    ]


def _seen(scene: Prompt) -> list[tuple[str, int, int]]:
    """Return name, first frame and the one after the last, of objects with a unique name."""
    names = _names(scene)
    return [(name, *run) for name, run in zip(names, scene["seen"]) if names.count(name) == 1]


def _names(scene: Prompt) -> list[str]:
    return [f"{item['color']} {DIGITS[item['digit']]}" for item in scene["objects"]]


def vocabulary() -> list[Any]:
    """List every word a question or an answer may hold, numbers 0 to 99 included."""
    words = (
        "where is are the digits digit how many there what do add up to colour which on "
        "left in frame from when and it "
        "answer think box none no yes at of a an picture right top bottom middle seconds "
        "label bbox 2d"
    ).split()
    return [*words, *COLORS, *DIGITS, *(str(n) for n in range(100))]


def answered(kind: Ask, question: Prompt, hasty: bool, margin: float) -> str:
    """Return the answer of a careful or a hasty person, who leaves a margin around boxes and
    overlooks one digit of a crowd."""
    if boxes := question.get("boxes"):
        return written([drawn(box, margin if hasty else 0.0) for box in boxes])
    if kind == "count" and hasty and int(question["answer"]) >= CROWD:
        return str(int(question["answer"]) - 1)
    answer: str = question["answer"]
    return answer


def drawn(box: list[int], margin: float) -> list[int]:
    """Return the box with every side pushed out by that share of its width or height, on even
    pixels of the picture."""
    width = box[2] - box[0]
    height = box[3] - box[1]
    far = (-margin * width, -margin * height, margin * width, margin * height)
    return [min(SIDE, max(0, GRID * round((v + d) / GRID))) for v, d in zip(box, far)]
