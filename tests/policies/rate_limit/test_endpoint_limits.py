"""Waits for a provider's rate limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.rate_limit.endpoint_limits import LIMITED, EndpointLimits
from policies.rate_limit.send_limits import UNLIMITED, RateLimit
from policies.types import NEVER


def requests(remaining: float, limit: float | None = 60, reset: float = 60.0, now: float = 0.0) -> RateLimit:
    return RateLimit.reported(False, remaining, limit, reset, now)


def tokens(remaining: float, limit: float | None = 1000, reset: float = 60.0) -> RateLimit:
    return RateLimit.reported(True, remaining, limit, reset, 0.0)


def provider(requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> EndpointLimits:
    return EndpointLimits(requests_per_minute, tokens_per_minute, learns=True)


def buckets(limits: EndpointLimits) -> tuple[RateLimit, ...]:
    return limits.send_limits(NEVER).buckets


def test_an_exhausted_limit_is_waited_for_until_it_lets_one_request_pass() -> None:
    """60 a minute are one a second; behind two others it takes three."""
    assert requests(0).wait(1, 0.0) == pytest.approx(1.0)
    assert requests(0).wait(1, 0.4) == pytest.approx(0.6)
    assert requests(0).wait(1, 0.0, requests_ahead=2) == pytest.approx(3.0)
    assert requests(1).wait(1, 0.0) == 0.0


def test_a_prompt_waits_for_the_tokens_it_lacks() -> None:
    assert tokens(400, reset=60.0).wait(300, 0.0) == 0.0
    assert tokens(400, reset=60.0).wait(500, 0.0) == pytest.approx(10.0)
    assert tokens(400, reset=60.0).wait(500, 0.0, tokens_ahead=100) == pytest.approx(20.0)


def test_a_prompt_larger_than_the_limit_waits_for_a_full_limit() -> None:
    assert tokens(400, reset=60.0).wait(9999, 0.0) == pytest.approx(60.0)
    assert tokens(400, reset=60.0).wait(9999, 60.0) == 0.0


def test_a_report_is_believed_for_a_minute() -> None:
    """A wrong one would otherwise end all requests, and with them all reports."""
    for limit in (None, 10):
        wrong = requests(0, limit=limit, reset=86_400.0)
        assert wrong.wait(1, 0.0) == 60.0
        assert wrong.wait(1, 59.0) == pytest.approx(1.0)
        assert wrong.wait(1, 60.0) == 0.0


def test_without_a_limit_what_remains_is_all_there_is_until_the_reset() -> None:
    unknown = requests(1, limit=None, reset=5.0)
    assert unknown.wait(1, 0.0) == 0.0
    assert unknown.after(1, 0.0).wait(1, 1.0) == pytest.approx(4.0)
    assert unknown.after(1, 0.0).wait(1, 5.0) == 0.0


@given(st.lists(st.floats(0, 5), max_size=30), st.integers(0, 20))
def test_a_wait_that_is_respected_never_exceeds_the_bucket(pauses: list[float], remaining: int) -> None:
    """Simulated: the provider's own bucket of 20, one a second, never refuses."""
    limit, bucket, filled_at, now = requests(remaining, 20, float(20 - remaining)), float(remaining), 0.0, 0.0
    for pause in pauses:
        now += pause
        now += limit.wait(1, now)
        bucket, filled_at = min(bucket + (now - filled_at), 20.0), now
        assert bucket >= 1 - 1e-6 or remaining == 20
        bucket -= 1
        limit = limit.after(1, now)


def test_requests_sent_after_the_reported_one_are_deducted() -> None:
    """A report is as of the sending of its request, and an older one changes nothing."""
    limits = provider()
    for at in (1.0, 2.0, 3.0):
        limits.on_sent(10, at)
    limits.on_reported([requests(5, limit=None, now=3.1)], sent_at=2.0)
    assert buckets(limits)[0].remaining == 4
    limits.on_reported([requests(50, limit=None, now=3.2)], sent_at=1.0)
    assert buckets(limits)[0].remaining == 4
    limits.on_sent(10, 4.0)
    assert buckets(limits)[0].remaining == 3


def test_a_rejection_without_a_time_waits_for_the_exhausted_limit() -> None:
    limits = provider()
    limits.on_reported([requests(0, limit=None, reset=7.0), tokens(900)], sent_at=0.0)
    assert limits.exhausted_for(1.0) == pytest.approx(6.0)
    limits.on_reported([requests(0, reset=60.0), tokens(900)], sent_at=0.5)
    assert limits.exhausted_for(0.0) == pytest.approx(1.0)
    limits.on_reported([requests(9, reset=7.0)], sent_at=1.0)
    assert limits.exhausted_for(1.0) is None


@pytest.mark.parametrize(
    ("remaining", "limit", "reset"), [(0, 1, 1e-320), (0, 1e-320, 60), (5e-324, 1, 60), (0, 1e15, 0)]
)
def test_no_report_of_a_hostile_server_makes_a_wait_that_no_clock_has(
    remaining: float, limit: float, reset: float
) -> None:
    reported = RateLimit.reported(True, remaining, limit, reset, 1000.0)
    for now in (1000.0, 1001.0):
        reported = reported.after(50, now)
        assert 0 <= reported.wait(100, now, 3, 300.0) <= 1e7


# ---------------------------------------------------------------------------- limits of the configuration


def test_a_configured_limit_lets_a_burst_pass_and_then_so_many_a_minute() -> None:
    """A bucket of the size of a minute."""
    limits = provider(60, None)
    for _ in range(60):
        assert buckets(limits)[0].wait(1, 0.0) == 0.0
        limits.on_sent(10, 0.0)
    assert buckets(limits)[0].wait(1, 0.0) == pytest.approx(1.0)
    assert buckets(limits)[0].wait(1, 1.0) == 0.0


def test_a_configured_limit_of_tokens_counts_prompts_and_answers() -> None:
    """1,000 tokens a minute are 100 in 6 s. A request is one request, however long its answer."""
    limits = provider(1000, 1000)
    limits.on_sent(600, 0.0)
    limits.on_output(400, 0.0)
    requests_left, tokens_left = buckets(limits)
    assert (requests_left.wait(1, 0.0), tokens_left.wait(100, 0.0)) == (0.0, pytest.approx(6.0))
    assert tokens_left.wait(100, 3600.0) == 0.0


def test_no_prompt_and_no_count_of_tokens_closes_an_endpoint_for_long() -> None:
    """One caller's prompt of 25 times the limit, which its provider refuses, costs the others a minute, not 25; so do
    reports of tokens that no answer has: two minutes for a full bucket."""
    limits = provider(None, 100_000)
    limits.on_sent(2_500_000, 0.0)
    assert buckets(limits)[0].wait(100_000, 0.0) == pytest.approx(60.0)
    for _ in range(100):
        limits.on_output(10**9, 0.0)
    assert buckets(limits)[0].wait(1, 0.0) == pytest.approx(60.0, rel=1e-3)
    assert buckets(limits)[0].wait(100_000, 0.0) == pytest.approx(120.0)


def test_without_a_configured_limit_there_is_none() -> None:
    assert buckets(provider(None, None)) == ()


def test_a_reload_keeps_what_was_sent_under_the_same_limit() -> None:
    """Another limit begins full."""
    limits = provider(60)
    for _ in range(60):
        limits.on_sent(10, 0.0)
    limits.reload(60, None, learns=True)
    assert buckets(limits)[0].wait(1, 0.0) == pytest.approx(1.0)
    limits.reload(30, None, learns=True)
    assert buckets(limits)[0].wait(1, 0.0) == 0.0


# ---------------------------------------------------------------------------- refusals


def test_a_refusal_known_from_elsewhere_counts_until_its_end() -> None:
    limits = provider()
    limits.refusal.on_refused(0.0, 5.0)
    assert [limits.send_limits(until).blocked_until for until in (NEVER, 3.0, 7.0)] == [5.0, 5.0, 7.0]
    assert provider().send_limits(NEVER) is UNLIMITED


def test_a_refusal_is_told_by_who_has_met_with_it() -> None:
    """By this process, or else by a peer; for lack of money it is told as such."""
    limits = provider()
    limits.refusal.on_refused(0.0, 5.0, "rate limit reached")
    assert [*limits.reasons(limits.send_limits(NEVER), NEVER, 1.0)] == [(LIMITED, "rate limit reached", 5.0)]
    (told,) = limits.reasons(limits.send_limits(9.0), NEVER, 6.0)
    assert told == (LIMITED, "a peer process reports it", 9.0)
    assert [*limits.reasons(limits.send_limits(9.0), 9.0, 6.0)] == []
