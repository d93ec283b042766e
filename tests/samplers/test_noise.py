"""Keyed random numbers: known answers, independence of the batch, moments, no correlation where
there must be none."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from samplers.noise import Rng, philox

ONES = 0xFFFFFFFF


def words(value):
    return tuple(torch.tensor([value]) for _ in range(4))


@pytest.mark.parametrize(
    "counter, key, known",
    [
        (words(0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (words(ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_known_answers_of_philox(counter, key, known):
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == known


def test_the_numbers_of_a_seed_do_not_change():
    """Golden values: resuming an old run must find the same noise."""
    golden = [[4115585100, 3658801050], [579983387, 488625181]]
    assert Rng.of(0, "rollout", 1).bits(torch.tensor([0, 9]), 2, step=1).tolist() == golden
    assert Rng.of(0).permutation(8).tolist() == [2, 6, 0, 1, 4, 5, 3, 7]


def test_a_permutation_sorts_by_its_words():
    """The first word of 32 bits decides, the second among equal ones."""
    rng = Rng.of(7, "order")
    words = rng.bits(torch.arange(50), 2, step=3).tolist()
    expected = sorted(range(50), key=lambda i: (words[i][0] << 31) ^ words[i][1])
    assert rng.permutation(50, step=3).tolist() == expected
    assert [rng.permutation(n).tolist() for n in (0, 1)] == [[], [0]]


def test_a_row_is_the_same_alone_and_among_others():
    drawn = partial(Rng.of(7, "rollout", 3).normal, step=2)
    rows = torch.arange(11)
    for shape in [(), (5,), (3, 4, 4)]:
        whole = drawn(rows, shape)
        assert whole.shape == (11, *shape)
        for size in (1, 4):
            assert torch.equal(torch.cat([drawn(part, shape) for part in rows.split(size)]), whole)
        order = torch.tensor([3, 10, 0, 3])
        assert torch.equal(drawn(order, shape), whole[order])
    assert torch.equal(drawn(rows, (10,))[:, :4], drawn(rows, (4,)))
    beyond = torch.tensor([5, 5 + 2**32, 5 + 2**40])  # 32 bits
    assert len(drawn(beyond, (1,)).unique()) == 3
    exact = drawn(rows, (3,), dtype=torch.float64)
    assert torch.equal(drawn(rows, (3,), dtype=torch.bfloat16), exact.bfloat16())


def test_streams_have_names_and_processes_name_their_rows_as_one_would():
    names = [(0,), (1,), ("0",), (0, 0), (0, "a"), (0, "b")]
    draws = {tuple(Rng.of(*name).bits(torch.arange(4), 4).flatten().tolist()) for name in names}
    assert len(draws) == len(names)
    assert Rng.of(3).fold("x") == Rng.of(3).fold("x") and hash(Rng.of(3)) == hash(Rng.of(3))
    rng = Rng.of(0)
    places = ((0, 2), (2, 1), (3, 2))
    parts = [replace(rng, offset=offset).rows(prompts, 3) for offset, prompts in places]
    assert torch.equal(torch.cat(parts), rng.rows(5, 3))
    assert replace(rng, offset=2).fold("x").offset == 2


def test_distribution_of_uniform_and_normal():
    """Kolmogorov and Smirnov's distance on 100,000 draws each, at a significance of one in a
    million."""
    rng = Rng.of(0, "distribution")
    rows = torch.arange(1000)
    uniform = rng.uniform(rows, (100,)).flatten().sort()[0]
    normal = torch.special.ndtr(
        rng.normal(rows, (100,), dtype=torch.float64, step=1).flatten().sort()[0]
    )
    empirical = (torch.arange(len(uniform), dtype=torch.float64) + 0.5) / len(uniform)
    for cumulated in (uniform, normal):
        assert (cumulated - empirical).abs().max() < 2.7 / math.sqrt(len(uniform))
    assert uniform[0] > 0 and uniform[-1] < 1


def test_neighbours_are_not_correlated():
    """Rows, steps, streams, positions: every pair of neighbours, 160,000 draws."""
    rng = Rng.of(0, "correlation")
    rows = torch.arange(400)
    shape = (400,)
    x = rng.normal(rows, shape)
    neighbours = {
        "row": rng.normal(rows + 1, shape),
        "step": rng.normal(rows, shape, step=1),
        "stream": Rng.of(1, "correlation").normal(rows, shape),
        "position": x.roll(1, dims=1),
        # the two numbers of one Box-Muller pair
        "pair": x.view(400, 200, 2).flip(-1).reshape(400, 400),
    }
    for name, neighbour in neighbours.items():
        # the squares too: equal radii would show there
        for f in (lambda z: z, torch.square, torch.abs):
            pair = torch.stack([f(x).flatten(), f(neighbour).flatten()])
            bound = 5 / 400 * (2**0.5 if name == "pair" else 1)
            assert abs(torch.corrcoef(pair)[0, 1]) < bound, name
