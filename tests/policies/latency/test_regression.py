"""Online regression of a positive quantity."""

from __future__ import annotations

from math import isfinite
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.latency.online_learning import Regression

OWN = (4.0, 4.0, 4.0)


def test_before_any_sample_the_reference_is_predicted() -> None:
    """Features are the contributions of the terms on the reference machine."""
    assert Regression(OWN[:2]).predict((0.5, 1.5)) == 2.0


@pytest.mark.parametrize("factor", [0.1, 1.0, 100.0])
def test_one_sample_fixes_the_common_factor(factor: float) -> None:
    """A machine a hundred times slower is assumed slower in every term."""
    fit = Regression(OWN[:2])
    fit.update((1.0, 1.0), 2 * factor)
    assert fit.predict((1.0, 1.0)) == pytest.approx(2 * factor, rel=0.1)
    assert fit.predict((2.0, 1.0)) == pytest.approx(3 * factor, rel=0.1)


def test_thirty_samples_separate_the_terms() -> None:
    """With 10% of noise."""
    fit, random = Regression(OWN), Random(1)
    for _ in range(30):
        features = (1.0, random.expovariate(0.5), random.expovariate(2.0))
        actual = 0.2 * features[0] + 3.0 * features[1] + 1.0 * features[2]
        fit.update(features, actual * random.lognormvariate(0, 0.1))
    assert fit.predict((1.0, 0.0, 0.0)) == pytest.approx(0.2, rel=0.3)
    assert fit.predict((1.0, 5.0, 1.0)) == pytest.approx(16.2, rel=0.1)


def test_small_results_count_as_much_as_large_ones() -> None:
    """Errors are relative: two seconds too many on a hundred must not spoil a prediction of 10 ms."""
    fit, random = Regression(OWN[:2]), Random(1)
    for number in range(60):
        small = number % 2 == 0
        features = (0.01, 0.0) if small else (0.01, 100.0)
        fit.update(features, (0.01 if small else 100.0) * random.lognormvariate(0, 0.05))
    assert fit.predict((0.01, 0.0)) == pytest.approx(0.01, rel=0.1)


def test_a_clipped_sample_counts_as_the_clip() -> None:
    """A sample a thousand times too large counts as twice too large."""
    clipped, plain = Regression(OWN[:1]), Regression(OWN[:1])
    clipped.update((1.0,), 1000.0, clip=1.0)
    plain.update((1.0,), 2.0)
    assert clipped.coefficients == plain.coefficients


def test_a_negative_term_is_zero_and_other_terms_absorb_the_difference() -> None:
    """Results that fall as a feature grows: the feature explains nothing."""
    fit = Regression(OWN[:2])
    for _ in range(50):
        fit.update((1.0, 0.1), 1.0)
        fit.update((1.0, 1.0), 0.8)
    assert fit.coefficients[1] == 0.0
    assert fit.predict((1.0, 0.5)) == pytest.approx(0.9, rel=0.05)


def test_a_warm_start_copies_coefficients_with_less_certainty() -> None:
    """The copy moves further on the first sample of its own."""
    leader, follower = Regression(OWN[:2]), Regression(OWN[:2])
    for _ in range(50):
        leader.update((1.0, 1.0), 6.0)
    follower.warm_start_from(leader)
    assert follower.predict((1.0, 1.0)) == leader.predict((1.0, 1.0))
    for fit in (leader, follower):
        fit.update((1.0, 1.0), 12.0)
    assert leader.predict((1.0, 1.0)) < 8.0 < 10.0 < follower.predict((1.0, 1.0))


def test_the_variance_of_an_unused_term_is_bounded() -> None:
    """By the prior's variance, so the term can still be learned without overshooting."""
    fit = Regression(OWN[:2])
    for _ in range(20_000):
        fit.update((1.0, 0.0), 1.0)
    assert fit.covariance[1][1] <= 13.0
    fit.update((1.0, 1.0), 4.0)
    assert fit.predict((1.0, 1.0)) == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("covariance", [[[1.0, -2.0], [-2.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], [[1e308] * 2] * 2])
def test_a_matrix_that_rounding_made_no_covariance_is_forgotten(covariance: list[list[float]]) -> None:
    """By numbers of a saved state that no machine has: each term is learned anew, and no sample fails."""
    fit = Regression(OWN[:2])
    fit.covariance = [list(row) for row in covariance]
    for actual in (0.001, *[3.0] * 30):
        fit.update((1.0, 1.0), actual)
    assert fit.predict((1.0, 1.0)) == pytest.approx(3.0, rel=0.1)
    assert all(0 < fit.covariance[i][i] <= 13.0 * max(1.0, fit.coefficients[i]) ** 2 for i in range(2))


feature = st.floats(0, 1e5)
samples = st.lists(st.tuples(st.tuples(st.just(1e-3), feature, feature), st.floats(1e-4, 1e5)), max_size=40)


@settings(max_examples=100, deadline=None)
@given(samples)
def test_coefficients_stay_finite_and_never_negative(history: list) -> None:
    """For any samples."""
    fit = Regression(OWN)
    for features, actual in history:
        fit.update(features, actual)
        assert all(isfinite(value) and value >= 0 for value in fit.coefficients)
        assert all(0 < fit.covariance[i][i] <= 13.0 * max(1.0, fit.coefficients[i]) ** 2 * 1.001 for i in range(3))
        assert fit.predict(features) > 0
