"""Admin data of one gateway process, read on the loop that serves callers.

Long answers are built in parts, so the loop runs callers in between; `/routes` is built once for all viewers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from aiohttp import web

from backends.interface import Operation
from gateway.admin.admin_server import json_response
from gateway.admin.admin_views import endpoint_view, explain
from gateway.admin.client_ttft import Beacons
from gateway.admin.request_query import RequestQuery
from gateway.admission.auth import ANYONE
from gateway.api.api_error import ApiError
from gateway.observe.metrics.route_stats import counts_in_place, route_stats
from gateway.observe.metrics.scrape_collectors import Registry
from gateway.observe.recorder import Recorder
from gateway.runtime import RuntimeHolder, redacted_config
from gateway.scheduler import Decider, RequestQueue
from gateway.strict_json import encode
from policies.routes.route import Route

BATCH = 20  # Records encoded between two turns of the loop: 0.5 ms
FRESH = 0.5  # s for which one answer of /routes serves all viewers


async def no_source() -> web.Response:
    raise ApiError(409, "This gateway was not told where its configuration comes from.", code="no_source")


@dataclass(slots=True, kw_only=True)
class GatewayAdmin:
    """`AdminData` of one process."""

    registry: Registry
    recorder: Recorder
    decider: Decider
    queue: RequestQueue
    runtime: RuntimeHolder
    beacons: Beacons
    reloading: Callable[[], Awaitable[web.Response]] = no_source
    stats: bytes = b""  # the last answer of /routes
    stats_at: float = 0.0  # monotonic time of `stats`

    async def refresh(self) -> None:
        """Nothing to do: counters are read in place."""

    def routes(self) -> Sequence[Route]:
        return self.runtime.current.routes.all

    def pools(self) -> Collection[str]:
        return self.runtime.current.pools

    def config(self) -> Mapping[str, Any]:
        return redacted_config(self.runtime.current.config)

    async def requests(self, query: RequestQuery) -> bytes:
        records, parts = query.select(self.recorder.recent), []
        for start in range(0, len(records), BATCH):
            parts.append(_array_members([record.as_json() for record in records[start : start + BATCH]]))
            await asyncio.sleep(0)
        return b"[" + b",".join(parts) + b"]"

    async def route_stats(self) -> bytes:
        if (now := monotonic()) - self.stats_at > FRESH:
            self.stats = encode(route_stats(counts_in_place(self.registry.collectors), self.routes(), time()))
            self.stats_at = now
        return self.stats

    async def fleet(self) -> Sequence[Mapping[str, Any]]:
        now, fleet = monotonic(), self.decider.monitor.fleet
        return [endpoint_view(fleet.statistics(endpoint, now), now) for endpoint in fleet.snapshot(now).loads]

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        runtime, key = self.runtime.current, headers.get("authorization")
        tenant = ANYONE if key is None else runtime.keys.tenant(key)
        wanted = runtime.wanted_headers
        request = await self.decider.parse(operation, body, headers, monotonic(), "explain", wanted)
        route = runtime.routes.match(request.model)
        estimate = await self.decider.estimate(request, route, tenant)
        decision = self.decider.decide(request, route, estimate, tenant, self.queue.sequence + 1)
        return json_response(200, encode(explain(decision, estimate, self.queue.depth(), runtime.pools)))

    async def report_ttft(self, beacon: bytes) -> web.Response:
        self.beacons.take(beacon)
        return web.Response(status=204)

    async def reload(self) -> web.Response:
        return await self.reloading()


def _array_members(records: list[dict[str, Any]]) -> bytes:
    """A JSON array without the brackets."""
    try:
        return encode(records)[1:-1]
    except UnicodeEncodeError:  # a lone surrogate in a backend's error message
        return json.dumps(records).encode()[1:-1]
