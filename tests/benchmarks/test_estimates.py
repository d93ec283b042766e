"""Totals and their intervals, by hand and by simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from mmrl.benchmarks.estimates import mean_of_categories, total, wilson


def test_wilsons_interval_is_scipys():
    for right, count in [(0, 10), (8, 10), (10, 10), (553, 600), (1, 2)]:
        interval = stats.binomtest(right, count).proportion_ci(method="wilson")
        assert wilson(right / count, count) == pytest.approx(
            (interval.low, interval.high), abs=1e-6
        )
    assert wilson(0.0, 10)[0] == 0 and wilson(1.0, 10)[1] == 1


def test_shares_of_single_samples_have_wilsons_interval_and_groups_a_bootstrap():
    single = total([[1.0]] * 8 + [[0.0]] * 2)
    assert (single.mean, single.interval, single.prompts) == (0.8, "Wilson", 10)
    assert (single.low, single.high) == pytest.approx(wilson(0.8, 10))
    # four samples of a prompt that agree are worth one: wider than Wilson over 40 samples
    grouped = total([[1.0] * 4] * 8 + [[0.0] * 4] * 2)
    assert (grouped.mean, grouped.interval, grouped.samples) == (0.8, "bootstrap", 40)
    low, high = wilson(0.8, 40)
    assert grouped.low < low and grouped.high > high


def test_what_is_always_right_may_still_be_wrong_elsewhere():
    perfect = total([[1.0, 1.0]] * 5)
    assert perfect.high == 1.0 and 0.5 < perfect.low < 0.6 and perfect.interval == "Wilson"
    assert mean_of_categories([[[1.0, 1.0]] * 5, [[1.0, 1.0]] * 5]).low > perfect.low


def test_what_could_not_be_scored_is_left_out():
    estimate = total([[math.nan, 0.5], [1.0, 0.5], [math.nan]])
    assert estimate.mean == pytest.approx(2 / 3) and estimate.prompts == 2
    nothing = total([[math.nan]])
    assert math.isnan(nothing.mean) and nothing.samples == 0
    assert math.isinf(total([[0.25, 0.5]]).low)


def test_the_mean_of_categories_weighs_them_alike():
    few = [[1.0], [1.0], [1.0], [0.0]]
    many = [[0.0]] * 90 + [[1.0]] * 10
    estimate = mean_of_categories([few, many])
    assert estimate.mean == pytest.approx((0.75 + 0.1) / 2)
    assert estimate.low < estimate.mean < estimate.high and estimate.prompts == 104
    assert estimate == mean_of_categories([few, many])


def test_the_bootstrap_covers():
    """Of graded scores of 40 prompts, about 19 of 20 intervals hold the true mean."""
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        values = chance.beta(2, 3, 40)
        estimate = total([[float(v)] for v in values])
        covered += estimate.low <= 0.4 <= estimate.high
    assert covered >= 88
