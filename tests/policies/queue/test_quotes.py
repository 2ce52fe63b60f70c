"""Quotes of new requests, and how they learn from those that were held."""

from __future__ import annotations

import pytest

from policies.latency.online_learning import ErrorQuantiles
from policies.queue.queued_request import HoldRule
from policies.queue.quotes import LATE, QuoteErrors
from policies.types import FOREVER, Forecast, Placement
from tests.support.queue_fixture import ONE, QueueFixture

FORECAST = Forecast(1.0, ErrorQuantiles().quantiles(0.0))


def test_a_request_that_nothing_holds_is_quoted_its_forecast() -> None:
    found = QueueFixture().quote(tokens=4000, budget=1.0).chosen
    assert found is not None
    quote, forecast = found.quote, found.candidate.forecast
    assert (quote.p50, quote.p90, quote.held_as) == (forecast.p50, forecast.p90, "")


def test_a_held_request_is_quoted_by_the_ttfts_of_those_held_by_the_same_rule() -> None:
    """Twice the forecast for most, three times for one in five; other rules learn nothing of it."""
    errors = QuoteErrors()
    for number in range(200):
        quote = errors.quote(FORECAST, 0.0, HoldRule.SLACK, False, 0.0)
        errors.observe(quote, 3.0 if number % 5 == 0 else 2.0, 0.0)
    learned, other = (errors.quote(FORECAST, 1.0, rule, False, 0.0) for rule in (HoldRule.SLACK, HoldRule.PACE))
    assert (learned.p50, learned.p90) == (pytest.approx(4.0, rel=0.02), pytest.approx(6.0, rel=0.02))
    assert other == QuoteErrors().quote(FORECAST, 1.0, HoldRule.PACE, False, 0.0)


def test_where_one_late_request_in_five_is_refused_no_p90_is_quoted() -> None:
    """The median is still known."""
    errors = QuoteErrors()
    for number in range(200):
        quote = errors.quote(FORECAST, 0.0, HoldRule.HARM, True, 0.0)
        errors.observe(quote, FOREVER if number % 5 == 0 else 2.0, 0.0)
    quote = errors.quote(FORECAST, 0.0, HoldRule.CALM, True, 0.0)
    assert (quote.held_as, quote.p50, quote.p90) == (LATE, pytest.approx(2.0, rel=0.1), None)


def test_asking_for_a_quote_changes_nothing() -> None:
    """Of a request in time, a late one, and one without a deadline."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.enter("held", tokens=4000, budget=0.15)
    for budget in (1.0, 0.15, None):
        before = queue.would_hold(tokens=4000, budget=budget)
        assert [queue.would_hold(tokens=4000, budget=budget) for _ in range(5)] == [before] * 5
    assert queue.scheduler.held == 1


def test_a_held_request_keeps_the_quote_of_its_entry() -> None:
    """Quoted once, however often it is decided again; it is that quote which is scored."""
    queue = QueueFixture()
    queue.fill(ONE)
    queue.enter("r", tokens=4000, budget=1.0)
    held = queue.held("r")
    first = held.quoted
    assert first is not None
    assert (first.at, first.held_as) == (queue.now, "prefill")
    assert queue.release(later=5.0) == ["r"]
    assert held.quoted is first


def test_a_quote_is_what_becomes_of_the_request() -> None:
    """Sent at once, with the forecast of its decision."""
    queue = QueueFixture()
    asked = queue.quote(tokens=4000, budget=1.0)
    queue.enter("r", tokens=4000, budget=1.0)
    assert asked.decision.outcome is Placement.PLACE
    assert asked.chosen is not None
    placed = queue.released["r"].chosen
    assert placed is not None
    assert (asked.chosen.candidate.endpoint.pool, asked.chosen.quote.p90) == (placed.endpoint.pool, placed.forecast.p90)
