from dataclasses import replace
from statistics import median

import pytest

from backends.server_profiles import ApiProfile
from lab.engines.engine_events import EngineFirstToken, EngineRequest, Finished, Refused
from lab.engines.virtual_engine import HostedApi

API = ApiProfile("api", "mini")


def test_the_median_ttft_grows_with_the_prompt():
    """Log-normal around base + tokens x rate."""

    def typical(prompt: int) -> float:
        api = HostedApi(replace(API, requests_per_minute=10_000), seed=1)
        return median(api.submit(EngineRequest(i, prompt, 1), now=0.0).first_at for i in range(2000))

    assert (typical(10), typical(20_000)) == pytest.approx((0.35, 0.75), rel=0.05)


def test_tokens_come_steadily_after_the_first():
    """First token and end are told in order, and lie (tokens - 1) gaps apart."""
    api = HostedApi(API, seed=3)
    timing = api.submit(EngineRequest("a", 100, 101), now=2.0)
    first, last = api.run_until(99.0)
    assert (first, last, api.running) == (
        EngineFirstToken("a", timing.first_at, 0.0, 0),
        Finished("a", pytest.approx(timing.first_at + 100 * timing.gap), 101),
        0,
    )


def test_beyond_the_rate_limit_requests_get_429_with_retry_after():
    """The window slides: a slot is free 60 s after its request."""
    api = HostedApi(replace(API, requests_per_minute=2))
    for now in (0.0, 10.0):
        api.submit(EngineRequest(now, 10, 1), now)
    with pytest.raises(Refused) as refused:
        api.submit(EngineRequest("third", 10, 1), now=15.0)
    assert (refused.value.status, refused.value.retry_after) == (429, 45.0)
    assert (api.remaining(59.0), api.remaining(60.0), api.resets_in(60.0)) == (0, 1, 10.0)


def test_a_bucket_holds_a_burst_and_is_refilled_evenly():
    """Six at once at four a second: the seventh after a quarter of a second; after a while six again, and no more."""
    api = HostedApi(replace(API, requests_per_minute=240, burst=6))
    for number in range(6):
        api.submit(EngineRequest(number, 10, 1), now=1.0)
    with pytest.raises(Refused) as refused:
        api.submit(EngineRequest("seventh", 10, 1), now=1.0)
    assert (refused.value.status, refused.value.retry_after) == (429, 0.25)
    assert [api.remaining(now) for now in (1.2, 1.25, 2.0, 60.0)] == [0, 1, 4, 6]
    api.submit(EngineRequest("eighth", 10, 1), now=1.25)
    assert api.remaining(1.25) == 0


def test_an_aborted_answer_sends_no_further_events():
    """The request still counts against the rate limit."""
    api = HostedApi(API)
    api.submit(EngineRequest("a", 10, 10), now=0.0)
    assert (api.abort("a"), api.run_until(99.0), api.running, api.remaining(1.0)) == (True, [], 0, 599)


def test_the_same_seed_gives_the_same_timing():
    """Answers are drawn from the seed, in order of submission."""
    timings = [HostedApi(API, seed=7).submit(EngineRequest("a", 10, 10), now=0.0) for _ in range(2)]
    assert timings[0] == timings[1]
