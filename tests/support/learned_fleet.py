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
) -> int:
    """Sends an attempt as a decision would; returns the key."""
    estimate, key = estimate or prompt(), next(KEYS)
    hit = to.hit(endpoint, estimate)
    forecast = to.forecast(endpoint, to.snapshot(now).loads[endpoint.id], estimate.tokens, hit, now)
    candidate = Candidate(endpoint, 0, estimate.tokens, hit, forecast, 1.0, 0.0)
    to.on_sent(key, candidate, estimate, now, stream, caller=caller)
    return key


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
    return of.forecast(endpoint, load(of, now, endpoint), tokens, 0, now).p50


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
