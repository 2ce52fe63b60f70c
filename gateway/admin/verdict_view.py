"""GET /verdicts: the state of each route in one sentence, from the answers of GET /windows and GET /incidents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.observe.windows.count_history import WINDOWS
from gateway.observe.windows.route_windows import FAILED
from policies.diagnosis.incident_groups import from_json
from policies.diagnosis.route_verdicts import RouteState, RouteVerdict, WindowCounts, verdicts
from policies.routes.route import TARGET

SHORTEST = "5m"  # window of a verdict: 10 s have too few requests
NOT_ASKED = ("refused", "client_gone")  # outcomes that are the caller's own


def verdict_window(window: str) -> tuple[str, int]:
    """Window of GET /windows, and minutes of GET /incidents, for a window that a viewer shows."""
    name = SHORTEST if WINDOWS[window].seconds < WINDOWS[SHORTEST].seconds else window
    return name, round(WINDOWS[name].seconds / 60)


def verdicts_view(windows: Mapping[str, Any], incidents: Mapping[str, Any]) -> dict[str, Any]:
    found = verdicts(
        [_counts(route) for route in windows["routes"]],
        [from_json(each) for each in incidents["incidents"]],
        windows["at"],
    )
    return {"window": windows["window"], "summary": summary(found), "routes": [_shown(each) for each in found]}


def summary(found: Sequence[RouteVerdict]) -> str:
    """All routes in a sentence."""
    troubled = sum(each.state > RouteState.FINE for each in found)
    fine = sum(each.state is RouteState.FINE for each in found)
    if not troubled:
        return f"All is well: {_routes(fine)} fine." if fine else "No route has had a request."
    return f"{_routes(troubled)} with trouble, {fine} fine."


def _routes(number: int) -> str:
    return f"{number} route{'s' * (number != 1)}"


def _shown(found: RouteVerdict) -> dict[str, Any]:
    state = found.state.name.lower()
    return {
        "route": found.route,
        "state": state,
        "text": found.text,
        "mend": found.mend,
        "request_id": found.request_id,
    }


def _counts(route: Mapping[str, Any]) -> WindowCounts:
    outcomes: Mapping[str, float] = route["requests"]
    judged = {name: sum(counts.values()) for name, counts in route["slo"].items() if name != "goodput"}
    budget = route["ttft_budget_ms"]
    return WindowCounts(
        route=route["route"],
        asked=round(sum(count for outcome, count in outcomes.items() if outcome not in NOT_ASKED)),
        failed=round(sum(outcomes.get(outcome, 0) for outcome in FAILED)),
        shed=round(outcomes.get("shed", 0)),
        met={name: route["slo"][name].get("true", 0) / of for name, of in judged.items() if of},
        promised=route["ttft_target"] or TARGET,
        ttft_budget=None if budget is None or route["ttft_budget_grows"] else budget / 1e3,
    )
