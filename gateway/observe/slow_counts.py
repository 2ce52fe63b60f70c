"""Counts of slow requests by route and cause, by the minute, to compare a window with the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from policies.diagnosis.causes import CauseVerdict

MINUTE = 60.0  # s
KEPT = 120  # minutes


class MinuteCounts:
    """One minute. `requests`: by route; `slow`: number, and s over, by route and cause."""

    def __init__(self, minute: int) -> None:
        self.minute = minute
        self.requests: dict[str, int] = {}
        self.slow: dict[tuple[str, str], tuple[int, float]] = {}


class SlowCounts:
    """The last KEPT minutes. Routes and causes are few, so memory is bounded."""

    def __init__(self) -> None:
        self._minutes: deque[MinuteCounts] = deque(maxlen=KEPT)

    def count(self, route: str, verdict: CauseVerdict | None, now: float) -> None:
        minute = int(now // MINUTE)
        if not self._minutes or self._minutes[-1].minute != minute:
            self._minutes.append(MinuteCounts(minute))
        current = self._minutes[-1]
        current.requests[route] = current.requests.get(route, 0) + 1
        if verdict is not None:
            number, over = current.slow.get((route, verdict.cause.value), (0, 0.0))
            current.slow[route, verdict.cause.value] = number + 1, over + verdict.over

    def window(self, route: str, now: float, minutes: int, back: int = 0) -> dict[str, Any]:
        """Requests of a route in `minutes` minutes up to now, or up to `back` minutes ago; slow ones by cause, with
        the sum of ms over."""
        end = int(now // MINUTE) - back
        requests, causes = 0, dict[str, tuple[int, float]]()
        for each in self._minutes:
            if end - minutes < each.minute <= end:
                requests += each.requests.get(route, 0)
                for (of, cause), (number, over) in each.slow.items():
                    if of == route:
                        before = causes.get(cause, (0, 0.0))
                        causes[cause] = before[0] + number, before[1] + over
        shown = {
            cause: {"requests": number, "over_ms": round(over * 1e3, 1)} for cause, (number, over) in causes.items()
        }
        return {"requests": requests, "causes": shown}


def merge_windows(windows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The same window of several workers."""
    causes: dict[str, dict[str, float]] = {}
    for window in windows:
        for cause, found in window["causes"].items():
            before = causes.get(cause, {"requests": 0, "over_ms": 0.0})
            causes[cause] = {name: round(before[name] + value, 1) for name, value in found.items()}
    return {"requests": sum(window["requests"] for window in windows), "causes": causes}
