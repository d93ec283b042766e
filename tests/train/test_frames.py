"""How deep the network lies below the loop: a stack trace of an iteration can be read."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mmrl import advantages
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / room) for room in ("mmrl", "samplers", "rewards"))
MOST = 12


class Depth(nn.Module):
    """Passes its input on, and notes mmrl's frames between it and ``Trainer.iterate``."""

    def __init__(self):
        super().__init__()
        self.stacks = {}  # with gradients or without -> the longest stack

    def forward(self, x):
        stack = []
        frame = sys._getframe(1)
        while frame.f_code.co_name != "iterate":
            if frame.f_code.co_filename.startswith(OURS):
                stack.append(frame.f_code.co_name)
            frame = frame.f_back
        grad = torch.is_grad_enabled()
        self.stacks[grad] = max(self.stacks.get(grad, []), stack, key=len)
        return x


@pytest.mark.parametrize("options", [{}, {"guidance_scale": 2.0}])
def test_few_frames_lie_between_an_iteration_and_the_network(options):
    policy = toys.make("flow", **options)
    depth = Depth()
    policy.net.insert(0, depth)
    make_trainer(policy=policy, advantage=advantages.dance_grpo).iterate()
    rollout = depth.stacks[False]
    update = depth.stacks[True]
    assert rollout[0] == update[0] == "at_width" and "loss" in update and "draw" in rollout
    assert len(rollout) <= MOST and len(update) <= MOST, (rollout, update)
