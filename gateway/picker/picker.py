"""Picks endpoints for requests whose bytes another proxy carries: parse, estimate, wait, decide.

The same steps as `Proxy.serve`, up to the decision. Rules:
- An answer comes within WITHIN of the whole request: where the decision takes longer, or waits for an engine, the least
  loaded endpoint that is up is named, and the queue is left.
- A request without a body, or with a path or a model that no route knows, is spread the same way: what it is for is the
  engine's to say.
- Names of headers come in two generations; a caller's own control headers steer nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from gateway.admission.auth import ANYONE
from gateway.api.api_error import ApiError
from gateway.api.paths import canonical
from gateway.config.field_types import authority
from gateway.decider import Decider
from gateway.observe.record import Stage
from gateway.observe.timeline import RequestTimeline
from gateway.proxy import OPERATIONS
from gateway.refusals import reject_unplaced
from gateway.runtime import Runtime, RuntimeHolder
from gateway.scheduler import RequestQueue
from gateway.upstream.routed_request import RoutedRequest
from policies.fleet.fleet import Fleet
from policies.types import Candidate, Health

WITHIN = 0.25  # s
TTFT_HEADER = "x-slo-ttft-ms"
# Current names of the control headers, and the names before.
RENAMED = {
    "x-llm-d-slo-ttft-ms": TTFT_HEADER,
    "x-llm-d-inference-fairness-id": "x-gateway-inference-fairness-id",
    "x-llm-d-inference-objective": "x-gateway-inference-objective",
}
FAIRNESS = "x-gateway-inference-fairness-id"
DESTINATION = "x-gateway-destination-endpoint"
CONTROL = (*RENAMED, *RENAMED.values(), DESTINATION, f"{DESTINATION}-subset")


@dataclass(slots=True)
class Asked:
    """A request as the proxy in front has it. `subset`: addresses among which to pick; empty: all."""

    headers: Mapping[str, str]
    body: bytes
    arrival: float
    subset: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        return self.headers.get(":path", "").partition("?")[0]


@dataclass(slots=True)
class Pick:
    """`addresses`: where the request goes, best first. `routed`: None where only loads were compared."""

    addresses: Sequence[str]
    routed: RoutedRequest | None = None
    candidates: Mapping[str, Candidate] = field(default_factory=dict)  # by address


class Picker:
    """Decides with the fleet of a gateway. `fallbacks`: addresses named after the first, at most."""

    def __init__(self, runtime: RuntimeHolder, decider: Decider, queue: RequestQueue, fallbacks: int) -> None:
        self._runtime = runtime
        self._decider = decider
        self._queue = queue
        self._fallbacks = fallbacks
        self._addresses: tuple[Runtime, Mapping[str, str]] | None = None  # of the runtime in force

    @property
    def fleet(self) -> Fleet:
        return self._decider.fleet

    async def pick(self, asked: Asked, timeline: RequestTimeline) -> Pick:
        """Raises ApiError for a request that no endpoint shall get."""
        runtime = self._runtime.current
        try:
            async with asyncio.timeout(WITHIN):
                found = await self._decided(asked, runtime, timeline)
        except TimeoutError:
            found = None
        if found is None:
            return self._least_loaded(runtime, asked)
        addresses = self._addresses_of(runtime)
        by_address = {addresses[each.endpoint.id]: each for each in found.decision.ranked}
        allowed = [address for address in by_address if is_in(asked.subset, address)]
        if not allowed:
            self._queue.on_dispatched(found.request)
            raise unavailable()
        return Pick(allowed[: 1 + self._fallbacks], found, by_address)

    def on_sent(self, pick: Pick) -> None:
        """The fleet knows of the request: the next one may be decided."""
        if pick.routed is not None:
            self._queue.on_dispatched(pick.routed.request)

    async def _decided(self, asked: Asked, runtime: Runtime, timeline: RequestTimeline) -> RoutedRequest | None:
        """None: there is nothing to decide by. Raises ApiError."""
        operation = OPERATIONS.get(canonical(asked.path)[0])
        if operation is None or not asked.body:
            return None
        headers = with_old_names(asked.headers)
        request_id = timeline.record.request_id
        timeline.end_stage(Stage.READ)
        try:
            request = await self._decider.parse(
                operation, asked.body, headers, asked.arrival, request_id, runtime.wanted_headers
            )
            route = runtime.routes.match(request.model, ANYONE).route
        except ApiError:
            return None
        timeline.end_stage(Stage.PARSE)
        timeline.routed(request, route)
        request.caller = headers.get(FAIRNESS, "")
        estimate = await self._decider.estimate(request, route, ANYONE)
        timeline.estimated(request, route, estimate)
        decision = await self._queue.decide(self._queue.queued(request, route, estimate, ANYONE), monotonic())
        if decision is None:  # a reload has replaced the route
            return None
        timeline.decided(decision)
        timeline.end_stage(Stage.DECIDE)
        reject_unplaced(decision)
        return RoutedRequest(
            request=request,
            route=route,
            estimate=estimate,
            decision=decision,
            timeline=timeline,
            upstreams=runtime.upstreams,
            first_token_limit=runtime.config.defaults.first_token,
            native=runtime.operations,
        )

    def _least_loaded(self, runtime: Runtime, asked: Asked) -> Pick:
        """Raises ApiError (503) where nothing is up."""
        loads, addresses = self.fleet.snapshot(monotonic()).loads, self._addresses_of(runtime)
        up = [
            (load.in_flight + load.running + load.waiting, addresses[id])
            for id, load in loads.items()
            if load.health is not Health.DOWN and id in addresses and is_in(asked.subset, addresses[id])
        ]
        if not up:
            raise unavailable()
        return Pick([address for _, address in sorted(up)][: 1 + self._fallbacks])

    def _addresses_of(self, runtime: Runtime) -> Mapping[str, str]:
        """`host:port` by endpoint."""
        if self._addresses is None or self._addresses[0] is not runtime:
            found = {id: authority(one.url, one.ip) for id, one in runtime.config.addresses().items()}
            self._addresses = runtime, found
        return self._addresses[1]


def with_old_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Header values under the names that are read; the current name of a header counts before the old one."""
    return {**headers, **{old: headers[new] for new, old in RENAMED.items() if new in headers}}


def is_in(subset: frozenset[str], address: str) -> bool:
    """An address without a port stands for all ports."""
    return not subset or address in subset or address.rpartition(":")[0].strip("[]") in subset


def unavailable() -> ApiError:
    return ApiError(503, "No endpoint is usable now.", type="server_error", code="unavailable")
