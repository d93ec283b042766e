"""Draws mazes as a data source: tokens or pictures with their shortest path, as in AlphaMaze."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from rewards.answers.maze import BACK, MOVES, Cell, Maze, written
from samplers.noise import Rng

SQUARE = 16  # pixels along a cell's side
TRIES = 20  # mazes drawn for one that is wanted
ASK = (
    "A maze is shown. {form}Which moves lead from the origin to the target? Think step by step "
    "inside <think> and </think>, then answer with moves alone: <|up|>, <|down|>, <|left|>, "
    "<|right|>."
)
FORMS = {
    "tokens": (
        "Every cell is <|row-column|>, its walls such as <|up_left_wall|> or <|no_wall|>, and "
        "<|origin|>, <|target|> or <|blank|>. "
    ),
    "picture": "The origin is green, the target red, walls are black. ",
}


@DATA.register("mazes")
class Mazes:
    """Draw mazes to be solved by moves, as tokens or pictures (AlphaMaze).

    Every maze is a random spanning tree of its cells, found depth first, so that exactly one path
    leads from the origin to the target; that path is the answer. A prompt holds ``text``, ``maze``
    (in tokens, for the reward of that name), ``answer`` (its moves), ``steps`` and, of pictures,
    ``images``.

    size: cells along a side. mazes: for training. held_out: mazes that differ from these. form: how
    a maze is shown: tokens, in the text, or picture. least, most: steps of the path; MazeBench's
    easy mazes have 1 to 4, medium ones 5 to 8, hard ones 9 to 13.

    seed: of all choices.
    """

    fields = ("text", "maze", "answer", "steps")  # of every prompt
    train: list[Prompt]
    held_out: list[Prompt]

    def __init__(
        self,
        size: Annotated[int, Ge(2), Le(32)] = 5,
        mazes: Annotated[int, Ge(1)] = 2000,
        held_out: Annotated[int, Ge(1)] = 100,
        form: Literal["tokens", "picture"] = "tokens",
        least: Annotated[int, Ge(1)] = 1,
        most: Annotated[int, Ge(1)] = 13,
        seed: int = 0,
    ):
        if least > most or least >= size * size:
            raise UserError(
                f"data.mazes: a way of {least} to {most} steps does not fit into {size} x {size} "
                "cells; give least at most `most` and below the number of cells"
            )
        shown: dict[str, Prompt] = {}
        for maze in drawn(size, TRIES * (mazes + held_out), (least, most), Rng.of(seed, "mazes")):
            tokens = maze.text()
            if tokens not in shown:
                shown[tokens] = asked(maze, tokens, form)
            if len(shown) == mazes + held_out:
                break
        else:
            raise UserError(
                f"data.mazes: only {len(shown)} different mazes of {size} x {size} cells with "
                f"{least} to {most} steps were drawn, not {mazes + held_out}; ask for fewer"
            )
        prompts = list(shown.values())
        self.held_out = prompts[:held_out]
        self.train = prompts[held_out:]


def asked(maze: Maze, tokens: str, form: Literal["tokens", "picture"]) -> Prompt:
    """Return the prompt that shows a maze, given also as ``tokens``."""
    moves = maze.solution()
    text = ASK.format(form=FORMS[form])
    prompt: Prompt = {"text": text, "maze": tokens, "answer": written(moves), "steps": len(moves)}
    if form == "picture":
        return prompt | {"images": [picture(maze)]}
    return prompt | {"text": f"{text}\n{tokens}"}


def drawn(size: int, count: int, steps: tuple[int, int], rng: Rng) -> Iterator[Maze]:
    """Draw at most ``count`` mazes, each determined by its index; those without a path of a
    length in ``steps`` (least, most) are left out."""
    cells = size * size
    least, most = steps
    for start in range(0, count, 256):
        rows = rng.rows(count, 1)[start : start + 256]
        for numbers in rng.uniform(rows, (cells + 2,)).tolist():
            walls = carved(size, iter(numbers[:cells]))
            origin = list(walls)[int(numbers[cells] * cells)]
            reached = Maze(walls, origin, origin).distances(origin)
            ends = [cell for cell, away in reached.items() if least <= away <= most]
            if ends:
                yield Maze(walls, origin, ends[int(numbers[cells + 1] * len(ends))])


def carved(size: int, numbers: Iterator[float]) -> dict[Cell, frozenset[str]]:
    """Carve a maze in which one path leads from every cell to every other, depth first."""
    walls = {(row, column): set(MOVES) for row in range(size) for column in range(size)}
    cell = list(walls)[int(next(numbers) * len(walls))]
    known = {cell}
    way = [cell]
    while way:
        row, column = way[-1]
        near = {move: (row + down, column + right) for move, (down, right) in MOVES.items()}
        new = [move for move, cell in near.items() if cell in walls and cell not in known]
        if not new:
            way.pop()
            continue
        move = new[int(next(numbers) * len(new))]
        walls[way[-1]].remove(move)
        walls[near[move]].remove(BACK[move])
        known.add(near[move])
        way.append(near[move])
    return {cell: frozenset(sides) for cell, sides in walls.items()}


def picture(maze: Maze) -> Any:
    """Draw a PIL image: black walls on white, the origin green, the target red."""
    from PIL import Image, ImageDraw

    rows, columns = (max(place) + 1 for place in zip(*maze.walls))
    image = Image.new("RGB", (columns * SQUARE + 1, rows * SQUARE + 1), "white")
    pen = ImageDraw.Draw(image)
    for (row, column), sides in maze.walls.items():
        x0, y0 = column * SQUARE, row * SQUARE
        x1, y1 = x0 + SQUARE, y0 + SQUARE
        color = {maze.origin: "green", maze.target: "red"}.get((row, column))
        if color:
            pen.ellipse((x0 + 4, y0 + 4, x1 - 4, y1 - 4), fill=color)
        edges = {"up": (x0, y0, x1, y0), "down": (x0, y1, x1, y1)}
        edges |= {"left": (x0, y0, x0, y1), "right": (x1, y0, x1, y1)}
        for side in sorted(sides):
            pen.line(edges[side], fill="black")
    return image
