"""A small policy of move tokens learns to solve mazes it never saw, by AlphaMaze's reward."""

from functools import partial

import torch

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.policies.tokens import CausalPolicy
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.worlds.mazes import Mazes
from rewards import MazeWalk
from rewards.answers.maze import MOVES, moves_of, read_maze, written
from samplers.noise import Rng
from tests.fixtures.toys import mlp

LENGTH = 4  # moves, and then the end


class Walker(CausalPolicy):
    """Writes at most three moves for a maze of 2 x 2 cells, of which it sees every wall."""

    moves = (*MOVES, "")

    def __init__(self):
        super().__init__(mlp(24 + 5 * LENGTH + LENGTH, 5), length=LENGTH, mask_id=5)

    def encode(self, prompts):
        return {"maze": torch.tensor([self.features(prompt) for prompt in prompts])}

    def features(self, prompt):
        maze = read_maze(prompt["maze"])
        return [
            float(flag)
            for cell in sorted(maze.walls)
            for flag in [cell == maze.origin, cell == maze.target]
            + [move in maze.walls[cell] for move in MOVES]
        ]

    def logits(self, ids, cond):
        tokens = torch.nn.functional.one_hot(ids, 6)[..., :5].to(cond["maze"])  # [B, L, 5]
        before = torch.tril(torch.ones(LENGTH, LENGTH), -1)[None, :, :, None] * tokens[:, None]
        maze = cond["maze"][:, None].expand(-1, LENGTH, -1)
        place = torch.eye(LENGTH).expand(len(ids), -1, -1)
        return self.active()(torch.cat([maze, before.flatten(2), place], -1))

    def decode(self, rollout):
        texts = []
        for row in rollout.sample.tolist():
            moves = [self.moves[token] for token in row]
            texts.append(written(moves[: [*moves, ""].index("")]))
        return texts


def tuned(policy, prompts, steps):
    """Tune on right answers, as the paper does first; too briefly to solve them."""
    optimizer = torch.optim.Adam(policy.net.parameters(), lr=1e-2)
    cond = policy.encode(prompts)
    moves = [moves_of(prompt["answer"])[0] for prompt in prompts]
    tokens = [[policy.moves.index(move) for move in row] for row in moves]
    ids = torch.tensor([row + [4] * (LENGTH - len(row)) for row in tokens])
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(
            policy.logits(ids, cond).flatten(0, 1), ids.ravel()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_mazes_that_were_never_seen_are_solved():
    source = Mazes(size=2, mazes=34, held_out=8, most=3)
    policy = Walker()
    tuned(policy, source.train, steps=30)
    trainer = Trainer(
        policy,
        source.train,
        Scorer({"maze": MazeWalk()}),
        advantages.grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(prompts_per_iteration=34, group_size=8, train_batch_size=272, iterations=40),
    )
    accuracy = MazeWalk(step=1, integrity=0, thinking=0, share=True)

    def solved(mazes):
        texts = policy.decode(policy.rollout(mazes, 8, Rng.of(1)))
        return accuracy(texts, [prompt for prompt in mazes for _ in range(8)]).mean().item()

    before = [solved(source.train), solved(source.held_out)]
    for _ in range(40):
        trainer.iterate()
    after = [solved(source.train), solved(source.held_out)]
    assert after[0] > before[0] + 0.3 and after[1] > before[1] + 0.1, (before, after)
