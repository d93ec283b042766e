"""Normalises names and placeholders of published data sets and trainers, and refuses what would be
misread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import ascii_uppercase
from typing import Any

from mmrl.core.types import Prompt
from mmrl.data.sources.text_files import loads

NUMBERED = re.compile(r"<\|?image[ _]?(\d+)\|?>")  # <image 1>, <image1>, <|image_1|>, <image_00>
TURNS = ("message", "messages", "conversations", "prompt")  # which may be written as a text
# columns that hold the options of a question one by one: of MMBench, SEED-Bench
LETTERED = tuple(
    tuple(name.format(letter, letter.lower()) for letter in ascii_uppercase[:10])
    for name in ("{0}", "choice_{1}", "option_{1}", "option_{0}")
)


def usual(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its media, turns and compared answers under the usual names."""
    usual_row = {key: value for key, value in row.items() if value is not None}
    for name in TURNS:
        if name in usual_row and (turns := _turns(usual_row[name])):
            usual_row.pop(name)
            usual_row["messages" if name == "message" else name] = turns
    if "decoded_image" in usual_row:  # MathVista, MathVision: ``image`` is only its name there
        usual_row["image"] = usual_row.pop("decoded_image")
    kind = usual_row.get("data_type")  # Video-R1
    if kind in ("image", "video") and "path" in usual_row and kind not in usual_row:
        usual_row[kind] = usual_row.pop("path")
    image = usual_row.get("image")
    if isinstance(image, Mapping) and image and all(map(NUMBERED.fullmatch, image)):  # MiniCPM-V
        usual_row["image"] = [image[mark] for mark in sorted(image)]
    for side in ("chosen", "rejected"):  # LLaMA-Factory's turn, TRL's list of one
        if side in usual_row:
            usual_row[side] = _said(usual_row[side])
    return usual_row


def _turns(value: Any) -> list[Any] | None:
    """Return turns that are written as a JSON text, as in MM-Eureka; None: it is none."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            value = loads(value.strip())
        except ValueError:
            return None
    is_talk = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    return value if is_talk and {"role", "from"} & set(value[0]) else None


def _said(answer: Any) -> Any:
    """Return the content of an assistant's turn; other answers as they are."""
    turn = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if not isinstance(turn, Mapping):
        return answer
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if isinstance(content, str) else answer


def marked(prompt: Prompt) -> Prompt:
    """Write placeholders as <image> and <video> if a text numbers its pictures, or has
    LLaVA-Video's <image> for its clip. Raises ValueError for other numbers."""
    texts = list(_texts(prompt))
    numbers = [int(number) for text in texts for number in NUMBERED.findall(text)]
    images, clips = (_count(prompt, name) for name in ("images", "video"))
    if numbers:
        if numbers not in (list(range(images)), list(range(1, images + 1))):
            raise ValueError(
                f"its text numbers pictures ({', '.join(map(str, numbers))}), and has {images}; "
                "write <image> at the place of each, in their order"
            )
        prompt = _written(prompt, lambda text: NUMBERED.sub("<image>", text))
    joined = "".join(texts)
    if clips and not images and joined.count("<image>") == clips and "<video>" not in joined:
        prompt = _written(prompt, lambda text: text.replace("<image>", "<video>"))
    return prompt


def _count(prompt: Prompt, name: str) -> int:
    value = prompt.get(name)
    return 0 if value is None else len(value) if isinstance(value, list) else 1


def _texts(prompt: Prompt) -> list[str]:
    if "messages" not in prompt:
        return [prompt["text"]] if isinstance(prompt.get("text"), str) else []
    contents = [turn["content"] for turn in prompt["messages"]]
    parts = [[{"text": c}] if isinstance(c, str) else c for c in contents]
    return [part["text"] for several in parts for part in several if "text" in part]


def _written(prompt: Prompt, write: Callable[[str], str]) -> Prompt:
    """Return a prompt with its texts rewritten by ``write``."""
    changed = dict(prompt) | {"text": write(prompt["text"])}
    if "messages" in prompt:
        changed["messages"] = [
            turn | {"content": _content(turn["content"], write)} for turn in prompt["messages"]
        ]
    return changed


def _content(content: Any, write: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return write(content)
    return [part | {"text": write(part["text"])} if "text" in part else part for part in content]


def refuse_unshown(prompt: Prompt) -> None:
    """Raise ValueError for an answer that is the index or the letter of an option which the
    question does not show: it could not be known, or rewards would expect a number."""
    answer = prompt.get("answer")
    for name, options in _options(prompt):
        number = str(answer) if isinstance(answer, (int, str)) and answer is not True else ""
        if number.isdecimal() and number not in options and int(number) <= len(options):
            raise ValueError(
                f"its answer {answer} is the place of one of its {name}; write the letter or the "
                f"text that is right, and the {name} into the question"
            )
        shown = " ".join(_texts(prompt)).casefold()
        letters = ascii_uppercase[: len(options)]
        if isinstance(answer, str) and len(answer) == 1 and answer in letters:
            texts = [re.sub(r"^\(?[A-Z][.):]\s*", "", each).casefold() for each in options]
            if not any(text and text in shown for text in texts):
                raise ValueError(
                    f"its answer {answer} is a letter of its {name}, which the question does not "
                    f"show; write them into the question, or, if the picture shows them, call them "
                    f"otherwise"
                )


def _options(prompt: Prompt) -> list[tuple[str, list[str]]]:
    """List the names of columns that hold options, and their texts."""
    options = []
    for name in ("choices", "options"):
        listed = prompt.get(name)
        if isinstance(listed, list) and listed and all(isinstance(each, str) for each in listed):
            options.append((name, listed))
    for names in LETTERED:
        if names[0] in prompt and names[1] in prompt:
            held = [name for name in names if name in prompt]
            options.append((f"columns {', '.join(held)}", [str(prompt[name]) for name in held]))
    return options
