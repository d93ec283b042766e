"""Defines ``transcription`` and ``text_similarity``: texts and free answers against a reference."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Lt

from mmrl.core.hub import check_model
from mmrl.core.pretrained import load_model, load_processor
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import fenced, final
from rewards.answers.verifiable import Verdict, Verifiable, need, tagged
from rewards.base.hf import POOLER
from rewards.card import card


def true_text(prompt: Prompt, name: str = "answer") -> str:
    value = need(prompt, name)
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        raise Unscorable(f'"{name}" is {value!r}; expected a text')
    return str(value)


@REWARDS.register("transcription")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="Levenshtein distance (rapidfuzz); ANLS (arXiv:1905.13648)",
)
class Transcription(Verifiable):
    """Compare the text read with the right one: 1 - edit distance / length of the longer.

    Args:
        unit: "character" or "word" (1 minus a word error rate that cannot be more than 1).
        case: whether capitals matter. Runs of blanks count as one, Unicode is compared in NFKC.
        least: similarities below count as 0; 0.5 gives DocVQA's ANLS.
    """

    def __init__(
        self,
        unit: Literal["character", "word"] = "character",
        case: bool = True,
        least: Annotated[float, Ge(0), Lt(1)] = 0.0,
    ):
        self.words = unit == "word"
        self.case = case
        self.least = least

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        from rapidfuzz.distance import Levenshtein

        right = self._even(true_text(prompt))
        answer = final(text)
        written = self._even(fenced(answer.value))
        if not written:
            return Verdict(0.0, "unparseable")
        near = Levenshtein.normalized_similarity(written, right)
        return Verdict(float(near) if near >= self.least else 0.0, answer.status)

    def _even(self, text: str) -> str | list[str]:
        words = unicodedata.normalize("NFKC", text if self.case else text.casefold()).split()
        return words if self.words else " ".join(words)

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(true_text(prompt))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_text(prompt)
        return {
            "twice": tagged(f"{right} {right}"),
            "empty answer": tagged(""),
            "noise around it": tagged(f"xx {right} xx"),
        }


# ---------------------------------------------------------------- free answers


def bidirectional(a: np.ndarray, b: np.ndarray | None = None) -> float:
    """Compute the bidirectional max-average similarity of unit vectors [N, D], [M, D] (Mixed-R1's
    BMAS), or of a matrix [N, M] given as ``a`` without ``b``: the mean best match, averaged over
    both directions."""
    scores = a if b is None else a @ b.T
    return float((scores.max(1).mean() + scores.max(0).mean()) / 2)


@REWARDS.register("text_similarity")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="Mixed-R1 (arXiv:2505.24164), BMAS",
    licence="of the model",
)
class TextSimilarity(Verifiable):
    """Compare an open answer with a reference: bidirectional max-average of token similarities,
    0..1.

    Every token of one text is matched with the most similar one of the other; the two means are
    averaged, so that neither omissions nor additions pay.

    Args:
        model: a transformers text encoder (folder or hub id), whose last hidden states are compared
            by cosine; None: words are compared by edit similarity, which needs no weights.
        device: of the model.
    """

    def __init__(self, model: str | None = None, device: str = "cpu"):
        self.encoder = _Encoder(model, device) if model else None

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = true_text(prompt)
        answer = final(text)
        if not answer.value.split():
            return Verdict(0.0, "unparseable")
        score = (
            self._words(answer.value, right)
            if self.encoder is None
            else self.encoder.compare(answer.value, right)
        )
        return Verdict(min(max(score, 0.0), 1.0), answer.status)

    def _words(self, predicted: str, right: str) -> float:
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist

        words = [re.findall(r"\w+|[^\w\s]", text.casefold())[:2000] for text in (predicted, right)]
        return bidirectional(cdist(*words, scorer=Levenshtein.normalized_similarity))

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(true_text(prompt))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_text(prompt)
        spam = " ".join(f"{chr(97 + i % 26)}{i}z" for i in range(30))
        return {"empty answer": tagged(""), "with much besides": tagged(f"{right} {spam}")}


class _Encoder:
    """Computes unit token embeddings by a transformers encoder, loaded from safetensors."""

    def __init__(self, path: str, device: str):
        from transformers import AutoModel, AutoTokenizer

        check_model(path)
        self.tokenizer = load_processor(AutoTokenizer, path)
        model = load_model(AutoModel, path, unread=POOLER, use_safetensors=True)
        self.model = model.to(device).eval()
        self.device = device

    def compare(self, predicted: str, right: str) -> float:
        return bidirectional(self.embed(predicted), self.embed(right))

    def embed(self, text: str) -> np.ndarray:
        """Return unit vectors [N, D] of the tokens, except special ones."""
        import torch

        inputs = self.tokenizer(
            text, return_tensors="pt", truncation=True, return_special_tokens_mask=True
        )
        keep = ~inputs.pop("special_tokens_mask")[0].bool()
        with torch.no_grad():
            hidden = self.model(**inputs.to(self.device)).last_hidden_state[0].float().cpu()
        return torch.nn.functional.normalize(hidden[keep] if keep.any() else hidden, dim=-1).numpy()
