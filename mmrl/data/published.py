"""Reads rows of published image preference data as they are: Pick-a-Pic, HPD v2 and v3,
ImageReward's rankings, Rapidata's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

TEXTS = ("text", "prompt", "caption")
LISTS = ("image_path", "file_path", "generations", "images")  # of the pictures of a row
# Rapidata's: the criterion, and the votes or the weight of each picture
WEIGHTS = ("weighted_results_{}_preference", "votes_{}")
Ranking = tuple[list[tuple[Any, float]], set[str]]
BETTER = {"img_better", "img_worse"}  # ImageReward's pairs
PICK_A_PIC = {"jpg_0", "jpg_1"}
HPD = {"path1", "path2"}  # version 3
RAPIDATA = {"image1", "image2"}
TIE = "equally good, no pair"
UNLABELLED = "without a label, no pair"


def pairs_in(row: Mapping[str, Any], left_out: Counter[str]) -> list[dict[str, Any]] | None:
    """Return the rows {text, chosen, rejected} that a row of a published data set stands for; None
    for other rows. ``left_out`` counts what is no pair, by reason. Raises ValueError."""
    ranking = None if {"chosen", "rejected"} & set(row) else _ranking(row, left_out)
    if ranking is None:
        return None
    ranked, used = ranking
    text = next((name for name in TEXTS if row.get(name)), None)
    if text is None:
        raise ValueError(f"no prompt or caption; this row has {', '.join(map(str, row))}")
    rest = {key: value for key, value in row.items() if key not in used}
    pairs = []
    for (first, rank), (second, below) in combinations(ranked, 2):
        if rank == below:
            left_out[TIE] += 1
            continue
        sides = (first, second) if rank < below else (second, first)
        pairs.append(rest | {"text": row[text]} | dict(zip(("chosen", "rejected"), sides)))
    return pairs


def _ranking(row: Mapping[str, Any], left_out: Counter[str]) -> Ranking | None:
    """Return the pictures of a row, each with a rank, the lowest best, and their columns."""
    columns = set(row)
    if columns >= BETTER:
        return [(row["img_better"], 0.0), (row["img_worse"], 1.0)], BETTER
    if {*PICK_A_PIC, "label_0"} <= columns:
        return _pick_a_pic(row, left_out), PICK_A_PIC
    if columns >= HPD:
        return _first_is_better(row), HPD
    if columns >= RAPIDATA:
        return _by_votes(row), RAPIDATA
    listed = next((name for name in LISTS if isinstance(row.get(name), (list, tuple))), None)
    ranks = None if listed is None else _ranks(row)
    if listed is None or ranks is None:
        return None
    if len(ranks) != len(row[listed]):
        raise ValueError(
            f"{listed} names {len(row[listed])} pictures, and there are {len(ranks)} ranks"
        )
    return list(zip(row[listed], ranks)), {listed}


def _pick_a_pic(row: Mapping[str, Any], left_out: Counter[str]) -> list[tuple[Any, float]]:
    """Rank by label_0: 1 the first is better, 0 the second, 0.5 neither."""
    label = row["label_0"]
    if row.get("has_label") is False or label is None:
        left_out[UNLABELLED] += 1
        return []
    return [(row["jpg_0"], -float(label)), (row["jpg_1"], float(label) - 1)]


def _first_is_better(row: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """Rank as HPD v3 has it: path1 is the better one, which choice_dist must not deny."""
    votes = row.get("choice_dist")
    if votes is not None and len(votes) == 2 and votes[0] < votes[1]:
        raise ValueError(f"path1 is the better picture in HPD v3, but choice_dist is {list(votes)}")
    return [(row["path1"], 0.0), (row["path2"], 1.0)]


def _by_votes(row: Mapping[str, Any]) -> list[tuple[Any, float]]:
    for names in WEIGHTS:
        votes = [row.get(names.format(side)) for side in ("image1", "image2")]
        if all(isinstance(vote, (int, float)) for vote in votes):
            return [(row[f"image{i + 1}"], -float(vote or 0)) for i, vote in enumerate(votes)]
    expected = " or ".join(names.format("image1") for names in WEIGHTS)
    raise ValueError(
        f"no {expected}, which says whether image1 or image2 is better; this row has "
        f"{', '.join(map(str, row))}; name the better one by columns: {{chosen: ...}}"
    )


def _ranks(row: Mapping[str, Any]) -> list[float] | None:
    """Return the rank of each picture of a row, the lowest best; None: it has none."""
    if isinstance(row.get("human_preference"), Sequence):  # 1 for the better one
        return [-float(value) for value in row["human_preference"]]
    for name in ("ranking", "rank"):
        if isinstance(row.get(name), Sequence) and not isinstance(row[name], str):
            return [float(value) for value in row[name]]
    return None
