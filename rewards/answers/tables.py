"""Defines ``table``: a table against a reference by TEDS."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import numpy as np

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import fenced, final, worst
from rewards.answers.verifiable import Verdict, Verifiable, tagged
from rewards.answers.writing import true_text
from rewards.card import card

MANY = 400  # cells of a table that are compared; the distance takes time in their product
LARGEST = 2 * MANY + 20  # cells of a table that are read
BORDER = re.compile(r"\s*:?-+:?\s*")
PIPE = re.compile(r"(?<!\\)\|")
BORDERS = re.compile(r":?-+:?\s*(?:\|\s*:?-+:?\s*)+")
FAR = 1e4  # more than the distance of any two rows


@dataclass(slots=True)
class Node:
    """Holds a node of a table's tree: the tag and, for a cell, its spans and text."""

    tag: str
    spans: tuple[int, int] = (1, 1)
    text: str = ""
    children: list[Node] = field(default_factory=list)

    def size(self) -> int:
        return 1 + sum(child.size() for child in self.children)


class _TableReader(HTMLParser):
    """Reads the first table of an HTML text; unclosed elements end where another opens.

    ``thead``, ``tbody`` and ``tfoot`` are transparent, ``th`` is ``td``: TEDS compares rows and
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
    """Read the tree of an HTML or Markdown table and whether it was whole; None if there is none,
    or it has too many cells."""
    if "<table" in text.casefold():
        reader = _TableReader()
        reader.feed(text)
        reader.close()
        return (
            (reader.table, reader.closed)
            if reader.table and reader.table.children
            else (None, False)
        )
    lines = [line.strip() for line in text.strip().splitlines()]
    bare = any(BORDERS.fullmatch(line) for line in lines)  # rows without pipes at their ends
    lines = [line for line in lines if line.startswith("|") or bare and "|" in line]
    rows = [PIPE.split(line.strip("|")) for line in lines]
    rows = [row for row in rows if not all(BORDER.fullmatch(cell) for cell in row)]
    if sum(map(len, rows)) > LARGEST:
        return None, False
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
    the normalised Levenshtein distance of their texts, and 0 with ``structure`` (TEDS-S).
    """
    if predicted == right:
        return 1.0
    distance = _distance(predicted, right, structure)
    return max(0.0, 1.0 - distance / max(predicted.size(), right.size()))


def _distance(first: Node, second: Node, structure: bool) -> float:
    """Compute the edit distance of two tables by Zhang and Shasha's recursion, one row at a time: a
    table has three levels, so that the distances of its subtrees have a closed form, except for two
    rows, which are aligned cell by cell."""
    above, below = _Places(first), _Places(second)
    renames = _renames(above.cells, below.cells, structure)  # [cells, cells]
    subtrees = np.ones((len(above.nodes), len(below.nodes)))  # distance of every pair
    subtrees[np.ix_(above.of_cells, below.of_cells)] = renames
    subtrees[np.ix_(above.of_rows, below.of_rows)] = below.aligned(above.rows, renames)
    for i, row in enumerate(above.rows):
        subtrees[above.of_rows[i], below.of_cells] = _least(renames[row].T) + len(renames[row])
    for j, row in enumerate(below.rows):
        count = row.stop - row.start
        subtrees[above.of_cells, below.of_rows[j]] = _least(renames[:, row]) + count
    ramp = np.arange(len(below.nodes) + 1, dtype=np.float64)
    forests = [ramp]  # of prefixes of the nodes of both tables
    for i, start in enumerate(above.starts):
        taken = np.minimum(forests[i][1:] + 1, forests[start][below.starts] + subtrees[i])
        inserted = np.concatenate([[i + 1.0], taken]) - ramp
        forests.append(np.minimum.accumulate(inserted) + ramp)
    return float(forests[-1][-1])


class _Places:
    """Holds the rows and cells of a table in postorder.

    ``starts`` [nodes]: the number of nodes before the subtree of each; ``of_cells``, ``of_rows``:
    places of cells and rows among the nodes; ``rows``: the cells of each row.
    """

    def __init__(self, table: Node):
        self.cells: list[Node] = []
        self.nodes: list[Node] = []
        self.rows: list[slice] = []
        starts: list[int] = []
        for row in table.children:
            first = len(self.nodes)
            self.rows.append(slice(len(self.cells), len(self.cells) + len(row.children)))
            self.cells += row.children
            self.nodes += [*row.children, row]
            starts += [*range(first, first + len(row.children)), first]
        self.starts = np.array(starts, dtype=int)
        is_row = np.array([node.tag == "tr" for node in self.nodes], dtype=bool)
        self.of_rows, self.of_cells = np.flatnonzero(is_row), np.flatnonzero(~is_row)

    def aligned(self, others: list[slice], renames: np.ndarray) -> np.ndarray:
        """Return the edit distances between the rows of another table and of this one [others,
        rows], from ``renames`` [cells, cells]: one cell of all the other rows at a time, the rows
        of this table one after another."""
        gaps = np.arange(len(self.rows))
        firsts = np.array([row.start for row in self.rows], dtype=int) + gaps
        lasts = np.array([row.stop for row in self.rows], dtype=int) + gaps
        is_cell = np.ones(len(self.cells) + len(self.rows), dtype=bool)
        is_cell[firsts] = False
        cells, segment = np.flatnonzero(is_cell), np.cumsum(~is_cell)
        ramp = np.arange(len(is_cell)) - firsts[segment - 1] + 0.0
        apart = ramp + FAR * segment  # a later row takes nothing from one before it
        sizes = np.array([row.stop - row.start for row in others])
        order = np.argsort(-sizes, kind="stable")
        begins = np.array([row.start for row in others])[order]
        lines = np.tile(ramp, (len(others), 1))
        for number in range(1, sizes.max(initial=0) + 1):
            longer = int((sizes >= number).sum())
            line = lines[:longer]
            taken = line + 1.0
            costs = line[:, cells - 1] + renames[begins[:longer] + number - 1]
            taken[:, cells] = np.minimum(taken[:, cells], costs)
            lines[:longer] = np.minimum.accumulate(taken - apart, axis=1) + apart
        distances = np.empty((len(others), len(self.rows)))
        distances[order] = lines[:, lasts]
        return distances


def _least(costs: np.ndarray) -> np.ndarray:
    """Return the cost [N] of the cheapest source of each of N cells: a cell of a row, or the row
    itself, for 1. ``costs``: [N, cells of the row]."""
    least: np.ndarray = np.minimum(costs.min(1, initial=1.0), 1.0)
    return least


def _renames(first: list[Node], second: list[Node], structure: bool) -> np.ndarray:
    """Return the cost of renaming a cell of one table to a cell of the other [first, second]."""
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

    spans = [np.array([cell.spans for cell in cells]).reshape(-1, 2) for cells in (first, second)]
    apart = (spans[0][:, None] != spans[1][None]).any(-1)
    texts = [[cell.text for cell in cells] for cells in (first, second)]
    if structure or not apart.size:
        whole: np.ndarray = apart.astype(np.float64)
        return whole
    distances = cdist(*texts, scorer=Levenshtein.normalized_distance, dtype=np.float64)
    renamed: np.ndarray = np.where(apart, 1.0, distances)
    return renamed


@REWARDS.register("table")
@card(
    media="text",
    needs="answer",
    low=0,
    high=1,
    source="TEDS (arXiv:1911.10683), Table-R1 (arXiv:2509.16889)",
)
class Table(Verifiable):
    """Compare the table of the answer with the right one (``answer``: HTML or Markdown) by TEDS.

    Args:
        structure: TEDS-S, which compares rows, cells and spans but not their texts.

    ``thead`` and ``tbody`` are ignored, ``th`` counts as ``td``. A table with more than 400 cells,
    or twice those of the right one, scores 0: no honest answer is that large, and the distance
    takes time in their product.
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
        return Verdict(teds(predicted, right, self.structure), status)

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
