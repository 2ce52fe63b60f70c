"""Rate limit of an API, learned from rejections."""

from __future__ import annotations

from policies.blame.blame import BLAME
from policies.fleet.fleet import AttemptReport
from policies.rate_limit.learned_limit import LearnedRateLimit
from policies.types import NEVER, AttemptOutcome
from tests.support.learned_fleet import API, answer, fleet, load, send

REQUESTS_SPENT = AttemptReport(retry_after=1.0, blame=BLAME["request_rate"])


def refused_after(requests: int) -> LearnedRateLimit:
    """Sends one request every 0.1 s; the last is rejected."""
    limit = LearnedRateLimit()
    for i in range(requests + 1):
        limit.on_sent(0.1 * i)
    limit.on_rejected(0.1 * requests)
    return limit


def test_the_limit_is_the_number_accepted_in_the_minute_before_a_rejection() -> None:
    """The API is full until the first of the 100 requests is a minute old; then one request fits."""
    limit = refused_after(100)
    assert limit.full_until == 60.0
    limit.on_sent(60.05)
    assert limit.full_until > 60.05


def test_a_rejection_after_a_few_requests_sets_no_limit() -> None:
    """The API was overloaded; a limit of three per minute would starve the API."""
    assert refused_after(3).full_until == NEVER


def test_an_api_that_refuses_a_request_at_the_least_limit_is_not_full() -> None:
    """The refused request was not accepted, and 19 are too few to learn from."""
    limit = refused_after(20)
    limit.on_sent(60.05)
    assert limit.full_until > 60.05
    limit.on_rejected(60.05)
    assert limit.full_until <= 60.05


def test_without_a_rejection_there_is_no_limit() -> None:
    """At any number of requests."""
    limit = LearnedRateLimit()
    for i in range(5000):
        limit.on_sent(0.001 * i)
    assert limit.full_until == NEVER


def test_a_learned_limit_is_forgotten_after_a_minute_without_a_rejection() -> None:
    """Otherwise a raised limit, or one that was none, would go unnoticed for hours."""
    limit = refused_after(100)
    assert (limit.limit(69.9), limit.limit(70.0)) == (100, None)
    for i in range(150):
        limit.on_sent(70.0 + 0.1 * i)
    assert limit.full_until <= 70.0


def test_an_api_at_its_limit_is_blocked_before_it_rejects() -> None:
    """The rest of the minute costs no rejection."""
    to = fleet()
    for i in range(50):
        answer(to, endpoint=API, now=0.2 * i)
    to.on_ended(send(to, endpoint=API, now=10.0), AttemptOutcome.RATE_LIMITED, 10.0, REQUESTS_SPENT)
    assert 59.0 < load(to, 12.0, API).limits.blocked_until <= 61.0
