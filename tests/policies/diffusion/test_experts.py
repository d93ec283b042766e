"""HiDream's experts: the library's outputs to the bit, and gradients that the library cuts off."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

from mmrl.policies.diffusion.experts import let_gradients_through


def layer(dtype=torch.float32, width=32):
    torch.manual_seed(0)
    made = MOEFeedForwardSwiGLU(width, 2 * width, 4, 2).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.to(dtype)


@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_are_the_library_s_to_the_bit(autocast):
    made, x = layer(), torch.randn(2, 50, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plain = made(x)
        let_gradients_through(made)
        ours = made(x)
    assert torch.equal(ours, plain) and ours.dtype == plain.dtype


def test_gradients_are_those_of_training_mode():
    """Which the library computes by masks, and in which nothing is trained here."""
    made, x = layer(torch.float64, 8), torch.randn(1, 9, 8, dtype=torch.float64)
    gradients = []
    for training in (True, False):
        if not training:
            let_gradients_through(made)
        made.train(training)
        leaf = x.clone().requires_grad_()
        taken = torch.autograd.grad(made(leaf).square().sum(), [leaf, *made.experts.parameters()])
        gradients.append(taken)
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
