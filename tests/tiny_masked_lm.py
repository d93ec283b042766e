"""A tiny BertForMaskedLM with its tokenizer, saved as a folder."""

import tempfile
from functools import cache
from pathlib import Path

import torch


@cache
def _place() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="mmrl-tiny-bert-")


@cache
def folder() -> Path:
    from transformers import BertConfig, BertForMaskedLM

    from .tiny_diffusers import word_tokenizer

    tokenizer = word_tokenizer(specials=["<mask>"])
    tokenizer.mask_token = "<mask>"
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(_place().name)
    tokenizer.save_pretrained(_place().name)
    return Path(_place().name)
