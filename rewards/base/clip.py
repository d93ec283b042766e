"""Wraps any open_clip model as two functions, pictures or texts -> unit embeddings.

Copies of one model are shared by the rewards that use it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as nnf
from cachetools import LRUCache
from torch import Tensor

from mmrl.core.errors import UserError, suggest
from mmrl.core.hub import check_repository
from mmrl.core.pretrained import load_open_clip
from mmrl.core.registry import locate
from rewards.base.media import normalize, resize_and_crop, to_uint8
from rewards.base.precision import is_lowered, own_precision
from rewards.base.truncation import of_open_clip

CONTEXT = 77  # tokens of CLIP's text encoders
CACHED_TEXTS = 16_384  # embeddings kept, the oldest go first: 50 MB at width 768
_shared: WeakValueDictionary[tuple[Any, ...], Clip] = WeakValueDictionary()


class Clip:
    """Holds an open_clip model in float32, frozen, in eval mode, with its tokenizer and its own
    preprocessing."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device):
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = tokenizer
        limit = int(getattr(tokenizer, "context_length", None) or CONTEXT)
        self.beginning = of_open_clip("a reward's CLIP model", tokenizer, limit)
        self.device = device
        self.preprocess_cfg = dict(model.visual.preprocess_cfg)
        size = self.preprocess_cfg["size"]
        height, width = (size, size) if isinstance(size, int) else size
        self.size = (height, width)
        # text -> [E] unit vector on the CPU, in float32
        self.texts: LRUCache[str, Tensor] = LRUCache(CACHED_TEXTS)
        self.lock = threading.Lock()
        self.shared: Clip | None = None  # keeps the shared model alive

    def pixels(self, pictures: Tensor, exact: bool = False) -> Tensor:
        """Prepare [N, 3, H, W] in 0..1 -> [N, 3, *size] as the model expects it; ``exact`` goes
        through 8-bit PIL images."""
        if exact:
            return self._through_pil(pictures)
        cfg = self.preprocess_cfg
        fitted = resize_and_crop(
            pictures.to(self.device),
            self.size,
            cfg["resize_mode"],
            cfg["interpolation"],
            cfg["fill_color"] / 255,
        )
        return normalize(fitted, cfg["mean"], cfg["std"])

    def _through_pil(self, pictures: Tensor) -> Tensor:
        from open_clip.transform import PreprocessCfg, image_transform_v2
        from PIL import Image

        transform = image_transform_v2(PreprocessCfg(**self.preprocess_cfg), is_train=False)
        images = [Image.fromarray(p.numpy()) for p in to_uint8(pictures).permute(0, 2, 3, 1)]
        return torch.stack([transform(image) for image in images]).to(self.device)

    def embed_images(self, pictures: Tensor, batch_size: int = 64, exact: bool = False) -> Tensor:
        """Embed [N, 3, H, W] in 0..1, any float type and device -> [N, E] unit vectors, float32, on
        the model's device.

        A picture with a pixel that is not finite has an embedding of NaN.
        """
        embeddings = []
        with own_precision(self.device.type):
            for part in pictures.split(batch_size):
                rows = nnf.normalize(
                    self.model.encode_image(self.pixels(part, exact)).float(), dim=-1
                )
                # clamping would hide an infinite pixel
                broken = ~part.isfinite().flatten(1).all(1).to(rows.device)
                embeddings.append(rows.masked_fill(broken[:, None], torch.nan))
        return torch.cat(embeddings)

    @torch.no_grad()
    def embed_texts(self, texts: list[str], batch_size: int = 64) -> Tensor:
        """Embed N texts -> [N, E] unit vectors, float32, on the model's device; cached per text."""
        with self.lock:  # rewards that share this model may run in parallel
            known = (
                {}
                if is_lowered()
                else {text: self.texts[text] for text in texts if text in self.texts}
            )
        fresh = [text for text in dict.fromkeys(texts) if text not in known]
        self.beginning.look(fresh)
        with own_precision(self.device.type):
            for start in range(0, len(fresh), batch_size):
                part = fresh[start : start + batch_size]
                tokens = self.tokenizer(part).to(self.device)  # [n, T]
                rows = nnf.normalize(self.model.encode_text(tokens).float(), dim=-1).cpu()
                known.update(zip(part, rows, strict=True))
        with self.lock:
            self.texts.update(() if is_lowered() else ((text, known[text]) for text in fresh))
        return torch.stack([known[text] for text in texts]).to(self.device)


def pick_device(name: str | torch.device) -> torch.device:
    """Pick a device: ``auto`` is the current CUDA device if there is one, else the CPU."""
    if name == "auto":
        return (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def load_clip(model: str, pretrained: str, device: str | torch.device = "auto") -> Clip:
    """Load an open_clip model by name and tag, hub id (``hf-hub:org/repo``), local folder or
    ``world:`` artifact.

    Raises:
        UserError: an unknown name or tag, a folder without model or configuration, weights that are
            not on this machine and cannot be downloaded.
    """

    where = pick_device(device)
    name, tag = resolve(model, pretrained)
    key = (name, tag, where)
    clip = _shared.get(key)
    if clip is None:
        if repository := hub_id(name, tag):
            check_repository(repository)
        quick = tag is not None and uses_quick_gelu(name, tag)
        try:
            clip = Clip(*load_open_clip(name, tag, quick), where)
        # open_clip and the hub raise a dozen types here, all meaning "no such model"
        except Exception as error:
            raise UserError(missing_message(name, tag, error)) from error
        _shared[key] = clip
    return clip


def load_named(clip: str, device: str | torch.device = "auto") -> Clip:
    """Load the model named by one string: ``name/tag`` of open_clip, or anything else that
    ``load_clip`` takes."""
    return load_clip(*split_name(clip), device)


def split_name(clip: str) -> tuple[str, str]:
    """Split ``ViT-L-14/openai`` into name and tag; folders, hub and world ids have no tag."""
    place = Path(clip.removeprefix("local-dir:")).expanduser()
    if (
        clip.startswith(("hf-hub:", "world:", "local-dir:"))
        or place.is_dir()
        or place.is_absolute()
        or clip[0] in ".~"
    ):
        return clip, ""
    name, _, tag = clip.partition("/")
    return name, tag or "openai"


def resolve(model: str, pretrained: str) -> tuple[str, str | None]:
    """Return the two arguments of ``open_clip.create_model``; a folder or hub id has its own
    weights (tag None)."""
    import open_clip

    if model.startswith("hf-hub:"):
        return model, None
    place = Path(locate(model).removeprefix("local-dir:")).expanduser()
    if place.is_dir():
        if not (place / "open_clip_config.json").is_file():
            raise UserError(f"{place} is not an open_clip model: it holds no open_clip_config.json")
        return f"local-dir:{place.resolve()}", None
    if model.startswith(("local-dir:", "world:", ".", "~")) or place.is_absolute():
        raise UserError(f"no such folder: {place} (looked for an open_clip model)")
    if model not in open_clip.list_models():
        known = suggest(model, open_clip.list_models())
        hint = known if known.startswith("did you mean") else "`open_clip.list_models()` lists them"
        raise UserError(
            f"unknown open_clip model {model!r}; {hint}; a folder or hf-hub:org/repo will do too"
        )
    return model, checked_tag(model, pretrained)


def checked_tag(model: str, pretrained: str) -> str:
    """Return a tag that open_clip knows for this model, or the path of a weights file."""
    import open_clip

    file = Path(pretrained).expanduser()
    if file.is_file():
        return str(file)
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained.lower() not in tags:
        raise UserError(
            f"open_clip model {model!r} has no weights {pretrained!r}; {suggest(pretrained, tags)}"
        )
    return pretrained


def hub_id(name: str, tag: str | None) -> str:
    """Return the hub repository that open_clip loads a model from; "" if none."""
    import open_clip

    if tag is None:
        return name.removeprefix("hf-hub:") if name.startswith("hf-hub:") else ""
    listed = (open_clip.get_pretrained_cfg(name, tag) or {}).get("hf_hub") or ""
    return "/".join(listed.split("/")[:2])


def uses_quick_gelu(name: str, tag: str) -> bool:
    """Tell whether weights were trained with QuickGELU (as OpenAI's); open_clip 3 merely warns
    without it."""
    import open_clip

    return bool((open_clip.get_pretrained_cfg(name, tag) or {}).get("quick_gelu", False))


def missing_message(name: str, tag: str | None, error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0].rstrip(".")
    cause = f"{type(error).__name__}: {first}"
    if name.startswith("local-dir:"):
        return f"cannot load the open_clip model in {name.removeprefix('local-dir:')}: {cause}"
    call = (
        f"open_clip.create_model({name!r})"
        if tag is None
        else (f"open_clip.create_model({name!r}, {tag!r})")
    )
    return (
        f"cannot load the open_clip model "
        f"{name!r}{f' with weights {tag!r}' if tag else ''}: {cause}. "
        f'Download it once where there is a network, `python -c "import open_clip; '
        f'{call}"`, and copy the hub cache '
        "(HF_HOME) here, or give a local folder that holds open_clip_config.json and "
        "open_clip_model.safetensors"
    )
