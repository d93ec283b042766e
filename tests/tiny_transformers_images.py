"""Tiny folders of transformers' own image generators, with random weights."""

from __future__ import annotations

import torch

from . import tiny_vlms


def tiny_emu3(folder, vocab=3):
    """``vocab`` visual tokens, whose ids are not those of their numbers; two pixels a token."""
    import transformers as hf

    names = {
        "image_token": "<image>",
        "boi_token": "<|image start|>",
        "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>",
        "eof_token": "<|extra_201|>",
    }
    visual = [f"<|visual token {i:06d}|>" for i in range(vocab)]
    tok = tiny_vlms.tokenizer([*names.values(), "<|extra_200|>", *visual], **names)
    image = hf.Emu3ImageProcessor(image_mean=[0.5, 0.4, 0.5], image_std=[0.5, 0.5, 0.6])
    processor = hf.Emu3Processor(image, tok, chat_template="{{ messages }}")
    config = hf.Emu3Config(
        text_config=tiny_vlms.text_config(tok, attention_dropout=0.0),
        vocabulary_map=tok.get_vocab(),
        vq_config={
            "codebook_size": vocab,
            "embed_dim": 4,
            "latent_channels": 4,
            "base_channels": 32,
            "hidden_size": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
            "temporal_downsample_factor": 2,
        },
    )
    return _saved(folder, lambda: hf.Emu3ForConditionalGeneration(config), processor)


def tiny_imagegpt(folder, vocab=3):
    """Four pixels of ``vocab`` colours."""
    import transformers as hf

    clusters = torch.linspace(-1, 1, 3 * vocab).view(vocab, 3).sin()
    processor = hf.ImageGPTImageProcessor(
        clusters=clusters.tolist(), size={"height": 2, "width": 2}
    )
    config = hf.ImageGPTConfig(
        vocab_size=vocab + 1,
        n_positions=4,
        n_embd=16,
        n_layer=2,
        n_head=2,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return _saved(folder, lambda: hf.ImageGPTForCausalImageModeling(config), processor)


def tiny_glm_image(folder, vocab=3):
    """A whole GlmImagePipeline: ``vocab`` image tokens, and two more that begin and end images.

    From now on processors ask for a small image of one token; theirs has 256, whatever the size of
    the large one.
    """
    import diffusers
    import transformers as hf

    hf.GlmImageProcessor._get_target_shape = lambda self, height, width: (
        height // 32,
        width // 32,
        1,
        1,
    )

    names = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    tok = tiny_vlms.tokenizer(list(names.values()), **names)
    template = (
        "{% for message in messages %}<|im_start|>{% for part in message.content %}{{ "
        "part.text }}{% endfor %}"
        "<|im_end|>{% endfor %}"
    )
    processor = hf.GlmImageProcessor(hf.GlmImageImageProcessor(), tok, chat_template=template)
    text = tiny_vlms.text_config(
        tok,
        vision_vocab_size=vocab + 2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]},
    )
    text["eos_token_id"] = vocab + 1
    config = hf.GlmImageConfig(
        text_config=text,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "image_size": 64,
            "patch_size": 16,
        },
        vq_config={"embed_dim": 8, "num_embeddings": vocab, "latent_channels": 32},
        image_token_id=tok.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=vocab,
        image_end_token_id=vocab + 1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.GlmImageForConditionalGeneration(config)
        tiny_vlms._wake(model)
        blocks = {
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        }
        pipeline = diffusers.GlmImagePipeline(
            tokenizer=hf.ByT5Tokenizer(),
            processor=processor,
            vision_language_encoder=model,
            text_encoder=hf.T5EncoderModel(
                hf.T5Config(
                    vocab_size=384,
                    d_model=12,
                    d_kv=6,
                    d_ff=16,
                    num_layers=1,
                    num_heads=2,
                    feed_forward_proj="gated-gelu",
                )
            ),
            vae=diffusers.AutoencoderKL(
                latent_channels=4,
                block_out_channels=(8,) * 4,
                norm_num_groups=4,
                layers_per_block=1,
                sample_size=64,
                latents_mean=[0.1] * 4,
                latents_std=[0.9] * 4,
                **blocks,
            ),
            transformer=diffusers.GlmImageTransformer2DModel(
                in_channels=4,
                out_channels=4,
                num_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                text_embed_dim=12,
                time_embed_dim=16,
                condition_dim=8,
                prior_vq_quantizer_codebook_size=vocab,
            ),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    pipeline.save_pretrained(folder)
    return folder


def _saved(folder, build, processor):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        tiny_vlms._wake(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
