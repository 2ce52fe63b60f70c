"""Engines and attainment of the access logs that a replay reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from gateway.records.log_entries import ChosenBreaks
from lab.intervals import wilson
from lab.replay.engine_fit import FittedEngine, fitted
from lab.replay.sim_fleet import Scenario
from lab.traffic.access_log import LoggedRequest
from lab.traffic.traces import logged_arrivals, read_log
from lab.traffic.traffic import Traffic, TrafficSource, assigned_route, breaks_on

SHOWN = 8  # endpoints


@dataclass(frozen=True, slots=True)
class LoggedAttainment:
    """Requests of a route that the gateway judged by their TTFT budget, and those that met it."""

    route: str
    judged: int
    met: int

    @property
    def share(self) -> float:
        return self.met / self.judged

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.met, self.judged)

    def line(self) -> str:
        low, high = self.interval
        interval = f"95% interval {low:.1%} to {high:.1%}"
        return f"as logged, {self.route}: {self.share:.1%} met, {interval}, {self.judged} requests with a TTFT budget"


class ReplayedLogs:
    """All access logs among the sources of a replay, as one. Raises TraceError."""

    def __init__(self, traffic: Traffic) -> None:
        logs = [(each, read_log(Path(each.trace), traffic.limit)) for each in traffic.sources if _is_log(each)]
        begin = min((request.at for _, log in logs for request in log), default=0.0)
        logs = [(source, [each for each in log if each.at - begin < traffic.cut]) for source, log in logs]
        self._by_source = logs
        self.requests: Sequence[LoggedRequest] = sorted(
            chain.from_iterable(log for _, log in logs), key=lambda request: request.at
        )
        self.fits: dict[str, FittedEngine] = {}  # of all scenarios so far, by endpoint id

    def fit(self, scenario: Scenario, pools: Collection[str]) -> dict[str, FittedEngine]:
        """Of the endpoints of these pools, by id."""
        wanted = [pool for pool in scenario.pools if pool.name in pools]
        if not self.requests or not wanted:
            return {}
        found = fitted(self.requests, logged_arrivals(self.requests), wanted)
        self.fits |= found
        return found

    def check_breaks(self, chosen: ChosenBreaks, routes: Collection[str]) -> None:
        """Raises ValueError where no request, replayed on `routes`, has one of these breaks."""
        found = Counter[str]()
        for source, log in self._by_source:
            if (own := breaks_on(replace(chosen, cls=None), assigned_route(source.route, routes))) is not None:
                found.update(each.broken for each in log if own.includes(each.route, each.broken))
        if not any(chosen.includes(chosen.route, cls) for cls in found):
            had = ", ".join(f"{cls} ({count})" for cls, count in found.most_common()) or "none"
            raise ValueError(f"no such break in an access log; breaks of route {chosen.route}: {had}")

    def attainments(self, routes: Collection[str]) -> list[LoggedAttainment]:
        """By route, as it happened; of all, where there are several."""
        judged = [request for request in self.requests if request.met is not None and request.route in routes]
        by_route = [_attainment(route, judged) for route in sorted({request.route for request in judged})]
        total = LoggedAttainment("all", len(judged), sum(bool(request.met) for request in judged))
        return [*by_route, total] if len(by_route) > 1 else by_route


def _is_log(source: TrafficSource) -> bool:
    return not source.trace.startswith("synthetic:") and not source.recorded_sessions


def _attainment(route: str, judged: Sequence[LoggedRequest]) -> LoggedAttainment:
    own = [request for request in judged if request.route == route]
    return LoggedAttainment(route, len(own), sum(bool(request.met) for request in own))


def with_fits(scenario: Scenario, fits: Mapping[str, FittedEngine]) -> Scenario:
    return replace(scenario, profiles={**scenario.profiles, **{name: fit.profile for name, fit in fits.items()}})


def fit_lines(fits: Mapping[str, FittedEngine]) -> Iterator[str]:
    """Profile and errors of each fit."""
    for name, fit in list(fits.items())[:SHOWN]:
        if not fit.answers:
            yield f"{name}: as the other endpoints of the pool; the log has too little of it"
            continue
        errors = f"first token within {fit.ttft_error:.0%}, TPOT within {fit.tpot_error:.0%} (median)"
        yield f"{name}: {fit.profile.name} to {fit.answers} answers of the log, {errors}"
    if len(fits) > SHOWN:
        yield f"and {len(fits) - SHOWN} more endpoints"
