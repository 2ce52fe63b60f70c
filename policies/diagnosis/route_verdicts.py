"""Verdict on each route in one sentence, from its counts in a window and its incidents: what an operator reads first.

States, the worst first:
- `fails`: requests ended without an answer, by a fault that is not the caller's. One is enough.
- `sheds`: requests were refused, as no endpoint had time for them.
- `late`: a smaller share of requests met an objective than the route promises.
- `recovered`: one of these, but the last such request ended more than RECOVERED seconds ago, and none of the others.
- `fine`, and `idle` for a route without a request in the window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from policies.diagnosis.causes import GLOSSES, Cause
from policies.diagnosis.incident_groups import IncidentGroup

RECOVERED = 60.0  # s


class RouteState(IntEnum):
    """The larger, the worse."""

    IDLE = 0
    FINE = 1
    RECOVERED = 2
    LATE = 3
    SHEDS = 4
    FAILS = 5


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Requests of a route in a window, refusals for a fault of the request excluded. `met`: share within the budget, by
    objective; `promised`: share that the route promises. `ttft_budget`: s, of a prompt without tokens if it grows."""

    route: str
    asked: int
    failed: int
    shed: int
    met: Mapping[str, float]
    promised: float
    ttft_budget: float | None = None


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """`mend`, `request_id`: of the worst incident; empty: there is none."""

    route: str
    state: RouteState
    text: str
    mend: str = ""
    request_id: str = ""


def verdicts(counts: Iterable[WindowCounts], incidents: Iterable[IncidentGroup], now: float) -> list[RouteVerdict]:
    """The worst first. `incidents`: of the same window, the worst first; `now`: Unix time."""
    of_route = defaultdict[str, list[IncidentGroup]](list)
    for each in incidents:
        of_route[each.route].append(each)
    found = [_verdict(each, of_route.get(each.route, ()), now) for each in counts]
    return sorted(found, key=lambda verdict: -verdict.state)


def _verdict(counts: WindowCounts, incidents: Sequence[IncidentGroup], now: float) -> RouteVerdict:
    """Of several troubles the worst that is not over, else the worst."""
    if troubles := _troubles(counts):
        return max((_judged(counts, each, incidents, now) for each in troubles), key=lambda found: found.state)
    few = f"; {incidents[0].late} late{_because(incidents[0])}" if incidents and counts.asked else ""
    state = RouteState.FINE if counts.asked else RouteState.IDLE
    return RouteVerdict(counts.route, state, f"{counts.route} {_well(counts)}{few}")


def _judged(counts: WindowCounts, state: RouteState, incidents: Sequence[IncidentGroup], now: float) -> RouteVerdict:
    """Judge one trouble by the incidents with requests of its kind: late requests do not keep a failure current."""
    is_late = state is RouteState.LATE
    own = [each for each in incidents if (each.late if is_late else each.failed)]
    told = own[0] if own else None
    text = f"{counts.route} {_trouble(counts, state)}{_because(told)}"
    ago = now - max((each.last if is_late or not own else each.failed_at for each in own or incidents), default=now)
    if ago > RECOVERED:
        state, text = RouteState.RECOVERED, f"{text}; not in the last {_minutes(ago)}"
    return RouteVerdict(counts.route, state, text, told.mend if told else "", told.request_id if told else "")


def _troubles(counts: WindowCounts) -> list[RouteState]:
    """The worst first."""
    if not counts.asked:
        return []
    found = {RouteState.FAILS: counts.failed, RouteState.SHEDS: counts.shed, RouteState.LATE: _missed(counts)}
    return [state for state, is_so in found.items() if is_so]


def _missed(counts: WindowCounts) -> str:
    """The objective that was met least; empty: all were met as promised."""
    least = min(counts.met, key=lambda objective: counts.met[objective], default="")
    return least if least and counts.met[least] < counts.promised else ""


def _well(counts: WindowCounts) -> str:
    if not counts.asked:
        return "idle: no request"
    if counts.ttft_budget is None or "ttft" not in counts.met:
        return f"fine: {counts.asked} answered"
    return f"fine: {_percent(counts.met['ttft'])} in {_time(counts.ttft_budget)}"


def _trouble(counts: WindowCounts, state: RouteState) -> str:
    if state is RouteState.FAILS:
        return f"fails {counts.failed} of {counts.asked} requests"
    if state is RouteState.SHEDS:
        return f"sheds {_percent(counts.shed / counts.asked)} of {counts.asked} requests"
    missed = _missed(counts)
    within = f"the {missed} budget" if missed != "ttft" or counts.ttft_budget is None else _time(counts.ttft_budget)
    return f"late: {_percent(counts.met[missed])} within {within}, {_percent(counts.promised)} promised"


def _because(incident: IncidentGroup | None) -> str:
    if incident is None:
        return ""
    if incident.cause == Cause.UNKNOWN:
        return f": {incident.evidence}"
    cause = GLOSSES.get(incident.cause, incident.cause)
    return f": {cause} ({incident.culprit})" if incident.culprit else f": {cause}"


def _percent(share: float) -> str:
    """A share that is not whole is not told as whole, and one that is there not as none."""
    if 0 < share < 0.001:
        return "under 0.1%"
    return "100%" if share == 1 else f"{min(share * 100, 99.9):.1f}%".replace(".0%", "%")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:g} s"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
