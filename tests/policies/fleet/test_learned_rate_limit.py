"""The rate limit of an API, as its refusals show it."""

from __future__ import annotations

from policies.fleet.circuit_breaker import LearnedRateLimit
from policies.fleet.fleet import AttemptReport
from policies.types import NEVER, AttemptOutcome
from tests.policies.fleets import API, answer, fleet, load, send


def refused_after(requests: int) -> LearnedRateLimit:
    """One request every 0.1 s, and one too many."""
    quota = LearnedRateLimit()
    for i in range(requests + 1):
        quota.on_sent(0.1 * i)
    quota.on_rejected(0.1 * requests)
    return quota


def test_what_was_taken_in_the_minute_before_a_refusal_is_the_limit() -> None:
    """Full until the first of the hundred is a minute old; then there is room for that one."""
    quota = refused_after(100)
    assert quota.full_until(10.0) == 60.0
    assert quota.full_until(60.05) == NEVER
    quota.on_sent(60.05)
    assert quota.full_until(60.05) > 60.05


def test_a_refusal_after_a_few_requests_says_nothing_of_a_limit() -> None:
    """The API was overloaded; a limit of three a minute would starve it."""
    assert refused_after(3).full_until(0.5) == NEVER


def test_without_a_refusal_there_is_no_limit() -> None:
    """However many are sent."""
    quota = LearnedRateLimit()
    for i in range(5000):
        quota.on_sent(0.001 * i)
    assert quota.full_until(5.0) == NEVER


def test_a_limit_is_tried_again_in_time() -> None:
    """A hundred minutes later twice as many are let through, or a limit that was raised would hold for ever."""
    quota = refused_after(100)
    for i in range(150):
        quota.on_sent(6000.0 + 0.1 * i)
    assert quota.full_until(6015.0) == NEVER


def test_an_api_at_its_limit_is_out_before_it_refuses() -> None:
    """The second minute costs no refusal; engines have no such limit."""
    to = fleet()
    for i in range(50):
        answer(to, endpoint=API, now=0.2 * i)
    to.on_ended(send(to, endpoint=API, now=10.0), AttemptOutcome.RATE_LIMITED, 10.0, AttemptReport(retry_after=1.0))
    assert 59.0 < load(to, 12.0, API).blocked_until <= 61.0
    for i in range(50):
        answer(to, endpoint=API, now=61.0 + 0.2 * i)
    assert load(to, 72.0, API).blocked_until > 119.0
