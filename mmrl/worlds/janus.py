"""Builds a tiny Janus of transformers' class with its processor, pre-trained to generate images but
not to understand them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.worlds import painting, vq_names
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import PainterRecipe
from mmrl.worlds.scenes import CANVAS, COLORS, DIGITS, PLACES, RELATIONS, SIZES
from mmrl.worlds.vq import load_vq
from mmrl.zoo.models.image_tokens.janus import JanusNet
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ

BOS = "<bos>"
EOS = "<eos>"
PAD = "<pad>"
UNK = "<unk>"
MARKS = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}
WORDS = (
    *"a an the of in to and digit digits picture with two three : ,".split(),
    *DIGITS,
    *COLORS,
    *SIZES,
    *" ".join((*PLACES, *RELATIONS)).split(),
)
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image_placeholder>"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def build_janus(folder: Path, vq: Path, recipe: PainterRecipe, progress: Progress) -> None:
    """Build a folder that JanusForConditionalGeneration and AutoProcessor load."""
    codec = load_vq(vq)
    lessons = painting.prepare(codec.encode, recipe)
    reads = processor(CANVAS // codec.factor)
    texts = [p["text"] for p in lessons.prompts]
    inputs = reads(
        text=texts, generation_mode="image", padding=True, padding_side="left", return_tensors="pt"
    )
    model = painting.seeded(recipe.seed, lambda: new_model(codec, reads.tokenizer, recipe))
    net = JanusNet(model)
    words = reads.tokenizer
    visible = words.convert_tokens_to_ids([BOS, MARKS["boi_token"]])
    painting.teach(net, lambda batch: loss(net, inputs, visible, batch), lessons, recipe, progress)
    with quiet_libraries():
        model.save_pretrained(folder)
        reads.save_pretrained(folder)


def loss(net: JanusNet, inputs: Any, visible: list[int], batch: painting.Batch) -> Tensor:
    """Compute the loss of image tokens, teacher forced. Without a caption every token but those
    ``visible`` is padding, which is attended to, as in Janus."""
    absent = batch.caption == len(inputs["input_ids"])
    shown = torch.where(absent, batch.wrong_caption, batch.caption)
    ids = inputs["input_ids"][shown]
    mask = inputs["attention_mask"][shown]
    attended = ~absent[:, None] | torch.isin(ids, torch.tensor(visible))
    ids = torch.where(attended, ids, net.config.text_config.pad_token_id)
    return painting.cross_entropy(
        net.vocabulary(net.teach({"ids": ids, "mask": mask}, batch.ids)), batch.ids
    )


def processor(grid: int) -> Any:
    """Make a JanusProcessor whose pictures are ``grid`` x ``grid`` patches."""
    from transformers import JanusImageProcessor, JanusProcessor

    half = [0.5] * 3
    image = JanusImageProcessor(
        size={"height": CANVAS, "width": CANVAS}, image_mean=half, image_std=half, min_size=8
    )
    return JanusProcessor(image, tokenizer(), num_image_tokens=grid**2, chat_template=TEMPLATE)


def tokenizer() -> Any:
    """Make a tokenizer with one token for every word and mark of the world's captions; the rest is
    unknown."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    special = [BOS, EOS, PAD, UNK, *MARKS.values()]
    core = Tokenizer(
        models.WordLevel(
            {t: i for i, t in enumerate(dict.fromkeys([*special, *WORDS]))}, unk_token=UNK
        )
    )
    core.normalizer = normalizers.Lowercase()
    marks = pre_tokenizers.Split(Regex(r"[^\w\s]|_"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=MARKS,
    )


def _towers(codec: LlamaGenVQ, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the vision tower, which nothing here uses, and of the VQ."""
    grid = CANVAS // codec.factor
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "mlp_ratio": 2,
        "depth": 2,
        "image_size": CANVAS,
        "patch_size": codec.factor,
        "projection_dim": width,
        "num_image_tokens": grid**2,
    }
    images = vq_names.janus_config(codec) | {
        "projection_dim": width,
        "image_token_embed_dim": width,
        "num_patches": grid,
        "num_hidden_layers": 2,
        "initializer_range": 0.1,
    }
    return vision, images


def new_model(codec: LlamaGenVQ, words: Any, recipe: PainterRecipe) -> Any:
    """Make a JanusForConditionalGeneration with the world's VQ and otherwise random weights; only
    the generating part is trained."""
    from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

    width = recipe.width
    bos, eos, pad, image, start = words.convert_tokens_to_ids(
        [BOS, EOS, PAD, *list(MARKS.values())[:2]]
    )
    text = {
        "model_type": "llama",
        "vocab_size": len(words),
        "hidden_size": width,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": 8 * width // 3,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "max_position_embeddings": 512,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    vision, images = _towers(codec, width)
    config = JanusConfig(
        text_config=text, vision_config=vision, vq_config=images, image_token_id=image
    )
    model = JanusForConditionalGeneration(config)
    vq_names.into_janus(codec, model.model.vqmodel)
    model.model.generation_embeddings.weight.data.copy_(codec.quantize.codebook())
    model.generation_config = GenerationConfig(
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        generation_kwargs={"boi_token_id": start},
    )
    for part in (model.model.vision_model, model.model.aligner, model.model.vqmodel):
        part.requires_grad_(False)
    return model
