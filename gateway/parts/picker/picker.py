"""Picks endpoints for requests whose bytes another proxy carries: parse, estimate, wait, decide.

The same steps as `Proxy.serve`, up to the decision. Rules:
- The reply is due WITHIN seconds after the whole request, or within `hold` if the data plane waits. A request that
  would wait longer for an engine leaves the queue, and goes to the best endpoint at that moment. If all endpoints are
  at their cap, or the request is not parsed within WITHIN, the least loaded healthy endpoint of the route is picked.
- If parsing takes longer (bodies above 150 KB are parsed in a thread, in turn), only the model is read from the body:
  no request goes to a pool of another model.
- A request without a body, or with an unknown model, goes to the least loaded endpoint of all pools: the engine answers
  or refuses.
- Only endpoints that know the model by the same name are named together: the body is written once.
- Endpoints come and go while a request waits: a decision is answered from the runtime in force when it was made.
- Names of headers come in two generations; a caller's own control headers steer nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic

from gateway.admission.auth import ANYONE
from gateway.admission.route_table import RoutedName
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest
from gateway.api.paths import canonical
from gateway.api.request_headers import LONGEST
from gateway.config.field_types import authority
from gateway.config.models import PickSection
from gateway.observe.record import Stage
from gateway.observe.timeline import RequestTimeline
from gateway.parts.picker.named_model import named_model
from gateway.proxy import OPERATIONS
from gateway.refusals import reject_unplaced
from gateway.request_steps import Decider
from gateway.runtime import Runtime, RuntimeHolder
from gateway.scheduler import RequestQueue
from gateway.upstream.dispatcher import Waker
from gateway.upstream.routed_request import RoutedRequest
from policies.fleet.fleet import Fleet
from policies.queue.queued_request import QueuedRequest
from policies.types import NEVER, UNUSABLE, Candidate, Decision, Health, Load, Placement

WITHIN = 0.2  # s; `message_timeout` of deploy/envoy is 0.25 s
ASK_AFTER = 0.05  # s in the queue, before the data plane is asked for more time: most wait for less
MARGIN = 0.25  # s that the data plane waits beyond `hold`
FAIRNESS = "x-gateway-inference-fairness-id"
UNNAMED = "-"  # caller of requests that name none: no caller at all would be the gateway, which needs no second witness
# Current names of the control headers, and the names before.
RENAMED = {
    "x-llm-d-slo-ttft-ms": "x-slo-ttft-ms",
    "x-llm-d-inference-fairness-id": FAIRNESS,
    "x-llm-d-inference-objective": "x-gateway-inference-objective",
}
DESTINATION = "x-gateway-destination-endpoint"
CONTROL = (*RENAMED, *RENAMED.values(), DESTINATION, f"{DESTINATION}-subset")


@dataclass(slots=True)
class Asked:
    """A request as the proxy in front has it. `subset`: addresses among which to pick; empty: all. `more_time`: asks
    the proxy to wait for so many seconds."""

    headers: Mapping[str, str]
    body: bytes
    arrival: float
    more_time: Callable[[float], None]
    subset: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        return self.headers.get(":path", "").partition("?")[0]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request with route and queue entry."""

    request: InferenceRequest
    named: RoutedName
    queued: QueuedRequest


@dataclass(slots=True)
class Pick:
    """Result of a pick. `addresses`: endpoints, best first. `model`: the servers' name of the model; empty: same as in
    the request. `routed` None: only loads were compared."""

    addresses: Sequence[str]
    model: str = ""
    routed: RoutedRequest | None = None
    candidates: Mapping[str, Candidate] = field(default_factory=dict)  # by address


class UncountedPicks:
    """Counts picks by load alone. The fleet does not count such requests; the engine's metrics include them from the
    next poll on."""

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
        """Requests since the last poll; 0 for engines without polls, which are picked round-robin."""
        _, at, count = self._named.get(id, (0, NEVER, 0))
        return count if at == scraped_at != NEVER else 0

    def keep(self, ids: Collection[str]) -> None:
        """Forget all other endpoints."""
        self._named = {id: named for id, named in self._named.items() if id in ids}


class Picker:
    """Decides with the fleet of a gateway."""

    def __init__(
        self, runtime: RuntimeHolder, decider: Decider, queue: RequestQueue, settings: PickSection, waker: Waker
    ) -> None:
        self._runtime = runtime
        self._decider = decider
        self._queue = queue
        self._waker = waker
        self._fallbacks = settings.fallbacks
        self._hold = settings.hold
        self._spread = UncountedPicks()
        self._addresses: tuple[Runtime, Mapping[str, str]] | None = None  # of the runtime in force

    @property
    def fleet(self) -> Fleet:
        return self._decider.fleet

    async def pick(self, asked: Asked, timeline: RequestTimeline) -> Pick:
        """Raises ApiError for a request that no endpoint shall get."""
        request = waiting = decision = None
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN) as limit:
                if (request := await self._parsed(asked, timeline)) is not None:
                    waiting = await self._estimated(request, timeline)
                if waiting is not None:
                    with self._asking_for_time(asked, limit):
                        decision = await self._queue.decide(waiting.queued, monotonic())
        if waiting is not None and decision is None:
            decision = self._decided_at_once(waiting)
        if waiting is None or decision is None:
            return self._least_loaded(asked, named_model(asked.body) if request is None else request.model)
        found = self._routed(waiting, decision, timeline)
        addresses = self._addresses_of(self._runtime.current)
        by_address: dict[str, Candidate] = {}
        for each in found.decision.ranked:  # ranks of a server, and keys, share an address
            by_address.setdefault(addresses[each.endpoint.id], each)
        allowed = [address for address in by_address if is_in(asked.subset, address)]
        if not allowed:
            self._queue.on_dispatched(found.request)
            raise unavailable()
        ids = {address: by_address[address].endpoint.id for address in allowed}
        chosen, model = self._alike(ids, waiting.named, found.request.model)
        if (first := by_address[chosen[0]]).load.wake_s:  # a sleeping engine: the request waits there
            self._waker.wake(first.endpoint.id, self._runtime.current.upstreams)
        return Pick(chosen, model, found, by_address)

    def _alike(self, ids: Mapping[str, str], named: RoutedName | None, wanted: str) -> tuple[Sequence[str], str]:
        """The first addresses, as many as may be named, of those at which the model has the same name as at the first;
        and this name, empty where it is `wanted`. `ids`: endpoints by address, best first."""
        if named is None:
            return [*ids][: 1 + self._fallbacks], ""
        model = self._model_at(named, next(iter(ids.values())))
        alike = (address for address, id in ids.items() if self._model_at(named, id) == model)
        return [*islice(alike, 1 + self._fallbacks)], model if model != wanted else ""

    def _model_at(self, named: RoutedName, id: str) -> str:
        """By which an endpoint knows the model."""
        own = self._runtime.current.upstreams[id].model
        return named.model or named.route.variants.get(self.fleet.view.pool_of(id), own)

    @contextmanager
    def _asking_for_time(self, asked: Asked, limit: asyncio.Timeout) -> Iterator[None]:
        """Extend `limit` to the end of the hold once the request is known to wait."""
        loop = asyncio.get_running_loop()
        if self._hold <= WITHIN:
            yield
            return

        def more() -> None:
            if loop.time() < (limit.when() or 0.0):  # both are due after a stall of the loop
                asked.more_time(self._hold + MARGIN)
                limit.reschedule(loop.time() + self._hold)

        later = loop.call_later(ASK_AFTER, more)
        try:
            yield
        finally:
            later.cancel()

    def on_sent(self, pick: Pick) -> None:
        """The fleet knows of the request: the next one may be decided."""
        if pick.routed is not None:
            self._queue.on_dispatched(pick.routed.request)

    async def _parsed(self, asked: Asked, timeline: RequestTimeline) -> InferenceRequest | None:
        """The request, as far as the gateway can read it; None: it has no known path, or no valid body."""
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
        request.caller = headers.get(FAIRNESS, "")[:LONGEST] or UNNAMED
        return request

    async def _estimated(self, request: InferenceRequest, timeline: RequestTimeline) -> Waiting | None:
        """The request, as it enters the queue; None: no route knows the model."""
        if (named := self._named(request.model)) is None:
            return None
        route = named.route
        timeline.routed(request, route)
        estimate = await self._decider.estimate(request, route, ANYONE)
        timeline.estimated(request, route, estimate)
        return Waiting(request, named, self._queue.queued(request, route, estimate, ANYONE))

    def _decided_at_once(self, waiting: Waiting) -> Decision | None:
        """The best endpoint now, for a request that the queue would hold longer; None: no endpoint, at its cap, or the
        route was replaced by a reload."""
        queued = waiting.queued
        named = self._named(waiting.request.model)
        if named is None or named.route is not queued.route:
            return None
        decision = self._decider.decide(
            waiting.request, queued.route, queued.estimate, ANYONE, sequence=queued.sequence
        )
        if not decision.ranked or decision.ranked[0].load.full:
            return None
        return replace(decision, outcome=Placement.PLACE)

    def _routed(self, waiting: Waiting, decision: Decision, timeline: RequestTimeline) -> RoutedRequest:
        """Raises ApiError where the decision is a refusal."""
        timeline.decided(decision)
        timeline.end_stage(Stage.DECIDE)
        reject_unplaced(decision)
        runtime = self._runtime.current
        routed = RoutedRequest(
            request=waiting.request,
            route=waiting.queued.route,
            estimate=waiting.queued.estimate,
            decision=decision,
            timeline=timeline,
            upstreams=runtime.upstreams,
            first_token_limit=runtime.config.defaults.first_token,
            model=waiting.named.model,
            servers=runtime.servers(waiting.named.model),
        )
        routed.assembled = False  # the body goes to the engine as it is
        return routed

    def _named(self, model: str) -> RoutedName | None:
        try:
            return self._runtime.current.routes.match(model, ANYONE)
        except ApiError:
            return None

    def _least_loaded(self, asked: Asked, model: str) -> Pick:
        """Of what is up, or else of the last resort. Raises ApiError (503) where there is neither."""
        addresses = self._addresses_of(self._runtime.current)
        named = self._named(model)
        allowed = {
            id: load
            for id, load in self.fleet.snapshot(monotonic()).loads.items()
            if id in addresses
            and is_in(asked.subset, addresses[id])
            and (named is None or self.fleet.view.pool_of(id) in named.route.pools)
        }
        up = {id: load for id, load in allowed.items() if load.health not in UNUSABLE}
        usable = up or {id: load for id, load in allowed.items() if load.health is Health.DOWN and load.failing}
        if not usable:
            raise unavailable()
        ids = dict[str, str]()
        for id in self._spread.take(usable):
            ids.setdefault(addresses[id], id)
        return Pick(*self._alike(ids, named, model))

    def _addresses_of(self, runtime: Runtime) -> Mapping[str, str]:
        """`host:port` by endpoint."""
        if self._addresses is None or self._addresses[0] is not runtime:
            found = {id: authority(one.url, one.ip) for id, one in runtime.config.addresses().items()}
            self._addresses = runtime, found
            self._spread.keep(found)
        return self._addresses[1]


def with_old_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers with old names set from current names; a current name takes precedence."""
    return {**headers, **{old: headers[new] for new, old in RENAMED.items() if new in headers}}


def is_in(subset: frozenset[str], address: str) -> bool:
    """An address without a port stands for all ports."""
    return not subset or address in subset or address.rpartition(":")[0].strip("[]") in subset


def unavailable() -> ApiError:
    return ApiError(503, "No endpoint is usable now.", type="server_error", code="unavailable")
