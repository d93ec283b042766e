"""Complete tiny pipelines of diffusers' real classes with random weights, saved as folders, without
a network."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WORDS = "a red blue green seven two zero nine left right moving digit on top of".split()


def clip_tokenizer(length=12):
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1} | {
        f"{w}</w>": i + 2 for i, w in enumerate(WORDS)
    }
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz" for c in (c, c + "</w>")]
    vocab |= {c: len(vocab) + i for i, c in enumerate(x for x in letters if x not in vocab)}
    merges = []
    for word in WORDS:
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            pair = (parts[0], parts[1])
            joined = parts[0] + parts[1]
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault(joined, len(vocab))
            parts = [joined, *parts[2:]]
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def clip_text(tokenizer, wide=16, project=None):
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=wide,
        intermediate_size=2 * wide,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        projection_dim=project or wide,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if project else CLIPTextModel)(config)


def t5_tokenizer(length=16):
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -5.0)]
    pieces += [("▁" + word, -1.0) for word in WORDS] + [
        (c, -6.0) for c in "abcdefghijklmnopqrstuvwxyz"
    ]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=length)


def t5(tokenizer, wide=32):
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=wide,
        d_kv=8,
        d_ff=2 * wide,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def word_tokenizer(specials=(), template=None):
    """One token a word, for language models that serve as text encoders."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *specials, *WORDS])}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(specials),
        model_max_length=512,
    )
    found.chat_template = template
    return found


def vae(latent=4, channels=(8, 16), **options):
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        latent_channels=latent,
        block_out_channels=channels,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        **options,
    )


def unet(text, **options):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "cross_attention_dim": text,
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 2,
            "norm_num_groups": 4,
        }
        | options
    )


def ddim(**options):
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        **options,
    )


def sd(prediction="epsilon"):
    from diffusers import StableDiffusionPipeline

    tokenizer = clip_tokenizer()
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=clip_text(tokenizer),
        tokenizer=tokenizer,
        unet=unet(16),
        feature_extractor=None,
        scheduler=ddim(prediction_type=prediction),
        safety_checker=None,
        requires_safety_checker=False,
    )


def sdxl():
    from diffusers import StableDiffusionXLPipeline

    one = clip_tokenizer()
    two = clip_tokenizer()
    return StableDiffusionXLPipeline(
        vae=vae(),
        tokenizer=one,
        tokenizer_2=two,
        text_encoder=clip_text(one),
        text_encoder_2=clip_text(two, 16, 16),
        unet=unet(
            32,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=1,
            projection_class_embeddings_input_dim=16 + 6 * 8,
            use_linear_projection=True,
        ),
        scheduler=ddim(),
    )


def flux(guidance_embeds=True):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip = clip_tokenizer()
    long = t5_tokenizer()
    net = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=guidance_embeds,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=guidance_embeds, shift=3.0),
        vae=vae(shift_factor=0.1),
        text_encoder=clip_text(clip),
        tokenizer=clip,
        text_encoder_2=t5(long),
        tokenizer_2=long,
        transformer=net,
    )


def wan_vae(latent=4, **options):
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        **{
            "base_dim": 8,
            "z_dim": latent,
            "dim_mult": [1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
            "latents_mean": [0.1 * i for i in range(latent)],
            "latents_std": [1.0 + 0.1 * i for i in range(latent)],
            "scale_factor_temporal": 2,
            "scale_factor_spatial": 2,
        }
        | options
    )


def wan_net(channels=4, **options):
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        **{
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": channels,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 1,
            "rope_max_seq_len": 32,
        }
        | options
    )


def umt5(tokenizer):
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2
        )
    )


def wan(two=False, expand=False):
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    tokenizer = t5_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=umt5(tokenizer),
        vae=wan_vae(),
        transformer=wan_net(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer_2=wan_net() if two else None,
        boundary_ratio=0.7 if two else None,
        expand_timesteps=expand,
    )


def amused(codes=12, side=4, wide=16):
    """Codes of 2 x 2 pixels; the network knows ``codes`` of them and the mask."""
    from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel

    tokenizer = clip_tokenizer()
    net = UVit2DModel(
        hidden_size=wide,
        cond_embed_dim=16,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=40,
        encoder_hidden_size=16,
        vocab_size=codes + 1,
        codebook_size=codes,
        in_channels=wide,
        block_out_channels=wide,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * wide,
        sample_size=side,
    )
    codec = VQModel(
        block_out_channels=(8, 8),
        latent_channels=4,
        num_vq_embeddings=codes,
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        vq_embed_dim=4,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
        sample_size=2 * side,
    )
    return AmusedPipeline(
        vqvae=codec,
        tokenizer=tokenizer,
        text_encoder=clip_text(tokenizer, 16, 16),
        transformer=net,
        scheduler=AmusedScheduler(mask_token_id=codes),
    )


BUILDERS = {
    "amused": amused,
    "amused-2": lambda: amused(codes=2, side=2),
    "sd": sd,
    "sd-v": lambda: sd("v_prediction"),
    "sdxl": sdxl,
    "flux": flux,
    "flux-schnell": lambda: flux(False),
    "wan": wan,
    "wan-two": lambda: wan(two=True),
    "wan-tokens": lambda: wan(expand=True),
}


def builders() -> dict[str, Callable]:
    """All tiny models; the other modules build on this one."""
    from . import tiny_image_models, tiny_video_models

    return BUILDERS | tiny_image_models.BUILDERS | tiny_video_models.BUILDERS


def build(name: str, folder: Path) -> Path:
    """The pipeline saved at ``folder`` with zero-initialised weights made random, so that nothing
    is without effect."""
    torch.manual_seed(0)
    pipe = builders()[name]()
    for part in ("transformer", "transformer_2", "unet"):
        if getattr(pipe, part, None) is not None:
            for parameter in getattr(pipe, part).parameters():
                if parameter.std() == 0 or parameter.numel() == 1:
                    torch.nn.init.normal_(parameter, std=0.2)
    pipe.save_pretrained(folder)
    assert (
        json.loads((folder / "model_index.json").read_text())["_class_name"] == type(pipe).__name__
    )
    return folder


@cache
def folder(name: str) -> Path:
    """The tiny model's folder, built once a process."""
    return build(name, Path(_session().name) / name)


@cache
def _session() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mmrl-tiny-")
