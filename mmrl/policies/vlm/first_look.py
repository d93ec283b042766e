"""Checks all prompts before sampling starts, so that a row that the model cannot take does not stop
a run halfway.

Every row's placeholders are counted and its text is searched for the model's special tokens; only
the headers of files are read (``mmrl.core.media.scan``). A row is encoded as in training only if it
is the first of its kind (roles and media), or has an image of unusual shape, which processors
refuse.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.core.errors import UserError
from mmrl.core.media.pictures import is_pil
from mmrl.core.media.scan import Finding, is_clip, scan
from mmrl.core.placeholders import MARKS, NAMES, misfit
from mmrl.core.types import Prompt
from mmrl.policies.vlm.audio import audios_of
from mmrl.policies.vlm.budgets import TooLong
from mmrl.policies.vlm.chat import messages_of, videos_of
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.media import images_of, where

if TYPE_CHECKING:
    from mmrl.policies.vlm.processor import Inputs

SHORT = 56  # pixels of a side below which a processor may refuse an image
SLIM = 16  # aspect ratio above which it may
FRAMES = 8  # of a clip at the budget's rate below which it may
ALIKE = 20  # rows of one kind that fail to encode before the others are assumed to fail
# upper bounds on an image's tokens: for a tiled image, and per pixels for larger ones
PICTURE = 8192
PATCH = 14 * 14
TEMPLATE = 512  # tokens that a template adds
FREE = EngineLimits()
GEOMETRY = ("boxes", "box", "point", "points", "mask", "tracks")
OPTIONS = ("chat_template_kwargs", "prefill", "fps")  # row settings that encoding reads
# everything in a row that decides its encoding, except the text
READ = NAMES | {"system", *GEOMETRY, *OPTIONS}
# processors' names of media tokens
MEDIA_TOKENS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token")


def misfits(
    prompts: Sequence[Prompt],
    inputs: Inputs,
    limits: EngineLimits = FREE,
    answer: int = 0,
) -> dict[int, str]:
    """Return errors of prompts, "file:line: why" by their index. ``limits``: of the engine, with
    answers of ``answer`` tokens."""
    files = [() if READ.isdisjoint(prompt) else tuple(_files(prompt)) for prompt in prompts]
    findings = iter(scan([source for several in files for source in several]))
    look = FirstLook(inputs, limits, answer)
    problems = {}
    for place, (prompt, several) in enumerate(zip(prompts, files)):
        looked = [(next(findings), source) for source in several]
        broken = [f"{_name(source)}{each.problem}" for each, source in looked if each.problem]
        if why := next(iter(broken), None) or look.problem(prompt, [each for each, _ in looked]):
            problems[place] = f"{where(prompt)}: {why}"
    return problems


class FirstLook:
    """Finds errors in prompts, one after the other."""

    def __init__(self, inputs: Inputs, limits: EngineLimits = FREE, answer: int = 0):
        self.inputs = inputs
        self.limits = limits
        self.answer = answer
        tokens = sorted(own_tokens(inputs), key=len, reverse=True)
        self.tokens = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self.fine: set[Hashable] = set()  # kinds and sizes that were encoded before
        self.refused: Counter[Hashable] = Counter()

    def problem(self, prompt: Prompt, findings: Sequence[Finding]) -> str | None:
        """Return the error of a prompt with these images and clips; None: there is none."""
        return (
            misfit(prompt)
            or self._token(prompt)
            or self.limits.media(len(_images(prompt)), len(_videos(prompt)))
            or self._refused(prompt, findings)
            or self._length(prompt, findings)
        )

    def _length(self, prompt: Prompt, findings: Sequence[Finding]) -> str | None:
        """Return an error if a prompt is too long: encoded where the upper bound does not
        decide."""
        if self.limits.tokens is None:
            return None
        letters = sum(len(text.encode()) for text in _texts(prompt))
        pictures = sum(max(PICTURE, each.size[0] * each.size[1] // PATCH) for each in findings)
        looked = len(_images(prompt)) == len(findings)  # no clip, and no unread image
        if looked and letters + pictures + TEMPLATE + self.answer <= self.limits.tokens:
            return None
        try:
            cost, _ = self.inputs.measure(prompt)
        except TooLong:  # whether that stops the run says its budget
            return None
        except UserError as error:
            return str(error).removeprefix(f"{where(prompt)}: ")
        return self.limits.length(cost.tokens, self.answer)

    def _refused(self, prompt: Prompt, findings: Sequence[Finding]) -> str | None:
        """Return why a prompt cannot be encoded, if it is the first of its kind."""
        is_plain = READ.isdisjoint(prompt) and "<" not in prompt.get("text", "")
        kind = "a question" if is_plain else _kind(prompt)
        kinds = {kind, *filter(None, map(self._unusual, findings))}
        if kinds <= self.fine:
            return None
        if self.refused[kind] >= ALIKE and kind not in self.fine:
            return f"as {ALIKE} other rows with the same roles and media, it cannot be encoded"
        try:
            self.inputs.encode(prompt)
        except TooLong:  # whether that stops the run says its budget
            pass
        except UserError as error:
            self.refused[kind] += 1
            return str(error).removeprefix(f"{where(prompt)}: ")
        self.fine |= kinds
        return None

    def _unusual(self, finding: Finding) -> Hashable:
        """Return the size of an image, or the length of a clip, that a processor may refuse; None:
        it is usual."""
        frames = round(finding.seconds * self.inputs.budgets.fps)
        low, high = sorted(finding.size)
        if finding.seconds and frames < FRAMES:
            return frames
        return finding.size if low > 0 and (low < SHORT or high > SLIM * low) else None

    def _token(self, prompt: Prompt) -> str | None:
        if self.tokens is None:
            return None
        for text in _texts(prompt):
            if match := self.tokens.search(text):
                return (
                    f"its text holds the model's own token {match[0]}, which would not be read as "
                    f"text; take it out (a picture's place is written <image>)"
                )
        return None


def own_tokens(inputs: Inputs) -> set[str]:
    """List the tokens that a text must not contain: those of media, and those with which the
    template marks turns."""
    tokenizer = inputs.tokenizer
    ids = [inputs.placeholder(kind) for kind in ("image", "video", "audio")]
    named = [getattr(inputs.processor, name, None) for name in MEDIA_TOKENS]
    named += [tokenizer.convert_ids_to_tokens(i) for i in ids if i is not None]
    texts = {str(getattr(token, "content", token)) for token in named if token is not None}
    question = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    try:
        rendered = inputs.template.render({"text": "a"}, question)
    except UserError:  # reported with the first prompt
        rendered = ""
    texts |= {token for token in tokenizer.all_special_tokens if token in rendered}
    known = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    return {text for text in texts & known if not MARKS.fullmatch(text)}


def _texts(prompt: Prompt) -> Iterator[str]:
    for message in messages_of(prompt):
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (part["text"] for part in parts if isinstance(part.get("text"), str))


def _files(prompt: Prompt) -> Iterator[Any]:
    """Yield the images and clips of a prompt whose headers are read."""
    images, videos = _images(prompt), _videos(prompt)
    images += [frame for video in videos if isinstance(video, list) for frame in video]
    yield from (image for image in images if isinstance(image, (str, bytes)) or is_pil(image))
    yield from (video for video in videos if is_clip(video))


def _images(prompt: Prompt) -> list[Any]:
    return [image for image in _inside(prompt, "image") + images_of(prompt) if image is not None]


def _videos(prompt: Prompt) -> list[Any]:
    return [video for video in _inside(prompt, "video") + videos_of(prompt) if video is not None]


def _inside(prompt: Prompt, kind: str) -> list[Any]:
    """List the media of a kind in the messages of a prompt."""
    contents = [message["content"] for message in prompt.get("messages") or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part.get(kind) for part in parts]


def _kind(prompt: Prompt) -> Hashable:
    """Return the key of a row's kind: rows with equal keys are encoded alike."""
    turns = tuple((m["role"], _part_kinds(m["content"])) for m in messages_of(prompt))
    media = tuple(len(of(prompt)) for of in (images_of, videos_of, audios_of))
    read = tuple(name for name in (*GEOMETRY, *OPTIONS) if prompt.get(name) is not None)
    return turns, media, read


def _part_kinds(content: Any) -> tuple[Any, ...]:
    if isinstance(content, list):
        return tuple(part.get("type") for part in content)
    return tuple(MARKS.findall(content)) if "<" in content else ()


def _name(source: Any) -> str:
    return f"{source}: " if isinstance(source, str) else "a picture: "
