"""Time grids against diffusers' own scheduler, and noise windows."""

from itertools import product

import numpy
import pytest
import torch

from mmrl.core.registry import describe, options
from samplers.noise import Rng
from samplers.schedules import compressed, dynamic, flow_match_euler, shifted
from samplers.tables import GRIDS, WINDOWS
from samplers.windows import all_but_last, window

NEEDS = {"dynamic": {"mu": 0.8}}
MANY = [1, 2, 3, 4, 6, 10, 14, 25, 28, 40, 50, 100, 999, 1000]


def diffusers_grid(steps, begin=None, mu=None, **config):
    """The sigmas of the real scheduler; ``begin`` are the unshifted ones a pipeline passes."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    scheduler.set_timesteps(
        **({"num_inference_steps": steps} if begin is None else {"sigmas": begin}), mu=mu
    )
    return scheduler.sigmas.double()


def near(actual, expected):
    torch.testing.assert_close(actual, expected, atol=3e-7, rtol=0)


def test_every_grid_falls_from_noise_to_data(subtests):
    for name in GRIDS:
        for steps in MANY:
            with subtests.test(name=name, steps=steps):
                grid = GRIDS[name](steps, **NEEDS.get(name, {}))
                assert grid.shape == (steps + 1,) and grid.dtype == torch.float64
                assert grid[0] == 1 and grid[-1] == 0 and (grid.diff() < 0).all()
                assert describe(GRIDS[name]) and "steps" not in options(GRIDS[name])
        with pytest.raises(ValueError, match="at least 1 step"):
            GRIDS[name](0, **NEEDS.get(name, {}))


def test_flow_match_euler_is_the_grid_of_diffusers(subtests):
    for shift, steps in product([0.5, 1.0, 1.7, 3.0, 12.0], MANY):
        with subtests.test(shift=shift, steps=steps):
            near(flow_match_euler(steps, shift=shift), diffusers_grid(steps, shift=shift))
    for train_steps, steps in ((1, 1), (10, 7), (500, 7)):
        expected = diffusers_grid(steps, shift=3.0, num_train_timesteps=train_steps)
        near(flow_match_euler(len(expected) - 1, train_steps=train_steps), expected)


def test_the_published_table_of_the_double_shift():
    twice = "1 0.960129 0.913349 0.857692 0.790368 0.707278 0.602151 0.464876 0.278049 0.008929 0"
    once = "1 0.964286 0.923077 0.875 0.818182 0.75 0.666667 0.5625 0.428571 0.25 0"
    for grid, table in ((flow_match_euler(10), twice), (shifted(10), once)):
        assert grid.tolist() == pytest.approx(list(map(float, table.split())), abs=6e-7)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_dynamic_as_pipelines_ask_for_it(kind):
    """Flux's from its own sigmas, Qwen-Image's with an end, SD3's from the scheduler's."""
    config = {"use_dynamic_shifting": True, "time_shift_type": kind}
    for mu, steps in product([0.3, 1.15, 2.0], MANY[:-2]):
        begin = numpy.linspace(1.0, 1 / steps, steps)
        options = {"mu": mu, "time_shift": kind}
        near(dynamic(steps, **options), diffusers_grid(steps, begin, mu, **config))
        near(dynamic(steps, smallest=1e-3, **options), diffusers_grid(steps, mu=mu, **config))
        if steps > 1:
            expected = diffusers_grid(steps, begin, mu, shift_terminal=0.02, **config)
            near(dynamic(steps, terminal=0.02, **options), expected)


def test_mu_from_the_number_of_tokens():
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    sizes = {"base_shift": 0.2, "max_shift": 0.9, "base_tokens": 100, "max_tokens": 8000}
    for tokens in [64, 256, 1024, 2025, 4096, 8192]:
        near(dynamic(6, tokens=tokens), dynamic(6, mu=calculate_shift(tokens)))
        mu = calculate_shift(tokens, 100, 8000, 0.2, 0.9)
        near(dynamic(6, tokens=tokens, **sizes), dynamic(6, mu=mu))


def test_dynamic_refuses(subtests):
    for wrong in [
        {},
        {"mu": 1.0, "tokens": 9},
        {"mu": 1.0, "smallest": 0.0},
        {"mu": 1.0, "terminal": 1.5},
        {"tokens": 9, "base_tokens": 5, "max_tokens": 5},
        {"mu": -1.0, "time_shift": "linear"},
    ]:
        with subtests.test(wrong=wrong), pytest.raises(ValueError):
            dynamic(4, **wrong)
    with pytest.raises(ValueError, match="shift must be greater than 0"):
        shifted(4, shift=0.0)


# Noise windows


def test_every_window_leaves_something_to_train(subtests):
    for name in WINDOWS:
        for steps in [6, 10]:
            with subtests.test(name=name, steps=steps):
                mask = WINDOWS[name](steps)
                assert mask.shape == (steps,) and mask.dtype == torch.bool and mask.any()
                assert describe(WINDOWS[name]) and "steps" not in options(WINDOWS[name])
                with pytest.raises(ValueError):
                    WINDOWS[name](0)


def test_windows_by_hand():
    for mask, expected in (
        (WINDOWS["all"](3), "111"),
        (all_but_last(3), "110"),
        (window(5, start=1, stop=3), "01100"),
        (window(5, start=2), "00111"),
        (window(5, start=-3, stop=-1), "00110"),
    ):
        assert "".join(map(str, mask.long().tolist())) == expected
    with pytest.raises(ValueError, match="at least 2 steps"):
        all_but_last(1)


def places(name, iterations, steps=25, **options):
    """(first step, size) of the window at each of the iterations."""
    masks = (WINDOWS[name](steps, i, Rng.of("w", i), **options) for i in iterations)
    return [(int(mask.nonzero().min()), int(mask.sum())) for mask in masks]


def test_progressive_window_moves_as_published_but_is_never_empty():
    """MixGRPO (Li et al. 2025), section 3.2: by 1 every 25 iterations; that of its
    GRPOTrainingStates is empty from iteration 575 to 599."""
    assert places("progressive", [0, 24, 25, 49, 475]) == [(0, 4), (0, 4), (1, 4), (1, 4), (19, 4)]
    # 20 positions of 25 iterations, then from the start
    assert places("progressive", [500, 599]) == [(0, 4), (3, 4)]
    assert places("progressive", [500, 5000], again=False) == [(19, 4)] * 2
    # without overlap
    assert places("progressive", [0, 25, 50], stride=4) == [(0, 4), (4, 4), (8, 4)]


@pytest.mark.parametrize("chosen", [{}, {"longest": 7, "shortest": 3}])
def test_a_decaying_window_stays_on_a_line_from_longest_to_shortest(chosen):
    longest = chosen.get("longest", 10)
    shortest = chosen.get("shortest", 1)
    first = [place for place, _ in places("decay", range(200), **chosen)]
    # 25 steps, stop -2
    line = [int(longest * (1 - place / 23) + shortest * place / 23) for place in range(19)]
    stays = [first[: first.index(19)].count(place) for place in range(19)]
    assert stays == [max(shortest, n) for n in line]


def test_an_exponential_decay_hurries_towards_the_end():
    first = [place for place, _ in places("exp_decay", range(600), every=25)]
    # ceil(25 exp(-0.1 n))
    assert [first.count(place) for place in (13, 14, 19)] == [25, 23, 14]


def test_random_windows_are_uniform_and_the_same_for_every_process():
    windows = places("random_window", range(400), steps=10, size=3, stop=5)
    assert {place for place, _ in windows} == {0, 1, 2} and {size for _, size in windows} == {3}
    assert min([place for place, _ in windows].count(k) for k in range(3)) > 90
    rng = Rng.of("w", 1)
    elsewhere = Rng(rng.key, offset=7)  # another process's first prompt
    assert torch.equal(
        WINDOWS["random_steps"](9, 1, rng, size=3), WINDOWS["random_steps"](9, 1, elsewhere, size=3)
    )
    drawn = (WINDOWS["random_steps"](9, i, Rng.of("w", i), size=3) for i in range(200))
    chosen = torch.stack(list(drawn))
    assert (chosen.sum(1) == 3).all() and (chosen[:, :-1].sum(0) > 45).all()
    assert not chosen[:, -1].any()


def test_a_compressed_tail_keeps_the_curve():
    times = shifted(10, shift=3.0)
    short = compressed(times, 4, 0.5)
    assert len(short) == 8 and torch.equal(short[:5], times[:5])
    assert short[-1] == 0 and short[5] == times[6]
    for same in (compressed(times, 4, 1.0), compressed(times, 10, 0.4)):
        assert torch.equal(same, times)
    assert len(compressed(times, 8, 0.4)) == 10  # at least one step
    for ratio in (0.0, 1.5):
        with pytest.raises(ValueError, match="must lie in"):
            compressed(times, 4, ratio)


@pytest.mark.parametrize(
    "wrong", [{"stop": 6}, {"start": 5}, {"start": 3, "stop": 3}, {"start": -6}, {"stop": 0}]
)
def test_impossible_windows_say_what_is_possible(wrong):
    with pytest.raises(ValueError, match="need 0 <= start < stop <= 5"):
        window(5, **wrong)


def test_windows_begin_at_the_first_iteration_and_first_place():
    quick = {"progressive": {"every": 1}, "decay": {"longest": 1}, "exp_decay": {"every": 1}}
    for name, chosen in quick.items():
        for iteration in range(3):
            expected = [False] * iteration + [True] * 4 + [False] * (6 - iteration)
            assert WINDOWS[name](10, iteration, **chosen).tolist() == expected
    # at least one iteration
    assert places("progressive", [0, 1, 2], steps=10, every=0) == [(0, 4), (1, 4), (2, 4)]
