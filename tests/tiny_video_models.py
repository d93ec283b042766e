"""Tiny video models of the families in tests/test_video_families.py; see
tests/tiny_diffusers.py."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from . import tiny_diffusers as tiny


def vision(wide=16, size=24, patch=12):
    return CLIPVisionConfig(
        hidden_size=wide,
        intermediate_size=2 * wide,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=size,
        patch_size=patch,
        projection_dim=wide,
    )


def eyes(size=24):
    sides = {"height": size, "width": size}
    return CLIPImageProcessor(size={"shortest_edge": size}, crop_size=sides)


def euler(**options):
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**options)


def wan_i2v(two=False):
    """Wan 2.1 with CLIP image embeddings, Wan 2.2 with two experts and none."""
    from diffusers import WanImageToVideoPipeline

    tokenizer = tiny.t5_tokenizer()

    def net():
        return tiny.wan_net(10, **({} if two else {"image_dim": 16, "added_kv_proj_dim": 24}))

    return WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny.umt5(tokenizer),
        vae=tiny.wan_vae(),
        scheduler=euler(shift=3.0),
        transformer=net(),
        transformer_2=net() if two else None,
        boundary_ratio=0.7 if two else None,
        image_encoder=None if two else CLIPVisionModel(vision()),
        image_processor=None if two else eyes(),
    )


def skyreels():
    from diffusers import SkyReelsV2ImageToVideoPipeline, SkyReelsV2Transformer3DModel

    tokenizer = tiny.t5_tokenizer()
    net = SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=10,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
        image_dim=16,
        added_kv_proj_dim=24,
    )
    return SkyReelsV2ImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny.umt5(tokenizer),
        vae=tiny.wan_vae(),
        scheduler=euler(shift=5.0),
        transformer=net,
        image_encoder=CLIPVisionModel(vision()),
        image_processor=eyes(),
    )


def ltx(timed=False):
    """``timed``: an autoencoder that takes a time, as 0.9.1 and later have."""
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel

    tokenizer = tiny.t5_tokenizer()
    net = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=32,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
        patch_size_t=1,
        timestep_conditioning=timed,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        scaling_factor=1.1,
    )
    vae.latents_mean.add_(0.1)
    vae.latents_std.mul_(1.2)
    scheduler = euler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return LTXPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=tiny.t5(tokenizer),
        tokenizer=tokenizer,
        transformer=net,
    )


def cogvideox(joined=None):
    """``joined``: frames to a token, as 1.5 has them."""
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    tokenizer = tiny.t5_tokenizer()
    net = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=1,
        sample_width=4,
        sample_height=2,
        sample_frames=9,
        patch_size=2,
        patch_size_t=joined,
        patch_bias=joined is None,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        scaling_factor=0.7,
    )
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
        clip_sample=False,
    )
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=tiny.t5(tokenizer),
        vae=vae,
        transformer=net,
        scheduler=scheduler,
    )


# words of the templates: not all, so that these are as long as real ones
WHOLE = """
system user assistant Describe the video by detailing following aspects main content and theme
of color shape size texture quantity text spatial relationships objects Actions events behaviors
temporal physical movement changes background environment light style
""".split()
MARKS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<image>",
    "<newline>",
)


def llama_tokenizer():
    """A token a word or punctuation mark or blank line; unknown words are spelt, so that the
    templates are long."""
    words = [*tiny.WORDS, *WHOLE]
    letters = [chr(i) for i in range(33, 127)]
    vocab = {
        token: i
        for i, token in enumerate(dict.fromkeys(["<pad>", "<unk>", *MARKS, *letters, *words]))
    }
    plain = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain.normalizer = normalizers.Replace("\n\n", "<newline>")
    pieces = Regex(rf"<newline>|\b(?:{'|'.join(words)})\b|.")
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(pieces, "isolated")]
    plain.pre_tokenizer = pre_tokenizers.Sequence(splits)
    plain.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", vocab["<|begin_of_text|>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<|begin_of_text|>",
        additional_special_tokens=list(MARKS[1:]),
        model_max_length=2048,
    )


def llama(tokenizer):
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=4096,
    )


def hunyuan_parts(channels=4, kind=None, guided=True):
    from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel

    clip = tiny.clip_tokenizer(77)
    net = HunyuanVideoTransformer3DModel(
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        guidance_embeds=guided,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        image_condition_type=kind,
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    return {
        "transformer": net,
        "vae": vae,
        "scheduler": euler(shift=7.0),
        "text_encoder_2": tiny.clip_text(clip, 8),
        "tokenizer_2": clip,
    }


def hunyuan():
    from diffusers import HunyuanVideoPipeline

    tokenizer = llama_tokenizer()
    return HunyuanVideoPipeline(
        tokenizer=tokenizer, text_encoder=LlamaModel(llama(tokenizer)), **hunyuan_parts()
    )


def hunyuan_i2v(kind):
    from diffusers import HunyuanVideoImageToVideoPipeline

    tokenizer = llama_tokenizer()
    config = LlavaConfig(
        vision_config=vision(size=48, patch=2),
        text_config=llama(tokenizer),
        vision_feature_layer=-2,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.pad_token_id = tokenizer.pad_token_id
    parts = hunyuan_parts(*((9, kind, False) if kind == "latent_concat" else (4, kind, True)))
    return HunyuanVideoImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=LlavaForConditionalGeneration(config),
        image_processor=eyes(48),
        **parts,
    )


BUILDERS = {
    "wan_i2v": wan_i2v,
    "wan_i2v-two": lambda: wan_i2v(two=True),
    "skyreels_i2v": skyreels,
    "ltx": ltx,
    "ltx-timed": lambda: ltx(timed=True),
    "cogvideox": cogvideox,
    "cogvideox-joined": lambda: cogvideox(2),
    "hunyuan_video": hunyuan,
    "hunyuan_i2v": lambda: hunyuan_i2v("token_replace"),
    "hunyuan_i2v-joined": lambda: hunyuan_i2v("latent_concat"),
}
