"""Spread of a forecast, from recent ratios of actual to predicted TTFT."""

from __future__ import annotations

from bisect import bisect_left
from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.latency.online_learning import ErrorQuantiles
from policies.types import QUANTILES, Forecast


def filled(sigma: float, samples: int, seed: int = 1) -> ErrorQuantiles:
    ratios, random = ErrorQuantiles(), Random(seed)
    for _ in range(samples):
        ratios.observe(random.lognormvariate(0, sigma), now=0.0)
    return ratios


def test_before_any_sample_the_spread_is_wide() -> None:
    """90% within 2.2 times the prediction."""
    assert Forecast(1.0, ErrorQuantiles().quantiles(0.0)).p90 == pytest.approx(exp(0.6 * 1.2816), rel=1e-3)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_quantiles_are_calibrated_on_recent_errors(sigma: float) -> None:
    """Of fresh samples that share is below each quantile, for any spread; averaged over 20 windows."""
    random = Random(5)
    shares = [0.0] * len(QUANTILES)
    for seed in range(20):
        grid = filled(sigma, 300, seed).quantiles(0.0)
        for _ in range(200):
            under = bisect_left(grid, random.lognormvariate(0, sigma))
            for i in range(under, len(grid)):
                shares[i] += 1 / 4000
    assert shares == pytest.approx(QUANTILES, abs=0.035)


def test_a_spread_without_samples_is_that_of_another_wider() -> None:
    """Errors of queued prompts begin as those of idle ones do, and wider; its own samples outweigh these."""
    idle, queued = filled(0.2, 300), ErrorQuantiles()
    queued.widen_from(idle, 0.0, 1.5)
    assert queued.quantiles(0.0) == pytest.approx([ratio**1.5 for ratio in idle.quantiles(0.0)], rel=0.01)
    for _ in range(100):
        queued.observe(2.0, now=0.0)
    assert Forecast(1.0, queued.quantiles(0.0)).p50 == pytest.approx(2.0, rel=0.05)


def test_a_persistent_bias_is_corrected() -> None:
    """Predictions half too small have a median ratio of two."""
    ratios = ErrorQuantiles()
    for _ in range(100):
        ratios.observe(2.0, now=0.0)
    assert Forecast(1.0, ratios.quantiles(0.0)).p50 == pytest.approx(2.0, rel=0.05)


def test_the_window_keeps_128_samples() -> None:
    """Older samples do not count."""
    ratios = filled(1.0, 500)
    for _ in range(128):
        ratios.observe(1.0, now=0.0)
    assert Forecast(1.0, ratios.quantiles(0.0)).quantile(0.98) < 1.1


def test_the_spread_widens_without_samples() -> None:
    """After hours the spread is nearly the prior's again."""
    ratios = filled(0.05, 128)
    fresh, hour, day = (Forecast(1.0, ratios.quantiles(now)).p90 for now in (0.0, 3600.0, 86400.0))
    assert fresh < hour < day
    assert day == pytest.approx(Forecast(1.0, ErrorQuantiles().quantiles(0.0)).p90, rel=0.01)


def test_a_warm_start_copies_the_spread() -> None:
    """Until samples of its own."""
    follower = ErrorQuantiles()
    follower.widen_from(filled(0.05, 128), now=0.0)
    assert Forecast(1.0, follower.quantiles(0.0)).p90 < 1.2


@given(st.lists(st.floats(0, 1e12, allow_nan=False), max_size=300))
def test_quantiles_ascend_and_are_positive(values: list[float]) -> None:
    """For any ratios."""
    ratios = ErrorQuantiles()
    for value in values:
        ratios.observe(value, now=0.0)
    grid = ratios.quantiles(0.0)
    assert list(grid) == sorted(grid)
    assert grid[0] > 0
