"""An update of the regression, compared with the textbook form of the Kalman filter in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.latency.online_learning import COMMON_DRIFT, HUBER, MIN_RESULT, OWN_DRIFT, Regression

NOISE, CLIP, COMMON, OWN = 0.02, 2.0, 9.0, 0.5
Matrix = list[list[float]]


def textbook(c: Sequence[float], p: Matrix, features: Sequence[float], actual: float) -> tuple[list[float], Matrix]:
    """The gain of a sample, the random walk, and the limit of variances."""
    terms = range(len(c))
    predicted = max(sum(c[i] * features[i] for i in terms), MIN_RESULT)
    x = [feature / predicted for feature in features]
    error = min(max(actual / predicted - 1.0, -CLIP), CLIP)
    s = [sum(p[i][j] * x[j] for j in terms) for i in terms]
    doubt = sum(s[i] * x[i] for i in terms)
    total = doubt + NOISE * max(1.0, abs(error) / (HUBER * (doubt + NOISE) ** 0.5))
    after = [c[i] + s[i] / total * error for i in terms]
    q = [[p[i][j] - s[i] / total * s[j] + COMMON_DRIFT * after[i] * after[j] for j in terms] for i in terms]
    for i in terms:
        q[i][i] += OWN_DRIFT * max(after[i], 1.0) ** 2
    for i in terms:
        limit = (COMMON + OWN) * max(after[i], 1.0) ** 2
        if q[i][i] > limit:
            factor = (limit / q[i][i]) ** 0.5
            for j in terms:
                q[i][j] *= factor
                q[j][i] *= factor
    return after, q


@pytest.mark.parametrize("terms", [1, 2, 3, 5])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_an_update_is_the_textbook_step(terms: int, data: st.DataObject) -> None:
    """For any number of terms, sample after sample; without a floor."""
    feature = st.floats(1e-3, 10.0)
    samples = st.lists(st.tuples(st.tuples(*[feature] * terms), st.floats(1e-2, 100.0)), min_size=1, max_size=8)
    fit = Regression((OWN,) * terms, COMMON, NOISE**0.5, floor=float("-inf"))
    expected, matrix = [1.0] * terms, [[COMMON + OWN * (i == j) for j in range(terms)] for i in range(terms)]
    for features, actual in data.draw(samples):
        fit.update(features, actual, CLIP)
        expected, matrix = textbook(expected, matrix, features, actual)
        assert fit.coefficients == pytest.approx(expected, rel=1e-6, abs=1e-9)
        for row, other in zip(fit.covariance, matrix, strict=True):
            assert row == pytest.approx(other, rel=1e-6, abs=1e-9)
