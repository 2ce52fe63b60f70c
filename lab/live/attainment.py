"""Attainment of the TTFT budgets in a replay against a real address, by route, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.intervals import wilson
from lab.live.live_player import LiveAnswer
from lab.traffic.traces import SeenBlocks
from policies.routes.route import Ttft

ALL = "all"


@dataclass(slots=True)
class RouteAttainment:
    """Requests of a route. `budgeted`: requests with a budget. A request without its first token is a miss."""

    name: str
    budget: float | None = None  # s, of a prompt without new tokens
    sent: int = 0
    budgeted: int = 0
    met: int = 0
    ttfts: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.met / self.budgeted if self.budgeted else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.met, self.budgeted)

    def add(self, answer: LiveAnswer, ttft: float | None, budget: float | None) -> None:
        self.sent += 1
        if budget is not None:
            self.budgeted += 1
            self.met += ttft is not None and ttft <= budget
        if ttft is not None:
            self.ttfts.append(ttft)
        if answer.tpot is not None:
            self.tpots.append(answer.tpot)
        if answer.failure:
            self.failures[answer.failure] += 1

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "route": self.name,
            "sent": self.sent,
            "budget_ms": None if self.budget is None else self.budget * 1e3,
            "met": self.met if self.budgeted else None,
            "attainment": [self.share, low, high] if self.budgeted else None,
            "ttft_ms": [quantile(self.ttfts, q) * 1e3 for q in (0.5, 0.9, 0.99)] if self.ttfts else None,
            "tpot_ms": quantile(self.tpots, 0.5) * 1e3 if self.tpots else None,
            "failures": dict(self.failures.most_common()),
        }


def attainments(answers: Iterable[LiveAnswer], budgets: Mapping[str, Ttft | None]) -> list[RouteAttainment]:
    """By route, in order of the names; and of all, where there are several. `budgets`: by route."""
    seen, routes, everything = SeenBlocks(), dict[str, RouteAttainment](), RouteAttainment(ALL)
    for answer in sorted(answers, key=lambda each: each.arrival.at):
        name, new = answer.arrival.route, seen.new_tokens(answer.arrival)
        wanted = budgets.get(name)
        budget = None if wanted is None else wanted.budget + (wanted.per_1k_tokens or 0.0) * new / 1e3
        ttft = answer.first_answer if wanted is not None and wanted.of == "answer" else answer.first
        found = routes.setdefault(name, RouteAttainment(name, None if wanted is None else wanted.budget))
        for each in (found, everything):
            each.add(answer, ttft, budget)
    rows = [routes[name] for name in sorted(routes)]
    return [*rows, everything] if len(rows) > 1 else rows


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]
