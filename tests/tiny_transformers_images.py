"""Tiny folders of transformers' own image generators, with random weights."""

from __future__ import annotations

import torch

from . import tiny_vlms


def tiny_emu3(folder, vocab=3):
    """``vocab`` visual tokens, whose ids are not those of their numbers; two pixels a token."""
    import transformers as hf

    names = {
        "image_token": "<image>", "boi_token": "<|image start|>", "eoi_token": "<|image end|>",
        "image_wrapper_token": "<|image token|>", "eof_token": "<|extra_201|>",
    }  # fmt: skip
    visual = [f"<|visual token {i:06d}|>" for i in range(vocab)]
    tok = tiny_vlms.tokenizer([*names.values(), "<|extra_200|>", *visual], **names)
    image = hf.Emu3ImageProcessor(image_mean=[0.5, 0.4, 0.5], image_std=[0.5, 0.5, 0.6])
    processor = hf.Emu3Processor(image, tok, chat_template="{{ messages }}")
    config = hf.Emu3Config(
        text_config=tiny_vlms.text_config(tok, attention_dropout=0.0), vocabulary_map=tok.get_vocab(),
        vq_config={
            "codebook_size": vocab, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1, "attn_resolutions": [], "temporal_downsample_factor": 2,
        },
    )  # fmt: skip
    return _saved(folder, lambda: hf.Emu3ForConditionalGeneration(config), processor)


def tiny_imagegpt(folder, vocab=3):
    """Four pixels of ``vocab`` colours."""
    import transformers as hf

    clusters = torch.linspace(-1, 1, 3 * vocab).view(vocab, 3).sin()
    processor = hf.ImageGPTImageProcessor(clusters=clusters.tolist(), size={"height": 2, "width": 2})
    config = hf.ImageGPTConfig(
        vocab_size=vocab + 1, n_positions=4, n_embd=16, n_layer=2, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return _saved(folder, lambda: hf.ImageGPTForCausalImageModeling(config), processor)


def _saved(folder, build, processor):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        tiny_vlms._wake(model)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
