"""Registers the data source ``paired``: a prompt to understand and one to generate, drawn together
(PairUni)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Epochs, place
from mmrl.data.prompts import SPLIT, split
from mmrl.data.sources.reader import rows_of
from mmrl.data.vision.formats import check, plain

SIDES = ("understand", "generate")


class Pairs(Epochs):
    """Holds prompts of both tasks; an iteration draws whole pairs."""

    def __init__(self, prompts: Sequence[Prompt]):
        super().__init__(prompts)
        self.pairs: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            self.pairs.setdefault(prompt["pair"], []).append(i)

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Return ``count`` prompts, two consecutive ones being a pair."""
        if count % 2:
            raise UserError(
                f"train.prompts_per_iteration {count}: pairs have two prompts each, so it "
                f"must be even"
            )
        names = list(self.pairs)
        half = count // 2
        turns = range(iteration * half, (iteration + 1) * half)
        return [self[i] for turn in turns for i in self.pairs[names[place(turn, len(names), seed)]]]

    def restricted(self, prompts: Sequence[Prompt]) -> Pairs:
        whole = Pairs(prompts).pairs
        return Pairs([prompt for prompt in prompts if len(whole[prompt["pair"]]) == 2])


def families(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Map each pair's name to one name for all pairs that share a prompt, directly or through
    others: none of them may be trained on while another is held out."""
    name = {prompt["pair"]: prompt["pair"] for prompt in prompts}

    def first(pair: str) -> str:
        while name[pair] != pair:
            pair = name[pair]
        return pair

    pair_of: dict[str, str] = {}
    for prompt in prompts:
        known = pair_of.setdefault(repr((prompt["text"], prompt.get("images"))), prompt["pair"])
        name[first(prompt["pair"])] = first(known)
    return {pair: first(pair) for pair in name}


@DATA.register("paired")
class Paired:
    """Read pairs of a prompt to understand and one to generate; a batch holds both sides (PairUni).

    path: any usual file (.jsonl, .json, .parquet ...) of rows with ``understand`` (text, images,
    answer ...), ``generate`` (text) and perhaps ``similarity``, how alike the two are, 0 to 1;
    without one they are aligned, 1. images: the folder that image paths start in; by default the
    file's own.
    held_out: the share of the pairs to hold out; pairs that share a prompt stay on one side.
    """

    train: Pairs
    held_out: list[Prompt]

    def __init__(
        self,
        path: Path,
        images: Path | None = None,
        held_out: Annotated[float, Ge(0), Lt(1)] = SPLIT,
    ):
        self.images = Path(images) if images is not None else Path(path).parent
        prompts = [prompt for at, row in rows_of(Path(path)) for prompt in self._pair(at, row)]
        if not prompts:
            raise UserError(f"{path}: no pair there")
        related = families(prompts)
        train, self.held_out = split(prompts, held_out, key=lambda prompt: related[prompt["pair"]])
        self.train = Pairs(train)

    def _pair(self, at: str, row: Any) -> list[Prompt]:
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, Mapping) or not all(
                isinstance(row.get(side), Mapping) for side in SIDES
            ):
                raise ValueError(f"a pair has the objects {' and '.join(SIDES)}")
            alike = 1.0 if row.get("similarity") is None else float(row["similarity"])
            if not 0 <= alike <= 1:
                raise ValueError(f"similarity {alike:g} does not lie in 0..1")
            return [self._side(at, side, row[side], alike) for side in SIDES]
        except (ValueError, TypeError) as error:
            raise UserError(f"{at}: {error}") from error

    def _side(self, at: str, side: str, entry: Mapping[str, Any], alike: float) -> Prompt:
        prompt = plain({key: value for key, value in entry.items() if value is not None}, {})
        if not isinstance(prompt.get("text"), str) or not prompt["text"].strip():
            raise ValueError(f"{side} has no text")
        if prompt.get("images"):
            several = prompt["images"] if isinstance(prompt["images"], list) else [prompt["images"]]
            prompt["images"] = [self._file(file) for file in several]
        check(prompt, ordered=True)
        return {**prompt, "task": side, "similarity": alike, "pair": at, "origin": f"{at}: {side}"}

    def _file(self, name: Any) -> Any:
        if isinstance(name, str) and not (self.images / name).is_file():
            raise ValueError(
                f"no file {self.images / name}; the option images names the folder "
                f"that paths start in"
            )
        return str((self.images / name).resolve()) if isinstance(name, str) else name
