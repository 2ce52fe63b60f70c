"""Quotes: TTFT of a request at its arrival, with its waits in the gateway's queue, and the accuracy of earlier quotes.

Rules:
- A request that no rule holds is quoted the forecast of its endpoint, with the spread of that endpoint's own errors.
- The rule that holds a request decides how far its forecast is off. Such a request is quoted its forecast with the
  spread of the last quotes of the same class: of each rule, and of all late requests.
- A quote is scored by the first token. A held request that never gets one counts as one that takes longest: where that
  happens to more than one in ten of a class, no p90 is quoted.
- Every request of the gateway is quoted as it enters the queue, so quotes are scored without any memory of quotes that
  callers have asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from policies.latency.online_learning import ErrorQuantiles
from policies.queue.queued_request import Hold, HoldRule, QueuedRequest, Quote
from policies.types import QUANTILES, TINY, Candidate, Decision, Forecast, Quantiles

LATE = "late"  # class of the quotes of all held requests that are late
# Before any score: held requests of replays took 1.1 to 1.6 times their forecast in the median of a class, nine in ten
# less than 1.3 to 3.9 times.
PRIOR: Quantiles = tuple(NormalDist(0.3, 0.9).inv_cdf(q) for q in QUANTILES)
_NEW = ErrorQuantiles(PRIOR)  # of a class without a scored quote


class QuoteErrors:
    """TTFT / quoted TTFT of held requests, by class."""

    def __init__(self) -> None:
        self._of: dict[str, ErrorQuantiles] = {}

    def quote(self, forecast: Forecast, wait: float, rule: HoldRule, late: bool, now: float) -> Quote:
        """Of a request that the rule holds. `forecast`: of the endpoint; `wait`: s in the queue before, beyond the
        waits of the forecast."""
        held_as = LATE if late else rule.value
        ratios = self._of.get(held_as, _NEW).quantiles(now)
        return Quote(now, Forecast(wait + forecast.point_estimate, ratios, samples=forecast.samples), held_as)

    def observe(self, quote: Quote, ttft: float, now: float) -> None:
        """`ttft`: s after the quote; FOREVER: the request was not answered."""
        if quote.held_as:
            ratio = ttft / max(quote.forecast.point_estimate, TINY)
            self._of.setdefault(quote.held_as, ErrorQuantiles(PRIOR)).observe(ratio, now)


@dataclass(frozen=True, slots=True)
class TierQuote:
    """Best endpoint of a tier for a request. `rule`: would hold the request there."""

    candidate: Candidate
    quote: Quote
    rule: HoldRule | None = None

    def chance(self, queued: QueuedRequest, now: float) -> float:
        """Probability of the TTFT budget."""
        if self.rule is None:
            return self.candidate.probability
        left = queued.deadline - now - queued.extra_unseen(self.candidate.endpoint.pool)
        return self.quote.forecast.probability(left)


@dataclass(frozen=True, slots=True)
class RequestQuote:
    """Fate of a new request. `tiers`: one TierQuote for each tier with a usable endpoint, in the order of the
    route; `chosen`: among `tiers`; None: a refusal. `chance`: of the TTFT budget.
    `again_in`: s until the whole budget can be made; None: not even by an idle endpoint, or there is no budget."""

    decision: Decision
    tiers: Sequence[TierQuote]
    chosen: TierQuote | None
    chance: float
    again_in: float | None

    @property
    def hold(self) -> Hold | None:
        """Rule of the queue that would hold the request; None: no rule does, or a refusal."""
        found = self.chosen
        if found is None or found.rule is None:
            return None
        return Hold(found.rule, found.candidate.endpoint.id, self.decision.at)
