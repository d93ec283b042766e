"""Builds tiny tokenizers and text encoders of the real classes (CLIP, T5), trained in two seconds
to distinguish captions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import TextRecipe
from mmrl.worlds.scenes import COLORS, DIGITS, PLACES, RELATIONS, SIZES, captions, is_held_out
from samplers.noise import Rng

# tokens; the longest caption (three digits) has 14 words and commas, plus start and end
LENGTH = 16
_WORDS = (
    *(
        "a",
        "an",
        "the",
        "of",
        "in",
        "to",
        "and",
        "digit",
        "digits",
        "picture",
        "with",
        "at",
        "on",
        "is",
        "are",
        "there",
    ),
    *itertools.chain(
        DIGITS, COLORS, SIZES, *(p.split() for p in PLACES), *(r.split() for r in RELATIONS)
    ),
)


def clip_tokenizer(words: Sequence[str] = _WORDS, length: int = LENGTH) -> Any:
    """Make a CLIPTokenizer: one token for every word of the world, bytes for all others."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    core = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    last = [f"{letter}</w>" for letter in letters]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        end_of_word_suffix="</w>",
        show_progress=False,
        initial_alphabet=letters,
        # equally frequent merges are ordered by the ids of their pieces, and the ids of last
        # letters would follow a hash table, which differs between processes
        special_tokens=last,
    )
    whole = [word for word in dict.fromkeys(words) if word.isalpha()]
    core.train_from_iterator((word for word in whole for _ in range(3)), trainer)
    merges = [tuple(pair) for pair in _merges(core)]
    pieces = [*letters, *last, *("".join(pair) for pair in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]  # the end last: pooling looks for the largest id
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=length)


def _merges(core: Any) -> list[Any]:
    import json

    merges = json.loads(core.to_str())["model"]["merges"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]


def t5_tokenizer(words: Sequence[str] = _WORDS, length: int = LENGTH) -> Any:
    """Make a T5Tokenizer (unigram) with one piece for every word, and single ASCII characters for
    all others."""
    from transformers import T5Tokenizer

    whole = [f"▁{word}" for word in dict.fromkeys(words) if word.isalpha()]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)] + [(word, -1.0) for word in whole]
    pieces += [(letter, -10.0) for letter in ["▁", *map(chr, range(33, 127))]]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=length)


def text_models(recipe: TextRecipe) -> dict[str, Any]:
    """Make ``tokenizer``, ``text_encoder`` and their twins 2 and 3, as StableDiffusion3Pipeline
    names them."""
    tokenizers = {
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5_tokenizer(),
    }
    return tokenizers | text_encoders(recipe, tokenizers)


def text_encoders(recipe: TextRecipe, tokenizers: dict[str, Any]) -> dict[str, Any]:
    """Make a random encoder for every tokenizer."""
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        clips = [
            CLIPTextModelWithProjection(_clip_config(recipe, tokenizers[name]))
            for name in ("tokenizer", "tokenizer_2")
        ]
        t5 = T5EncoderModel(_t5_config(recipe, tokenizers["tokenizer_3"]))
    return {"text_encoder": clips[0], "text_encoder_2": clips[1], "text_encoder_3": t5}


def _clip_config(recipe: TextRecipe, clip: Any) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(clip),
        hidden_size=recipe.width,
        projection_dim=recipe.width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=4 * recipe.width,
        max_position_embeddings=clip.model_max_length,
        hidden_act="gelu",
        bos_token_id=clip.bos_token_id,
        eos_token_id=clip.eos_token_id,
        pad_token_id=clip.pad_token_id,
    )


def _t5_config(recipe: TextRecipe, t5: Any) -> Any:
    from transformers import T5Config

    return T5Config(
        vocab_size=len(t5),
        d_model=recipe.joint,
        d_kv=16,
        d_ff=2 * recipe.joint,
        num_layers=2,
        num_heads=4,
        pad_token_id=t5.pad_token_id,
        eos_token_id=t5.eos_token_id,
        decoder_start_token_id=t5.pad_token_id,
        dropout_rate=0.0,
    )


def caption_labels(prompts: list[Prompt]) -> Tensor:
    """Return the content of captions, [P, 16] long: per object presence, digit, colour, size,
    place, then relation; 0: none."""
    rows = []
    for prompt in prompts:
        row = []
        for item in prompt["objects"]:
            names = (COLORS, item["color"]), (SIZES, item["size"]), (PLACES, item["place"])
            row += [1, item["digit"] + 1] + [
                list(known).index(name) + 1 if name else 0 for known, name in names
            ]
        relation = RELATIONS.index(prompt["relation"]) + 1 if prompt["relation"] else 0
        rows.append(row + [0] * (15 - len(row)) + [relation])
    return torch.tensor(rows)


def teach_text(models: dict[str, Any], recipe: TextRecipe, progress: Progress) -> None:
    """Train the encoders until a caption's content can be read linearly from their pooled output;
    then freeze them.

    Replaces the web-scale training of the real encoders. Held-out captions are left out.
    """
    prompts = [p for p in captions("mixed", 3000, recipe.seed) if not is_held_out(p["text"])]
    ids = {name: tokens(models, name, [p["text"] for p in prompts]) for name in ("", "_2", "_3")}
    truth = caption_labels(prompts)
    encoders = nn.ModuleList(models[f"text_encoder{name}"] for name in ids)
    sizes = [int(column.max()) + 1 for column in truth.T]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        heads = nn.ModuleList(
            nn.Linear(w, sum(sizes)) for w in (recipe.width, recipe.width, recipe.joint)
        )
    weights = [*encoders.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(weights, recipe.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    for step in progress.steps("text encoders", recipe.steps, optimizer, schedule):
        rows = (
            Rng.of(recipe.seed, "text").uniform(torch.arange(recipe.batch), (), step) * len(prompts)
        ).long()
        loss = torch.zeros(())
        for head, pooled in zip(
            heads, pool(models, {name: value[rows] for name, value in ids.items()})
        ):
            for logits, target in zip(head(pooled).split(sizes, -1), truth[rows].T):
                loss = loss + F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    encoders.eval().requires_grad_(False)


def tokens(models: dict[str, Any], name: str, texts: list[str]) -> Tensor:
    """Return the token ids of one of the three tokenizers ("", "_2", "_3"), as the pipeline pads
    them: [P, length]."""
    tokenizer = models[f"tokenizer{name}"]
    ids: Tensor = tokenizer(
        texts,
        padding="max_length",
        max_length=tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    return ids


def pool(models: dict[str, Any], ids: dict[str, Tensor]) -> list[Tensor]:
    """Return the two CLIP projections and the mean last hidden state of T5, one [P, width] each."""
    pooled = [models[f"text_encoder{name}"](ids[name]).text_embeds for name in ("", "_2")]
    return [*pooled, models["text_encoder_3"](ids["_3"]).last_hidden_state.mean(1)]


@torch.no_grad()
def embed(models: dict[str, Any], texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return tokens [P, 32, joint] and pooled [P, 2 width], as
    StableDiffusion3Pipeline.encode_prompt does."""
    return encoded(models, {name: tokens(models, name, texts) for name in ("", "_2", "_3")})


def encoded(models: dict[str, Any], ids: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Encode the ids of the three tokenizers; see ``embed``."""
    hidden = []
    pooled = []
    for name in ("", "_2"):
        outputs = models[f"text_encoder{name}"](ids[name], output_hidden_states=True)
        hidden.append(outputs.hidden_states[-2])
        pooled.append(outputs.text_embeds)
    long = models["text_encoder_3"](ids["_3"])[0]
    states = torch.cat(hidden, -1)
    states = F.pad(states, (0, long.shape[-1] - states.shape[-1]))
    return torch.cat([states, long], 1), torch.cat(pooled, -1)
