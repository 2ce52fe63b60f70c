"""Admin data of one gateway process, read on the loop that serves callers.

Rules:
- Long answers are built in parts, so the loop runs callers in between; `/routes` is built once for all viewers.
- Callers report their own TTFT (on screen) by beacons, POST /ttft. A beacon refers to a request in progress or among
  the recent Records, and each request is counted once, with the labels of the Record: nobody with access to the port
  can count more requests than there were.
- A reported TTFT is a claim: shown beside the gateway's own measurement, never used by predictions or decisions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic, time
from typing import Any

from aiohttp import web
from msgspec import to_builtins

from backends.interface import Operation
from gateway.admin.admin_replies import json_response
from gateway.admin.admin_views import (
    bounds_view,
    endpoint_view,
    explain,
    holds_view,
    left_out_view,
    named_view,
    request_view,
)
from gateway.admin.request_query import RequestQuery
from gateway.admission.auth import ANYONE
from gateway.admission.route_table import RoutedName
from gateway.api.api_error import ApiError, bad_request
from gateway.api.inference_request import KEY_HEADERS, InferenceRequest
from gateway.api.operation_fit import OperationFit
from gateway.config.models import Config, Key
from gateway.observe.metrics.scrape_collectors import Registry, counts_in_place, route_stats
from gateway.observe.metrics.series import Histogram
from gateway.observe.part_notes import ON_SCREEN
from gateway.observe.recorder import Recorder
from gateway.observe.windows.history_keeper import HistoryKeeper
from gateway.request_steps import Decider
from gateway.runtime import Runtime, RuntimeHolder
from gateway.scheduler import RequestQueue
from gateway.strict_json import BadJson, decode, encode

BATCH = 20  # Records encoded between two turns of the loop: 0.5 ms
MAP_FRESH = 5.0  # s for which one map of prefixes serves all viewers: 64 endpoints take milliseconds
FRESH = 0.5  # s for which one answer of /routes serves all viewers
LONGEST_TTFT = 3_600_000.0  # ms, in a beacon
LONGEST_ID = 128  # characters


async def no_source() -> web.Response:
    raise ApiError(409, "This gateway was not told where its configuration comes from.", code="no_source")


def no_advice() -> Mapping[str, Any]:
    raise ApiError(404, "This gateway does not follow prompts.", code="not_followed")


@dataclass(slots=True, kw_only=True)
class GatewayAdmin:
    """Implements `gateway.admin.admin_server.AdminData` for one process."""

    registry: Registry
    recorder: Recorder
    decider: Decider
    operations: OperationFit
    queue: RequestQueue
    runtime: RuntimeHolder
    on_screen: Histogram  # TTFT reported by callers, by route
    advice_sums: Callable[[], Mapping[str, Any]] = no_advice  # of prompts, for GET /advise
    stored_keys: Callable[[], Sequence[Key]] = tuple  # by this process's state
    map_prefixes: Callable[[float], Sequence[Mapping[str, Any]]] = lambda now: ()  # the hottest, by endpoint
    pool_members: list[Callable[[str], Mapping[str, Any]]] = field(default_factory=list)  # of rows of GET /fleet
    reload: Callable[[], Awaitable[web.Response]] = no_source
    stats: bytes = b""  # the last answer of /routes
    stats_at: float = 0.0  # monotonic time of `stats`
    prefix_map: Sequence[Mapping[str, Any]] = ()
    mapped_at: float = -MAP_FRESH  # monotonic time of `prefix_map`
    history: HistoryKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.history = HistoryKeeper(self._route_stats)

    @property
    def config(self) -> Config:
        return self.runtime.current.config

    async def metrics(self) -> Registry:
        return self.registry

    async def requests(self, query: RequestQuery) -> bytes:
        self.recorder.flush()
        records, parts = query.select(self.recorder.recent, self.recorder.missed), []
        for start in range(0, len(records), BATCH):
            parts.append(_array_members([request_view(record) for record in records[start : start + BATCH]]))
            await asyncio.sleep(0)
        return b"[" + b",".join(parts) + b"]"

    async def route_stats(self) -> bytes:
        if (now := monotonic()) - self.stats_at > FRESH:
            self.stats, self.stats_at = encode(self._route_stats()), now
        return self.stats

    def _route_stats(self) -> Mapping[str, Any]:
        return route_stats(counts_in_place(self.registry.collectors), self.config.all_routes, time())

    async def windows(self, window: str) -> bytes:
        return self.history.view(window)

    async def causes(self, route: str, minutes: int) -> Mapping[str, Any]:
        self.recorder.flush()
        return self.recorder.slow.windows(route, minutes)

    async def incidents(self, minutes: int) -> Mapping[str, Any]:
        self.recorder.flush()
        return self.recorder.slow.incidents(minutes)

    async def advice(self) -> Mapping[str, Any]:
        self.recorder.flush()
        return self.advice_sums()

    async def prefixes(self) -> Sequence[Mapping[str, Any]]:
        if (now := monotonic()) - self.mapped_at > MAP_FRESH:
            self.prefix_map, self.mapped_at = self.map_prefixes(now), now
        return self.prefix_map

    async def fleet(self) -> Sequence[Mapping[str, Any]]:
        now, fleet = monotonic(), self.decider.fleet
        held, loads = holds_view(self.queue.scheduler.holds(), now), fleet.snapshot(now).loads
        bounds = bounds_view(loads, fleet.view.engine_rates(now), fleet.view.pool_of)
        return [
            {
                **endpoint_view(fleet.view.statistics(endpoint, now), now),
                "held": held.get(endpoint, []),
                **bounds.get(endpoint, {"bound": None, "pool_bound": None}),
                **{name: value for of in self.pool_members for name, value in of(fleet.view.pool_of(endpoint)).items()},
            }
            for endpoint in loads
        ]

    @property
    def drained(self) -> Set[str]:
        return frozenset(self.decider.fleet.drained)

    async def drain(self, endpoints: Set[str]) -> Sequence[str]:
        """Requests that have been placed, and not sent yet, are sent first."""
        self.decider.fleet.drain(endpoints)
        while self.queue.dispatch_pending:  # noqa: ASYNC110 - a turn of the loop
            await asyncio.sleep(0)
        return ()

    async def known_keys(self) -> Sequence[Key]:
        return self.stored_keys()

    async def learned(self) -> Mapping[str, Any]:
        now, fleet, found = monotonic(), self.decider.fleet, dict[str, Any]()
        for endpoint in fleet.snapshot(now).loads:
            with suppress(ValueError):  # out of bounds
                if (known := fleet.view.learned(endpoint, now)) is not None:
                    found[endpoint] = to_builtins(known)
        return found

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        runtime = self.runtime.current
        tenant = ANYONE if headers.keys().isdisjoint(KEY_HEADERS) else runtime.keys.tenant(headers)
        wanted = runtime.wanted_headers
        request = await self.decider.parse(operation, body, headers, monotonic(), "explain", wanted)
        named = runtime.routes.match(request.model, tenant)
        route = named.route
        if (work := self.operations.work(request, route, runtime.servers(named.model), body)) is not None:
            await self.decider.off_loop(len(body), work)
        estimate = await self.decider.estimate(request, route, tenant)
        queued = self.queue.queued(request, route, estimate, tenant)
        decision, hold = self.queue.would_place(queued)
        fleet, at = self.decider.fleet, decision.at
        beliefs = fleet.view.beliefs(fleet.snapshot(at).loads, at)
        found = explain(decision, estimate, self.queue.depth(), runtime.pools, beliefs, hold)
        pools = {"pools": {pool: self._pool_view(pool, request, named, runtime) for pool in route.pools}}
        view = {**named_view(request.model, named), **found, **left_out_view(request), **pools}
        return json_response(200, encode(view))

    def _pool_view(self, pool: str, request: InferenceRequest, named: RoutedName, runtime: Runtime) -> dict[str, Any]:
        """Model and operation that a pool would be asked for, and knowledge of parts about the pool."""
        translated = request.translated.get(pool)
        return {
            "model": named.model or named.route.variants.get(pool, runtime.pools[pool].model),
            "operation": (request.operation if translated is None else translated.operation).value,
            **{name: value for of in self.pool_members for name, value in of(pool).items()},
        }

    async def report_ttft(self, beacon: bytes) -> web.Response:
        request_id, seconds = parse_beacon(beacon)
        records = chain((life.record for life in self.recorder.lives), reversed(self.recorder.recent))
        record = next((record for record in records if record.request_id == request_id), None)
        if record is None:
            raise ApiError(404, "No recent request has this id.", param="request_id", code="unknown_request")
        if record.ttft is None:
            raise ApiError(409, "This request has no first token.", param="request_id", code="no_first_token")
        if ON_SCREEN.of(record) is not None:
            raise ApiError(409, "The first token of this request was reported before.", code="reported_before")
        ON_SCREEN.put(record, seconds)
        self.on_screen.of[(record.route.name,)].observe(seconds)
        return web.Response(status=204)


def _array_members(records: list[dict[str, Any]]) -> bytes:
    """A JSON array without the brackets."""
    try:
        return encode(records)[1:-1]
    except UnicodeEncodeError:  # a lone surrogate in a backend's error message
        return json.dumps(records).encode()[1:-1]


def parse_beacon(raw: bytes) -> tuple[str, float]:
    """The id of a request, and seconds. Raises ApiError."""
    try:
        beacon: Any = decode(raw)
    except BadJson as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from None
    if not isinstance(beacon, dict):
        raise bad_request("The body must be a JSON object with request_id and ttft_ms.")
    request_id, ttft = beacon.get("request_id"), beacon.get("ttft_ms")
    if not (isinstance(request_id, str) and 0 < len(request_id) <= LONGEST_ID):
        raise bad_request(f"request_id must be a string of up to {LONGEST_ID} characters.", param="request_id")
    if isinstance(ttft, bool) or not isinstance(ttft, int | float) or not 0 <= ttft <= LONGEST_TTFT:
        raise bad_request(f"ttft_ms must be a number from 0 to {LONGEST_TTFT:.0f}.", param="ttft_ms")
    return request_id, ttft / 1e3
