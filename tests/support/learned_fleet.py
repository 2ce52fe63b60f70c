"""A small fleet and its attempts, for tests of learned state."""

from __future__ import annotations

from itertools import count
from statistics import median

from hypothesis import strategies as st

from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Candidate, Endpoint, Load, Pool, PoolEstimate, PrefixBlocks
from tests.support.virtual_engine import Request

ONE, TWO, API = Endpoint("small/1", "small"), Endpoint("small/2", "small"), Endpoint("api/1", "api")


SMALL = Pool("small", "m", (ONE, TWO), kv_tokens=16_000)


HOSTED = Pool("api", "g", (API,), local=False)


KEYS = count()


def fleet() -> Fleet:
    return Fleet([SMALL, HOSTED])


def prompt(tokens: int = 1000, blocks: int = 0, scale: float = 1.0, first: int = 1) -> PoolEstimate:
    return PoolEstimate(tokens, PrefixBlocks(range(first, first + blocks), 16, scale), text_tokens=tokens - 7)


def send(
    to: Fleet,
    estimate: PoolEstimate | None = None,
    endpoint: Endpoint = ONE,
    now: float = 0.0,
    stream: bool = True,
    caller: str = "",
    tpot_budget: float | None = None,
) -> int:
    """Sends an attempt as a decision would; returns the key."""
    estimate, key = estimate or prompt(), next(KEYS)
    to.on_sent(key, candidate_of(to, endpoint, now, estimate), estimate, now, stream, tpot_budget, caller=caller)
    return key


def candidate_of(of: Fleet, endpoint: Endpoint, now: float, estimate: PoolEstimate | None = None) -> Candidate:
    estimate, present = estimate or prompt(), of.snapshot(now).loads[endpoint.id]
    hit = of.view.hit(endpoint, estimate)
    forecast = of.view.forecast(endpoint, present, estimate.tokens, hit, now)
    return Candidate(endpoint, 0, estimate.tokens, hit, forecast, 1.0, 0.0, load=present)


def answer(
    to: Fleet,
    estimate: PoolEstimate | None = None,
    endpoint: Endpoint = ONE,
    now: float = 0.0,
    ttft: float = 0.1,
    reported: AttemptReport | None = None,
) -> None:
    key = send(to, estimate, endpoint, now)
    to.on_first_token(key, now + ttft)
    to.on_ended(key, AttemptOutcome.COMPLETED, now + ttft + 1, reported)


def load(of: Fleet, now: float = 0.0, endpoint: Endpoint = ONE) -> Load:
    return of.snapshot(now).loads[endpoint.id]


def median_ttft(of: Fleet, endpoint: Endpoint = ONE, tokens: int = 1000, now: float = 0.0) -> float:
    return of.view.forecast(endpoint, load(of, now, endpoint), tokens, 0, now).p50


events = st.tuples(
    st.sampled_from(["send", "first", "end", "scrape", "lost", "found"]),
    st.integers(0, 7),
    st.sampled_from([ONE, TWO, API]),
    st.sampled_from(list(AttemptOutcome)),
    st.booleans(),
)


# --------------------------------------------------------------------------- on a virtual engine


def median_error(answered: list[Request]) -> float:
    """Median relative error of the predicted medians."""
    return median(abs(request.ttft / request.forecast.p50 - 1) for request in answered)
