"""Limits on sending, as decisions ask them."""

from __future__ import annotations

import pytest

from policies.rate_limit.send_limits import RATE_LIMIT_WINDOW, UNLIMITED, RateLimit, SendLimits

MINUTE = (RateLimit.configured(False, 60.0), RateLimit.configured(True, 6000.0))  # one request, 100 tokens a second


def test_the_longest_wait_counts() -> None:
    """Of a refusal of all requests, one of this caller's alone, and each bucket."""
    spent = tuple(limit.after(6000, 0.0, requests=60) for limit in MINUTE)
    assert SendLimits(buckets=MINUTE).wait(100, 0.0) == 0.0
    assert SendLimits(buckets=spent).wait(500, 0.0) == pytest.approx(5.0)
    assert SendLimits(9.0, buckets=spent).wait(500, 0.0) == 9.0
    assert SendLimits(9.0, 11.0, spent).wait(500, 1.0) == 10.0
    assert SendLimits(9.0, 11.0).wait(500, 12.0) == 0.0


def test_requests_that_are_sent_before_count() -> None:
    """Where a bucket counts anything at all."""
    limits = SendLimits(buckets=MINUTE)
    assert limits.behind(63, 0.0).wait(1, 0.0) == pytest.approx(4.0)
    assert limits.behind(1, 6000.0).wait(100, 0.0) == pytest.approx(1.0)
    assert limits.behind(0, 0.0) is limits
    assert UNLIMITED.behind(9, 9e9) is UNLIMITED


@pytest.mark.parametrize(
    "limits", [SendLimits(buckets=MINUTE), SendLimits(blocked_until=1.5), SendLimits(refused_until=1.5)]
)
def test_some_request_may_have_to_wait(limits: SendLimits) -> None:
    assert limits.may_hold(1.0)
    assert limits.may_hold(2.0) == bool(limits.buckets)
    assert not UNLIMITED.may_hold(1.0)


def test_a_refusal_of_all_is_remembered_for_a_minute() -> None:
    """One of the caller's own says nothing of others."""
    limits = SendLimits(blocked_until=10.0, refused_until=500.0)
    lately = [limits.refused_lately(now) for now in (1.0, 10.0, 10.0 + RATE_LIMIT_WINDOW, 10.1 + RATE_LIMIT_WINDOW)]
    assert lately == [True, True, True, False]
    assert not UNLIMITED.refused_lately(1.0)
