"""Traffic of a replay: one or several traces, at a load, on the routes of a scenario.

Sessions have no recorded start: they start as a Poisson process, `SessionStarts.rate` times the load per second. A
higher load means more sessions, at the pace of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from gateway.records.log_entries import ChosenBreaks
from lab.traffic.session_sample import sampled, with_sessions
from lab.traffic.sessions import closed_loop, is_sessions, read_sessions
from lab.traffic.traces import AGENTS, BLOCK, Agents, Arrival, TraceError, agents, at_load, coarser, read_trace, spread
from policies.types import FOREVER

RATE = 0.1  # new sessions per second of a recorded trace
SECONDS = 600.0  # of recorded sessions, which no end of the trace cuts
SOURCE = 1 << 20  # numbers of sessions per source


@dataclass(frozen=True, slots=True)
class SessionStarts:
    """`rate`: new sessions per second of a recorded trace, at a load of 1; `closed`: closed loop.

    `before`: sessions of other sources, with lower numbers.
    """

    rate: float = RATE
    seconds: float = SECONDS
    closed: bool = False
    before: int = 0


@dataclass(frozen=True, slots=True)
class TrafficSource:
    """`[ROUTE=]TRACE` of the command line. `route` None: the trace's own, or the only route."""

    trace: str
    route: str | None = None

    @classmethod
    def parse(cls, text: str) -> TrafficSource:
        route, named, trace = text.partition("=")
        return cls(trace, route) if named and "/" not in route else cls(text)

    @property
    def recorded_sessions(self) -> bool:
        return not self.trace.startswith("synthetic:") and is_sessions(Path(self.trace))

    def arrivals(
        self,
        load: float,
        seed: int,
        limit: int | None,
        starts: SessionStarts = SessionStarts(),
        repaired: ChosenBreaks | None = None,
    ) -> list[Arrival]:
        """At `load` times the trace's rate. Sessions keep the pace, and grow in number instead."""
        if self.recorded_sessions:
            recorded = read_sessions(Path(self.trace))
            return recorded.started(starts.rate * load, starts.seconds, seed, starts.closed, starts.before)[:limit]
        if self.trace == AGENTS:
            return _synthetic(load, seed, starts)[:limit]
        if self.trace.startswith("synthetic:"):
            raise TraceError(f"{self.trace}: unknown synthetic trace; known: {AGENTS}")
        found = spread(_read_cached(self.trace, limit, repaired), seed)
        is_closed = load != 1.0 and any(each.follows for each in found)
        found = sampled(with_sessions(found), load, seed) if is_closed else at_load(found, load)
        return [replace(each, session=each.session + starts.before) if each.session else each for each in found]


def _synthetic(load: float, seed: int, starts: SessionStarts) -> list[Arrival]:
    usual = Agents()
    made = agents(replace(usual, sessions=usual.sessions * load), seed)
    numbered = [replace(arrival, session=arrival.session + starts.before) for arrival in made]
    return closed_loop(numbered, starts.seconds) if starts.closed else numbered


@lru_cache(maxsize=8)
def _read_cached(trace: str, limit: int | None, repaired: ChosenBreaks | None) -> list[Arrival]:
    return read_trace(Path(trace), limit, repaired)


@dataclass(frozen=True, slots=True)
class Traffic:
    """All sources of a replay. `limit`: requests of each source; `seconds`: cut-off in replay time.

    `rate`, `closed`: as in SessionStarts. `repaired`: breaks of prefixes that access logs are played without.
    """

    sources: tuple[TrafficSource, ...]
    limit: int | None = None
    seconds: float | None = None
    rate: float = RATE
    closed: bool = False
    repaired: ChosenBreaks | None = None

    @property
    def cut(self) -> float:
        """Seconds of the replay after which nothing arrives."""
        if self.seconds is None and any(source.recorded_sessions for source in self.sources):
            return SECONDS
        return FOREVER if self.seconds is None else self.seconds

    @property
    def window(self) -> float:
        """`seconds` of the Scenario."""
        return self.cut if self.closed and self.cut < FOREVER else 0.0

    def arrivals(self, routes: Collection[str], load: float, seed: int) -> list[Arrival]:
        """Arrivals in time order, each on one of `routes`. Raises TraceError."""
        starts = SessionStarts(self.rate, self.cut, self.closed)
        chosen = [
            arrival
            for i, source in enumerate(self.sources)
            for arrival in on_routes(
                source.arrivals(
                    load,
                    seed,
                    self.limit,
                    replace(starts, before=i * SOURCE),
                    self.repaired and breaks_on(self.repaired, assigned_route(source.route, routes)),
                ),
                routes,
                source.route,
            )
            if (arrival.follows and self.closed) or arrival.at < self.cut
        ]
        block = max((arrival.block for arrival in chosen), default=BLOCK)
        chosen = [arrival if arrival.block == block else coarser(arrival, block) for arrival in chosen]
        if self.closed and not any(arrival.session for arrival in chosen):
            raise TraceError("--closed: no trace holds sessions")
        return sorted(chosen, key=lambda arrival: arrival.at)


def assigned_route(route: str | None, routes: Collection[str]) -> str | None:
    """The route of all requests of a trace: that of the command line, or the only route; None: as the trace says."""
    return next(iter(routes)) if route is None and len(routes) == 1 else route


def breaks_on(chosen: ChosenBreaks, assigned: str | None) -> ChosenBreaks | None:
    """The breaks in a log whose requests are all on route `assigned`, by the log's names of routes. None: they are on
    their own; returned: there are none."""
    if assigned is None:
        return chosen
    return replace(chosen, route="") if chosen.route == assigned else None


def on_routes(arrivals: Iterable[Arrival], routes: Collection[str], route: str | None) -> list[Arrival]:
    """Assigns every arrival to `route`, to the route named by the trace, or to the only route."""
    names = ", ".join(routes)
    if route is not None and route not in routes:
        raise TraceError(f"no route '{route}'; known: {names}")
    route = assigned_route(route, routes)
    chosen = [arrival if route is None else replace(arrival, route=route) for arrival in arrivals]
    known = [arrival for arrival in chosen if arrival.route in routes]
    if not known:
        raise TraceError(f"no request of the trace names one of the routes {names}; write ROUTE=TRACE")
    return known
