"""Counts of slow requests by route, cause and culprit, by the minute: windows to compare, and incidents."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from policies.diagnosis.incident_groups import IncidentGroup, as_json, from_json, incidents, joined

MINUTE = 60.0  # s
KEPT = 120  # minutes
MOST = 256  # kinds of misses in a minute, above which a kind loses its culprit: there are as many routes and causes

Kind = tuple[str, str, str, str, bool]  # route, cause, culprit, caller whose own work it is, whether it failed


class MinuteCounts:
    """One minute. `requests`: by route; `slow`: of each kind of miss."""

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.requests: dict[str, int] = {}
        self.slow: dict[Kind, IncidentGroup] = {}

    def add(self, miss: IncidentGroup) -> None:
        kind = miss.route, miss.cause, miss.culprit, miss.caller, miss.failed > 0
        if kind not in self.slow and len(self.slow) >= MOST:
            kind = miss.route, miss.cause, "", "", miss.failed > 0
        self.slow[kind] = joined(self.slow[kind], miss) if kind in self.slow else miss


class SlowCounts:
    """The last KEPT minutes, bounded."""

    def __init__(self) -> None:
        self._minutes: deque[MinuteCounts] = deque(maxlen=KEPT)

    def count(self, route: str, miss: IncidentGroup | None, now: float) -> None:
        """`miss`: of a slow or failed request."""
        minute = int(now // MINUTE)
        if not self._minutes or self._minutes[-1].minute != minute:
            self._minutes.append(MinuteCounts(minute))
        current = self._minutes[-1]
        current.requests[route] = current.requests.get(route, 0) + 1
        if miss is not None:
            current.add(miss)

    def window(self, route: str, now: float, minutes: int, back: int = 0) -> dict[str, Any]:
        """Requests of a route in `minutes` minutes up to now, or up to `back` minutes ago; slow ones by cause, with
        the sum of ms over."""
        requests, causes = 0, dict[str, tuple[int, float]]()
        for each in self._within(now, minutes, back):
            requests += each.requests.get(route, 0)
            for miss in each.slow.values():
                if miss.route == route:
                    before = causes.get(miss.cause, (0, 0.0))
                    causes[miss.cause] = before[0] + miss.requests, before[1] + miss.over
        shown = {
            cause: {"requests": number, "over_ms": round(over * 1e3, 1)} for cause, (number, over) in causes.items()
        }
        return {"requests": requests, "causes": shown}

    def incidents(self, now: float, minutes: int) -> dict[str, Any]:
        """Requests by route, and the incidents of all routes, in `minutes` minutes up to now."""
        requests: dict[str, int] = {}
        found = list[IncidentGroup]()
        for each in self._within(now, minutes):
            for route, number in each.requests.items():
                requests[route] = requests.get(route, 0) + number
            found += each.slow.values()
        return _shown(requests, found)

    def _within(self, now: float, minutes: int, back: int = 0) -> Iterator[MinuteCounts]:
        end = int(now // MINUTE) - back
        return (each for each in self._minutes if end - minutes < each.minute <= end)


def merge_incidents(answers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The incidents of several workers."""
    requests: dict[str, int] = {}
    for each in answers:
        for route, number in each["requests"].items():
            requests[route] = requests.get(route, 0) + number
    return _shown(requests, [from_json(shown) for each in answers for shown in each["incidents"]])


def merge_windows(windows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The same window of several workers."""
    causes: dict[str, dict[str, float]] = {}
    for window in windows:
        for cause, found in window["causes"].items():
            before = causes.get(cause, {"requests": 0, "over_ms": 0.0})
            causes[cause] = {name: round(before[name] + value, 1) for name, value in found.items()}
    return {"requests": sum(window["requests"] for window in windows), "causes": causes}


def _shown(requests: dict[str, int], found: list[IncidentGroup]) -> dict[str, Any]:
    return {"requests": requests, "incidents": [as_json(each, requests) for each in incidents(found)]}
