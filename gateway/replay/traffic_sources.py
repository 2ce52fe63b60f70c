"""Where the requests of a replay come from: `[ROUTE=]TRACE` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from gateway.replay.scenario import Scenario, routed
from gateway.replay.synthetic import Agents, agents
from gateway.replay.traces import Arrival, TraceError, at_load, read_trace, spread

AGENTS = "synthetic:agents"


@dataclass(frozen=True, slots=True)
class TrafficSource:
    """`route` None: the trace's own, or the only one there is."""

    trace: str
    route: str | None = None

    @classmethod
    def parse(cls, text: str) -> TrafficSource:
        route, named, trace = text.partition("=")
        return cls(trace, route) if named and "/" not in route else cls(text)

    def arrivals(self, load: float, seed: int, limit: int | None) -> list[Arrival]:
        """At `load` times the trace's own pace. Made-up sessions keep their pace and become more instead."""
        if self.trace == AGENTS:
            usual = Agents()
            return agents(replace(usual, sessions=usual.sessions * load), seed)[:limit]
        if self.trace.startswith("synthetic:"):
            raise TraceError(f"{self.trace}: there is {AGENTS} only")
        return at_load(spread(_read(self.trace, limit), seed), load)


@lru_cache(maxsize=8)
def _read(trace: str, limit: int | None) -> list[Arrival]:
    return read_trace(Path(trace), limit)


@dataclass(frozen=True, slots=True)
class Traffic:
    """All sources. `limit`: requests of each; `seconds`: of the replay's own time."""

    sources: tuple[TrafficSource, ...]
    limit: int | None = None
    seconds: float | None = None

    def arrivals(self, setting: Scenario, load: float, seed: int) -> Sequence[Arrival]:
        """In order of time, every one on a route of the setting. Raises TraceError."""
        chosen = [
            arrival
            for source in self.sources
            for arrival in routed(source.arrivals(load, seed, self.limit), setting, source.route)
            if self.seconds is None or arrival.at < self.seconds
        ]
        return sorted(chosen, key=lambda arrival: arrival.at)
