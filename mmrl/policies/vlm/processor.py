"""Turns prompts into tensors: the processor's side of a vision-language model, without any pass of
the network.

A prompt is encoded alone, exactly as its processor and chat template do, and prompts are collated
afterwards by one rule for all families: sequences are padded on the left, vision tensors are joined
along their first dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.pictures import full_size
from mmrl.core.thoughts import opened_by
from mmrl.core.types import Prompt
from mmrl.policies.vlm.audio import audios_of, open_audio, rate_of, with_audio_mask
from mmrl.policies.vlm.budgets import Cost, Shrink
from mmrl.policies.vlm.chat import (
    messages_of,
    parts_of,
    rate_of_part,
    rates_of,
    videos_of,
)
from mmrl.policies.vlm.collation import collated, is_pixels, kinds_of
from mmrl.policies.vlm.engines.external import EnginePrompt
from mmrl.policies.vlm.families import Family
from mmrl.policies.vlm.media import (
    Budgets,
    Video,
    image_at,
    images_of,
    open_video,
    shown_image,
    shown_video,
    video_at,
    where,
)
from mmrl.policies.vlm.special import stop_ids, suppressed_ids, text_of
from mmrl.policies.vlm.template import Template, behind

GEOMETRY = ("boxes", "box", "point", "points", "mask", "tracks")  # answers in coordinates
UNUSED = ("labels", "num_crops", "num_patches", "offset_mapping")
ViewSizes = list[list[int]]


class Inputs:
    """Encodes prompts for one model. ``generation``: its generation config, which lists more stop
    tokens; ``template``: extra variables of its chat template."""

    def __init__(
        self,
        processor: Any,
        config: Any,
        budgets: Budgets,
        family: Family,
        generation: Any = None,
        template: Mapping[str, Any] | None = None,
    ):
        self.processor = processor
        self.config = config
        self.budgets = budgets
        self.family = family
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.flat = False  # whether the processor takes one flat list of images
        self.template = Template(processor, self.tokenizer, family.name, template or {})
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.pad = self.tokenizer.pad_token_id
        self.suppressed = suppressed_ids(processor, self.tokenizer, config)
        self.stops = stop_ids(self.tokenizer, config, generation)

    def encode(self, prompt: Prompt) -> dict[str, Tensor]:
        """Encode one prompt as the processor does: ``input_ids`` [1, S], ``attention_mask`` [1, S],
        and what its family adds.

        Raises UserError naming the prompt: an unreadable image or video, placeholders that do not
        match the images, coordinates in the answer of a family whose space is unknown, an input its
        family needs and the processor left out; ``TooLong`` for one above its budget.
        """
        return self.take(prompt)[0]

    def take(self, prompt: Prompt) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Encode and ``view`` a prompt at once, opening every image and video once."""
        self._check_geometry(prompt)
        messages, images, videos = self._opened(prompt)
        encoded, _ = self._within(prompt, messages, images, videos)
        begun = self._rendered(prompt, messages)[1]
        return encoded, self._view(encoded, images, videos) | {"begun": begun}

    def engine_prompt(self, prompt: Prompt) -> EnginePrompt:
        """Return a prompt for another engine, whose own processor replaces each placeholder by
        features."""
        messages, images, videos = self._opened(prompt)
        if any(p["type"] == "audio" for m in messages for p in m["content"]):
            raise UserError(f"{where(prompt)}: other engines are given no audio; use engine: own")
        encoded, scale = self._within(prompt, messages, images, videos)
        text, _ = self._rendered(prompt, messages)
        plain = bool(self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))
        ids = self.tokenizer(text, add_special_tokens=not plain)["input_ids"]
        smaller = [image_at(image, scale, self.budgets) for image in images]
        read = encoded["input_ids"][0].tolist()
        return EnginePrompt(
            where(prompt), ids, read, smaller, [video_at(video, scale) for video in videos]
        )

    def measure(self, prompt: Prompt) -> tuple[Cost, float]:
        """Return a prompt's cost within its budget, and the factor by which its pixels were
        scaled."""
        encoded, scale = self._within(prompt, *self._opened(prompt))
        return self.cost(encoded), scale

    def cost(self, encoded: dict[str, Tensor]) -> Cost:
        return Cost(self.placeholders(encoded), encoded["input_ids"].shape[1])

    def _within(
        self, prompt: Prompt, messages: list[dict[str, Any]], images: list[Any], videos: list[Video]
    ) -> tuple[dict[str, Tensor], float]:
        """Encode a prompt, with images and frames scaled down until it is within its budget."""
        scale = 1.0
        shrink = Shrink(self.budgets)
        while True:
            smaller = [image_at(image, scale, self.budgets) for image in images]
            encoded = self._encoded(
                prompt, messages, smaller, [video_at(video, scale) for video in videos]
            )
            step = shrink.next(self.cost(encoded), bool(images or videos), where(prompt))
            if step == 1:
                return encoded, scale
            scale *= step * self._shrunk(encoded, smaller)

    def _shrunk(self, encoded: dict[str, Tensor], images: list[Any]) -> float:
        """Return the share of these pixels that the processor itself keeps: larger scales have no
        effect."""
        if self.family.resize != "grid" or not images:
            return 1.0
        pixels = sum(width * height for width, height in self._resized(encoded, len(images), ()))
        offered: float = sum(image.size[0] * image.size[1] for image in images)
        return min(1.0, pixels / offered)

    def _encoded(
        self, prompt: Prompt, messages: list[dict[str, Any]], images: list[Any], videos: list[Video]
    ) -> dict[str, Tensor]:
        processed = self._processed(prompt, messages, images, videos)
        if missing := {
            f"return_{name}": True for name in self.family.needs if name not in processed
        }:
            # some return type ids only on request
            processed = self._processed(prompt, messages, images, videos, **missing)
        encoded = {k: torch.as_tensor(v) for k, v in processed.items() if k not in UNUSED}
        for name in self.family.needs:
            if name not in encoded:
                raise UserError(
                    f"{where(prompt)}: the processor {type(self.processor).__name__} gave "
                    f"no {name}, without which "
                    f"{self.family.name} computes wrong positions or masks; use the "
                    f"processor files of the same release"
                )
        self._check_media(prompt, encoded, len(images), len(videos))
        self._check_count(prompt, encoded)
        return encoded

    def _check_media(
        self, prompt: Prompt, encoded: dict[str, Tensor], images: int, videos: int
    ) -> None:
        """Check that the family supports the prompt's media. Raises UserError naming the prompt."""
        if videos and (not self.family.video or not any(map(is_pixels, encoded))):
            raise UserError(
                f"{where(prompt)}: {self.family.name} takes no videos; give frames of it as images"
            )
        if images and videos and (self.family.apart or self.family.either):
            raise UserError(
                f"{where(prompt)}: {self.family.name} takes images or a video in a prompt, not "
                f"both; leave out one of them"
            )

    def collate(self, encoded: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Collate n encoded prompts to one batch: sequences [n, S] padded on the left, vision
        tensors joined.

        Rows may have no images, or differing numbers of images and tiles. Dimensions beyond the
        first that differ are filled with zeros at their end, which every family takes for padding.
        """
        if len(self.groups(encoded)) > 1:
            needed = f"equally many {'images' if self.family.by_row else 'frames'} in each"
            if self.family.apart:
                needed = "images or videos, not both"
            if self.family.alone:
                needed = "one prompt in each, with a picture where there are several processes"
            raise UserError(
                f"{self.family.name} cannot take these prompts in one batch: it needs {needed}"
            )
        length = max(prompt["input_ids"].shape[1] for prompt in encoded)
        names = list(dict.fromkeys(name for prompt in encoded for name in prompt))
        return {name: collated(name, encoded, length, self.family, self.pad) for name in names}

    def groups(self, encoded: list[dict[str, Tensor]]) -> list[list[int]]:
        """Group the positions of prompts that can be in one batch without changing each other;
        nearly always all of them."""
        return kinds_of(encoded, self.family)

    def view(self, prompt: Prompt, encoded: dict[str, Tensor]) -> dict[str, Any]:
        """Return what a reward must know about the model's input: ``coords``, the ``sizes`` of the
        files and ``resized`` sizes in pixels [W, H], images before videos, ``frames`` of the video
        and its ``duration`` in seconds; and ``begun``, the start of the answer in the prompt."""
        messages, images, videos = self._opened(prompt)
        begun = self._rendered(prompt, messages)[1]
        return self._view(encoded, images, videos) | {"begun": begun}

    def _view(
        self, encoded: dict[str, Tensor], images: list[Any], videos: list[Video]
    ) -> dict[str, Any]:
        return {
            "coords": self.family.coords,
            "sizes": [list(full_size(image)) for image in images]
            + [list(video.size) for video in videos],
            "resized": self._resized(encoded, len(images), videos),
            "frames": sum(len(video.indices) for video in videos),
            "duration": videos[0].duration if videos else None,
        }

    def placeholders(self, encoded: dict[str, Tensor]) -> int:
        """Count the placeholder tokens of image or video features in a prompt."""
        ids = [i for i in (self.placeholder("image"), self.placeholder("video")) if i is not None]
        return int(torch.isin(encoded["input_ids"], torch.tensor(ids)).sum())

    def tokens(self, answer: str) -> list[int] | None:
        """Return an answer's tokens with the stop token; None if it contains a token that may not
        be sampled."""
        ids: list[int] = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        never = {*self.suppressed, *self.stops}
        size = text_of(self.config).vocab_size
        return None if any(i in never or i >= size for i in ids) else [*ids, self._closing()]

    def _closing(self) -> int:
        """Return the stop token with which the chat template ends an answer."""
        ids: list[int] = self.tokenizer(self.template.closes(), add_special_tokens=False)[
            "input_ids"
        ]
        closing = next((token for token in ids if token in self.stops), None)
        if closing is not None:
            return closing
        end_token: int = self.tokenizer.eos_token_id
        return end_token if end_token in self.stops else self.stops[0]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def save(self, folder: Any) -> None:
        """Save processor, tokenizer and chat template to a model's folder."""
        self.processor.save_pretrained(folder)

    # ----------------------------------------------------------------------------------------------
    # one prompt

    def _opened(self, prompt: Prompt) -> tuple[list[dict[str, Any]], list[Any], list[Video]]:
        """Return messages whose content is parts, the opened images and the opened videos, in the
        order of the parts."""
        waiting = {
            "image": images_of(prompt),
            "video": videos_of(prompt),
            "audio": audios_of(prompt),
        }
        counts = {kind: len(sources_of_kind) for kind, sources_of_kind in waiting.items()}
        messages = [dict(m, content=parts_of(m["content"])) for m in messages_of(prompt)]
        marked = {
            kind: sum(p["type"] == kind for m in messages for p in m["content"]) for kind in waiting
        }
        for kind in ("audio", "video", "image"):  # images first, audio last
            if not marked[kind]:
                first = next((m for m in messages if m["role"] == "user"), messages[-1])
                first["content"] = [{"type": kind}] * counts[kind] + first["content"]
        parts = [p for m in messages for p in m["content"] if p["type"] in waiting]
        sources, rates = _sources_of(prompt, parts, waiting, marked)
        most = self.budgets.max_pixels
        images = [shown_image(each, prompt, n, most) for n, each in enumerate(sources["image"])]
        videos = [
            shown_video(open_video(source, rate, self.budgets, prompt), prompt, f"video {n}")
            for n, (source, rate) in enumerate(zip(sources["video"], rates, strict=True))
        ]
        sounds = iter(sources["audio"])
        plain = [
            [
                {"type": "audio", "audio": next(sounds)}
                if p["type"] == "audio"
                else {"type": p["type"]}
                if p["type"] in sources
                else p
                for p in m["content"]
            ]
            for m in messages
        ]
        return [dict(m, content=parts) for m, parts in zip(messages, plain)], images, videos

    def _processed(
        self,
        prompt: Prompt,
        messages: list[dict[str, Any]],
        images: list[Any],
        videos: list[Video],
        **asked: bool,
    ) -> dict[str, Any]:
        text, _ = self._rendered(prompt, messages)
        options: dict[str, Any] = {"return_tensors": "pt", **asked}
        if images:
            options["images"] = images if self.flat else [images]
        if videos:
            metadata = [video.metadata() for video in videos]
            options |= {"videos": [video.frames for video in videos], "video_metadata": metadata}
            options["do_sample_frames"] = False
        if sounds := self._sounds(prompt, messages):
            options["audio"] = sounds
        if self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token):
            options["add_special_tokens"] = False
        try:
            return with_audio_mask(dict(self._called([text], options)))
        except (
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
            StopIteration,
        ) as error:
            raise UserError(
                f"{where(prompt)}: {type(self.processor).__name__} cannot encode this "
                f"prompt with {len(images)} images "
                f"and {len(videos)} videos: {error}{_unlike(videos)}"
            ) from error

    def _called(self, text: list[str], options: dict[str, Any]) -> Any:
        """Call the processor with images as a list of lists by prompt, or, if it takes none
        (GOT-OCR 2), as one flat list."""
        try:
            return self.processor(text=text, **options)
        except (ValueError, TypeError) as error:
            if "ested" not in str(error) or "images" not in options or self.flat:
                raise
        whole = self.processor(text=text, **options | {"images": options["images"][0]})
        self.flat = True
        return whole

    def _sounds(self, prompt: Prompt, messages: list[dict[str, Any]]) -> list[Any]:
        """Open a prompt's audio, in the order of its placeholders."""
        sources = [p["audio"] for m in messages for p in m["content"] if p["type"] == "audio"]
        if not sources:
            return []
        rate = rate_of(self.processor, self.family, prompt)
        return [open_audio(source, rate, prompt) for source in sources]

    def _rendered(self, prompt: Prompt, messages: list[dict[str, Any]]) -> tuple[str, str]:
        """Return the text of a prompt, and the start of the answer in it: the thinking tag that the
        template opens, and the row's ``prefill``."""
        rendered = self.template.render(prompt, messages)
        opened = opened_by(rendered)
        prefill = behind(opened, prompt.get("prefill", ""))
        return rendered + prefill, opened + prefill

    def _check_geometry(self, prompt: Prompt) -> None:
        if self.family.coords is None and any(prompt.get(key) is not None for key in GEOMETRY):
            raise UserError(
                f"{where(prompt)}: its answer has coordinates, and it is not known in "
                f"which space {self.family.name} "
                f"answers ({self.family.note or 'unknown family'}); set the "
                f"policy's coordinate_space to original, resized, "
                "rel1000 or rel1, as this checkpoint was taught"
            )

    def _check_count(self, prompt: Prompt, encoded: dict[str, Tensor]) -> None:
        """Check the placeholders against the number of features by the grids; a text that contains
        special tokens would have more."""
        features = {kind: self._features(kind, encoded) for kind in ("image", "video")}
        if not self.family.known:  # it may have extra placeholders: ends of lines (HunYuan)
            return
        if self.family.video_tokens == "image":
            features = {"image": features["image"] + features["video"], "video": 0}
        for kind, expected in features.items():
            placeholder = self.placeholder(kind)
            gridless = f"{kind}_grid_thw" not in encoded
            if placeholder is None or gridless and any(map(is_pixels, encoded)):
                continue
            actual = int((encoded["input_ids"] == placeholder).sum())
            if expected != actual:
                raise self.mismatch(prompt, kind, expected, actual)

    def _features(self, kind: str, encoded: dict[str, Tensor]) -> int:
        """Count the features of all images or videos of a prompt, by their grids."""
        grid = encoded.get(f"{kind}_grid_thw")
        if grid is None:
            return 0
        if kind == "video" and self.family.video_tokens == "mask":
            return int(encoded["video_compression_mask"].sum())
        pooled = kind == "video" and self.family.video_tokens == "frame"
        patches = grid[:, 1:] if pooled else grid
        return int(patches.prod(1).sum()) // self._merge(kind) ** 2

    def mismatch(self, prompt: Prompt, kind: str, expected: int, actual: int) -> UserError:
        """Return the UserError for a prompt whose placeholders and features differ in number."""
        return UserError(
            f"{where(prompt)}: {actual} {kind} placeholder tokens for {expected} {kind} "
            f"features; its text must not "
            f"hold the model's own {kind} token "
            f"({self.tokenizer.convert_ids_to_tokens(self.placeholder(kind))}), nor be cut"
        )

    def _resized(
        self, encoded: dict[str, Tensor], images: int, videos: Sequence[Video]
    ) -> ViewSizes:
        sizes: ViewSizes = []
        for kind, key, pixels in (
            ("image", "image_grid_thw", images),
            ("video", "video_grid_thw", len(videos)),
        ):
            if key in encoded:
                grids = encoded[key]
                if kind == "video" and self.family.video_tokens == "frame":
                    grids = grids[self._first_clips(videos)]
                patch = getattr(self.processor, f"{kind}_processor").patch_size
                sizes += [[w * patch, h * patch] for _, h, w in grids.tolist()]
            elif pixels:
                shape = self._pixels(kind, encoded).shape
                sizes += [[shape[-1], shape[-2]]] * pixels
        return sizes

    def _first_clips(self, videos: Sequence[Video]) -> list[int]:
        """Return the indices of the grids of each video's first clip."""
        frames = self.processor.video_processor.temporal_patch_size
        clips = [-(-len(video.indices) // frames) for video in videos]
        return [sum(clips[:n]) for n in range(len(clips))]

    def _pixels(self, kind: str, encoded: dict[str, Tensor]) -> Tensor:
        """Return the pixels of all images or videos of a prompt."""
        names = [name for name in encoded if is_pixels(name)]
        of_videos = [name for name in names if "video" in name]
        return encoded[(of_videos if kind == "video" else names)[:1][0] if of_videos else names[0]]

    def placeholder(self, kind: str) -> int | None:
        """Return the placeholder of one feature; a processor's own may represent a whole image
        (Gemma 3)."""
        named = (
            (self.config, "_token_id"),
            (self.config, "_token_index"),
            (self.processor, "_token_id"),
        )
        candidates = (getattr(holder, kind + suffix, None) for holder, suffix in named)
        return next((value for value in candidates if isinstance(value, int)), None)

    def _merge(self, kind: str) -> int:
        side: int = getattr(getattr(self.processor, f"{kind}_processor"), "merge_size", 1)
        return side


def _sources_of(
    prompt: Prompt,
    parts: list[dict[str, Any]],
    waiting: dict[str, list[Any]],
    marked: dict[str, int],
) -> tuple[dict[str, list[Any]], list[Any]]:
    """Find the file of every image, video and audio part: its own, or the next of the prompt's,
    ``waiting``; also the frame rates of the videos. ``marked``: the placeholders of a text."""
    counts = {kind: len(files) for kind, files in waiting.items()}
    sources: dict[str, list[Any]] = {kind: [] for kind in waiting}
    listed_rates, rates = rates_of(prompt, counts["video"]), []
    for part in parts:
        kind = part["type"]
        path = next((part[key] for key in (kind, "path", "url") if part.get(key) is not None), None)
        if path is None and not waiting[kind]:
            raise UserError(
                f"{where(prompt)}: its text has more <{kind}> placeholders than the prompt has "
                f"{kind}s ({marked[kind]} and {counts[kind]}); remove some, or give the missing "
                f"{kind}s"
            )
        if kind == "video":
            rates.append(listed_rates.pop(0) if path is None else rate_of_part(part, prompt))
        sources[kind].append(path if path is not None else waiting[kind].pop(0))
    for kind, rest in waiting.items():
        if rest:
            raise UserError(
                f"{where(prompt)}: its text has {marked[kind]} <{kind}> placeholders for "
                f"{counts[kind]} {kind}s; write one for every {kind}, or none at all"
            )
    return sources, rates


def _unlike(videos: Sequence[Video]) -> str:
    """Return the remedy where a processor may have refused videos with different numbers of
    frames."""
    counts = sorted({len(video.frames) for video in videos})
    if len(counts) < 2:
        return ""
    return (
        f"; its clips have {' and '.join(map(str, counts))} frames: budgets.frames: {counts[0]} "
        "gives all as many"
    )
