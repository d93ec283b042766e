"""Paired intervals over prompts and seeds, against plain loops and against what they promise."""

import numpy as np
import pytest
from scipy import stats

from mmrl.core.statistics import holm, interval, paired, spread


def by_loop(table):
    """Variances of the mean and their degrees of freedom, a cell at a time."""
    count_s, count_p = len(table), len(table[0])
    mean = sum(sum(row) for row in table) / (count_s * count_p)
    seed = [sum(row) / count_p for row in table]
    prompt = [sum(row[p] for row in table) / count_s for p in range(count_p)]
    of_seed = sum(count_p * (x - mean) ** 2 for x in seed) / (count_s - 1)
    of_prompt = sum(count_s * (x - mean) ** 2 for x in prompt) / (count_p - 1)
    of_rest = 0.0
    for s in range(count_s):
        for p in range(count_p):
            of_rest += (table[s][p] - seed[s] - prompt[p] + mean) ** 2
    of_rest /= (count_s - 1) * (count_p - 1)
    both = of_seed + of_prompt - of_rest
    freedom = both**2 / (
        of_seed**2 / (count_s - 1)
        + of_prompt**2 / (count_p - 1)
        + of_rest**2 / ((count_s - 1) * (count_p - 1))
    )
    cells = count_s * count_p
    estimates = [(of_seed / cells, count_s - 1), (of_prompt / cells, count_p - 1)]
    if both > 0:
        estimates.append((both / cells, max(freedom, min(count_s, count_p) - 1)))
    return estimates


def test_the_variance_is_that_of_a_loop(subtests):
    for trial in range(6):
        with subtests.test(trial=trial):
            rng = np.random.default_rng(trial)
            seeds, prompts = rng.integers(2, 6), rng.integers(2, 9)
            table = rng.normal(size=(seeds, prompts)) + rng.normal(size=(seeds, 1)) * (trial % 3)
            table += rng.normal(size=prompts) * (trial % 2)
            estimates = by_loop(table.tolist())
            assert np.allclose(spread(table), estimates, rtol=1e-9, atol=0)
            halves = [stats.t.ppf(0.975, f) * v**0.5 for v, f in estimates]
            result = interval(table)
            assert result.high - result.mean == pytest.approx(max(halves), rel=1e-9)
            mean = abs(table.mean())
            p_values = [2 * stats.t.sf(mean / v**0.5, f) for v, f in estimates]
            assert result.p == pytest.approx(max(p_values), rel=1e-9)


def test_one_seed_is_the_t_interval_over_prompts():
    values = np.random.default_rng(0).normal(0.3, 1.0, size=(1, 12))
    result = interval(values)
    expected = stats.ttest_1samp(values[0], 0.0)
    low, high = expected.confidence_interval(0.95)
    assert (result.low, result.high) == pytest.approx((low, high), rel=1e-9)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-9) and result.freedom == 11


def test_differences_are_paired_and_unscored_prompts_left_out():
    rng = np.random.default_rng(1)
    hard = rng.normal(size=(1, 6)) * 100  # what prompts have in common cancels
    first = hard + rng.normal(size=(3, 6))
    second = hard + 0.5 + rng.normal(size=(3, 6))
    holes = second.copy()
    holes[1, 4] = np.nan
    whole = paired(np.delete(first, 4, 1), np.delete(second, 4, 1))
    assert paired(first, holes) == whole and whole.prompts == 5 and whole.seeds == 3
    assert whole.high - whole.low < 20  # of prompts that differ by a hundred
    assert paired(second, first).mean == pytest.approx(-paired(first, second).mean)


def test_where_nothing_varies_nothing_is_claimed():
    same = interval(np.full((3, 4), 0.25))
    assert same.low == -np.inf and same.p == 1  # how much other prompts would vary is not seen
    assert interval(np.array([[0.7]])).high == np.inf
    assert interval(np.array([[1.0]])).low == -np.inf
    level = paired(np.full((1, 5), 0.25), np.full((1, 5), 0.25))
    assert level.low == -np.inf and level.p == 1


def test_of_scores_0_and_1_the_interval_is_exact():
    """Of means Clopper and Pearson's, of differences the sign test's p-value."""
    for right, prompts in ((0, 5), (5, 5), (3, 12), (29, 30)):
        scores = np.zeros((1, prompts))
        scores[0, :right] = 1
        exact = stats.binomtest(right, prompts).proportion_ci(0.95)
        found = interval(scores)
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=0.01)
    for better, worse in ((9, 1), (3, 1), (0, 0)):
        first, second = np.zeros((2, 1, 20))
        second[0, :better] = 1
        first[0, better : better + worse] = 1
        exact = stats.binomtest(better, better + worse).pvalue if better else 1.0
        found = paired(first, second)
        assert found.p == pytest.approx(exact, abs=0.02)
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def test_holm_is_the_step_down_rule():
    values = [0.01, 0.04, 0.03, 0.5, 0.2]
    expected, largest = {}, 0.0
    for rank, (p, i) in enumerate(sorted((p, i) for i, p in enumerate(values))):
        largest = max(largest, min(1.0, p * (len(values) - rank)))
        expected[i] = largest
    assert holm(values) == [expected[i] for i in range(len(values))]
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
