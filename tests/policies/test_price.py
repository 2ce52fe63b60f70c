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


def test_the_most_that_a_request_can_cost_holds_for_every_cache() -> None:
    assert CACHING.at_most(1e6, 1e6) == pytest.approx(18.75)
    assert Price(3.0, 15.0, cached_input=0.3).at_most(1e6, 0) == pytest.approx(3.0)
