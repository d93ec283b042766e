"""Reports before training what a model ignores of its prompts: words beyond a text encoder's limit,
and columns that look like row settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from typing import Any

from mmrl.core import pretrained
from mmrl.core.types import Prompt
from mmrl.policies.diffusion import diffusers_folder

TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
# row settings of other programs, and arguments of pipeline calls
SETTINGS = (
    "negative_prompt",
    "negative",
    "seed",
    "guidance_scale",
    "guidance",
    "true_cfg_scale",
    "size",
    "height",
    "width",
)
SHOWN = 40  # characters of the truncated text
PART = 4096  # texts per tokenizer call


def cut(
    place: str,
    texts: Sequence[str],
    text_length: int | None,
    option: str = "policy option text_length",
) -> tuple[str, ...]:
    """Return a sentence for each tokenizer of a folder that truncates some of the texts: CLIP's at
    its position embeddings, others at ``text_length``, which ``option`` sets."""
    if not texts:
        return ()
    index = diffusers_folder.index(place)
    return tuple(
        sentence
        for part in TOKENIZERS
        if (index.get(part) or [None])[0] is not None
        for sentence in _cut_by(place, part, str(index[part][1]), texts, text_length, option)
    )


def limit_of(call: Mapping[str, Any], known: Mapping[str, Parameter]) -> int | None:
    """Return a pipeline's maximum tokens of a prompt; None: its tokenizer's limit."""
    default = known["max_sequence_length"].default if "max_sequence_length" in known else None
    length = call.get("max_sequence_length", default)
    return length if isinstance(length, int) else None


def _cut_by(
    place: str, part: str, kind: str, texts: Sequence[str], text_length: int | None, option: str
) -> Iterator[str]:
    import transformers

    cls = getattr(transformers, kind, transformers.AutoTokenizer)
    tokenizer: Any = pretrained.load_processor(cls, place, subfolder=part)
    clip = kind.startswith("CLIP")
    most = int(tokenizer.model_max_length)
    limit = most if clip or text_length is None else text_length
    helps = (
        "write what matters first"
        if clip or text_length is None
        else f"raise {option}, or write what matters first"
    )
    by = f"{limit} tokens that the text encoder of {part} ({'CLIP' if clip else kind}) reads"
    yield from cut_by(tokenizer, texts, limit, by, helps)


def cut_by(
    tokenizer: Any,
    texts: Sequence[str],
    limit: int,
    by: str,
    helps: str = "write what matters first",
) -> Iterator[str]:
    """Yield a sentence where a tokenizer makes more than ``limit`` tokens, ``by`` in words, of some
    of the texts."""
    lengths: list[int] = []
    with diffusers_folder.quiet():
        for start in range(0, len(texts), PART):
            rows = tokenizer(list(texts[start : start + PART])).input_ids
            lengths += [len(row) for row in rows]
    over = [i for i, length in enumerate(lengths) if length > limit]
    if not over:
        return
    first = texts[over[0]]
    ids = tokenizer(first).input_ids[limit - 1 :]
    lost = tokenizer.decode(ids, skip_special_tokens=True).strip()
    yield (
        f"{len(over)} of {len(texts)} prompts are longer than the {by} and are cut there, the "
        f"first before {lost[:SHOWN]!r}; {helps}"
    )


def unread(prompts: Sequence[Prompt], read: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a sentence on columns of prompts that look like row settings but are not ``read``."""
    columns = sorted({key for prompt in prompts for key in prompt if isinstance(key, str)})
    similar = [
        key
        for key in columns
        if key not in read and (key in SETTINGS or get_close_matches(key, SETTINGS, 1, 0.85))
    ]
    if not similar:
        return ()
    known = f" (read of a row: {', '.join(read)})" if read else ""
    return (
        f"prompts have {', '.join(similar)}, which this policy does not read of a row{known}; one "
        "value for all rows is an option of the policy or of the command",
    )
