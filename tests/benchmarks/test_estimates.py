"""Totals and their intervals, by hand and by simulation."""

import math

import pytest
from scipy import stats

from mmrl.apps.benchmarks.estimates import mean_of_categories, total


def test_shares_of_single_samples_have_clopper_and_pearsons_interval():
    for right, count in [(0, 10), (8, 10), (10, 10), (553, 600)]:
        estimate = total([[1.0]] * right + [[0.0]] * (count - right))
        exact = stats.binomtest(right, count).proportion_ci(method="exact")
        assert (estimate.low, estimate.high) == pytest.approx((exact.low, exact.high), abs=0.02)
        assert (estimate.mean, estimate.interval) == (right / count, "Gaffke")


def test_samples_of_a_prompt_that_agree_are_worth_one_and_holes_are_left_out():
    grouped = total([[1.0] * 4] * 8 + [[0.0] * 4] * 2)
    single = total([[1.0]] * 8 + [[0.0]] * 2)
    assert (grouped.mean, grouped.samples, grouped.prompts) == (0.8, 40, 10)
    assert (grouped.low, grouped.high) == (single.low, single.high)
    holed = total([[math.nan, 0.5], [1.0, 0.5], [math.nan]])
    assert holed.mean == pytest.approx(2 / 3) and holed.prompts == 2
    assert math.isnan(total([[math.nan]]).mean) and math.isinf(total([[0.25, 0.5]]).low)


def test_the_mean_of_categories_weighs_them_alike():
    few = [[1.0], [1.0], [1.0], [0.0]]
    many = [[0.0]] * 90 + [[1.0]] * 10
    estimate = mean_of_categories([few, many])
    assert estimate.mean == pytest.approx((0.75 + 0.1) / 2)
    assert estimate.low < estimate.mean < estimate.high and estimate.prompts == 104
    perfect = total([[1.0, 1.0]] * 5)
    assert mean_of_categories([[[1.0, 1.0]] * 5, [[1.0, 1.0]] * 5]).low > perfect.low
