"""Statistics of measurements: by hand, and on simulated data whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.lab.stats import (
    bootstrap_median,
    geometric_mean,
    medians_by,
    paired_ratios,
    quantile,
    spread,
)


def test_quantiles_go_straight_between_neighbours():
    values = [10.0, 0.0, 30.0, 20.0]
    assert [quantile(values, s) for s in (0.0, 0.1, 0.5, 0.9, 1.0)] == pytest.approx(
        [0.0, 3.0, 15.0, 27.0, 30.0]
    )


def test_spread():
    found = spread([1.0, None, 3.0, 8.0])
    assert (found.n, found.median, found.mean) == (3, 3.0, 4.0)
    assert (found.p10, found.p90) == pytest.approx((1.4, 7.0))
    assert spread([None]) is None
    assert spread([]) is None


def test_a_repeat_that_was_disturbed_does_not_count():
    assert medians_by([(0, 1.0), (1, 5.0), (0, 1.1), (0, 40.0), (2, None)]) == {0: 1.1, 1: 5.0}


def test_only_pairs_are_compared():
    assert paired_ratios({0: 3.0, 1: 4.0, 2: 1.0}, {0: 2.0, 1: 4.0, 3: 1.0}) == {0: 1.5, 1: 1.0}
    assert paired_ratios({0: 3.0}, {0: 0.0}) == {}


def test_geometric_mean_of_a_gain_and_its_inverse_is_none():
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) is None


class TestBootstrap:
    def test_no_interval_from_one_value(self):
        assert bootstrap_median([]) is None
        assert bootstrap_median([1.3]) is None

    def test_equal_values_leave_no_doubt(self):
        assert bootstrap_median([1.25] * 8) == (1.25, 1.25)

    def test_the_same_values_give_the_same_interval(self):
        values = list(np.random.default_rng(0).normal(1.2, 0.1, 20))
        assert bootstrap_median(values) == bootstrap_median(values)

    def test_it_lies_within_the_values_and_around_their_median(self):
        values = [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 5.0]
        low, high = bootstrap_median(values)
        assert 0.9 <= low < 1.2 < high <= 5.0

    def test_a_wider_level_is_wider(self):
        values = list(np.random.default_rng(1).normal(1.2, 0.1, 40))
        narrow, wide = (bootstrap_median(values, level=level) for level in (0.5, 0.99))
        assert wide[0] < narrow[0] < narrow[1] < wide[1]

    @pytest.mark.parametrize("prompts", [12, 40])
    def test_it_holds_the_true_median_as_often_as_it_says(self, prompts):
        # Skewed, as speed-ups are: exp of a normal around ln 1.3. 300 runs: 95 % ± 4 binomial
        # deviations of 1.3 %.
        rng = np.random.default_rng(prompts)
        held = 0
        for _ in range(300):
            values = np.exp(rng.normal(np.log(1.3), 0.4, prompts))
            low, high = bootstrap_median(list(values), resamples=1000)
            held += low <= 1.3 <= high
        assert 0.90 <= held / 300 <= 0.99
