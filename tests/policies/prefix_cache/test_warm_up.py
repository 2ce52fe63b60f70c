"""Schedule of the gateway's own requests: warm-up and keep-warm."""

from __future__ import annotations

import pytest

from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import Fleet
from policies.prefix_cache.warm_up import (
    JITTER,
    MAX_FAILURES,
    MAX_OTHER_REQUESTS,
    MAX_WARM_UP,
    WarmUp,
    is_idle,
    warm_up_tokens,
)
from policies.rate_limit.send_limits import SendLimits
from policies.types import Health, Load
from tests.support.learned_fleet import HOSTED, ONE, SMALL, TWO, fleet, load

# --------------------------------------------------------------------------- lost caches


def test_at_boot_no_cache_is_lost() -> None:
    """Before the start no cache is known."""
    assert fleet().cache_lost == set()


@pytest.mark.parametrize("sign", ["start time", "counter", "unreachable"])
def test_a_restarted_engine_has_lost_its_cache(sign: str) -> None:
    """Shown by another start time, a counter that went back, or two failed probes."""
    to = fleet()
    if sign == "unreachable":
        to.on_probe_failed(ONE.id, 0.0)
        to.on_probe_failed(ONE.id, 0.5)
    else:
        for at, value in ((0.0, 500.0), (0.5, 100.0)):
            said = EngineLoad(started_at=value) if sign == "start time" else EngineLoad(prefix_queries=value)
            to.on_scrape(ONE.id, said, at)
    assert to.cache_lost == {ONE.id}


def test_an_added_endpoint_has_a_lost_cache_and_a_removed_endpoint_none() -> None:
    """A reload may add and remove endpoints."""
    to = Fleet([HOSTED])
    to.reload([HOSTED, SMALL])
    assert to.cache_lost == {ONE.id, TWO.id}
    to.reload([HOSTED])
    assert to.cache_lost == set()


def test_a_load_shows_warming() -> None:
    """Per endpoint."""
    to = fleet()
    to.set_warming(ONE.id, True)
    assert (load(to, endpoint=ONE).warming, load(to, endpoint=TWO).warming) == (True, False)
    to.set_warming(ONE.id, False)
    assert not load(to, endpoint=ONE).warming


# --------------------------------------------------------------------------- warming up


def test_a_warm_up_is_bounded_by_cache_share_and_prefill_time() -> None:
    """A slow engine is not busy for minutes, and a fast engine's cache keeps room for traffic."""
    assert warm_up_tokens(cache=400_000, rate=20_000) == 100_000
    assert warm_up_tokens(cache=400_000, rate=1_000) == 10_000


def test_a_warm_up_sends_the_hottest_prefix_first_and_ends_with_the_last() -> None:
    """Only completed prefixes are counted."""
    plan = WarmUp(["hottest", "hot"], in_flight=0, now=0.0)
    assert [plan.next(n, 0.1) for n in range(3)] == ["hottest", "hot", None]
    plan.on_ended(True, 500)
    plan.on_ended(False, 300)
    assert (plan.prefixes, plan.tokens) == (1, 500)


def test_a_warm_up_ends_when_the_pool_needs_the_engine() -> None:
    """A warming endpoint is the last choice, so other requests there show need. Own requests, and requests from
    before, do not count."""
    plan = WarmUp("abcd", in_flight=3, now=0.0)
    assert plan.next(3, 0.0) == "a"
    assert plan.next(3 + 1 + MAX_OTHER_REQUESTS - 1, 0.1) == "b"
    assert plan.next(3 + 2 + MAX_OTHER_REQUESTS, 0.1) is None


def test_a_warm_up_ends_after_failures_in_a_row() -> None:
    """A success resets the count."""
    plan = WarmUp("abcdefgh", in_flight=0, now=0.0)
    for well in [False] * (MAX_FAILURES - 1) + [True] + [False] * MAX_FAILURES:
        assert plan.next(0, 0.0) is not None
        plan.on_ended(well, 10)
    assert plan.next(0, 0.0) is None


def test_a_warm_up_ends_after_max_warm_up() -> None:
    """A pool must not miss an engine for long."""
    plan = WarmUp("ab", in_flight=0, now=100.0)
    assert plan.next(0, 100.0 + MAX_WARM_UP - 0.1) == "a"
    assert plan.next(0, 100.0 + MAX_WARM_UP) is None


# --------------------------------------------------------------------------- keeping warm


def test_keep_warm_waits_for_the_idle_time() -> None:
    """Less a jitter."""
    assert not is_idle("p/a", Load(), used_at=0.0, idle=60.0, now=60.0 * (1 - JITTER) - 0.1)
    assert is_idle("p/a", Load(), used_at=0.0, idle=60.0, now=60.0)


@pytest.mark.parametrize(
    "busy", [Load(health=Health.DOWN), Load(in_flight=1), Load(limits=SendLimits(blocked_until=61.0))]
)
def test_keep_warm_skips_a_down_busy_or_rate_limited_endpoint(busy: Load) -> None:
    """Traffic keeps an endpoint warm; a down endpoint takes no request."""
    assert not is_idle("p/a", busy, used_at=0.0, idle=60.0, now=60.0)


def test_a_jitter_spreads_keep_warm_requests() -> None:
    """Half of a large pool waits longer than the other half."""
    now = 60.0 * (1 - JITTER / 2)
    asked = [is_idle(f"p/{i}", Load(), used_at=0.0, idle=60.0, now=now) for i in range(100)]
    assert 30 <= sum(asked) <= 70
