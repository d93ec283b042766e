"""Tiny image models of the families in tests/test_image_families.py; see
tests/tiny_diffusers.py."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from . import tiny_diffusers, tiny_vlms

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CHAT = (
    "{%- for message in messages -%}<|im_start|>{{- message.role }} {{ message.content "
    "}}<|im_end|>{%- endfor -%}"
)


def words():
    """One token a word, punctuation mark or new line, about as many as the real one, so that a
    template is cut off."""
    specials = ["<|im_start|>", "<|im_end|>", *tiny_vlms.QWEN.values()]
    vocab = {
        token: i
        for i, token in enumerate(["<pad>", "<eos>", "<unk>", *specials, *tiny_diffusers.WORDS])
    }
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.add_special_tokens(specials)
    parts = [
        pre_tokenizers.Split(" ", "removed"),
        pre_tokenizers.Split("\n", "isolated"),
        pre_tokenizers.Punctuation(),
    ]
    plain.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="right",
        extra_special_tokens=tiny_vlms.QWEN,
        additional_special_tokens=specials,
        model_max_length=512,
        chat_template=CHAT,
    )


def flow_euler(**options):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**options)


def sana(out_channels=4):
    from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel

    tokenizer = words()
    net = SanaTransformer2DModel(
        in_channels=4,
        out_channels=out_channels,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=32,
        sample_size=32,
        timestep_scale=0.5,
        qk_norm=None,
    )
    stages = {
        "block_out_channels": (8, 16),
        "layers_per_block": (1, 1),
        "qkv_multiscales": ((), ()),
        "block_types": ("ResBlock", "ResBlock"),
    }
    both = {
        f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in stages.items()
    }
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(Gemma2Config(vocab_size=len(tokenizer), **SMALL)),
        vae=AutoencoderDC(latent_channels=4, scaling_factor=0.41, **both),
        transformer=net,
        scheduler=flow_euler(shift=3.0),
    )


def qwen_vl(tokenizer):
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 64,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
        "window_size": 112,
    }
    text = SMALL | {
        "vocab_size": len(tokenizer),
        "rope_parameters": tiny_vlms.ROPE,
        "num_hidden_layers": 2,
    }
    ids = tiny_vlms.ids(tokenizer, **tiny_vlms.QWEN_IDS)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    )


def qwen_parts():
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel

    tokenizer = words()
    shifts = {
        "base_shift": 0.5,
        "max_shift": 0.9,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    }
    return {
        "tokenizer": tokenizer,
        "text_encoder": qwen_vl(tokenizer),
        "scheduler": flow_euler(use_dynamic_shifting=True, **shifts),
        "vae": AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.7, 1.1, 2.0],
        ),
        "transformer": QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6),
        ),
    }


def qwen_image():
    from diffusers import QwenImagePipeline

    return QwenImagePipeline(**qwen_parts())


def z_image():
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    tokenizer = words()
    net = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )
    return ZImagePipeline(
        scheduler=flow_euler(shift=3.0),
        vae=tiny_diffusers.vae(shift_factor=0.1),
        tokenizer=tokenizer,
        text_encoder=Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), **SMALL)),
        transformer=net,
    )


def flux2():
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel

    tokenizer = words()
    net = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=96,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(
        latent_channels=4,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    vae.bn.running_mean.uniform_(-1, 1)
    vae.bn.running_var.uniform_(0.5, 2)
    return Flux2KleinPipeline(
        scheduler=flow_euler(use_dynamic_shifting=True, shift=3.0),
        vae=vae,
        tokenizer=tokenizer,
        transformer=net,
        text_encoder=Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **SMALL)),
    )


def lcm():
    from diffusers import LatentConsistencyModelPipeline, LCMScheduler

    tokenizer = tiny_diffusers.clip_tokenizer()
    return LatentConsistencyModelPipeline(
        vae=tiny_diffusers.vae(),
        text_encoder=tiny_diffusers.clip_text(tokenizer),
        tokenizer=tokenizer,
        unet=tiny_diffusers.unet(16, time_cond_proj_dim=8),
        scheduler=LCMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def flux_kontext():
    from diffusers import FluxKontextPipeline

    parts = tiny_diffusers.flux().components
    return FluxKontextPipeline(
        **{name: parts[name] for name in parts if "image" not in name and "feature" not in name}
    )


def qwen_edit():
    import transformers as hf
    from diffusers import QwenImageEditPipeline

    parts = qwen_parts()
    pixels = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
    images = hf.Qwen2VLImageProcessor(**pixels)
    videos = hf.Qwen2VLVideoProcessor(**pixels)
    return QwenImageEditPipeline(
        processor=hf.Qwen2VLProcessor(images, parts["tokenizer"], videos), **parts
    )


BUILDERS = {
    "sana": sana,
    "sana-variance": lambda: sana(8),
    "qwen_image": qwen_image,
    "z_image": z_image,
    "flux2": flux2,
    "lcm": lcm,
    "flux_kontext": flux_kontext,
    "qwen_edit": qwen_edit,
}
