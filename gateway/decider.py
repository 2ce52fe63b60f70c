"""From a request to a decision: the estimate, the Ask, the snapshot and the clock, given to pure code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

from backends.interface import Operation
from gateway.admission.auth import Tenant
from gateway.api.inference_request import InferenceRequest, parse
from gateway.fleet.monitor import Monitor
from gateway.observe.record import Record, RequestOutcome
from gateway.tokenize.estimator import Estimator
from policies.routes.route import Route
from policies.routing.tiers import decide
from policies.types import Decision, Health, PromptEstimate, RequestView

LARGE = 150_000  # bytes of body: 0.4 ms to parse if nothing in it is known
MANY, SUSPECT = 400, 15_000  # messages: 1 ms to parse if none is known; bytes of body that may hold as many
LOOK = 2_048  # bytes in which messages are counted, in three places: in all of 100 KB it would take 56 us


class Decider:
    """What the straight line, the line of those who wait and /explain share."""

    def __init__(self, estimator: Estimator, monitor: Monitor) -> None:
        self.estimator, self.monitor = estimator, monitor

    async def parse(
        self,
        operation: Operation,
        raw: bytes,
        headers: Mapping[str, str],
        arrival: float,
        request_id: str,
        wanted_headers: frozenset[str] = frozenset(),
    ) -> InferenceRequest:
        """`ingress.parse`, in a thread where it would hold up the loop. Raises Refusal."""
        asked = operation, raw, headers, arrival, request_id, wanted_headers
        if len(raw) <= LARGE and (len(raw) <= SUSPECT or messages_in(raw) <= MANY):
            return parse(*asked)
        return await asyncio.get_running_loop().run_in_executor(self.estimator.executor, parse, *asked)

    async def estimate(self, request: InferenceRequest, route: Route, tenant: Tenant) -> PromptEstimate:
        """Prompt tokens and prefix blocks for every pool of the route; large new text is counted in a thread."""
        pools = [tier.pool for tier in route.tiers]
        expected = self.monitor.fleet.expected_output(route.name, route.output_cap(request.max_tokens))
        return await self.estimator.estimate(request.prompt, pools, tenant.cache_group, expected)

    def decide(
        self, request: InferenceRequest, route: Route, estimate: PromptEstimate, tenant: Tenant, ordinal: int
    ) -> Decision:
        """What would become of it now if nobody were held back. Changes nothing."""
        now, fleet, ask = monotonic(), self.monitor.fleet, ask_of(request, route, tenant.cache_group)
        return decide(ask, estimate, route, fleet.snapshot(now), fleet, now, ordinal)

    def learn(self, record: Record) -> None:
        """A sink of Records: how long this route's answers are."""
        if record.end is RequestOutcome.COMPLETED and record.output_tokens:
            self.monitor.fleet.observe_output(record.route, record.output_tokens)

    def any_usable(self, now: float) -> bool:
        return any(load.health is not Health.DOWN for load in self.monitor.snapshot(now).loads.values())


def messages_in(raw: bytes) -> float:
    """About as many as a body has, if they are spread as in the places where it is looked at."""
    places = 0, len(raw) // 2, len(raw) - LOOK
    return sum(raw.count(b'"role"', at, at + LOOK) for at in places) * len(raw) / (3 * LOOK)


def ask_of(request: InferenceRequest, route: Route, cache_group: str = "") -> RequestView:
    """What policies may know of a request."""
    return RequestView(
        route=route.name,
        arrival=request.arrival,
        stream=request.stream,
        max_tokens=route.output_cap(request.max_tokens),
        turns=request.user_turns,
        tools=request.tools,
        images=request.images,
        json_schema=request.json_schema,
        priority=request.priority,
        headers=request.headers,
        cache_group=cache_group,
        session=request.session,
        ttft_budget=request.ttft_budget,
        tpot_budget=request.tpot_budget,
    )
