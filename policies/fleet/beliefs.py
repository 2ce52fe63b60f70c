"""Beliefs about an endpoint beyond its load, and why they are held: for the operator.

One value for GET /fleet, POST /explain and the dashboard. Callers are counted, never named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, starmap

from policies.fleet.caller_evidence import CallerState
from policies.fleet.circuit_breaker import BreakerState, CircuitBreaker
from policies.rate_limit.endpoint_limits import CONFIGURED, LIMITED
from policies.types import Health, Load

ALL = 0  # callers: every caller
LIMITS = (LIMITED, CONFIGURED)  # beliefs about limits in force


@dataclass(frozen=True, slots=True)
class Belief:
    """`until`: time of the next trial, or of the end of the belief. `callers`: number of callers to whom the belief
    applies, where their requests alone are the evidence; ALL: to every caller."""

    what: str
    why: str
    until: float
    callers: int = ALL


def beliefs(
    load: Load,
    shared: CircuitBreaker,
    callers: Iterable[CallerState],
    limited: Iterable[tuple[str, str, float]],
    now: float,
    load_fault: str = "",
) -> Iterator[Belief]:
    """`load`: for all callers; `limited`: beliefs about rate limits; `load_fault`: why the load is not known."""
    yield from _of_breaker(shared, now)
    if load.health is Health.DRAINING:
        yield Belief("draining", "an operator has drained it: it gets no request until it is ready again", now)
    if load.health is Health.ASLEEP:
        yield Belief("asleep", "it gets no request until it is woken", now)
    if load_fault and load_fault != shared.why:
        yield Belief("load unknown", load_fault, now)
    yield from starmap(Belief, limited)
    yield from _of_variants(load.unknown_variants or {}, now)
    if load.warming:
        yield Belief("warming up", "its cache is being refilled: the last choice of its pool", now)
    yield from _of_callers(callers, now)


def limits(callers: Iterable[CallerState], limited: Iterable[tuple[str, str, float]], now: float) -> Iterator[Belief]:
    """Of the beliefs those about limits in force: a provider's, or the configuration's."""
    yield from (Belief(*each) for each in limited if each[0] in LIMITS)
    yield from (each for each in _of_callers(callers, now) if each.what in LIMITS)


def _of_breaker(breaker: CircuitBreaker, now: float) -> Iterator[Belief]:
    if breaker.state is BreakerState.OPEN and breaker.until > now:
        yield Belief("down", breaker.why, breaker.until)
    elif breaker.state is not BreakerState.CLOSED:
        yield Belief("on trial", breaker.why, now)


def _of_variants(unknown: Mapping[str, float], now: float) -> Iterator[Belief]:
    for name, until in unknown.items():
        if until > now:
            yield Belief("model not served", f"it does not know the model {name}", until)


def _of_callers(callers: Iterable[CallerState], now: float) -> Iterator[Belief]:
    """Equal beliefs of several callers are one, until the latest end."""
    found: dict[tuple[str, str], Belief] = {}
    for state in callers:
        if state.is_over(now):
            continue
        for belief in chain(
            _of_breaker(state.breaker, now),
            starmap(Belief, state.refusal.reasons(now)),
            starmap(Belief, () if state.queue_cap is None else state.queue_cap.reasons(now)),
            _of_variants(state.unknown_variants, now),
        ):
            same = found.get((belief.what, belief.why), replace(belief, callers=0))
            until = max(same.until, belief.until)
            found[belief.what, belief.why] = replace(same, callers=same.callers + 1, until=until)
    yield from found.values()
