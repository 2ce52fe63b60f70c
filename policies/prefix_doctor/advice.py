"""Advice from the sums of a ledger: breaks ranked by cost, and growth of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.prefix_doctor.break_class import BreakClass, mend
from policies.prefix_doctor.prefix_ledger import DAY
from policies.prompt_outline import PARTS

WEEK = 7  # days
SHORTEST = 60.0  # s of observation from which a day is extrapolated
GROWTH = 0.1  # of the mean prompt against the week before, from which growth is an alert ...
GROWN = 50  # ... and tokens
ENOUGH = 20  # requests, below which a week says nothing


@dataclass(frozen=True, slots=True)
class BreakAdvice:
    """One place. Sums are per day; `seconds`: of prefill."""

    route: str
    caller: str
    role: str
    at: int
    cls: BreakClass
    breaks: float
    requests: float
    lost: float
    seconds: float
    missed: float
    usd: float
    mend: str


@dataclass(frozen=True, slots=True)
class Drift:
    """Mean tokens of a prompt by part, in the latest seven days and in those before; None: too few requests."""

    route: str
    now: Mapping[str, float]
    before: Mapping[str, float] | None

    @property
    def growth(self) -> float | None:
        """Of the mean prompt, relative."""
        if self.before is None or not (earlier := sum(self.before.values())):
            return None
        return sum(self.now.values()) / earlier - 1

    @property
    def has_grown(self) -> bool:
        growth = self.growth
        if growth is None or self.before is None:
            return False
        return growth >= GROWTH and sum(self.now.values()) - sum(self.before.values()) >= GROWN


@dataclass(frozen=True, slots=True)
class RepairAdvice:
    """Requests of a day whose prompts a rule has changed, and tokens of theirs that were shared."""

    route: str
    caller: str
    rule: str
    requests: float
    kept: float


@dataclass(frozen=True, slots=True)
class Advice:
    wall: float
    observed: float  # s
    breaks: Sequence[BreakAdvice] = ()
    repairs: Sequence[RepairAdvice] = ()
    drifts: Sequence[Drift] = ()
    days: Mapping[str, Mapping[int, Mapping[str, float]]] = field(default_factory=dict)  # mean prompts, by route


def advice(sums: Mapping[str, Any]) -> Advice:
    """`sums`: as of GET /advise. Raises KeyError, TypeError or ValueError for another document."""
    wall, observed = float(sums["wall"]), float(sums["observed_s"])
    per_day = DAY / max(observed, SHORTEST)
    days = {route: {int(day): totals for day, totals in found.items()} for route, found in sums["days"].items()}
    today = int(wall // DAY)
    return Advice(
        wall,
        observed,
        sorted(_breaks(sums["callers"], per_day), key=lambda each: (-each.seconds, -each.usd, -each.lost)),
        _repairs(sums["callers"], per_day),
        [drift for route, found in days.items() if (drift := _drift(route, found, today)) is not None],
        {route: {day: _mean(totals) for day, totals in found.items()} for route, found in days.items()},
    )


# -- breaks --------------------------------------------------------------------------------


def _breaks(callers: Iterable[Mapping[str, Any]], per_day: float) -> Iterable[BreakAdvice]:
    """Workers, and halves of a day, are summed up by place."""
    places: dict[tuple[str, str, str, int], list[Mapping[str, Any]]] = {}
    requests: dict[tuple[str, str], int] = {}
    for caller in callers:
        key = str(caller["route"]), str(caller["caller"])
        requests[key] = requests.get(key, 0) + int(caller["requests"])
        for place in caller["places"]:
            places.setdefault((*key, str(place["role"]), int(place["block"])), []).append(place)
    for (route, name, role, _), found in places.items():
        sums = {column: per_day * sum(float(each[column]) for each in found) for column in _SUMS}
        at, cls = min(int(each["at_tokens"]) for each in found), _class(found)
        yield BreakAdvice(
            route,
            name,
            role,
            at,
            cls,
            breaks=sums["breaks"],
            requests=per_day * requests[route, name],
            lost=sums["lost_tokens"],
            seconds=sums["prefill_ms"] / 1e3,
            missed=sums["missed_budgets"],
            usd=sums["usd"],
            mend=mend(route, cls, role),
        )


_SUMS = ("breaks", "lost_tokens", "prefill_ms", "missed_budgets", "usd")


def _class(found: Iterable[Mapping[str, Any]]) -> BreakClass:
    """The most frequent; the first break of each conversation has none yet."""
    counts: dict[str, int] = {}
    for place in found:
        for cls, number in place["classes"].items():
            counts[cls] = counts.get(cls, 0) + int(number)
    known = {cls: number for cls, number in counts.items() if cls != BreakClass.UNCLASSIFIED}
    return BreakClass(max(known, key=lambda cls: known[cls])) if known else BreakClass.UNCLASSIFIED


def _repairs(callers: Iterable[Mapping[str, Any]], per_day: float) -> list[RepairAdvice]:
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for caller in callers:
        for rule, found in caller["repaired"].items():
            key = str(caller["route"]), str(caller["caller"]), str(rule)
            requests, kept = sums.get(key, (0, 0))
            sums[key] = requests + int(found["requests"]), kept + int(found["kept_tokens"])
    return [RepairAdvice(*key, per_day * requests, per_day * kept) for key, (requests, kept) in sums.items()]


# -- prompts -------------------------------------------------------------------------------


def _mean(totals: Mapping[str, Any]) -> dict[str, float]:
    requests = max(int(totals["requests"]), 1)
    return {part: float(totals["tokens"][part]) / requests for part in PARTS}


def _week(days: Mapping[int, Mapping[str, Any]], last: int) -> list[Mapping[str, Any]]:
    return [totals for day, totals in days.items() if last - WEEK < day <= last]


def _drift(route: str, days: Mapping[int, Mapping[str, Any]], today: int) -> Drift | None:
    now, before = _mean_of(_week(days, today)), _mean_of(_week(days, today - WEEK))
    return None if now is None else Drift(route, now, before)


def _mean_of(week: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    requests = sum(int(totals["requests"]) for totals in week)
    if requests < ENOUGH:
        return None
    return {part: sum(float(totals["tokens"][part]) for totals in week) / requests for part in PARTS}
