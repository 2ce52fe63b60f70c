"""Engines slower than the promised TPOT even at rest, in virtual time: the promise is no reason to refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from backends.server_profiles import PROFILES, EngineProfile
from lab.replay.player import play
from lab.replay.results import ReplayOutcome, RequestResult
from lab.replay.sim_fleet import Scenario, ScheduledFault
from tests.support.replay_builders import arrivals, route, scenario

PROMISE = 0.05  # s per token
LOADS = {"idle": 0.1, "busy": 0.8, "saturated": 6.0}  # requests per second; the engine prefills about 3
RATIOS = (0.8, 0.9, 0.95, 1.0, 1.1, 2.0)  # TPOT of an answer alone / promised TPOT
BUSY_HOST = (ScheduledFault(20.0, "main/0", "slow", 3.0),)
GPU = PROFILES["8b-l4"]


def fleet(ratio: float, promise: float | None) -> Scenario:
    """One engine, `ratio` times as slow to decode as `PROMISE`. `promise`: of the route; None: none."""
    assert isinstance(GPU, EngineProfile)
    slow = replace(GPU, weights_ms=PROMISE * ratio * 1e3 - GPU.duration_ms(1, 1) + GPU.weights_ms)
    tpot = "off" if promise is None else {"budget": f"{promise}s"}
    base = scenario(1, "8b-l4", route(ttft={"budget": "3s"}, tpot=tpot), first_token=60.0)
    return replace(base, profiles=dict.fromkeys(base.profiles, slow))


@cache
def played(
    ratio: float, load: str, promise: float | None, faults: tuple[ScheduledFault, ...] = ()
) -> list[RequestResult]:
    """Prompts of about 1,000 tokens, answers of about 200."""
    rate, scene = LOADS[load], replace(fleet(ratio, promise), faults=faults)
    return play(scene, arrivals(max(int(60 * rate), 30), rate, 1_000, 200), seed=1).requests


def answered(results: list[RequestResult]) -> int:
    return sum(result.end is ReplayOutcome.COMPLETED for result in results)


def ttft(results: list[RequestResult], share: float) -> float:
    """Quantile of the TTFT of all, in seconds; a refused request has waited longest."""
    waited = sorted(60.0 if result.ttft is None else result.ttft for result in results)
    return waited[int(share * (len(waited) - 1))]


def assert_as_good(found: list[RequestResult], without: list[RequestResult], tail: float = 1.5) -> None:
    """As many answers, about as soon, as from the same engine without a promise; where saturated a fifth
    less at most: the answers keep as much of the time, and what would wait for too long is refused.

    `tail`: most p90 of the TTFT, relative to that without a promise.
    """
    assert answered(found) >= (1.0 if answered(without) == len(without) else 0.8) * answered(without)
    for share, most in ((0.5, 1.5), (0.9, tail)):
        assert ttft(found, share) <= most * ttft(without, share) + 0.1
    assert ttft(found, 1.0) <= ttft(without, 1.0) + 10.0


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_promise_that_cannot_be_kept_refuses_nobody(ratio: float, load: str) -> None:
    """The same on both sides of the promise: no cliff."""
    assert_as_good(played(ratio, load, PROMISE), played(ratio, load, None))


@pytest.mark.parametrize("load", ["idle", "busy"])
def test_a_host_that_becomes_busy_refuses_nobody(load: str) -> None:
    """At 0.6 times the promise, and after 20 s at 1.8 times.

    Until the pace at rest is learned anew, prefills wait for answers that cannot catch up, and one in ten has them
    before it; without a promise none waits.
    """
    assert_as_good(played(0.6, load, PROMISE, BUSY_HOST), played(0.6, load, None, BUSY_HOST), tail=2.2)


def test_a_promise_that_can_be_kept_still_limits_prefills() -> None:
    """An engine at 0.6 times the promise keeps the promise for most answers, which takes fewer answers at a time."""
    kept, not_kept = (_pace_kept(played(0.6, "saturated", promise)) for promise in (PROMISE, None))
    assert kept > 0.9 > 0.5 > not_kept


def _pace_kept(results: list[RequestResult]) -> float:
    paces = [result.tpot for result in results if result.tpot is not None]
    return sum(pace <= PROMISE for pace in paces) / len(paces)
