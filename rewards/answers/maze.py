"""Defines ``maze``, which walks the moves of an answer through its prompt's maze."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

from annotated_types import Ge

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable
from rewards.answers.reading import final
from rewards.answers.verifiable import Verdict, Verifiable, need
from rewards.card import card, card_of

Cell = tuple[int, int]  # row and column, (0, 0) at the top on the left
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
CELL = re.compile(r"<\|(\d{1,3})-(\d{1,3})\|>\s*<\|([a-z_]{1,40})_wall\|>\s*<\|(\w{1,10})\|>")
MOVE = re.compile(r"<\|(up|down|left|right)\|>|\b(up|down|left|right)\b", re.IGNORECASE)
Amount = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class Maze:
    """Holds a maze: the walls of every cell, where to start, where to go."""

    walls: dict[Cell, frozenset[str]]
    origin: Cell
    target: Cell

    def step(self, cell: Cell, move: str) -> Cell | None:
        """Return the cell that a move leads to; None if a wall or the edge blocks it."""
        down, right = MOVES[move]
        neighbour = (cell[0] + down, cell[1] + right)
        if neighbour not in self.walls or move in self.walls[cell]:
            return None
        return None if BACK[move] in self.walls[neighbour] else neighbour

    def distances(self, start: Cell) -> dict[Cell, int]:
        """Return the steps from ``start`` to every cell that can be reached, breadth first."""
        steps = {start: 0}
        queue = deque([start])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                neighbour = self.step(cell, move)
                if neighbour is not None and neighbour not in steps:
                    steps[neighbour] = steps[cell] + 1
                    queue.append(neighbour)
        return steps

    def solution(self) -> list[str]:
        """Return the moves of a shortest path; empty if there is none to the target."""
        steps = self.distances(self.target)
        cell = self.origin
        moves = []
        while steps.get(cell, 0):
            nearer = {move: self.step(cell, move) for move in MOVES}
            move, cell = next(
                (move, neighbour)
                for move, neighbour in nearer.items()
                if neighbour is not None and steps[neighbour] < steps[cell]
            )
            moves.append(move)
        return moves

    def walk(self, moves: list[str]) -> list[Cell]:
        """Return the cells of a walk, the origin first; it ends before the first wall."""
        cells = [self.origin]
        for move in moves:
            neighbour = self.step(cells[-1], move)
            if neighbour is None:
                break
            cells.append(neighbour)
        return cells

    def text(self) -> str:
        """Write the maze as AlphaMaze does: a line per row, for each cell its place, walls and
        mark."""
        rows: dict[int, str] = {}
        for row, column in sorted(self.walls):
            cell = (row, column)
            walls = "_".join(move for move in MOVES if move in self.walls[cell]) or "no"
            mark = {self.origin: "origin", self.target: "target"}.get(cell, "blank")
            rows[row] = rows.get(row, "") + f"<|{row}-{column}|><|{walls}_wall|><|{mark}|>"
        return "\n".join(rows.values())


@lru_cache(maxsize=4096)
def read_maze(text: str) -> Maze:
    """Read a maze in tokens. Raises Unscorable if it is malformed, or has no path to the target."""
    walls: dict[Cell, frozenset[str]] = {}
    marks: dict[str, list[Cell]] = {"origin": [], "target": []}
    for row, column, names, mark in CELL.findall(text):
        cell = (int(row), int(column))
        sides = frozenset(names.split("_")) - {"no"}
        if not sides <= set(MOVES) or cell in walls:
            raise Unscorable(f'"maze" holds <|{row}-{column}|> twice or with walls {names!r}')
        walls[cell] = sides
        if mark in marks:
            marks[mark].append(cell)
    if [len(cells) for cells in marks.values()] != [1, 1]:
        raise Unscorable(
            '"maze" must have one <|origin|> and one <|target|> among its cells '
            "<|row-column|><|..._wall|><|blank|>"
        )
    maze = Maze(walls, marks["origin"][0], marks["target"][0])
    if not maze.solution():
        raise Unscorable('"maze" has no way from its origin to its target')
    return maze


def moves_of(text: str) -> tuple[list[str], bool]:
    """Return the moves of an answer, and whether it holds nothing else."""
    body = final(text).value
    moves = [(token or word).lower() for token, word in MOVE.findall(body)]
    return moves, bool(moves) and not MOVE.sub("", body).strip(" \t\r\n,.;")


def written(moves: list[str]) -> str:
    """Write moves as AlphaMaze's tokens."""
    return "".join(f"<|{move}|>" for move in moves)


@REWARDS.register("maze")
@card(media="text", needs="maze", low=0, source="AlphaMaze (arXiv:2502.14669), section 3.4")
class MazeWalk(Verifiable):
    """Reward moves that lead through the prompt's maze, with AlphaMaze's three parts and weights.

    reward = ``step`` * steps + ``integrity`` [nothing but moves is answered] + ``thinking``
    [<think> and </think>, half for each that occurs exactly once]. The field ``maze`` holds the
    maze in AlphaMaze's tokens, <|row-column|><|up_left_wall|><|blank|>; moves are <|up|>, <|down|>,
    <|left|>, <|right|> or these words, read after the thought. steps = n, the length of the
    shortest path, if the answer is right (the published code, which knows one solution per maze),
    or by ``credit``. The paper's text gives ``integrity`` for every valid token, which is ``each:
    true``; that rewards wandering, so the default gives it once, as in the published code.

    Args:
        step: for every step of the solution.
        integrity: for an answer that holds only moves (the published code has 1).
        thinking: for both tags of the thought.
        credit: "shortest": a shortest path is right; "arrival": any walk that ends at the target
            (MazeBench's success); "progress": a wrong answer also earns the steps by which its
            walk, up to the first wall, gets nearer to the target, at most n - 1 (our reading of
            "each valid movement step").
        each: ``integrity`` for every move of an answer that holds only moves.
        share: divide by the reward of the maze's best answer, so that every maze pays from 0 to 1.
    """

    def __init__(
        self,
        step: Amount = 0.2,
        integrity: Amount = 0.5,
        thinking: Amount = 0.25,
        credit: Literal["shortest", "arrival", "progress"] = "shortest",
        each: bool = False,
        share: bool = False,
    ):
        if each and share:
            raise UserError(
                "maze: with each: true longer answers earn ever more, so that there is no best one "
                "to divide by; leave out share or each"
            )
        self.step = step
        self.integrity = integrity
        self.thinking = thinking
        self.credit = credit
        self.each = each
        self.share = share
        if share:
            self.card = replace(card_of(type(self)), high=1)

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        maze = read_maze(str(need(prompt, "maze")))
        moves, clean = moves_of(text)
        length = len(maze.solution())
        tags = sum(str(text).count(tag) == 1 for tag in ("<think>", "</think>")) / 2
        score = self.integrity * clean * (len(moves) if self.each else 1) + self.thinking * tags
        score += self.step * self._steps(maze, moves, length)
        if self.share:
            best = self.step * length + self.integrity + self.thinking
            score = score / best if best else 0.0
        return Verdict(score, "ok" if clean else "repaired" if moves else "unparseable")

    def _steps(self, maze: Maze, moves: list[str], length: int) -> int:
        cells = maze.walk(moves)
        whole = len(cells) > len(moves) and cells[-1] == maze.target
        if self.credit == "progress" and not whole:
            return min(max(0, length - maze.distances(maze.target)[cells[-1]]), length - 1)
        return length if whole and (self.credit != "shortest" or len(moves) == length) else 0

    def ground_truth(self, prompt: Prompt) -> str:
        moves = read_maze(str(need(prompt, "maze"))).solution()
        return f"<think>\nstep by step\n</think>\n{written(moves)}"

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = read_maze(str(need(prompt, "maze"))).solution()
        ways = {
            "into the wall": right[:-1] + [BACK[right[-1]]],
            "one move short": right[:-1],
            "every way": list(MOVES) * 50,
        }
        return {name: f"<think>\n</think>\n{written(moves)}" for name, moves in ways.items()} | {
            "without a thought": written(right),
            "moves in words around": f"<think>\n</think>\nI go {written(right)}",
        }
