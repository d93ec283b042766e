"""Defines ``transcription``, ``table`` and ``text_similarity``: texts, tables and free answers
against a reference."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt

from mmrl.core.hub import check_model
from mmrl.core.pretrained import load_model, load_processor
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards._hf import POOLER
from rewards._sandbox import Broken, Sandbox
from rewards.card import card
from rewards.reading import fenced, final, worst
from rewards.vision.base import Verdict, Verifiable, need, tagged
from rewards.vision.coords import Unscorable

WORKER = Sandbox("tree_distance", seconds=10.0, memory=2 * 2**30)  # one for this process
MANY = 400  # cells of a table that are compared; the tree distance takes time with their square


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
        least: similarities below are 0; 0.5 makes it the ANLS of DocVQA.
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


# ---------------------------------------------------------------- tables


@dataclass
class Node:
    """Holds a node of a table's tree: the tag, and of a cell its spans and text."""

    tag: str
    spans: tuple[int, int] = (1, 1)
    text: str = ""
    children: list[Node] = field(default_factory=list)

    def size(self) -> int:
        return 1 + sum(child.size() for child in self.children)

    def plain(self) -> list[Any]:
        """Return it as ``rewards._foreign`` reads it."""
        return [self.tag, self.spans, self.text, [child.plain() for child in self.children]]


class _TableReader(HTMLParser):
    """Reads the first table of an HTML text; what is not closed is closed where something else
    opens.

    ``thead``, ``tbody`` and ``tfoot`` are read through, ``th`` is ``td``: TEDS compares rows and
    cells.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.table: Node | None = None
        self.row: Node | None = None
        self.cell: Node | None = None
        self.pieces: dict[int, tuple[Node, list[str]]] = {}  # of the texts of cells
        self.done = False
        self.closed = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.done:
            return
        if tag == "table" and self.table is None:
            self.table = Node("table")
        elif tag == "tr" and self.table is not None:
            self.row = Node("tr")
            self.cell = None
            self.table.children.append(self.row)
        elif tag in ("td", "th") and self.row is not None:
            attributes = dict(attrs)
            self.cell = Node(
                "td", (_span(attributes.get("rowspan")), _span(attributes.get("colspan")))
            )
            self.row.children.append(self.cell)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.cell = None
        elif tag == "tr":
            self.row = self.cell = None
        elif tag == "table" and self.table is not None:
            self.done = self.closed = True

    def handle_data(self, text: str) -> None:
        if self.cell is not None and not self.done:
            self.pieces.setdefault(id(self.cell), (self.cell, []))[1].append(text)

    def close(self) -> None:
        super().close()
        for cell, pieces in self.pieces.values():
            cell.text = " ".join(" ".join(pieces).split())


def _span(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"\d{1,3}", text.strip()) else 1


def read_table(text: str) -> tuple[Node | None, bool]:
    """Read the tree of an HTML or Markdown table and whether it was whole; None if there is
    none."""
    if "<table" in text.casefold():
        reader = _TableReader()
        reader.feed(text)
        reader.close()
        return (
            (reader.table, reader.closed)
            if reader.table and reader.table.children
            else (None, False)
        )
    lines = [line.strip() for line in text.strip().splitlines() if line.strip().startswith("|")]
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    rows = [row for row in rows if not all(re.fullmatch(r"\s*:?-+:?\s*", cell) for cell in row)]
    cells = [
        [Node("td", text=" ".join(cell.replace(r"\|", "|").split())) for cell in row]
        for row in rows
    ]
    return (
        (Node("table", children=[Node("tr", children=row) for row in cells]), True)
        if cells
        else (None, False)
    )


def teds(predicted: Node, right: Node, structure: bool = False) -> float:
    """Compute tree-edit-distance similarity (Zhong et al. 2020, arXiv:1911.10683): 1 - distance /
    nodes of the larger.

    Inserting and deleting cost 1; renaming costs 1 between different tags or spans, else for cells
    the normalised Levenshtein distance of their texts, and 0 with ``structure`` (TEDS-S). It is
    computed in a process beside this one.

    Raises:
        Broken: it took more time or memory than a table may.
    """
    if predicted.plain() == right.plain():
        return 1.0
    distance = WORKER.ask("tree_distance", predicted.plain(), right.plain(), structure)
    return max(0.0, 1.0 - float(distance) / max(predicted.size(), right.size()))


@REWARDS.register("table")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="TEDS (arXiv:1911.10683), Table-R1 (arXiv:2509.16889); apted",
)
class Table(Verifiable):
    """Compare the table of the answer with the right one (``answer``: HTML or Markdown) by TEDS.

    Args:
        structure: TEDS-S, which compares rows, cells and spans but not their texts.

    Tables are read through ``thead`` and ``tbody``, ``th`` counts as ``td``. A table with more than
    400 cells, or twice those of the right one, scores 0: nobody gets there by honest means, and the
    distance would take minutes. It is computed in a process beside this one, which is killed and
    replaced where a table takes more than 10 s of a processor or 2 GiB: that scores 0 too.
    """

    def __init__(self, structure: bool = False):
        self.structure = structure

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = self._right(prompt)
        answer = final(text)
        predicted, whole = read_table(fenced(answer.value))
        if predicted is None:
            return Verdict(0.0, "unparseable")
        if predicted.size() > 2 * right.size() + 20:
            return Verdict(0.0, worst(answer.status, "wrong_count"))
        status = worst(answer.status, "ok" if whole else "repaired")
        try:
            return Verdict(teds(predicted, right, self.structure), status)
        except Broken:
            return Verdict(0.0, "unparseable")

    def _right(self, prompt: Prompt) -> Node:
        table, _ = read_table(true_text(prompt))
        if table is None or table.size() > MANY:
            raise Unscorable(
                f'"answer" holds no table of HTML or Markdown, or one of more than {MANY} cells'
            )
        return table

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(true_text(prompt))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        rows = self._right(prompt).children
        empty = "<table><tr><td></td></tr></table>"
        body = "".join(
            "<tr>" + "".join(f"<td>{c.text}</td>" for c in row.children) + "</tr>" for row in rows
        )
        extra_rows = "<tr><td>x</td></tr>" * 3
        return {
            "one cell": tagged(empty),
            "three rows more": tagged(f"<table>{body}{extra_rows}</table>"),
        }


# ---------------------------------------------------------------- free answers


def bidirectional(a: np.ndarray, b: np.ndarray | None = None) -> float:
    """Compute the bidirectional max-average similarity of unit vectors [N, D], [M, D] (Mixed-R1's
    BMAS), or of a matrix [N, M] that is given as ``a`` without ``b``: mean over both directions
    of the mean best match."""
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
    averaged, so that neither leaving out nor adding pays.

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
    """Makes unit token embeddings by a transformers encoder, loaded from safetensors."""

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
        """Return unit vectors [N, D] of the tokens, without special ones."""
        import torch

        inputs = self.tokenizer(
            text, return_tensors="pt", truncation=True, return_special_tokens_mask=True
        )
        keep = ~inputs.pop("special_tokens_mask")[0].bool()
        with torch.no_grad():
            hidden = self.model(**inputs.to(self.device)).last_hidden_state[0].float().cpu()
        return torch.nn.functional.normalize(hidden[keep] if keep.any() else hidden, dim=-1).numpy()
