"""Finds special token ids: those that may never be sampled, and those that end an answer; and
identifies vocabularies."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

PLACEHOLDER = re.compile(
    r"(?:.*_)?(?:image|video|vision|visual|audio|boi|eoi|boa|eoa|img|imgs|global|fake|slice|tile)"
    r"(?:_.*)?"
    r"_token(?:_id|_ids|_index)?"
)
TILES = re.compile(r"<row_\d+_col_\d+>")


def suppressed_ids(processor: Any, tokenizer: Any, config: Any) -> tuple[int, ...]:
    """List the ids of placeholders, starts, ends and separators of images and videos: a sampled one
    would need an image that does not exist. Ids beyond the head's vocabulary (Llama 3.2 Vision,
    Molmo2) have no logit and are left out."""
    suppressed: set[int] = set()
    known = set(tokenizer.get_vocab().values()) | set(tokenizer.added_tokens_decoder)
    for holder in (processor, tokenizer, config):
        for name in (
            name
            for name in dir(holder)
            if PLACEHOLDER.fullmatch(name) and not name.startswith("__")
        ):
            value = getattr(holder, name, None)
            values = value if isinstance(value, (list, tuple)) else [value]
            ids = [tokenizer.convert_tokens_to_ids(v) if isinstance(v, str) else v for v in values]
            suppressed.update(
                i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i in known
            )
    suppressed.update(
        i for i, token in tokenizer.added_tokens_decoder.items() if TILES.fullmatch(str(token))
    )
    # families that generate images from the vocabulary of their answers
    drawn = getattr(config, "vocabulary_map", None) or {}
    suppressed.update(i for i in drawn.values() if i in known)
    suppressed -= {*stop_ids(tokenizer, config, None), tokenizer.unk_token_id}
    return tuple(sorted(i for i in suppressed if i < text_of(config).vocab_size))


def text_of(config: Any) -> Any:
    """Return the part of a configuration that describes the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def stop_ids(tokenizer: Any, config: Any, generation: Any) -> tuple[int, ...]:
    stops: set[int] = set()
    for holder in (tokenizer, config, text_of(config), generation):
        value = getattr(holder, "eos_token_id", None)
        ids = value if isinstance(value, (list, tuple)) else [value]
        stops.update(i for i in ids if i is not None)
    return tuple(sorted(stops))


def digest_of(tokenizer: Any) -> str:
    """Return a hash of a vocabulary: equal for the same tokens at the same ids."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return f"{len(tokens)} tokens, {hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]}"
