"""Lists what differs between families of vision-language models: a table by ``model_type``, and
rules for everything else.

A family lists the space of its coordinates, how its image processor resizes, which extra inputs its
forward pass needs, and where its parts are. Nothing is guessed: an unknown family works, and
``Family.unverified`` lists what is not known about it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

from torch import nn

from mmrl.core.errors import UserError

# Kimi K2.5's clips of several frames, whose features earlier versions of transformers cannot
# separate
CUTS_CLIPS = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)
Coords = Literal["original", "resized", "rel1000", "rel1"]
PARTS = ("language", "projector", "vision")
TYPE_IDS = ("mm_token_type_ids", "token_type_ids")
VISION = (
    "vision_tower",
    "visual",
    "vision_model",
    "vision_encoder",
    "image_tower",
    "image_embed.img_processor",
    "audio_tower",
    "embed_tokens_extend.audio_embed",
    "vqmodel",
    "generation_embeddings",
    "generation_aligner",
    "generation_head",
)
LANGUAGE = ("language_model", "text_model", "lm_head")
PROJECTOR = (
    "multi_modal_projector",
    "connector",
    "aligner",
    "image_newline",
    "embed_vision",
    "embed_audio",
    "embed_tokens_extend",
    "mm_projector",
    "model.merger",
    "model.projector",
    "visual_embeddings_table",
    "visual.merger",
    "visual.deepstack_merger_list",
)
# model types whose language models are called directly for answers: the outer class only costs time
# without an image
DIRECT = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "internvl",
    "llava",
    "llava_next",
    "llava_onevision",
    "glm4v",
    "glm46v",
    "glm4v_moe",
    "llama4",
    "mistral3",
    "lfm2_vl",
    "kimi_k25",
    "ovis2",
    "minicpmv4_7",
    "perception_lm",
    "cohere2_vision",
    "video_llama_3",
    "qwen3_omni_moe_thinker",
)
# those in which image tokens attend causally too; in others prompts stay padded
CAUSAL = (*DIRECT, "idefics3", "smolvlm", "janus", "phi4_multimodal", "chameleon")
# those whose towers take pixels only in the network's dtype; Llama 4's processor rounds them
OWN_DTYPE = ("llama4", "kimi_k25", "chameleon")


@dataclass(frozen=True)
class Family:
    """Describes a family. ``coords``: the space of the model's answers, None where it must be
    given. ``resize``: what its processor does to a whole image: ``grid`` (stretched to a grid of
    patches it reports), ``stretch`` (to one size), None (crops, pads or tiles, so coordinates of
    the resized image mean nothing). ``needs``: inputs without which it computes wrongly.
    ``by_row``: each prompt has a row of image slots, so only prompts with the same number of images
    make a batch. ``video``: it takes videos; ``apart``: not in one batch with images; ``alone``:
    every prompt is a separate batch; ``either``: not in one prompt with images, of which its
    processor keeps one kind. ``video_tokens``: how many tokens of a prompt stand for a video: as
    many as its grid has features (``grid``), those of an image (``image``), those of a frame for
    each of its clips (``frame``), or what its processor keeps (``mask``). ``joins``: how vision
    tensors of several prompts become those of one batch (``collation.py``). ``hears``: it takes
    audio, in one batch with images (``beside``) or not (``apart``). ``note``: where this is known
    from."""

    name: str
    coords: Coords | None = None
    resize: Literal["grid", "stretch"] | None = None
    needs: tuple[str, ...] = ()
    by_row: bool = False
    video: bool = False
    apart: bool = False
    alone: bool = False
    either: bool = False
    video_tokens: Literal["grid", "image", "frame", "mask"] = "grid"
    joins: Literal["rows", "last", "tiles", "indices"] = "rows"
    hears: Literal["", "beside", "apart"] = ""
    note: str = ""
    known: bool = True

    @property
    def splits(self) -> bool:
        """Tell whether some prompts of the family cannot share a batch with others, so that a pass
        over rows may call the network several times."""
        return (
            self.alone
            or self.by_row
            or self.apart
            or bool(self.hears)
            or (self.video and self.resize != "grid")
        )

    def unverified(self) -> tuple[str, ...]:
        """List what was not verified about the family, for the log; empty where all facts are
        known."""
        statements = []
        if not self.known:
            statements.append(
                f"{self.name} is not in mmrl's table: batching, video and parts follow "
                f"general rules"
            )
        if self.coords is None:
            statements.append(
                f"the coordinate space of {self.name}'s answers is not "
                f"known{self.note and ': ' + self.note}"
            )
        return tuple(statements)


def _qwen(name: str, coords: Coords | None, note: str) -> Family:
    return Family(name, coords, "grid", ("mm_token_type_ids",), video=True, note=note)


def _glm(name: str, coords: Coords | None, note: str) -> Family:
    """Describe a GLM: its image token also stands for video frames, so a batch has either images or
    videos."""
    return replace(_qwen(name, coords, note), video_tokens="image", apart=True)


FAMILIES = {
    f.name: f
    for f in (
        _qwen("qwen2_vl", "rel1000", "integers of 0-1000, model card and Visual-RFT"),
        _qwen("qwen2_5_vl", "resized", "pixels of the resized image, QwenLM/Qwen3-VL#1161"),
        _qwen("qwen3_vl", "rel1000", "QwenLM/Qwen3-VL#1486"),
        _qwen("qwen3_vl_moe", "rel1000", "QwenLM/Qwen3-VL#1486"),
        _qwen("qwen3_5", "rel1000", "QwenLM/Qwen3.8-Flash-Next#4"),
        _qwen("qwen3_5_moe", "rel1000", "QwenLM/Qwen3.8-Flash-Next#4"),
        Family(
            "qwen3_omni_moe_thinker",
            resize="grid",
            video=True,
            hears="beside",
            note="no statement found",
        ),
        _glm("glm4v", "rel1000", "ms-swift's template"),
        _glm("glm46v", "rel1000", "zai-org/glm-skills, glmv-grounding"),
        _glm("glm4v_moe", "rel1000", "ms-swift's template"),
        Family("internvl", "rel1000", video=True, note="<box>[[...]]</box>, VLM-R1's module"),
        Family(
            "llava",
            note="LLaVA-1.5 was taught 0-1 of the image padded to a square, which its "
            "processor does not do",
        ),
        Family("llava_next", note="taught 0-1; its processor pads and tiles"),
        Family("llava_onevision", video=True, note="no statement found"),
        Family("idefics3", note="no statement found"),
        Family("smolvlm", video=True, either=True, note="no statement found"),
        Family("gemma3", resize="stretch", needs=("token_type_ids",), note="no statement found"),
        Family(
            "paligemma",
            resize="stretch",
            needs=("token_type_ids",),
            note="answers in <locNNNN>, y first, 1024 bins",
        ),
        Family("gemma4", needs=("mm_token_type_ids",), video=True, note="no statement found"),
        Family("llama4", note="no statement found"),
        Family("mistral3", note="no statement found"),
        Family("lfm2_vl", note="no statement found"),
        Family(
            "molmo2",
            needs=("mm_token_type_ids",),
            video=True,
            apart=True,
            joins="indices",
            note="no statement found",
        ),
        Family("ovis2", note="no statement found"),
        Family(
            "minicpmv4_7",
            needs=("mm_token_type_ids",),
            video=True,
            joins="last",
            note="no statement found",
        ),
        Family("phi4_multimodal", hears="apart", note="no statement found"),
        Family(
            "kimi_k25",
            resize="grid",
            video=CUTS_CLIPS,
            video_tokens="frame",
            note="no statement found",
        ),
        Family("perception_lm", video=True, joins="tiles", note="no statement found"),
        Family("cohere2_vision", note="no statement found"),
        Family(
            "video_llama_3",
            resize="grid",
            video=True,
            video_tokens="mask",
            note="no statement found",
        ),
        Family("chameleon", note="not taught to ground"),
        Family("mllama", by_row=True, note="no statement found"),
        Family("janus", note="not taught to ground"),
    )
}


def family_of(config: Any, coords: Coords | None = None) -> Family:
    """Return the family of a model's configuration; ``coords`` overrides what the table says.

    An unknown ``model_type`` gets general rules: it needs the type ids that its forward pass takes
    by name.
    """
    name = config.model_type
    family = FAMILIES.get(name) or Family(name, needs=_type_ids_of(config), video=True, known=False)
    if coords == "resized" and family.resize is None:
        raise UserError(
            f"coordinate_space: resized means nothing for {name}, whose processor crops, pads or "
            f"tiles images; "
            "say in which space the model answers: original, rel1000 or rel1"
        )
    return replace(family, coords=coords) if coords else family


def _type_ids_of(config: Any) -> tuple[str, ...]:
    from transformers import AutoModelForImageTextToText

    mapping = AutoModelForImageTextToText._model_mapping
    if type(config) not in mapping:
        return ()
    taken = inspect.signature(mapping[type(config)].forward).parameters
    return tuple(name for name in TYPE_IDS if name in taken)


def part_of(name: str) -> str:
    """Return ``language``, ``projector`` or ``vision``: where a parameter or module of that dotted
    name belongs.

    The longest known path wins: ``visual.merger`` is a projector inside the vision tower. Any other
    name, such as the embeddings of a model without a ``language_model``, belongs to the language
    model.
    """
    dotted = f".{name}."
    matches = [
        (len(path), part)
        for part, paths in _PATHS.items()
        for path in paths
        if f".{path}." in dotted
    ]
    return max(matches)[1] if matches else "language"


_PATHS = {"language": LANGUAGE, "projector": PROJECTOR, "vision": VISION}


def modules_of(net: nn.Module, part: str) -> list[str]:
    """Name the linear layers of one part, for adapters. A router that is a linear layer returns
    more than its product."""
    return [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear)
        and part_of(name) == part
        and not type(module).__name__.endswith("Router")
    ]
