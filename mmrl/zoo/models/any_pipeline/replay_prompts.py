"""Writes the arguments with which a pipeline is called for prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from mmrl.core.broken_rows import BrokenRows
from mmrl.core.errors import UserError
from mmrl.core.media import USUAL_RATE
from mmrl.core.types import Prompt
from mmrl.policies.diffusion.prompt_book import PromptBook
from mmrl.policies.diffusion.prompt_videos import CHANGERS, VIDEOS
from mmrl.policies.vlm.media import where

OURS = (
    "num_inference_steps",
    "latents",
    "audio_latents",
    "generator",
    "output_type",
    "return_dict",
)
EDITORS = ("Edit", "Kontext", "ImageToVideo", "Img2Img", "VideoToWorld")  # that see a picture
PICTURES = ("image", "images", "control_image")
BINNING = "use_resolution_binning"  # samples another size than the one asked for
# defaults of a call that change what is sampled, beside its size, length and guidance
CHANGING = ("clean_caption", "negative_prompt", "max_sequence_length", "cfg_normalization")
SHOWN = 80  # characters of a prompt in a sentence
RATES = ("frame_rate", "fps")
FRAMES = ("num_frames", "frames", "video_length")  # what calls name the length of a video
# guidances besides that of the prompt, with which calls for videos with sound begin: none unless
# they are asked for, and the sound's scales follow the video's
UNGUIDED = {
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_guidance_scale": None,
    "audio_stg_scale": None,
    "audio_modality_scale": None,
}


def unset(known: Mapping[str, Parameter], call: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """List what a call, of these parameters, says of how samples are made without having been
    asked; empty where that is nothing."""
    names = [n for n in CHANGING if n in known and n not in call and n not in inputs]
    values = {name: known[name].default for name in names}
    if "negative_prompt" in values:
        values["negative_prompt"] = values["negative_prompt"] or ""
    values |= {BINNING: False} if BINNING in known and BINNING not in call else {}
    return ", ".join(f"{name} {value!r}" for name, value in values.items())


class PromptArguments:
    """Numbers the prompts of a run, and makes a pipeline's arguments of numbers.

    A number is a digest of what the prompt says, so it means the same in every process.
    """

    def __init__(
        self,
        pipeline: str,
        known: Mapping[str, Parameter],
        call: dict[str, Any],
        inputs: dict[str, str] | None,
        guidance_argument: str | None,
        video_frames: int | None = None,
    ):
        self.pipeline = pipeline
        self.known = known
        self.call = call
        self.inputs = _inputs(pipeline, known) if inputs is None else inputs
        self.guidance = guidance_argument or _guidance(known)
        self.videos = self._videos(video_frames)
        self.book = PromptBook(PICTURES, videos=self.videos, rate=self.rate() or USUAL_RATE)
        for name in (*call, *self.inputs, *([self.guidance] if self.guidance else [])):
            if name not in known or name in OURS or name == "self":
                free = ", ".join(n for n in known if n not in (*OURS, "self"))
                why = "is set by the policy" if name in OURS else "does not exist"
                raise UserError(
                    f"policy option call: {name} {why} in a call of {pipeline}, which takes: {free}"
                )

    def sizes(self) -> tuple[tuple[int, int] | None, int | None]:
        """Return [height, width] and the frames that the call asks for; None where it does not."""
        height, width = self.call.get("height"), self.call.get("width")
        lengths = [self.call[name] for name in FRAMES if name in self.call]
        frames = next(iter([*lengths, *self.videos.values()]), None)
        return (height, width) if height and width else None, frames

    def rate(self) -> float | None:
        """Return the frames a second that the call asks for, or does by itself; None where it has
        no such argument."""
        names = [name for name in RATES if name in self.known]
        rates = [self.call.get(name, self.known[name].default) for name in names]
        return next((float(rate) for rate in rates if isinstance(rate, (int, float))), None)

    @property
    def makes_video(self) -> bool:
        """Tell whether the call makes a video: it says of how many frames, or changes one."""
        return any(name in self.known for name in FRAMES) or bool(self.videos)

    def _videos(self, frames: int | None) -> dict[str, int]:
        """Say of how many frames each argument is that is a video."""
        names = [name for name in self.inputs if name in VIDEOS]
        if names and frames is None:
            raise UserError(
                f"policy option video_frames: say how many frames of a prompt's video "
                f"{self.pipeline} takes; all prompts have as many"
            )
        if frames is not None and (not names or frames < 1):
            why = f"must be at least 1, not {frames}" if names else "is for calls with a video"
            raise UserError(f"policy option video_frames: {why} ({self.pipeline})")
        return {name: frames for name in names if frames is not None}

    def check_guidance(self, scale: float) -> None:
        """Refuse guidance where the pipeline has no argument for it."""
        if scale != 1 and self.guidance is None:
            raise UserError(
                f"policy option guidance_scale: {self.pipeline} has no classifier-free guidance; "
                "leave it 1. A scale that the network takes as an input goes to "
                "call: {guidance_scale: ...}"
            )

    def numbers(self, prompts: Sequence[Prompt]) -> Tensor:
        """Return the number [P] of every prompt. UserError names a prompt without an input."""
        for prompt in prompts:
            self._check(prompt)
        return torch.tensor([self.book.number(self.inputs, prompt) for prompt in prompts])

    def of(self, numbers: Sequence[int], scale: float | None) -> dict[str, Any]:
        """Write the arguments for the prompts of these numbers, at a guidance scale (None: the
        call's own). UserError where another policy has numbered them, by other inputs."""
        if scale is not None:
            self.check_guidance(scale)
        for number in numbers:
            names = self.book.names(number)
            if set(names) != set(self.inputs):
                raise UserError(
                    f"{self.pipeline} reads {', '.join(self.inputs)} of a prompt (policy option "
                    f"inputs), and is asked about prompts of which {', '.join(names) or 'nothing'} "
                    "was read"
                )
        return self._written([self.book.values(number) for number in numbers], scale)

    def shown(self, number: int) -> str:
        """Describe a prompt for a sentence."""
        values = self.book.values(number)
        known = [value for value in values.values() if isinstance(value, (str, int))]
        texts = [repr(x if len(str(x)) <= SHOWN else f"{str(x)[:SHOWN]} ...") for x in known]
        return f"the prompt {', '.join(texts)}" if texts else f"a prompt of {', '.join(values)}"

    def example(self) -> dict[str, Any]:
        """Write arguments for an empty prompt, to learn shapes and times."""
        return self._written([{name: self._blank(name) for name in self.inputs}], None)

    def blank(self, words: int) -> Prompt:
        """Make an empty prompt of ``words`` words."""
        blanks = {field: self._blank(name) for name, field in self.inputs.items()}
        return {f: " ".join([v] * words) if isinstance(v, str) else v for f, v in blanks.items()}

    def _written(self, rows: list[dict[str, Any]], scale: float | None) -> dict[str, Any]:
        sounds = "audio_guidance_scale" in self.known
        arguments: dict[str, Any] = {
            n: v for n, v in UNGUIDED.items() if sounds and n in self.known
        }
        arguments |= {BINNING: False} if BINNING in self.known else {}
        arguments |= self.call
        for name in self.inputs:
            values = [row[name] for row in rows]
            # not every pipeline takes lists; classes come in them
            alone = len(values) == 1 and not isinstance(values[0], int)
            arguments[name] = values[0] if alone else values
        if self.guidance is not None:
            arguments[self.guidance] = 1.0 if scale is None else float(scale)
            if self.guidance == "true_cfg_scale" and "negative_prompt" in self.known:
                arguments.setdefault("negative_prompt", "")
        negative = arguments.get("negative_prompt")
        if isinstance(negative, str) and len(rows) > 1:  # pipelines want as many as prompts
            arguments["negative_prompt"] = [negative] * len(rows)
        return arguments

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise BrokenRows for prompts without an input, and texts that are none."""
        problems: dict[int, str] = {}
        for place, prompt in enumerate(prompts):
            try:
                self._check(prompt)
            except UserError as error:
                problems[place] = str(error)
        if problems:
            raise BrokenRows(problems, len(prompts))

    def _check(self, prompt: Prompt) -> None:
        for name, field in self.inputs.items():
            if field not in prompt:
                raise UserError(
                    f"{where(prompt)}: it has no {field!r}, which {self.pipeline} reads as its "
                    f"{name} (policy option inputs); it has: {', '.join(prompt) or 'nothing'}"
                )
            value = prompt[field]
            empty = value is None and name != "prompt"
            if "prompt" in name and not (empty or isinstance(value, str)):
                raise UserError(f"{where(prompt)}: {field!r} must be a text, not {value!r:.60}")

    def _blank(self, name: str) -> Any:
        if name not in (*PICTURES, *self.videos):
            return "a" if "prompt" in name else 0
        from PIL import Image

        if name in self.videos:
            return [self._blank(PICTURES[0])] * self.videos[name]
        return Image.new("RGB", (self.call.get("width", 512), self.call.get("height", 512)), "grey")


def _inputs(pipeline: str, known: Mapping[str, Parameter]) -> dict[str, str]:
    """Choose the arguments that differ by prompt: its text, a class where the model takes one, and
    a picture or a video that must be there."""
    chosen = {"prompt": "text"} if "prompt" in known else {}
    if not chosen and "class_labels" in known:
        chosen = {"class_labels": "label"}
    image = known.get("image")
    edits = image is not None and (
        image.default is Parameter.empty or any(word in pipeline for word in EDITORS)
    )
    changed = [n for n in VIDEOS if n in known and any(word in pipeline for word in CHANGERS)]
    return chosen | ({"image": "image"} if edits else {}) | {name: name for name in changed}


def _guidance(known: Mapping[str, Parameter]) -> str | None:
    if "true_cfg_scale" in known:
        return "true_cfg_scale"
    negative = any(name.startswith("negative_prompt") for name in known)
    return "guidance_scale" if negative and "guidance_scale" in known else None
