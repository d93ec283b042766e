"""What scoring guided samples without guidance costs, in tables of random logits where everything
is enumerated."""

import pytest
import torch

from samplers.noise import Rng
from tests.fixtures.image_tokens import cosine, every

VOCAB = 3
LENGTH = 3
TABLES = 60
IDS = every(VOCAB, LENGTH)


def normal(*names):
    return Rng.of(*names).normal(torch.arange(VOCAB**LENGTH), (VOCAB,), dtype=torch.float64)


def logp(tables):
    """[V^T] of all sequences, for one table [V^t, V] a position."""
    total = 0
    for t, z in enumerate(tables):
        row = (
            (IDS[:, :t] * VOCAB ** torch.arange(t - 1, -1, -1)).sum(1)
            if t
            else torch.zeros(len(IDS)).long()
        )
        total = total + z.log_softmax(-1)[row, IDS[:, t]]
    return total


def mismatch(seed, scale, centred):
    """Cosine of the conditional score's expected gradient to the true one, over z_c."""
    z = [normal("z", seed, t)[: VOCAB**t].requires_grad_() for t in range(LENGTH)]
    empty = [normal("empty", seed, t)[: VOCAB**t] for t in range(LENGTH)]
    r = normal("reward", seed)[:, 0]
    p = logp([u + scale * (c - u) for c, u in zip(z, empty, strict=True)]).exp()
    true = torch.autograd.grad((p * r).sum(), z, retain_graph=True)
    weight = (p * (r - (p * r).sum() if centred else r)).detach()
    gradient = torch.autograd.grad((weight * logp(z)).sum(), z)
    return cosine(*(torch.cat([part.flatten() for part in parts]) for parts in (gradient, true)))


@pytest.mark.parametrize(
    ("scale", "centred", "expected"),
    [
        (1.0, True, 1.0),
        (2.0, True, 0.963),
        (5.0, True, 0.899),
        (2.0, False, 0.869),
        (5.0, False, 0.581),
    ],
)
def test_the_bias_of_the_published_score_is_as_large_as_it_was_measured(scale, centred, expected):
    """Anchors measured on another set of random tables: the same up to sampling error."""
    biases = [mismatch(seed, scale, centred) for seed in range(TABLES)]
    assert sum(biases) / TABLES == pytest.approx(
        expected, abs=1e-9 if scale == 1 else 0.04 if centred else 0.12
    )
