"""A request on its way to a decision: read by the tier walk, held by the queue, awaited by the gateway's scheduler."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from policies.routes.route import Route
from policies.types import FOREVER, NEVER, Endpoint, PromptEstimate, RequestView


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request with its route and estimate, and its state while it waits in the gateway."""

    request_key: Hashable  # unique among requests not yet dispatched
    request: RequestView
    estimate: PromptEstimate
    route: Route
    sequence: int  # number of the request: turns round robin and breaks ties
    cache_group: str = ""  # the tenant, for fairness
    deadline: float = field(init=False)  # of the first token; FOREVER without a TTFT budget

    # while queued; written by policies.queue alone
    assigned: Endpoint | None = None
    prefill_s: float = 0.0  # engine time there
    spill_at: float = FOREVER  # last moment at which another tier still makes the deadline
    checked_at: float = NEVER  # last comparison with other tiers
    rate_limited_s: float = 0.0  # s queued because of a provider's rate limit, without the current period
    limited_since: float = FOREVER  # start of the current period; FOREVER: none

    def __post_init__(self) -> None:
        self.deadline = self.request.arrival + self.route.ttft_budget(self.request.ttft_budget)

    def __lt__(self, other: QueuedRequest) -> bool:
        return (self.deadline, self.sequence) < (other.deadline, other.sequence)

    @property
    def output_cap(self) -> int | None:
        """The caller's max_tokens under the route's limit."""
        return self.route.output_cap(self.request.max_tokens)

    def set_rate_limited(self, now: float, limited: bool = False) -> None:
        """Closes the current rate-limited period at `now` and, if `limited`, begins another."""
        if self.limited_since < now:
            self.rate_limited_s += now - self.limited_since
        self.limited_since = now if limited else FOREVER
