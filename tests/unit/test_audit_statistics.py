"""The audit's statistics on simulated samples whose answer is known; seeds are fixed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from outrider.audit.statistics import (
    BIASES,
    ENDED,
    ENOUGH_POWER,
    LEAST_EXPECTED,
    Stratum,
    compare,
    holm,
    power_of_bias,
    samples_needed,
    smallest_bias,
    table_of,
    total_variation,
)
from outrider.audit.statistics import _chi_square as chi_square
from outrider.audit.statistics import _g as g_statistic
from outrider.errors import UsageError

FEW = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
MANY = 1 / np.arange(2, 202)
MANY /= MANY.sum()


def draw(rng, law, n, length=1):
    return [tuple(row) for row in rng.choice(len(law), size=(n, length), p=law).tolist()]


def shifted(law, bias):
    """The bias whose power is told: from the most probable token to the others."""
    moved = law + bias * law / (1 - law[0])
    moved[0] = law[0] - bias
    return moved


def test_bins_expect_enough_in_both_samples():
    rng = np.random.default_rng(1)
    for n, m in ((50, 50), (400, 90), (2000, 2000)):
        table = table_of(draw(rng, MANY, n), draw(rng, MANY, m))
        assert table.sizes == (n, m)
        assert min(table.pooled) * min(n, m) >= LEAST_EXPECTED
        assert table.labels[-1] is None


def test_a_certain_token_is_one_bin():
    table = table_of([(7,)] * 90, [(7,)] * 89 + [(8,)])
    assert table.labels == (None,)
    assert compare([Stratum([[7]] * 900, [[7]] * 900)]).verdict == "consistent"


def test_chi_square_is_scipy_s():
    rng = np.random.default_rng(2)
    table = table_of(draw(rng, FEW, 300), draw(rng, FEW, 500))
    rows = np.stack([table.plain, table.speculative])
    assert chi_square(table) == pytest.approx(stats.chi2_contingency(rows, False).statistic)
    g = stats.chi2_contingency(rows, False, lambda_="log-likelihood").statistic
    assert 0.97 * g < g_statistic(table) < g  # less Williams' correction


def test_holm_is_bonferroni_for_the_first_and_never_falls():
    assert holm([0.5, 0.001, 0.02]) == pytest.approx([0.5, 0.003, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@pytest.mark.parametrize(("law", "n"), [(FEW, 400), (MANY, 700)])
def test_false_alarms_are_as_rare_as_alpha_says(law, n):
    """150 runs with equal laws at alpha = 0.05: more alarms than this have probability 1e-4."""
    rng = np.random.default_rng(3)
    alarms = sum(
        compare([Stratum(draw(rng, law, n, 2), draw(rng, law, n, 2))], alpha=0.05).verdict
        == "different"
        for _ in range(150)
    )
    assert alarms <= stats.binom.isf(1e-4, 150, 0.05)


@pytest.mark.parametrize(("law", "n"), [(FEW, 1500), (MANY, 2000)])
def test_each_statistic_s_p_values_are_uniform_in_the_tail(law, n):
    """Without Williams' correction the G-test fails this on many small bins."""
    rng = np.random.default_rng(4)
    low = {chi_square: 0, g_statistic: 0}
    for _ in range(500):
        table = table_of(draw(rng, law, n), draw(rng, law, n))
        for statistic in low:
            low[statistic] += stats.chi2.sf(statistic(table), len(table.plain) - 1) < 0.02
    assert max(low.values()) <= stats.binom.isf(1e-4, 500, 0.02)


@pytest.mark.parametrize(("law", "n", "bias"), [(FEW, 1500, 0.05), (MANY, 4000, 0.04)])
def test_power_is_that_of_simulation(law, n, bias):
    rng = np.random.default_rng(5)
    level, runs, seen = 0.01, 250, 0
    for _ in range(runs):
        table = table_of(draw(rng, law, n), draw(rng, shifted(law, bias), n))
        p = stats.chi2.sf(chi_square(table), len(table.plain) - 1)
        seen += p < level
    told = power_of_bias([table_of(draw(rng, law, n), draw(rng, law, n))], bias, level)
    assert 0.1 < told < 0.95, "a case that can go wrong either way"
    assert seen / runs == pytest.approx(told, abs=0.1)


def test_samples_needed_and_the_smallest_bias_give_the_power():
    rng = np.random.default_rng(6)
    tables = [table_of(draw(rng, FEW, 500), draw(rng, FEW, 500))]
    needed = samples_needed(tables, 0.05, 1e-3)
    assert power_of_bias(tables, 0.05, 1e-3, needed / 500) == pytest.approx(ENOUGH_POWER, abs=5e-3)
    least = smallest_bias(tables, 1e-3)
    assert power_of_bias(tables, least, 1e-3) == pytest.approx(ENOUGH_POWER, abs=5e-3)


@pytest.mark.parametrize("bias", [0.0, 0.02, 0.1, 0.3])
def test_the_interval_covers_total_variation(bias):
    """95 % intervals in 200 runs; the bound behind them is far from sharp, so all but two hold."""
    rng = np.random.default_rng(7)
    missed, estimates = 0, []
    for _ in range(200):
        tables = [table_of(draw(rng, FEW, 800), draw(rng, shifted(FEW, bias), 800))]
        estimate, low, high = total_variation(tables)
        assert low <= estimate <= high
        estimates.append(estimate)
        missed += not low <= bias <= high
    assert missed <= 2
    assert np.mean(estimates) == pytest.approx(bias, abs=0.03)


def test_a_difference_is_named():
    rng = np.random.default_rng(8)
    report = compare([Stratum(draw(rng, FEW, 3000, 3), draw(rng, shifted(FEW, 0.1), 3000, 3))])
    assert report.verdict == "different"
    assert report.worst.at_odds[0].token_ids is not None
    assert report.worst.adjusted_p < 1e-3
    position = report.comparisons[0]
    assert position.name == "position 1"
    assert position.at_odds[0].token_ids == (0,)
    assert position.at_odds[0].z < -5
    assert position.tv_low > 0


def test_a_difference_in_pairs_alone_is_found():
    """Both positions have the right law, but they hang together."""
    rng = np.random.default_rng(9)
    first = rng.integers(0, 4, 3000).tolist()
    other = rng.integers(0, 4, 3000).tolist()
    tied = [f if i % 3 == 0 else o for i, (f, o) in enumerate(zip(first, other, strict=True))]
    free = list(zip(rng.integers(0, 4, 3000).tolist(), other, strict=True))
    report = compare([Stratum(free, list(zip(first, tied, strict=True)))])
    assert report.verdict == "different"
    assert report.worst.name == "positions 1-2"
    assert report.comparisons[0].adjusted_p > 0.01


def test_a_difference_under_one_prompt_is_not_lost_among_others():
    rng = np.random.default_rng(10)
    same = [Stratum(draw(rng, FEW, 1500), draw(rng, FEW, 1500)) for _ in range(2)]
    wrong = Stratum(draw(rng, FEW, 1500), draw(rng, shifted(FEW, 0.1), 1500))
    assert compare(same).verdict != "different"
    report = compare([*same, wrong])
    assert report.verdict == "different"
    assert report.worst.at_odds[0].prompt == 2


def test_output_that_ends_sooner_is_different():
    report = compare([Stratum([(1, 1)] * 400, [(1, 1)] * 200 + [(1,)] * 200)])
    assert report.verdict == "different"
    assert (ENDED,) in [bin_.token_ids for bin_ in report.comparisons[1].at_odds]


def test_few_samples_are_not_enough_and_the_number_told_is():
    rng = np.random.default_rng(11)
    report = compare([Stratum(draw(rng, FEW, 100), draw(rng, FEW, 100))])
    assert report.verdict == "not enough samples"
    assert report.needed is not None
    powers = report.comparisons[0].powers
    assert [power.bias for power in powers] == list(BIASES)
    assert sorted(p.probability for p in powers) == [p.probability for p in powers]
    n = int(1.3 * report.needed)  # with more samples come more bins
    assert compare([Stratum(draw(rng, FEW, n), draw(rng, FEW, n))]).verdict == "consistent"


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0, float("nan")])
def test_alpha_is_checked(alpha):
    with pytest.raises(UsageError, match="alpha"):
        compare([Stratum([[1]], [[1]])], alpha=alpha)


def test_empty_samples_are_refused():
    for strata in ([], [Stratum([], [[1]])]):
        with pytest.raises(UsageError, match="at least one sample"):
            compare(strata)
