"""The input of a decision: a request with route, estimate and deadlines."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from policies.route_hooks import Fits
from policies.routes.route import Route
from policies.types import FOREVER, Candidate, Forecast, PromptEstimate, Quantiles, RequestView


@dataclass(slots=True, eq=False)
class PlacementRequest:
    """A request with its route and estimate: the input of a decision."""

    request_key: Hashable  # unique among requests not yet dispatched
    request: RequestView
    estimate: PromptEstimate
    route: Route
    sequence: int  # number of the request: turns round robin and breaks ties
    tenant: str = ""  # for fairness
    weight: float = 1.0  # of the tenant
    reasoning: Mapping[str, Forecast] | None = None  # before the answer, by pool, where the budget is of the answer
    answer_tokens: Quantiles = ()  # of the answer, where the end of it is weighed; empty: not known
    decode_s: float = 0.0  # expected from the first token to the last, at the fastest pool
    deadline: float = field(init=False)  # of the first token; FOREVER without a TTFT or total budget
    due: float = field(init=False)  # of the last byte, where the request can wait until then; else FOREVER
    unseen: Mapping[str, float] | None = field(init=False)  # s of reasoning that the target share keeps to, by pool
    output_cap: int | None = field(init=False)  # the caller's max_tokens under the route's limit
    fits: tuple[Fits, ...] = field(init=False)  # hooks: may an endpoint take it
    promises_total_alone: bool = field(init=False)  # the chance of the whole answer decides: there is no TTFT budget

    def __post_init__(self) -> None:
        route, request = self.route, self.request
        self.deadline = request.arrival + route.ttft_budget(request.ttft_budget, self.estimate.uncached_tokens)
        self.promises_total_alone = route.total is not None and route.ttft is None and request.ttft_budget is None
        self.unseen = None
        if self.reasoning:
            self.unseen = {pool: each.quantile(route.target) for pool, each in self.reasoning.items()}
            self.deadline -= self.least_unseen
        if self.deadline == FOREVER and route.total is not None:
            self.deadline = self.total_deadline - self.decode_s
        self.due = FOREVER
        if self.deadline == FOREVER:
            self.due = request.arrival + route.done_within(request.by)
        self.output_cap, self.fits = route.output_cap(request.max_tokens), route.fits(request)

    def qualifies(self, candidate: Candidate) -> bool:
        """The candidate makes the deadline with the target probability, or is tried as its forecast is a guess."""
        return candidate.probability >= self.route.target or candidate.trial_s > 0

    @property
    def weighs_total(self) -> bool:
        """The chance of the whole answer counts beside that of the first token."""
        return bool(self.answer_tokens) and self.route.total is not None and not self.promises_total_alone

    @property
    def total_deadline(self) -> float:
        """Of the last token; FOREVER without a total budget."""
        return FOREVER if self.route.total is None else self.request.arrival + self.route.total.budget

    @property
    def least_unseen(self) -> float:
        """Seconds of reasoning at the pool with the least: the deadline leaves these."""
        return min(self.unseen.values()) if self.unseen else 0.0

    def extra_unseen(self, pool: str) -> float:
        """The same at the pool, beyond the least."""
        return self.unseen[pool] - self.least_unseen if self.unseen else 0.0
