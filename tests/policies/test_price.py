"""Cost of a request by what was cached."""

from __future__ import annotations

import pytest

from policies.types import Price

CACHING = Price(input=3.0, output=15.0, cached_input=0.3, cache_write=3.75)


@pytest.mark.parametrize(
    ("cached", "written", "usd"),
    [(0, 0, 18.0), (1e6, 0, 15.3), (0, 1e6, 18.75), (4e5, 1e5, 15 + 1.5 + 0.12 + 0.375), (9e9, 9e9, 15.3)],
)
def test_cached_and_written_input_have_their_own_prices(cached: float, written: float, usd: float) -> None:
    """More cached than there was input is a report that cannot be."""
    assert CACHING.of(1e6, 1e6, cached, written) == pytest.approx(usd)


def test_without_prices_of_their_own_they_cost_as_input() -> None:
    assert Price(3.0, 15.0).of(1e6, 1e6, 5e5, 1e5) == pytest.approx(18.0)


@pytest.mark.parametrize(
    ("price", "usd"),
    [
        (CACHING, 6.0),  # twice the input, where a write costs 1.25 times the input
        (Price(3.0, 15.0, cache_write=3.75, cache_write_1h=7.0), 7.0),
        (Price(3.0, 15.0), 3.0),
        (Price(3.0, 15.0, cache_write=0.0), 0.0),
        (Price(3.0, 15.0, cache_write=9.0), 9.0),
        (Price(3.0, 15.0, cache_write_1h=7.0), 7.0),
    ],
)
def test_what_a_cache_keeps_for_an_hour_has_a_price_of_its_own(price: Price, usd: float) -> None:
    short = price.input if price.cache_write is None else price.cache_write
    assert price.of(1e6, 0, written=1e6, written_1h=1e6) == pytest.approx(usd)
    assert price.of(1e6, 0, written=1e6, written_1h=9e9) == pytest.approx(usd)
    assert price.of(1e6, 0, written=1e6, written_1h=5e5) == pytest.approx((usd + short) / 2)


def test_the_most_that_a_request_can_cost_holds_for_every_cache() -> None:
    """The dearest is what a cache keeps for an hour."""
    assert CACHING.at_most(1e6, 1e6) == pytest.approx(21.0)
    assert Price(3.0, 15.0, cached_input=0.3).at_most(1e6, 0) == pytest.approx(3.0)


LONG = Price(0.1, 0.5, 0.01, 0.125, long=(100_001, Price(0.5, 2.5, 0.05, 0.625)))


@pytest.mark.parametrize(("prompt", "usd"), [(100_000, 0.01 + 0.00005), (100_001, 5 * (0.0100001 + 0.00005))])
def test_from_some_tokens_of_prompt_on_all_tokens_cost_another_price(prompt: int, usd: float) -> None:
    """Those of the answer too, and those below the limit."""
    assert LONG.of(prompt, 100) == pytest.approx(usd)


def test_cached_tokens_count_towards_a_long_prompt() -> None:
    assert LONG.of(200_000, 0, cached=150_000, written=50_000) == pytest.approx((150_000 * 0.05 + 50_000 * 0.625) / 1e6)


@pytest.mark.parametrize(("prompt", "dearest"), [(100_000, 0.2), (100_001, 1.0)])
def test_the_most_that_a_prompt_costs_is_of_its_length(prompt: int, dearest: float) -> None:
    """Written to be kept for an hour."""
    assert LONG.at_most(prompt, 0) == pytest.approx(prompt * dearest / 1e6)
