"""Shares of requests that met a budget, with a lower bound that takes sessions, not requests, to be independent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

from lab.replay.results import ReplayOutcome, RequestResult, Results
from policies.routes.route import Route

NORMAL = 1.2816  # quantile of the normal distribution: one side, 90%
TTFT, TPOT, TOTAL = "ttft", "tpot", "total"


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """`met` of `requests` made a budget of a route, whose `target` is a share. `lower`: 90% sure to be exceeded;
    `highest`: that of no miss among so few; `required`: the target, or `highest` where that is less."""

    route: str
    budget: str  # TTFT, TPOT or TOTAL
    requests: int
    met: int
    target: float
    lower: float
    highest: float

    @property
    def share(self) -> float:
        return self.met / self.requests

    @property
    def required(self) -> float:
        return min(self.target, self.highest)

    @property
    def shortfall(self) -> float:
        return self.required - self.lower

    def has_room(self, spare: float) -> bool:
        """The budget is met, and `lower` above `required` by this share of what is possible."""
        return self.lower >= self.required + spare * (self.highest - self.required)


def lower_bound(share: float, count: float) -> float:
    """Of a share of `count` independent draws, by Wilson (1927)."""
    z2 = NORMAL * NORMAL
    middle = share + z2 / (2 * count)
    return max((middle - NORMAL * sqrt(share * (1 - share) / count + z2 / (4 * count * count))) / (1 + z2 / count), 0.0)


def independent_draws(met_of: Iterable[tuple[int, int]]) -> float:
    """Requests that say as much as those of all sessions, `(met, requests)` each, whose turns fail together."""
    sessions = list(met_of)
    requests = sum(count for _, count in sessions)
    share = sum(met for met, _ in sessions) / requests
    if not 0 < share < 1:
        return float(len(sessions))
    between = sum((met - share * count) ** 2 for met, count in sessions)
    return min(share * (1 - share) * requests * requests / between, float(requests)) if between else float(requests)


def budget_shares(results: Results, requests: Iterable[RequestResult]) -> Iterator[BudgetShare]:
    """One for each budget of each route with requests."""
    by_route: dict[str, list[RequestResult]] = {}
    for result in requests:
        by_route.setdefault(result.route, []).append(result)
    for name, found in by_route.items():
        route = results.routes[name]
        for budget in budgets_of(route):
            yield _share(route, budget, [(result.session, _met(results, result, budget)) for result in found])


def budgets_of(route: Route) -> list[str]:
    held = {TTFT: route.ttft, TPOT: route.tpot, TOTAL: route.total}
    return [name for name, budget in held.items() if budget is not None]


def _met(results: Results, result: RequestResult, budget: str) -> bool:
    if budget == TTFT:
        return results.met_ttft(result)
    if budget == TOTAL:
        return results.met_total(result)
    limit = results.routes[result.route].tpot
    return result.end is ReplayOutcome.COMPLETED and (limit is None or (result.tpot or 0.0) <= limit.budget)


def _share(route: Route, budget: str, met: Iterable[tuple[int, bool]]) -> BudgetShare:
    by_session: dict[int, list[int]] = {}
    for session, made in met:
        counts = by_session.setdefault(session, [0, 0])
        counts[0] += made
        counts[1] += 1
    pairs = [(made, count) for made, count in by_session.values()]
    made, count = (sum(each) for each in zip(*pairs, strict=True))
    draws = independent_draws(pairs)
    lower, highest = lower_bound(made / count, draws), lower_bound(1.0, draws)
    return BudgetShare(route.name, budget, count, made, route.target, lower, highest)


def worst(shares: Iterable[BudgetShare]) -> Mapping[tuple[str, str], BudgetShare]:
    """The share with the largest shortfall, by route and budget."""
    found: dict[tuple[str, str], BudgetShare] = {}
    for share in shares:
        key = share.route, share.budget
        if key not in found or share.shortfall > found[key].shortfall:
            found[key] = share
    return found
