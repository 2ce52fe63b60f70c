"""Picks endpoints for requests whose bytes another proxy carries: parse, estimate, wait, decide.

The same steps as `Proxy.serve`, up to the decision. Rules:
- An answer comes within WITHIN of the whole request: where the decision takes longer, or waits for an engine, the least
  loaded endpoint of the route that is up is named, and the queue is left.
- A request without a body, or with a path or a model that no route knows, is spread over all pools in the same way: its
  purpose is the engine's to say.
- Endpoints come and go while a request waits: a decision is answered from the runtime in force when it was made.
- Names of headers come in two generations; a caller's own control headers steer nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from gateway.admission.auth import ANYONE
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest
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
from policies.routes.route import Route
from policies.types import NEVER, Candidate, Health, Load

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


class UncountedPicks:
    """Endpoints named by load alone. The fleet does not count such a request, and its engine tells of it at the next
    poll: until then it counts here."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[int, float, int]] = {}  # by endpoint: turn, time of the last poll, requests since
        self._turns = 0

    def take(self, loads: Mapping[str, Load]) -> list[str]:
        """Endpoints, least loaded first, of equals the one named longest ago. The first counts as named."""
        order = sorted(loads, key=lambda id: self._order(id, loads[id]))
        chosen, self._turns = order[0], self._turns + 1
        since = loads[chosen].scraped_at
        self._named[chosen] = self._turns, since, self._since(chosen, since) + 1
        return order

    def _order(self, id: str, load: Load) -> tuple[int, int]:
        since = self._since(id, load.scraped_at)
        return load.in_flight + load.running + load.waiting + since, self._named.get(id, (0,))[0]

    def _since(self, id: str, scraped_at: float) -> int:
        """Requests since the last poll. 0 for an engine that is not polled: those are taken in turn."""
        _, at, count = self._named.get(id, (0, NEVER, 0))
        return count if at == scraped_at != NEVER else 0

    def keep(self, ids: Collection[str]) -> None:
        """Forget all other endpoints."""
        self._named = {id: named for id, named in self._named.items() if id in ids}


class Picker:
    """Decides with the fleet of a gateway. `fallbacks`: addresses named after the first, at most."""

    def __init__(self, runtime: RuntimeHolder, decider: Decider, queue: RequestQueue, fallbacks: int) -> None:
        self._runtime = runtime
        self._decider = decider
        self._queue = queue
        self._fallbacks = fallbacks
        self._spread = UncountedPicks()
        self._addresses: tuple[Runtime, Mapping[str, str]] | None = None  # of the runtime in force

    @property
    def fleet(self) -> Fleet:
        return self._decider.fleet

    async def pick(self, asked: Asked, timeline: RequestTimeline) -> Pick:
        """Raises ApiError for a request that no endpoint shall get."""
        request = found = None
        try:
            async with asyncio.timeout(WITHIN):
                if (request := await self._parsed(asked, timeline)) is not None:
                    found = await self._decided(request, timeline)
        except TimeoutError:
            found = None
        if found is None:
            return self._least_loaded(asked, request)
        addresses = self._addresses_of(self._runtime.current)
        by_address: dict[str, Candidate] = {}
        for each in found.decision.ranked:  # ranks of a server, and keys, share an address
            by_address.setdefault(addresses[each.endpoint.id], each)
        allowed = [address for address in by_address if is_in(asked.subset, address)]
        if not allowed:
            self._queue.on_dispatched(found.request)
            raise unavailable()
        return Pick(allowed[: 1 + self._fallbacks], found, by_address)

    def on_sent(self, pick: Pick) -> None:
        """The fleet knows of the request: the next one may be decided."""
        if pick.routed is not None:
            self._queue.on_dispatched(pick.routed.request)

    async def _parsed(self, asked: Asked, timeline: RequestTimeline) -> InferenceRequest | None:
        """None: there is nothing to decide by."""
        operation = OPERATIONS.get(canonical(asked.path)[0])
        if operation is None or not asked.body:
            return None
        headers, wanted = with_old_names(asked.headers), self._runtime.current.wanted_headers
        timeline.end_stage(Stage.READ)
        try:
            request = await self._decider.parse(
                operation, asked.body, headers, asked.arrival, timeline.record.request_id, wanted
            )
        except ApiError:
            return None
        timeline.end_stage(Stage.PARSE)
        request.caller = headers.get(FAIRNESS, "")
        return request

    async def _decided(self, request: InferenceRequest, timeline: RequestTimeline) -> RoutedRequest | None:
        """None: no route knows the model, or a reload has replaced the route. Raises ApiError."""
        if (route := self._route_of(request)) is None:
            return None
        timeline.routed(request, route)
        estimate = await self._decider.estimate(request, route, ANYONE)
        timeline.estimated(request, route, estimate)
        decision = await self._queue.decide(self._queue.queued(request, route, estimate, ANYONE), monotonic())
        if decision is None:
            return None
        timeline.decided(decision)
        timeline.end_stage(Stage.DECIDE)
        reject_unplaced(decision)
        runtime = self._runtime.current
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

    def _route_of(self, request: InferenceRequest) -> Route | None:
        try:
            return self._runtime.current.routes.match(request.model, ANYONE).route
        except ApiError:
            return None

    def _least_loaded(self, asked: Asked, request: InferenceRequest | None) -> Pick:
        """Raises ApiError (503) where nothing is up."""
        addresses = self._addresses_of(self._runtime.current)
        route = None if request is None else self._route_of(request)
        up = {
            id: load
            for id, load in self.fleet.snapshot(monotonic()).loads.items()
            if load.health is not Health.DOWN
            and id in addresses
            and is_in(asked.subset, addresses[id])
            and (route is None or self.fleet.pool_of(id) in route.pools)
        }
        if not up:
            raise unavailable()
        found = [*dict.fromkeys(addresses[id] for id in self._spread.take(up))]
        return Pick(found[: 1 + self._fallbacks])

    def _addresses_of(self, runtime: Runtime) -> Mapping[str, str]:
        """`host:port` by endpoint."""
        if self._addresses is None or self._addresses[0] is not runtime:
            found = {id: authority(one.url, one.ip) for id, one in runtime.config.addresses().items()}
            self._addresses = runtime, found
            self._spread.keep(found)
        return self._addresses[1]


def with_old_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Header values under the names that are read; the current name of a header counts before the old one."""
    return {**headers, **{old: headers[new] for new, old in RENAMED.items() if new in headers}}


def is_in(subset: frozenset[str], address: str) -> bool:
    """An address without a port stands for all ports."""
    return not subset or address in subset or address.rpartition(":")[0].strip("[]") in subset


def unavailable() -> ApiError:
    return ApiError(503, "No endpoint is usable now.", type="server_error", code="unavailable")
