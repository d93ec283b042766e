"""Turns a row of a published format into a prompt: text or messages, images, video, and the right
answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mmrl.core.types import Prompt
from mmrl.data.sources.folders import PICTURES, VIDEOS
from mmrl.data.vision.boxes import unwrapped

# Usual names for what mmrl calls text, images ...; the first one found counts.
ALIASES = {
    "text": ("text", "question", "prompt", "problem", "query", "instruction"),
    "images": (
        *("images", "image", "image_path", "img", "image_file", "file_name", "img_filename"),
    ),
    "video": ("video", "videos", "video_path"),
    "answer": ("answer", "solution", "ground_truth"),
    "boxes": ("boxes", "bboxes"),
}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
# of a column
PICTURED = re.compile("image|img|picture|photo|screen|diagram|figure|video|clip|file_?name|path")
DETECT = "Find every object of these kinds and give the box of each: {labels}."
REFER = "Give the box of {expression}."


# names of columns that hold a conversation: those of most tools, ms-swift's, The Cauldron's, TRL's
TURNS = ("messages", "conversations", "conversation", "texts", "prompt")
SURE = ("messages", "conversations")  # whatever they hold
SWIFT = ("<bbox>", "<ref-object>")  # ms-swift's marks for boxes and names in ``objects``


def turns_of(row: Mapping[str, Any]) -> str | None:
    """Name the column that holds a conversation: ``prompt`` does where it is a list of turns (TRL,
    verl), else it is a question."""
    known = (name for name in TURNS if name in row)
    return next((name for name in known if name in SURE or _is_talk(row[name])), None)


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def plain(row: Mapping[str, Any], columns: Mapping[str, str]) -> Prompt:
    """Read a row of named values; ``columns`` maps names. Other values stay as they are."""
    row = _checked(row) if columns else _instructed(_checked(row))
    prompt = dict(row)
    for ours in {**ALIASES, **columns}:
        theirs = columns.get(ours)
        if theirs is not None and theirs not in row:
            raise ValueError(
                f"no column {theirs!r} (columns.{ours}); it has {', '.join(map(str, row))}"
            )
        name = theirs or next((name for name in ALIASES[ours] if row.get(name) is not None), None)
        if name is not None:
            if ours == "answer" and theirs is None and name != ours:
                _refuse_thought(name, row[name])
            prompt.pop(name, None)
            prompt[ours] = row[name]
    if "bbox" in prompt and "boxes" not in prompt:
        prompt["boxes"] = [prompt.pop("bbox")]
    if isinstance(prompt.get("answer"), str):
        prompt["answer"] = unwrapped(prompt["answer"])
    _refuse_unread(prompt)
    return prompt


def _refuse_thought(name: str, value: Any) -> None:
    """Raise ValueError for a solution that is a response with its thought, as in
    multimodal-open-r1: rewards would expect all of it."""
    if isinstance(value, str) and "<think>" in value and "<answer>" in value:
        raise ValueError(
            f"its {name} is a whole response with a thought; name the column that rewards compare "
            f"with by columns: {{answer: ...}}, or {name} itself to learn it (sft)"
        )


def _refuse_unread(prompt: Mapping[str, Any]) -> None:
    """Raise ValueError if pictures are in columns that are not read, and the question has none, as
    in MMMU (image_1, image_2)."""
    if any(prompt.get(name) is not None for name in ("images", "video")):
        return
    names = [name for name in prompt if PICTURED.search(name) and _is_picture(prompt[name])]
    if names:
        raise ValueError(
            f"its question has no picture, and {', '.join(names)} would not be read; name the one "
            f"that is asked about with columns: {{images: {names[0]}}}, or write several as a list "
            "under images"
        )


def _is_picture(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    is_file = isinstance(value, str) and value.lower().endswith((*PICTURES, *VIDEOS))
    return isinstance(value, bytes) or is_file


def _checked(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the answer from where verl keeps it. Raises ValueError for placeholders of
    ms-swift, which other values of the row replace."""
    prompt = dict(row)
    _refuse_marks(row)
    if row.get("history"):
        raise ValueError("it has a history; write the turns as messages of role and content")
    judged = row.get("reward_model")
    answered = any(row.get(name) is not None for name in ALIASES["answer"])
    if not answered and "query" in row and isinstance(row.get("response"), str):
        prompt["answer"] = prompt.pop("response")  # ms-swift's name
    if isinstance(judged, Mapping) and not answered and judged.get("ground_truth") is not None:
        prompt["answer"] = judged["ground_truth"]
    return prompt


def _refuse_marks(row: Mapping[str, Any]) -> None:
    if "objects" in row and any(mark in str(list(row.values())) for mark in SWIFT):
        raise ValueError(
            f"its text has {' or '.join(SWIFT)}, in whose place ms-swift puts what objects hold; "
            "write names and boxes into the text, and the right boxes as boxes"
        )


def _instructed(prompt: dict[str, Any]) -> dict[str, Any]:
    """Read Alpaca's columns: the question is ``instruction`` followed by ``input``, the answer is
    ``output``."""
    instruction = prompt.get("instruction")
    if not isinstance(instruction, str) or "output" not in prompt:
        return prompt
    left = ("instruction", "input", "output", "history")  # the last of which is empty
    rest = {k: v for k, v in prompt.items() if k not in left}
    below = prompt.get("input")
    text = f"{instruction}\n{below}" if below else instruction
    return {"answer": prompt["output"]} | rest | {"text": text}


def conversation(row: Mapping[str, Any], columns: Mapping[str, str]) -> Prompt:
    """Read LLaVA (``conversations`` of from and value), ShareGPT and Qwen (``messages`` of role and
    content, text or parts), TRL and verl (``prompt`` of the same).

    The last turn, if it is the assistant's, is the ground truth (unless the row has one); those
    before it are the prompt.
    """
    name = turns_of(row)
    if name is None:
        raise ValueError(f"no messages or conversations; it has {', '.join(row)}")
    _refuse_marks(row)
    rest = plain({key: value for key, value in row.items() if key != name}, columns)
    listed = [turn for several in _list(row[name], name) for turn in _exchange(several)]
    turns = [_turn(turn, i) for i, turn in enumerate(listed)]
    if not turns:
        raise ValueError(f"{name} is empty")
    if turns[-1]["role"] == "assistant":
        last = turns.pop()["content"]
        rest.setdefault("answer", last if isinstance(last, str) else _words(last))
    user_turns = [turn for turn in turns if turn["role"] == "user"]
    if not user_turns:
        raise ValueError(f"{name} has no question of a user")
    content = user_turns[-1]["content"]
    rest["text"] = content if isinstance(content, str) else _words(content)
    if turns[0]["role"] == "system" and isinstance(turns[0]["content"], str):
        rest["system"] = turns.pop(0)["content"]
    if len(turns) > 1 or not isinstance(content, str):
        rest["messages"] = turns
    return rest


def _exchange(turn: Any) -> list[Any]:
    """Return a turn, or two turns for a question with its answer, as in ms-swift and The
    Cauldron."""
    if not isinstance(turn, Mapping) or {"role", "from"} & turn.keys():
        return [turn]
    pair: list[Any] = [
        {"role": role, "content": turn[role]} for role in ROLES if turn.get(role) is not None
    ]
    return pair or [turn]


def _turn(turn: Any, index: int) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError(
            f"turn {index} is {type(turn).__name__}, expected role and content, or from and value"
        )
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if role not in ROLES:
        raise ValueError(f"turn {index} is by {role!r}; known: {', '.join(ROLES)}")
    if not isinstance(content, (str, list)):
        raise ValueError(f"turn {index} has no text")
    if odd := [part for part in content if not isinstance(part, (str, Mapping))]:
        raise ValueError(
            f"turn {index} holds {odd[0]!r}, expected text, or parts of it; a right box is written "
            "under boxes, another answer under answer"
        )
    return {
        "role": ROLES[role],
        "content": content if isinstance(content, str) else [_part(p) for p in content],
    }


def _part(part: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a part as chat templates expect it; parquet fills absent keys with None."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") or next(
        (k for k in ("image", "video", "text") if part.get(k) is not None), None
    )
    if kind == "image_url":
        url = part["image_url"]
        return {"type": "image", "image": url["url"] if isinstance(url, Mapping) else url}
    if kind not in ("text", "image", "video"):
        raise ValueError(f"a part of a message is {kind!r}; known: text, image, video")
    content_part = {key: value for key, value in part.items() if value is not None} | {"type": kind}
    if kind == "text" and not isinstance(content_part.get("text"), str):
        raise ValueError("a text part of a message has no text")
    return content_part


def _words(parts: list[dict[str, Any]]) -> str:
    """Join the text of all parts; if none has text, name their types."""
    texts = " ".join(part["text"].strip() for part in parts if part["type"] == "text")
    return texts or "".join(f"<{part['type']}>" for part in parts)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {type(value).__name__}, expected a list")
    return value


def coco(content: Mapping[str, Any], question: str | None) -> Iterator[tuple[str, Any]]:
    """Read detection data: a prompt per image, with boxes and labels; crowds, and images without
    any box, are left out."""
    names = {kind["id"]: kind["name"] for kind in content.get("categories", ())}
    text = (question or DETECT).format(labels=", ".join(dict.fromkeys(names.values())))

    def prompt(image: Mapping[str, Any], objects: list[Any]) -> Prompt:
        return _sized(image) | {
            "text": text,
            "boxes": [corners(entry["bbox"]) for entry in objects],
            "labels": [names[entry["category_id"]] for entry in objects],
        }

    for image, entries in _annotated(content):
        if objects := [entry for entry in entries if not entry.get("iscrowd")]:
            yield f"image {image.get('id')}", partial(prompt, image, objects)


def refcoco(content: Mapping[str, Any], question: str | None) -> Iterator[tuple[str, Any]]:
    """Read referring expressions: a prompt per expression (``caption``, or ``sentences``), with the
    box of its object."""

    def prompt(image: Mapping[str, Any], entry: Mapping[str, Any], expression: str) -> Prompt:
        text = (question or REFER).format(expression=expression)
        return _sized(image) | {"text": text, "boxes": [corners(entry["bbox"])]}

    for image, entries in _annotated(content):
        for entry in entries:
            for expression in expressions(entry) or expressions(image):
                yield f"annotation {entry.get('id')}", partial(prompt, image, entry, expression)


def refers(
    row: Mapping[str, Any], question: str | None, columns: Mapping[str, str], are_corners: bool
) -> Prompt:
    """Read one referring expression from a row, with ``bbox`` [x, y, width, height], or corners if
    ``are_corners``."""
    columns = dict(columns)
    if (theirs := columns.pop("expression", None)) is not None:
        if theirs not in row:
            raise ValueError(
                f"no column {theirs!r} (columns.expression); it has {', '.join(map(str, row))}"
            )
        rest = {key: value for key, value in row.items() if key != theirs}
        row = rest | {"expression": row[theirs]}
    sentences = expressions(row)
    if not sentences:
        raise ValueError("no expression: a caption, expression, ref or sentences")
    prompt = plain({k: v for k, v in row.items() if k not in ("bbox", *EXPRESSIONS)}, columns)
    return prompt | {
        "text": (question or REFER).format(expression=sentences[0]),
        "boxes": [row["bbox"] if are_corners else corners(row["bbox"])],
    }


EXPRESSIONS = ("caption", "expression", "ref", "sentences")


def expressions(record: Any) -> list[str]:
    """List the expressions of a row or annotation of referring data; none if it has no texts."""
    known = record if isinstance(record, Mapping) else {}
    value: Any = next((known[key] for key in EXPRESSIONS if known.get(key)), [])
    several = value if isinstance(value, (list, tuple)) else [value]
    sentences = [
        sentence.get("sent", sentence.get("raw")) if isinstance(sentence, Mapping) else sentence
        for sentence in several
    ]
    return [sentence for sentence in sentences if isinstance(sentence, str)]


def corners(bbox: Any) -> list[float]:
    """Return COCO's [x, y, width, height] as [x0, y0, x1, y1]."""
    known = isinstance(bbox, (list, tuple)) and len(bbox) == 4
    if not known or any(isinstance(v, int) and abs(v) > MOST for v in bbox):
        raise ValueError(f"bbox {bbox!r} is not [x, y, width, height]")
    x, y, width, height = (float(v) for v in bbox)
    return [x, y, x + width, y + height]


MOST = 1e9  # pixels; also refuses infinity, NaN, and integers that no float can hold


def check(prompt: Mapping[str, Any], ordered: bool = False) -> None:
    """Raise ValueError for malformed boxes, and for a different number of labels. Where they lie,
    and whether they are corners, is checked for all rows together (``mmrl.data.vision.boxes``), or
    here if ``ordered``."""
    boxes = prompt.get("boxes")
    if boxes is None:
        return
    for box in _list(boxes, "boxes"):
        numbers = (
            isinstance(box, (list, tuple))
            and len(box) == 4
            and all(isinstance(v, (int, float)) for v in box)
        )
        if not numbers or not all(abs(v) < MOST for v in box):
            raise ValueError(f"box {box!r} is not four numbers [x0, y0, x1, y1]")
        if ordered and not (box[0] < box[2] and box[1] < box[3]):
            raise ValueError(f"box {box!r} is empty or inverted; expected x0 < x1 and y0 < y1")
    labels = prompt.get("labels")
    if labels is not None and len(labels) != len(boxes):
        raise ValueError(f"{len(labels)} labels for {len(boxes)} boxes")


def _annotated(content: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    by_image: dict[Any, list[Any]] = {}
    for annotation in _list(content["annotations"], "annotations"):
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    for image in _list(content["images"], "images"):
        yield image, by_image.get(image["id"], [])


def _sized(image: Mapping[str, Any]) -> Prompt:
    sizes = {key: image[key] for key in ("width", "height") if key in image}
    return {"images": [image["file_name"]], **sizes}
