"""Counts of breaks and compositions, from which advice is written.

Rules:
- A ledger holds sums alone: it is filled by a running gateway or from its log, and ledgers of workers add up.
- Breaks are of the last 12 to 24 hours: in two generations, so that a mended one is forgotten. Days are kept for two
  weeks and a day, to compare a week with the week before.
- Routes are few. Of callers, and of places of breaks, the first ones are kept apart and all further ones summed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

from policies.prefix_doctor.lineage import Lineage, PrefixBreak
from policies.prompt_outline import EMPTY, PARTS, Composition

GENERATION = 43_200.0  # s
DAY = 86_400  # s
DAYS = 15
CALLERS = 256  # of a route and a generation
PLACES = 16  # of a caller
OTHERS = "(other callers)"
ELSEWHERE = -1  # block of all further places


class BreakCost(NamedTuple):
    """Of one break. `seconds`: of prefill; `missed`: a budget was, and would have been met."""

    seconds: float = 0.0
    missed: bool = False
    usd: float = 0.0

    def as_json(self) -> dict[str, Any]:
        times = {"prefill_ms": round(self.seconds * 1e3, 3)}
        return {**times, "missed_budget": self.missed, "usd": round(self.usd, 8)}


NO_COST = BreakCost()
NO_LINEAGE = Lineage()


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """Values of one request for the ledger."""

    route: str
    caller: str
    wall: float  # Unix time, s
    composition: Composition = EMPTY
    lineage: Lineage = NO_LINEAGE
    cost: BreakCost = NO_COST
    repaired: Sequence[str] = ()


@dataclass(slots=True)
class BreakTotals:
    """Of one place, under the names of GET /advise. `at_tokens`: the least; `classes`: breaks by class."""

    role: str
    block: int
    at_tokens: int = 0
    breaks: int = 0
    lost_tokens: int = 0
    prefill_ms: float = 0.0
    missed_budgets: int = 0
    usd: float = 0.0
    classes: dict[str, int] = field(default_factory=dict)

    def add(self, broken: PrefixBreak, cost: BreakCost) -> None:
        self.at_tokens = min(self.at_tokens, broken.at) if self.breaks else broken.at
        self.breaks += 1
        self.lost_tokens += broken.lost
        self.prefill_ms += cost.seconds * 1e3
        self.missed_budgets += cost.missed
        self.usd += cost.usd
        self.classes[broken.cls.value] = self.classes.get(broken.cls.value, 0) + 1

    def as_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in self.__slots__}  # asdict takes ten times as long
        return {**told, "prefill_ms": round(self.prefill_ms, 3), "usd": round(self.usd, 6)}


@dataclass(slots=True)
class CallerTotals:
    """Of one route and caller. `repaired`: requests, and tokens kept by the rule, by rule."""

    requests: int = 0
    places: dict[tuple[str, int], BreakTotals] = field(default_factory=dict)
    repaired: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, entry: LedgerEntry) -> None:
        self.requests += 1
        for rule in entry.repaired:
            requests, kept = self.repaired.get(rule, (0, 0))
            self.repaired[rule] = requests + 1, kept + (entry.lineage.kept or 0)
        if (broken := entry.lineage.broken) is not None:
            key = broken.role, broken.block
            if key not in self.places and len(self.places) >= PLACES:
                key = broken.role, ELSEWHERE
            self.places.setdefault(key, BreakTotals(*key)).add(broken, entry.cost)


@dataclass(slots=True)
class DayTotals:
    """Prompts of one route. `tokens`: by PARTS."""

    requests: int = 0
    tokens: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    def add(self, composition: Composition) -> None:
        if composition is not EMPTY:
            self.requests += 1
            self.tokens = list(map(add, self.tokens, composition))

    def as_json(self) -> dict[str, Any]:
        tokens = {part: round(tokens) for part, tokens in zip(PARTS, self.tokens, strict=True)}
        return {"requests": self.requests, "tokens": tokens}


@dataclass(slots=True)
class Generation:
    began: float
    callers: dict[tuple[str, str], CallerTotals] = field(default_factory=dict)

    def of(self, route: str, caller: str) -> CallerTotals:
        if (known := self.callers.get((route, caller))) is not None:
            return known
        key = (route, caller) if len(self.callers) < CALLERS else (route, OTHERS)
        return self.callers.setdefault(key, CallerTotals())


class PrefixLedger:
    """`now`: monotonic time. `rotates`: breaks of more than a day ago are forgotten; false for a log that is read."""

    def __init__(self, now: float, *, rotates: bool = True) -> None:
        self._rotates = rotates
        self._old: Generation | None = None
        self._young = Generation(now)
        self._days: dict[str, dict[int, DayTotals]] = {}

    def note(self, entry: LedgerEntry, now: float) -> None:
        if self._rotates and now - self._young.began >= GENERATION:
            self._old = self._young if now - self._young.began < 2 * GENERATION else None
            self._young = Generation(now)
        self._young.of(entry.route, entry.caller).add(entry)
        days, day = self._days.setdefault(entry.route, {}), int(entry.wall // DAY)
        if (totals := days.get(day)) is None:
            if len(days) >= DAYS:
                if day < (oldest := min(days)):
                    return
                del days[oldest]
            totals = days[day] = DayTotals()
        totals.add(entry.composition)

    def as_json(self, now: float, wall: float) -> dict[str, Any]:
        generations = [self._young] if self._old is None else [self._old, self._young]
        return {
            "wall": round(wall, 3),
            "observed_s": round(now - generations[0].began, 3),
            "callers": [_caller_json(key, totals) for each in generations for key, totals in each.callers.items()],
            "days": {
                route: {str(day): totals.as_json() for day, totals in sorted(days.items())}
                for route, days in self._days.items()
            },
        }


def _caller_json(key: tuple[str, str], totals: CallerTotals) -> dict[str, Any]:
    repaired = {rule: {"requests": n, "kept_tokens": kept} for rule, (n, kept) in totals.repaired.items()}
    return {
        "route": key[0],
        "caller": key[1],
        "requests": totals.requests,
        "places": [place.as_json() for place in totals.places.values()],
        "repaired": repaired,
    }


def merge_advice(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of several workers, which have observed the same time."""
    replies = list(found)
    days: dict[str, dict[str, Any]] = {}
    for reply in replies:
        for route, by_day in reply["days"].items():
            merged = days.setdefault(route, {})
            for day, totals in by_day.items():
                merged[day] = _summed(merged[day], totals) if day in merged else totals
    return {
        "wall": max((each["wall"] for each in replies), default=0.0),
        "observed_s": max((each["observed_s"] for each in replies), default=0.0),
        "callers": [caller for each in replies for caller in each["callers"]],
        "days": days,
    }


def _summed(one: Any, other: Any) -> Any:
    """Two values of the same shape."""
    if isinstance(one, Mapping):
        return {name: _summed(one[name], other[name]) for name in one}
    if isinstance(one, list):
        return [_summed(a, b) for a, b in zip(one, other, strict=True)]
    return one + other
