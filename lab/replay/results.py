"""Results of a replay: one RequestResult per request, and the statistics of a route or of all of them.

Definitions are those of measurement: attainment is met / all offered, so shedding cannot inflate the figure; good means
TTFT and TPOT met; an answer of fewer than two tokens has no TPOT, which counts as met. A route without budgets has no
misses: the figures are completed requests and throughput.

A RequestResult takes about 0.4 KB, as much as an Arrival; decisions are kept only of the worst requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappush, heappushpop

from lab.intervals import wilson
from lab.traffic.traces import Arrival, SeenBlocks
from policies.routes.route import Route
from policies.types import Decision, PromptEstimate

NAN = float("nan")
Interval = tuple[float, float]  # s: start, end


class ReplayOutcome(Enum):
    UNFINISHED = "unfinished"  # at the end of the replay
    COMPLETED = "completed"
    SHED = "shed"  # refused, or queued for too long
    LOST = "lost"  # every attempt failed before the first token
    BROKEN = "broken"  # failed after the first token
    LEFT = "left"  # the caller, before the first token


@dataclass(slots=True)
class RequestResult:
    """One request of a replay. Times are seconds of the replay's clock; None: has not happened."""

    number: int
    route: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    session: int = 0  # 0: none
    stream: bool = True
    refusals: list[float] = field(default_factory=list)  # s waited before each 503
    returned_at: float | None = None  # last time that the refused caller came back
    end: ReplayOutcome = ReplayOutcome.UNFINISHED
    dispatched_at: float | None = None  # of the first attempt: the end of the wait in the gateway's queue
    sent_at: float | None = None  # of the winning attempt
    first_at: float | None = None
    ended_at: float | None = None  # whatever the end
    attempts: int = 0
    hedges: int = 0
    tier: int = 0
    external: bool = False  # answered by an external API
    endpoint: str = ""
    pool: str = ""
    cached: int = 0  # tokens, as found by the engine
    p50: float = 0.0  # predicted, s after `sent_at`
    p90: float = 0.0
    total_p50: float = 0.0  # predicted whole answer, s after `sent_at`; 0: not weighed, or unknown
    total_p90: float = 0.0
    alternative: float | None = None  # lowest predicted p50 among the other candidates, s
    cost: float = 0.0  # USD
    new_tokens: int = 0  # of the prompt, that no earlier prompt began with; where a TTFT budget grows with these

    @property
    def ttft(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.arrived

    @property
    def queued(self) -> tuple[float, float] | None:
        """Start and end of the wait in the gateway's queue, since the last return; None: never dispatched."""
        if self.dispatched_at is None:
            return None
        return self.arrived if self.returned_at is None else self.returned_at, self.dispatched_at

    @property
    def tpot(self) -> float | None:
        if self.first_at is None or self.ended_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_at) / (self.output_tokens - 1)

    @property
    def took(self) -> float:
        """Seconds from the arrival to the end, whatever the end; NaN while unfinished."""
        return NAN if self.ended_at is None else self.ended_at - self.arrived

    @property
    def total(self) -> float | None:
        return self.took if self.end is ReplayOutcome.COMPLETED else None

    @property
    def is_under_total_p90(self) -> bool | None:
        """The whole answer took less than predicted, nearly always; None: it was not predicted, or has not ended."""
        if not self.total_p90 or self.ended_at is None or self.sent_at is None:
            return None
        return self.ended_at - self.sent_at <= self.total_p90

    @property
    def upstream(self) -> float | None:
        """Seconds from sending the winning attempt to the first token."""
        return None if self.first_at is None or self.sent_at is None else self.first_at - self.sent_at

    @property
    def regret(self) -> float:
        """Seconds that the best alternative would have saved, as predicted at the time."""
        upstream = self.upstream
        return 0.0 if upstream is None or self.alternative is None else max(upstream - self.alternative, 0.0)


@dataclass(frozen=True, slots=True)
class ResultRow:
    """Statistics of one route, or of all. A share of nothing is NaN."""

    name: str
    offered: int
    attainment: float  # TTFT met / offered
    interval: tuple[float, float]  # of 95%, of the attainment
    good: float  # TTFT and TPOT met / offered
    goodput: float  # good requests per second
    total: float  # total budget met / offered to routes with such a budget
    ttft: tuple[float, float, float]  # p50, p90, p99, s
    tpot: tuple[float, float]  # p50, p90, s
    hit: float  # cached / prompt tokens
    tiers: tuple[float, ...]  # share of the answered
    preferred: float  # share of the first tier among the good
    cost: float
    sheds: int
    lost: int  # before the first token
    broken: int  # after the first token
    unfinished: int
    extra: int  # hedges
    coverage: float  # share of TTFTs under the predicted p90
    error: float  # median |actual / p50 - 1|
    regret: float  # mean, s
    completed: int
    output_rate: float  # tokens/s of completed requests
    external: float  # share of the answered, by external APIs
    refused_after: float  # median wait before a 503, s
    refused: int  # 503s; a caller that comes back may get several
    returned: int  # requests that came back after a 503
    returned_good: float  # share of these that then met the TTFT budget, counted from their return
    total_coverage: float  # share of whole answers under the predicted p90
    answer: tuple[float, float, float]  # arrival to last byte: mean, p50, p90, s


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """Accuracy of the predictions for one pool."""

    pool: str
    samples: int
    coverage: float
    error: float


@dataclass(frozen=True, slots=True)
class RegrettedDecision:
    """A decision with regret, and the inputs."""

    result: RequestResult
    decision: Decision
    estimate: PromptEstimate

    def __lt__(self, other: RegrettedDecision) -> bool:
        return (self.result.regret, -self.result.number) < (other.result.regret, -other.result.number)


@dataclass(slots=True)
class Results:
    """All requests of one replay, in order of arrival. `seconds`: duration of the offered traffic."""

    routes: Mapping[str, Route]
    seconds: float
    keep: int = 0  # number of decisions kept, the most regretted
    requests: list[RequestResult] = field(default_factory=list)
    prefills: dict[str, list[Interval]] = field(default_factory=dict)  # of all attempts, by endpoint
    _seen: SeenBlocks = field(default_factory=SeenBlocks)
    _worst: list[RegrettedDecision] = field(default_factory=list)  # a heap, the least regret first

    def answered(self, result: RequestResult, decision: Decision, estimate: PromptEstimate) -> None:
        """Called at the first token, when the regret is known."""
        if self.keep and result.regret > 0:
            push = heappush if len(self._worst) < self.keep else heappushpop
            push(self._worst, RegrettedDecision(result, decision, estimate))

    def prefilled(self, endpoint: str, sent_at: float, now: float) -> None:
        """Note the prefill of an attempt: `sent_at` to `now`, s, the time of its first token or of its end."""
        self.prefills.setdefault(endpoint, []).append((sent_at, now))

    def worst(self) -> list[RegrettedDecision]:
        """Decisions with the most regret, the worst first."""
        return sorted(self._worst, reverse=True)

    # ---------------------------------------------------------------- budgets

    def new_tokens(self, arrival: Arrival) -> int:
        """Tokens of an arriving prompt that no earlier prompt began with; 0 where no TTFT budget grows with these.

        The measure of every policy: by its own uncached tokens, a policy that loses caches would get more time.
        """
        if not any(route.budget_grows for route in self.routes.values()):
            return 0
        return self._seen.new_tokens(arrival)

    def met_ttft(self, result: RequestResult) -> bool:
        """An answer without streaming arrives whole: it is judged by its total time."""
        route = self.routes[result.route]
        if not result.stream:
            return result.first_at is not None
        return result.ttft is not None and result.ttft <= route.ttft_budget(None, result.new_tokens)

    def is_judged(self, result: RequestResult) -> bool:
        """By the TTFT budget: streams, what was not answered, and callers that left after it."""
        if result.end is ReplayOutcome.LEFT:
            return result.took > self.routes[result.route].ttft_budget(None, result.new_tokens)
        return result.stream or result.first_at is None

    def made_it(self, result: RequestResult) -> bool:
        """A returned request met the TTFT budget, counted from the return."""
        if result.first_at is None or result.returned_at is None:
            return False
        budget = self.routes[result.route].ttft_budget(None, result.new_tokens)
        return result.first_at - result.returned_at <= budget

    def met_total(self, result: RequestResult) -> bool:
        route = self.routes[result.route]
        budget = route.total.budget if route.total else route.by
        return result.total is not None and (budget is None or result.total <= budget)

    def is_good(self, result: RequestResult) -> bool:
        if not self.met_ttft(result) or result.end in (ReplayOutcome.LOST, ReplayOutcome.BROKEN):
            return False
        budget = self.routes[result.route].tpot
        return budget is None or (result.end is ReplayOutcome.COMPLETED and (result.tpot or 0.0) <= budget.budget)

    # ---------------------------------------------------------------- statistics

    def rows(self) -> list[ResultRow]:
        """One per route with requests, then `all` routes with a budget."""
        by_route: dict[str, list[RequestResult]] = {name: [] for name in self.routes}
        for result in self.requests:
            by_route[result.route].append(result)
        return [*(self.row(name, found) for name, found in by_route.items() if found), self.overall()]

    def overall(self) -> ResultRow:
        return self.row("all", self._budgeted())

    def between(self, start: float, end: float) -> ResultRow:
        """Requests with a budget that arrived in [start, end)."""
        return self.row("between", [result for result in self._budgeted() if start <= result.arrived < end])

    def first_tokens(self, points: int) -> Iterator[tuple[float, float]]:
        """TTFT, and the share of the requests with a budget that had their first token by then."""
        requests = self._budgeted()
        ttfts = sorted(result.ttft for result in requests if result.ttft is not None)
        step = max(len(ttfts) // points, 1)
        return ((ttft, (i + 1) / len(requests)) for i, ttft in enumerate(ttfts) if i % step == 0 or i + 1 == len(ttfts))

    def calibration(self) -> list[CalibrationResult]:
        by_pool: dict[str, list[RequestResult]] = {}
        for result in self.requests:
            if result.p50 and result.upstream is not None:
                by_pool.setdefault(result.pool, []).append(result)
        return [
            CalibrationResult(pool, len(found), _coverage(found), _error(found))
            for pool, found in sorted(by_pool.items())
        ]

    def _budgeted(self) -> list[RequestResult]:
        """All requests where no route has a budget."""
        return [result for result in self.requests if has_budget(self.routes[result.route])] or self.requests

    def row(self, name: str, requests: Sequence[RequestResult]) -> ResultRow:
        answered = [result for result in requests if result.first_at is not None]
        completed = [result for result in requests if result.end is ReplayOutcome.COMPLETED]
        good = [result for result in requests if self.is_good(result)]
        timed = [each for each in requests if self.routes[each.route].total or self.routes[each.route].by]
        predicted = [result for result in answered if result.p50]
        ttfts = [result.ttft for result in answered if result.ttft is not None]
        judged = list(filter(self.is_judged, requests))
        met = sum(map(self.met_ttft, judged))
        waits = [wait for result in requests for wait in result.refusals]
        returned = [result for result in requests if result.returned_at is not None]
        tpots = [result.tpot for result in completed if result.tpot is not None]
        totals = [result.took for result in completed]
        ended = {end: sum(result.end is end for result in requests) for end in ReplayOutcome}
        return ResultRow(
            name=name,
            offered=len(requests),
            attainment=met / len(judged) if judged else NAN,
            interval=wilson(met, len(judged)),
            good=_share(requests, self.is_good),
            goodput=len(good) / self.seconds,
            total=_share(timed, self.met_total),
            ttft=(quantile(ttfts, 0.5), quantile(ttfts, 0.9), quantile(ttfts, 0.99)),
            tpot=(quantile(tpots, 0.5), quantile(tpots, 0.9)),
            hit=sum(result.cached for result in answered) / max(sum(result.prompt_tokens for result in answered), 1),
            tiers=_tiers(answered),
            preferred=_share(good, lambda result: result.tier == 0),
            cost=sum(result.cost for result in requests),
            sheds=ended[ReplayOutcome.SHED],
            lost=ended[ReplayOutcome.LOST],
            broken=ended[ReplayOutcome.BROKEN],
            unfinished=ended[ReplayOutcome.UNFINISHED],
            extra=sum(result.hedges for result in requests),
            coverage=_coverage(predicted),
            error=_error(predicted),
            regret=sum(result.regret for result in predicted) / len(predicted) if predicted else NAN,
            completed=len(completed),
            output_rate=sum(result.output_tokens for result in completed) / self.seconds,
            external=_share(answered, lambda result: result.external),
            refused_after=quantile(waits, 0.5),
            refused=len(waits),
            returned=len(returned),
            returned_good=_share(returned, self.made_it),
            total_coverage=_mean([each.is_under_total_p90 for each in completed if each.total_p90]),
            answer=(_mean(totals), quantile(totals, 0.5), quantile(totals, 0.9)),
        )


def has_budget(route: Route) -> bool:
    """True with a budget; other routes are judged by throughput."""
    return route.ttft is not None or route.tpot is not None or route.total is not None


def quantile(values: Iterable[float], q: float) -> float:
    """Nearest rank; NaN without values."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else NAN


def _coverage(requests: Sequence[RequestResult]) -> float:
    return _share(requests, lambda result: result.upstream is not None and result.upstream <= result.p90)


def _error(requests: Sequence[RequestResult]) -> float:
    return quantile((abs((result.upstream or 0.0) / result.p50 - 1) for result in requests), 0.5)


def _mean(values: Sequence[float | None]) -> float:
    return sum(filter(None, values)) / len(values) if values else NAN


def _share(requests: Sequence[RequestResult], holds: Callable[[RequestResult], bool]) -> float:
    return sum(map(holds, requests)) / len(requests) if requests else NAN


def _tiers(answered: Sequence[RequestResult]) -> tuple[float, ...]:
    count = max((result.tier for result in answered), default=0) + 1
    return tuple(sum(result.tier == tier for result in answered) / max(len(answered), 1) for tier in range(count))
