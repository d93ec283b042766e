"""Mazes and their reward: drawn mazes have one way, the reward is AlphaMaze's formula by a loop."""

import random
from itertools import product

import pytest

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.worlds.mazes import Mazes, picture
from rewards import MazeWalk
from rewards.answers.maze import MOVES, moves_of, read_maze, written

# a ring of four cells: two ways of two steps lead from corner to corner
RING = (
    "<|0-0|><|up_left_wall|><|origin|><|0-1|><|up_right_wall|><|blank|>"
    "<|1-0|><|down_left_wall|><|blank|><|1-1|><|down_right_wall|><|target|>"
)


def published(maze, text, credit, each=False):
    """Walk by hand: the paper's three sums over the answer's tokens."""
    body = text.split("</think>")[-1].strip()
    row, column = next(cell for cell in maze.walls if cell == maze.origin)
    stopped = False
    tokens = [token for token in body.replace(">", "> ").split() if token]
    for token in tokens:
        move = token.strip("<|>")
        if stopped or move not in MOVES or move in maze.walls[(row, column)]:
            stopped = True
            continue
        row += {"up": -1, "down": 1}.get(move, 0)
        column += {"left": -1, "right": 1}.get(move, 0)
    length = len(maze.solution())
    arrived = not stopped and (row, column) == maze.target
    steps = length if arrived and (credit != "shortest" or len(tokens) == length) else 0
    if credit == "progress" and not arrived:
        steps = min(max(0, length - maze.distances(maze.target)[(row, column)]), length - 1)
    clean = bool(tokens) and all(token.strip("<|>") in MOVES for token in tokens)
    tags = 0.125 * (text.count("<think>") == 1) + 0.125 * (text.count("</think>") == 1)
    return 0.2 * steps + 0.5 * clean * (len(tokens) if each else 1) + tags


def test_the_reward_is_the_papers_sum(subtests):
    for each in [False, True]:
        for credit in ["shortest", "arrival", "progress"]:
            with subtests.test(each=each, credit=credit):
                reward = MazeWalk(credit=credit, each=each)
                draw = random.Random(0)
                prompts = Mazes(size=4, mazes=12, held_out=4).train
                for prompt in prompts:
                    maze = read_maze(prompt["maze"])
                    right = maze.solution()
                    walks = [right, right[:-1], [*right, draw.choice(sorted(MOVES))]]
                    walks += [draw.choices(sorted(MOVES), k=draw.randint(1, 9)) for _ in range(20)]
                    for moves, thought in product(
                        walks, ["<think>a</think>", "", "<think><think></think>"]
                    ):
                        text = thought + written(moves)
                        assert reward.judge(text, prompt).score == pytest.approx(
                            published(maze, text, credit, each), abs=1e-9
                        )


def test_every_shortest_way_is_right_and_detours_only_arrive():
    prompt = {"maze": RING}
    ways = ["<|right|><|down|>", "<|down|><|right|>", "<|right|><|left|><|right|><|down|>"]
    for credit, expected in {"shortest": [0.9, 0.9, 0.5], "arrival": [0.9] * 3}.items():
        scores = MazeWalk(credit=credit)(ways, [prompt] * 3).tolist()
        assert scores == pytest.approx(expected)
    assert MazeWalk(share=True)(["<think></think>down, right"], [prompt]).item() == 1
    assert moves_of("I go <|up|>") == (["up"], False) and moves_of("Up, left.")[1]
    for empty in ("", "<think>", "<|blank|>"):
        assert moves_of(empty) == ([], False)


def test_a_broken_maze_is_the_prompts_fault(subtests):
    for maze, cause in [
        ("", "one <|origin|>"),
        (RING.replace("target", "blank"), "one <|origin|>"),
        (RING.replace("down_left", "west"), "walls 'west'"),
        (RING.replace("1-1", "0-0"), "twice"),
        (RING.replace("down_right", "up_down_left_right"), "no way"),
    ]:
        with subtests.test(maze=maze, cause=cause):
            (verdict,) = MazeWalk().verdicts(["<|up|>"], [{"maze": maze}])
            assert verdict.score != verdict.score and cause in verdict.note


def test_drawn_mazes_have_one_way_and_are_the_same_for_a_seed():
    mazes = Mazes(size=4, mazes=40, held_out=10, least=2, most=6)
    texts = [prompt["maze"] for prompt in [*mazes.held_out, *mazes.train]]
    assert len(set(texts)) == 50 and len(mazes.train) == 40
    for prompt in mazes.train:
        maze = read_maze(prompt["maze"])
        doors = sum(4 - len(sides) for sides in maze.walls.values())
        assert doors == 2 * (16 - 1) and len(maze.distances(maze.origin)) == 16  # a tree
        assert 2 <= prompt["steps"] == len(maze.solution()) <= 6
        assert maze.walk(moves_of(prompt["answer"])[0])[-1] == maze.target
        assert maze.text() == prompt["maze"] and prompt["maze"] in prompt["text"]
    again = Mazes(size=4, mazes=20, held_out=10, least=2, most=6)
    assert again.held_out == mazes.held_out and again.train == mazes.train[:20]
    assert Mazes(size=4, mazes=40, held_out=10, least=2, most=6, seed=1).train != mazes.train


def test_pictures_show_the_maze_and_its_text_does_not():
    mazes = DATA.build("mazes", size=3, mazes=2, held_out=1, form="picture")
    prompt = mazes.train[0]
    maze = read_maze(prompt["maze"])
    (image,) = prompt["images"]
    assert image.size == (49, 49) and "<|0-0|>" not in prompt["text"]
    assert image.tobytes() == picture(maze).tobytes()
    row, column = maze.origin
    assert image.getpixel((16 * column + 8, 16 * row + 8)) == (0, 128, 0)
    for (row, column), sides in maze.walls.items():
        middle = image.getpixel((16 * column + 8, 16 * row))
        assert (middle == (0, 0, 0)) == ("up" in sides)


def test_mazes_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match="does not fit into 2 x 2"):
        Mazes(size=2, least=4)
    with pytest.raises(UserError, match="leave out share or each"):
        MazeWalk(each=True, share=True)
    with pytest.raises(UserError, match="different mazes .* ask for fewer"):
        Mazes(size=2, mazes=500)
