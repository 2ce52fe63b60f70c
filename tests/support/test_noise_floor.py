"""The noise floor of forecasts, on engines whose noise is known."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import NormalDist, median
from typing import Any

import pytest

from tests.support.noise_floor import Floor, Seen, floor_of, noise_floor, seen, span_of

MEDIAN_DEVIATION = NormalDist().inv_cdf(0.75)  # of a normal distribution, in standard deviations


def engine(sigma: float, seed: int, requests: int = 200, bias: float = 1.0) -> list[Seen]:
    """20 ms, .1 ms a token of queue and prompt, a normal error of `sigma`; forecast at `bias` times the median."""
    rng = random.Random(seed)
    found = []
    for _ in range(requests):
        prompt, queued = rng.randrange(20, 2500), rng.choice((0, 0, 500))
        uncached = rng.randrange(10, prompt)
        terms = (1.0, prompt, uncached, uncached * (prompt - 0.5 * uncached), float(queued), 0.0, rng.randrange(3))
        typical = 20 + 0.1 * (uncached + queued)
        found.append(Seen(terms, bias * typical, typical * rng.lognormvariate(0, sigma)))
    return found


def floor(sigma: float, bias: float = 1.0) -> Floor:
    return floor_of([engine(sigma, seed, bias=bias) for seed in (1, 2)])


@pytest.mark.parametrize("sigma", [0.05, 0.2])
@pytest.mark.parametrize("bias", [0.5, 1.0])
def test_every_way_finds_the_noise_of_an_engine(sigma: float, bias: float) -> None:
    """Within a quarter: the median of the noise itself, however wrong the forecast is."""
    expected = 100 * MEDIAN_DEVIATION * sigma
    found = floor(sigma, bias)
    for way in (found.terms, found.alike, found.nearby, found.twins):
        assert way == pytest.approx(expected, rel=0.25)


def test_an_engine_without_noise_has_no_floor() -> None:
    assert floor(0.0).lowest < 0.1


def test_a_term_that_the_forecast_lacks_is_no_noise() -> None:
    """A forecast without the queue is wrong by up to 60%; requests with as long a queue show it."""
    blind = [replace(one, forecast=one.forecast - 0.1 * one.terms[4]) for one in engine(0.02, 3)]
    assert median(abs(one.missed - 1) for one in blind if one.terms[4]) > 0.3
    assert floor_of([blind]).terms < 3
    assert floor_of([blind]).twins < 6


def test_a_slowness_that_passes_is_no_noise() -> None:
    """The requests just before and after show it: half of the time at half the speed."""
    slowed = [replace(one, ttft=one.ttft * (2 if i > 100 else 1)) for i, one in enumerate(engine(0.02, 3))]
    assert floor_of([slowed]).nearby < 3 < floor_of([slowed]).terms


def record(wall: float, opened_ms: float, ttft_ms: float, total_ms: float) -> dict[str, Any]:
    return {
        "endpoint": "small/1",
        "wall": wall,
        "attempts": [{"opened_ms": opened_ms}],
        "ttft_ms": ttft_ms,
        "ttft_predicted_p50_ms": 100.0,
        "total_ms": total_ms,
        "prompt_tokens_reported": 100,
        "cached_tokens_reported": 40,
    }


def test_what_is_in_flight_at_the_sending_is_told_from_the_records() -> None:
    """The first decodes, the second prefills since the first token of the first, when the third is sent."""
    first, second, third = record(1.0, 2, 50, 900), record(1.02, 2, 300, 800), record(1.1, 10, 400, 500)
    terms = seen([span_of(each) for each in (third, first, second)])[-1].terms
    assert terms == pytest.approx((1.0, 100, 60, 60 * 70, 60.0, 1110 - 1050, 1))


def test_records_are_read_by_engine() -> None:
    """A queue at one engine delays nobody at another: equal requests of two engines, one twice as slow."""
    records = [
        record(float(i), 1, ttft, ttft + 100) | {"endpoint": endpoint}
        for i in range(60)
        for endpoint, ttft in (("a", 50.0), ("b", 100.0))
    ]
    assert noise_floor(records).lowest < 0.1
