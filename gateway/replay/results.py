"""What became of the requests of a replay, and the figures that follow from it.

Definitions are those of measurement: attainment is met / all offered, so shedding cannot inflate it;
good is TTFT and TPOT met; under two tokens there is no TPOT, which counts as met. A route without
budgets has no misses: it is shown by what it completed.

A Fate takes some 0.4 KB, about what its arrival takes; decisions are kept of the worst alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappush, heappushpop

from policies.routes.route import Route
from policies.types import Decision, Placement, PromptEstimate

NAN = float("nan")


class ReplayOutcome(Enum):
    UNFINISHED = "unfinished"  # when the replay was over
    COMPLETED = "completed"
    SHED = "shed"  # refused, or held for too long
    LOST = "lost"  # every attempt failed before the first token
    BROKEN = "broken"  # it died after its first token


@dataclass(slots=True)
class RequestResult:
    """One request of a replay. Times are seconds of the replay's clock; None: it never happened."""

    number: int
    route: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    end: ReplayOutcome = ReplayOutcome.UNFINISHED
    outcome: Placement | None = None
    sent_at: float | None = None  # of the attempt that won
    first_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0
    hedges: int = 0
    tier: int = 0
    endpoint: str = ""
    cached: int = 0  # tokens, as the engine found
    believed: int = 0
    p50: float = 0.0  # predicted from the sending on, s
    p90: float = 0.0
    alternative: float | None = None  # the least p50 among the others, s
    cost: float = 0.0  # USD

    @property
    def ttft(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.arrived

    @property
    def tpot(self) -> float | None:
        if self.first_at is None or self.ended_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_at) / (self.output_tokens - 1)

    @property
    def total(self) -> float | None:
        return (
            self.ended_at - self.arrived if self.end is ReplayOutcome.COMPLETED and self.ended_at is not None else None
        )

    @property
    def upstream(self) -> float | None:
        """From the sending of the attempt that won to its first token, s."""
        return None if self.first_at is None or self.sent_at is None else self.first_at - self.sent_at

    @property
    def regret(self) -> float:
        """Seconds by which the best alternative, as predicted then, would have been faster."""
        upstream = self.upstream
        return 0.0 if upstream is None or self.alternative is None else max(upstream - self.alternative, 0.0)


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The figures of one route, or of all. A share of nothing is NaN."""

    name: str
    offered: int
    attainment: float  # TTFT met / offered
    good: float  # TTFT and TPOT met / offered
    goodput: float  # good requests per second
    total: float  # total budget met / offered to routes that have one
    ttft: tuple[float, float, float]  # p50, p90, p99, s
    tpot: tuple[float, float]  # p50, p90, s
    hit: float  # cached / prompt tokens
    tiers: tuple[float, ...]  # share of the answered
    preferred: float  # share of the first tier among the good
    cost: float
    sheds: int
    lost: int  # before their first token
    broken: int  # after it
    unfinished: int
    extra: int  # hedges
    coverage: float  # share of TTFTs under the predicted p90
    error: float  # median |actual / p50 - 1|
    regret: float  # mean, s
    completed: int
    output_rate: float  # tokens/s of those completed


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """How well the predictions for one pool held."""

    pool: str
    samples: int
    coverage: float
    error: float


@dataclass(frozen=True, slots=True)
class Worst:
    """A decision that turned out badly, with all that it weighed."""

    fate: RequestResult
    decision: Decision
    estimate: PromptEstimate

    def __lt__(self, other: Worst) -> bool:
        return (self.fate.regret, -self.fate.number) < (other.fate.regret, -other.fate.number)


@dataclass(slots=True)
class Results:
    """All fates of one replay, in order of arrival. `seconds` is the offered duration."""

    routes: Mapping[str, Route]
    seconds: float
    keep: int = 0  # decisions of the most regret that are kept
    fates: list[RequestResult] = field(default_factory=list)
    _worst: list[Worst] = field(default_factory=list)  # a heap, the least of them first

    # ---------------------------------------------------------------- what happened

    def enter(self, fate: RequestResult) -> None:
        self.fates.append(fate)

    def answered(self, fate: RequestResult, decision: Decision, estimate: PromptEstimate) -> None:
        """Its first token is here, so that its regret is known."""
        if self.keep and fate.regret > 0:
            if len(self._worst) < self.keep:
                heappush(self._worst, Worst(fate, decision, estimate))
            else:
                heappushpop(self._worst, Worst(fate, decision, estimate))

    def worst(self) -> list[Worst]:
        """The decisions with the most regret, the worst first."""
        return sorted(self._worst, reverse=True)

    # ---------------------------------------------------------------- was it good

    def met_ttft(self, fate: RequestResult) -> bool:
        route = self.routes[fate.route]
        return fate.ttft is not None and (route.ttft is None or fate.ttft <= route.ttft.budget)

    def met_total(self, fate: RequestResult) -> bool:
        budget = self.routes[fate.route].total
        return fate.total is not None and (budget is None or fate.total <= budget.budget)

    def is_good(self, fate: RequestResult) -> bool:
        if not self.met_ttft(fate) or fate.end in (ReplayOutcome.LOST, ReplayOutcome.BROKEN):
            return False
        budget = self.routes[fate.route].tpot
        return budget is None or (fate.end is ReplayOutcome.COMPLETED and (fate.tpot or 0.0) <= budget.budget)

    def has_budget(self, name: str) -> bool:
        return self.routes[name].ttft is not None or self.routes[name].tpot is not None

    # ---------------------------------------------------------------- figures

    def rows(self) -> list[ResultRow]:
        """Every route that was asked for, and `all` that have a budget."""
        by_route: dict[str, list[RequestResult]] = {name: [] for name in self.routes}
        for fate in self.fates:
            by_route[fate.route].append(fate)
        return [*(self.row(name, fates) for name, fates in by_route.items() if fates), self.overall()]

    def overall(self) -> ResultRow:
        return self.row("all", self._budgeted())

    def between(self, start: float, end: float) -> ResultRow:
        """Those with a budget that arrived in this time."""
        return self.row("between", [fate for fate in self._budgeted() if start <= fate.arrived < end])

    def calibration(self) -> list[CalibrationResult]:
        by_pool: dict[str, list[RequestResult]] = {}
        for fate in self.fates:
            if fate.p50 and fate.upstream is not None:
                by_pool.setdefault(fate.endpoint.partition("/")[0], []).append(fate)
        return [
            CalibrationResult(pool, len(told), _coverage(told), _error(told)) for pool, told in sorted(by_pool.items())
        ]

    def _budgeted(self) -> list[RequestResult]:
        """Without any budget in any route, all of them."""
        return [fate for fate in self.fates if self.has_budget(fate.route)] or self.fates

    def row(self, name: str, fates: Sequence[RequestResult]) -> ResultRow:
        answered = [fate for fate in fates if fate.first_at is not None]
        done = [fate for fate in fates if fate.end is ReplayOutcome.COMPLETED]
        good = [fate for fate in fates if self.is_good(fate)]
        timed = [fate for fate in fates if self.routes[fate.route].total is not None]
        told = [fate for fate in answered if fate.p50]
        ttfts, tpots = [f.ttft for f in answered if f.ttft is not None], [f.tpot for f in done if f.tpot is not None]
        ended = {end: sum(fate.end is end for fate in fates) for end in ReplayOutcome}
        return ResultRow(
            name=name,
            offered=len(fates),
            attainment=_share(fates, self.met_ttft),
            good=_share(fates, self.is_good),
            goodput=len(good) / self.seconds,
            total=_share(timed, self.met_total),
            ttft=(quantile(ttfts, 0.5), quantile(ttfts, 0.9), quantile(ttfts, 0.99)),
            tpot=(quantile(tpots, 0.5), quantile(tpots, 0.9)),
            hit=sum(fate.cached for fate in answered) / max(sum(fate.prompt_tokens for fate in answered), 1),
            tiers=_tiers(answered),
            preferred=_share(good, lambda fate: fate.tier == 0),
            cost=sum(fate.cost for fate in fates),
            sheds=ended[ReplayOutcome.SHED],
            lost=ended[ReplayOutcome.LOST],
            broken=ended[ReplayOutcome.BROKEN],
            unfinished=ended[ReplayOutcome.UNFINISHED],
            extra=sum(fate.hedges for fate in fates),
            coverage=_coverage(told),
            error=_error(told),
            regret=sum(fate.regret for fate in told) / len(told) if told else NAN,
            completed=len(done),
            output_rate=sum(fate.output_tokens for fate in done) / self.seconds,
        )


def quantile(values: Iterable[float], q: float) -> float:
    """Nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else NAN


def _coverage(told: Sequence[RequestResult]) -> float:
    return _share(told, lambda fate: fate.upstream is not None and fate.upstream <= fate.p90)


def _error(told: Sequence[RequestResult]) -> float:
    return quantile((abs((fate.upstream or 0.0) / fate.p50 - 1) for fate in told), 0.5)


def _share(fates: Sequence[RequestResult], holds: Callable[[RequestResult], bool]) -> float:
    return sum(map(holds, fates)) / len(fates) if fates else NAN


def _tiers(answered: Sequence[RequestResult]) -> tuple[float, ...]:
    count = max((fate.tier for fate in answered), default=0) + 1
    return tuple(sum(fate.tier == tier for fate in answered) / max(len(answered), 1) for tier in range(count))
