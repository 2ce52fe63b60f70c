"""The step that is written out, against the one that is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.latency.recursive_least_squares import COMMON_DRIFT, HUBER, OWN_DRIFT, SMALLEST, Matrix, Vector, step

NOISE, FLOOR = 0.02, 0.05


def plain(
    c: Vector, p: list[list[float]], most: Vector, features: Vector, actual: float, clip: float
) -> tuple[list[float], list[list[float]]]:
    """A sample's gain and the random walk, by loops; nothing below the floor."""
    terms = range(len(c))
    predicted = max(sum(c[i] * features[i] for i in terms), SMALLEST)
    x = [feature / predicted for feature in features]
    error = min(max(actual / predicted - 1.0, -clip), clip)
    s = [sum(p[i][j] * x[j] for j in terms) for i in terms]
    doubt = sum(s[i] * x[i] for i in terms)
    total = doubt + NOISE * max(1.0, abs(error) / (HUBER * (doubt + NOISE) ** 0.5))
    after = [max(c[i] + s[i] / total * error, FLOOR) for i in terms]
    q = [[p[i][j] - s[i] / total * s[j] + COMMON_DRIFT * after[i] * after[j] for j in terms] for i in terms]
    for i in terms:
        q[i][i] += OWN_DRIFT * max(after[i], 1.0) ** 2
    for i in terms:
        limit = most[i] * max(after[i], 1.0) ** 2
        if q[i][i] > limit:
            factor = (limit / q[i][i]) ** 0.5
            for j in terms:
                q[i][j] *= factor
                q[j][i] *= factor
    return after, q


def lifted(coefficients: Vector, covariance: Matrix) -> Sequence[float]:
    return [max(value, FLOOR) for value in coefficients]


@pytest.mark.parametrize("terms", [1, 2, 3, 5])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_written_out_it_is_the_same_step(terms: int, data: st.DataObject) -> None:
    """For any number of terms, sample after sample."""
    feature = st.floats(1e-3, 10.0)
    samples = st.lists(st.tuples(st.tuples(*[feature] * terms), st.floats(1e-2, 100.0)), min_size=1, max_size=8)
    most = (9.5,) * terms
    expected, matrix = [1.0] * terms, [[9.0 + 0.5 * (i == j) for j in range(terms)] for i in range(terms)]
    coefficients: Vector = expected
    covariance: Matrix = [value for row in matrix for value in row]
    for features, actual in data.draw(samples):
        coefficients, covariance = step(terms)(
            coefficients, covariance, most, features, actual, 2.0, NOISE, FLOOR, lifted
        )
        expected, matrix = plain(expected, matrix, most, features, actual, 2.0)
        assert coefficients == pytest.approx(expected, rel=1e-6)
        assert covariance == pytest.approx([value for row in matrix for value in row], rel=1e-6, abs=1e-9)
