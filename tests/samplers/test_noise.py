"""Keyed random numbers: known answers, independence of the batch, moments, no correlation where
there must be none."""

import math

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


def philox_by_hand(counter, key):
    """The definition in Python's unbounded integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p = a * 0xD2511F53
        q = c * 0xCD9E8D57
        a = (q >> 32) ^ b ^ k
        b = q & ONES
        c = (p >> 32) ^ d ^ m
        d = p & ONES
        k = (k + 0x9E3779B9) & ONES
        m = (m + 0xBB67AE85) & ONES
    return a, b, c, d


def test_philox_equals_its_definition():
    drawn = torch.randint(0, 2**32, (4, 50), generator=torch.Generator().manual_seed(0))
    key = (0xDEADBEEF, 0x12345678)
    words = torch.stack(philox(tuple(drawn), key))
    for i in range(50):
        assert tuple(words[:, i].tolist()) == philox_by_hand(drawn[:, i].tolist(), key)


def test_a_row_is_the_same_alone_and_among_others(subtests):
    for draw in ["normal", "uniform"]:
        for shape in [(), (1,), (5,), (3, 4, 4)]:
            with subtests.test(draw=draw, shape=shape):
                rng = Rng.of(7, "rollout", 3)
                rows = torch.arange(11)
                whole = getattr(rng, draw)(rows, shape, step=2)
                assert whole.shape == (11, *shape)
                for size in (1, 2, 4, 11):
                    parts = [getattr(rng, draw)(part, shape, step=2) for part in rows.split(size)]
                    assert torch.equal(torch.cat(parts), whole)
                order = torch.tensor([3, 10, 0, 3])
                assert torch.equal(getattr(rng, draw)(order, shape, step=2), whole[order])


def test_a_larger_shape_begins_with_the_smaller_one():
    rng = Rng.of(0)
    rows = torch.arange(3)
    assert torch.equal(rng.normal(rows, (10,))[:, :4], rng.normal(rows, (4,)))


def test_rows_beyond_32_bits_are_rows_of_their_own():
    rows = torch.tensor([5, 5 + 2**32, 5 + 2**40])
    assert len(Rng.of(1).uniform(rows, (1,)).unique()) == 3


def test_streams_have_names():
    rows = torch.arange(4)
    streams = [
        Rng.of(0),
        Rng.of(1),
        Rng.of("0"),
        Rng.of(0, 0),
        Rng.of(0).fold("a"),
        Rng.of(0).fold("b"),
    ]
    draws = {tuple(stream.bits(rows, 4).flatten().tolist()) for stream in streams}
    assert len(draws) == len(streams)
    assert Rng.of(3, "x") == Rng.of(3, "x") and Rng.of(3).fold("x") == Rng.of(3).fold("x")
    assert hash(Rng.of(3)) == hash(Rng.of(3))


def test_the_numbers_of_a_seed_do_not_change():
    """A golden value: resuming an old run must find the same noise."""
    assert Rng.of(0, "rollout", 1).bits(torch.tensor([0, 9]), 2, step=1).tolist() == GOLDEN


GOLDEN = [[4115585100, 3658801050], [579983387, 488625181]]
ORDER = [2, 6, 0, 1, 4, 5, 3, 7]


def test_processes_name_their_rows_as_one_process_would():
    from dataclasses import replace

    rng = Rng.of(0)
    parts = [
        replace(rng, offset=offset).rows(prompts, 3) for offset, prompts in ((0, 2), (2, 1), (3, 2))
    ]
    assert torch.equal(torch.cat(parts), rng.rows(5, 3))
    assert replace(rng, offset=2).fold("x").offset == 2


def test_nothing_touches_the_global_generator():
    before = torch.get_rng_state()
    Rng.of(0).normal(torch.arange(5), (3,))
    Rng.of(0).permutation(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_moments_of_the_normal():
    # 400,000 draws
    x = Rng.of(0, "moments").normal(torch.arange(1000), (400,), dtype=torch.float64).flatten()
    error = 5 / math.sqrt(len(x))  # five standard errors
    assert abs(x.mean()) < error and abs(x.var() - 1) < error * math.sqrt(2)
    assert abs((x**3).mean()) < error * math.sqrt(15) and abs(
        (x**4).mean() - 3
    ) < error * math.sqrt(96)


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
            assert abs(torch.corrcoef(pair)[0, 1]) < 5 / 400 * (2**0.5 if name == "pair" else 1), (
                name
            )


def test_a_permutation_is_one(subtests):
    for n in [0, 1, 2, 17, 1000]:
        with subtests.test(n=n):
            order = Rng.of(0).permutation(n)
            assert torch.equal(order.sort()[0], torch.arange(n))
            if n > 2:
                assert not torch.equal(order, Rng.of(0).permutation(n, step=1))
                assert not torch.equal(order, torch.arange(n))


def test_permutations_are_uniform():
    """Each of the six orders of three, 3,000 draws: chi square with five degrees of freedom."""
    rng = Rng.of(0, "permutations")
    codes = torch.stack([rng.permutation(3, step) for step in range(3000)]) @ torch.tensor(
        [9, 3, 1]
    )
    counts = codes.unique(return_counts=True)[1].double()
    assert len(counts) == 6 and ((counts - 500) ** 2 / 500).sum() < 36  # one in a million


def test_dtype():
    rows = torch.arange(2)
    assert Rng.of(0).normal(rows, (3,)).dtype == torch.float32
    exact = Rng.of(0).normal(rows, (3,), dtype=torch.float64)
    assert torch.equal(Rng.of(0).normal(rows, (3,), dtype=torch.bfloat16), exact.to(torch.bfloat16))


def test_a_permutation_sorts_by_its_words():
    """The first word of 32 bits decides, the second among equal ones: an old run must find the same
    order."""
    rng = Rng.of(7, "order")
    words = rng.bits(torch.arange(50), 2, step=3).tolist()
    expected = sorted(range(50), key=lambda i: (words[i][0] << 31) ^ words[i][1])
    assert rng.permutation(50, step=3).tolist() == expected
    assert Rng.of(0).permutation(8).tolist() == ORDER
