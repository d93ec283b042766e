"""Maps module names of diffusers' networks to those of ComfyUI and kohya's sd-scripts, to write
adapters for them.

Only formats that diffusers can read back are written: ``lora_files`` reads every file again and
compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["diffusers", "comfyui", "kohya"]
FORMATS: tuple[Format, ...] = ("diffusers", "comfyui", "kohya")
# diffusers' names of the parts of an original module, joined along its outputs
Rule = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Place:
    """Locates a diffusers module in the original network: part ``index`` of ``parts`` of the
    outputs of module ``name``."""

    name: str
    index: int = 0
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Names:
    """Names modules as the original network does. ``rules``: original name to diffusers' name,
    ``{}`` being a block's number; ``same``: a pattern of names that both share."""

    rules: tuple[Rule, ...] = ()
    same: str = ""

    def place(self, module: str, config: Mapping[str, Any]) -> Place | None:
        """Return where a module of diffusers' network is in the original one; None: unknown."""
        for original, parts in self.rules:
            for index, part in enumerate(parts):
                match = re.fullmatch(re.escape(part).replace(r"\{\}", r"(\d+)"), module)
                if match:
                    numbers = match.groups()
                    siblings = tuple(name.format(*numbers) for name in parts)
                    return Place(original.format(*numbers), index, siblings)
        return Place(module, 0, (module,)) if re.match(self.same or "(?!)", module) else None


@dataclass(frozen=True)
class SgmNames(Names):
    """Names the attention blocks of SDXL's U-Net as the original code and sd-scripts do."""

    def place(self, module: str, config: Mapping[str, Any]) -> Place | None:
        """Return the place of a module of an attention block; None for all others."""
        layers = int(config["layers_per_block"]) + 1  # a block's layers and its resampling
        match = re.fullmatch(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.(.+)", module)
        if match:
            way, block, layer, rest = match.groups()
            number = int(block) * layers + int(layer)
            name = (
                f"input_blocks.{number + 1}.1.{rest}"
                if way == "down"
                else f"output_blocks.{number}.1.{rest}"
            )
            return Place(name, 0, (module,))
        middle, separator, rest = module.partition("mid_block.attentions.0.")
        return Place(f"middle_block.1.{rest}", 0, (module,)) if separator and not middle else None


@dataclass(frozen=True)
class Family:
    """The formats supported for the pipelines of a family. ``whole``: modules of a block that
    diffusers' reader of kohya's form expects in every block. ``one_alpha``: it misreads alphas that
    differ between modules. ``texts``: kohya's prefixes of the text encoders that the pipeline loads
    adapters into, in their order."""

    comfyui: Names | None = None
    kohya: Names | None = None
    whole: tuple[str, ...] = ()
    one_alpha: bool = False
    texts: tuple[str, ...] = ()


def _each(original: str, block: str, pairs: Mapping[str, str | Sequence[str]]) -> tuple[Rule, ...]:
    """Build the rules of a block type."""
    listed = {
        name: (parts,) if isinstance(parts, str) else tuple(parts) for name, parts in pairs.items()
    }
    return tuple(
        (f"{original}.{{}}.{name}", tuple(f"{block}.{{}}.{part}" for part in parts))
        for name, parts in listed.items()
    )


def _of_attention(prefix: str, names: Sequence[str]) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


QKV = _of_attention("attn", ("to_q", "to_k", "to_v"))
TEXT_QKV = _of_attention("attn", ("add_q_proj", "add_k_proj", "add_v_proj"))

FLUX = Names(
    _each(
        "double_blocks",
        "transformer_blocks",
        {
            "img_attn.qkv": QKV,
            "txt_attn.qkv": TEXT_QKV,
            "img_attn.proj": "attn.to_out.0",
            "txt_attn.proj": "attn.to_add_out",
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
        },
    )
    + _each(
        "single_blocks",
        "single_transformer_blocks",
        {
            "linear1": [*QKV, "proj_mlp"],
            "linear2": "proj_out",
            "modulation.lin": "norm.linear",
        },
    )
)
FLUX2 = Names(
    _each(
        "double_blocks",
        "transformer_blocks",
        {
            "img_attn.qkv": QKV,
            "txt_attn.qkv": TEXT_QKV,
            "img_attn.proj": "attn.to_out.0",
            "txt_attn.proj": "attn.to_add_out",
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
    )
    + _each(
        "single_blocks",
        "single_transformer_blocks",
        {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"},
    )
    + (
        ("img_in", ("x_embedder",)),
        ("txt_in", ("context_embedder",)),
        ("final_layer.linear", ("proj_out",)),
    )
)
# as diffusion-pipe names them, which ComfyUI and diffusers read
HUNYUAN = Names(
    _each(
        "double_blocks",
        "transformer_blocks",
        {
            "img_attn_qkv": QKV,
            "txt_attn_qkv": TEXT_QKV,
            "img_attn_proj": "attn.to_out.0",
            "txt_attn_proj": "attn.to_add_out",
            "img_mlp.fc1": "ff.net.0.proj",
            "img_mlp.fc2": "ff.net.2",
            "txt_mlp.fc1": "ff_context.net.0.proj",
            "txt_mlp.fc2": "ff_context.net.2",
            "img_mod.linear": "norm1.linear",
            "txt_mod.linear": "norm1_context.linear",
        },
    )
    + _each(
        "single_blocks",
        "single_transformer_blocks",
        {
            "linear1": [*QKV, "proj_mlp"],
            "linear2": "proj_out",
            "modulation.linear": "norm.linear",
        },
    )
)
WAN_BLOCK = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
WAN_PICTURE = {"cross_attn.k_img": "attn2.add_k_proj", "cross_attn.v_img": "attn2.add_v_proj"}
WAN = Names(_each("blocks", "blocks", WAN_BLOCK | WAN_PICTURE))
ALL = Names(same=".")
WAN_FAMILY = Family(WAN, WAN, whole=tuple(WAN_BLOCK.values()))
FLUX_FAMILY = Family(kohya=FLUX, texts=("lora_te1",))  # lora_te3 is T5, which diffusers skips
SD_FAMILY = Family(kohya=ALL, one_alpha=True, texts=("lora_te",))
QWEN_FAMILY = Family(ALL, ALL)

# diffusers' pipelines -> formats that their readers support
FAMILIES: dict[str, Family] = {
    "StableDiffusionPipeline": SD_FAMILY,
    "LatentConsistencyModelPipeline": SD_FAMILY,
    "StableDiffusionXLPipeline": Family(
        kohya=SgmNames(), one_alpha=True, texts=("lora_te1", "lora_te2")
    ),
    "FluxPipeline": FLUX_FAMILY,
    "FluxKontextPipeline": FLUX_FAMILY,
    "Flux2Pipeline": Family(FLUX2, FLUX2),
    "Flux2KleinPipeline": Family(FLUX2, FLUX2),
    "QwenImagePipeline": QWEN_FAMILY,
    "QwenImageEditPipeline": QWEN_FAMILY,
    "ZImagePipeline": Family(Names(same=r"(layers|noise_refiner|context_refiner)\."), ALL),
    "LTXPipeline": Family(Names(same=r"transformer_blocks\.")),
    "HunyuanVideoPipeline": Family(HUNYUAN),
    "HunyuanVideoImageToVideoPipeline": Family(HUNYUAN),
    "WanPipeline": WAN_FAMILY,
    "WanImageToVideoPipeline": WAN_FAMILY,
    "SkyReelsV2ImageToVideoPipeline": WAN_FAMILY,
}
