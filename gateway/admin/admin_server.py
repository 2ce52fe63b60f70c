"""The admin port: what operators and Prometheus read. Nothing here is on the data port.

It runs on the loop of those whom it shows: what takes long goes in parts, and what several look at is made once.
No reply allows another origin to read it; the port is private.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic, time
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from backends.interface import Operation
from gateway.admin import endpoint_view as fleet
from gateway.admin.client_ttft import MAX_BEACON, Beacons
from gateway.admin.dashboard_page import dashboard
from gateway.admin.decision_view import explain
from gateway.admin.replies import reply, respond
from gateway.admin.request_query import wanted
from gateway.admission.auth import ANYONE
from gateway.api.api_error import ApiError
from gateway.api.strict_json import encode
from gateway.decider import Decider
from gateway.downstream.http_request import framing_error
from gateway.observe.metrics.registry import Registry
from gateway.observe.metrics.route_stats import kept, route_stats
from gateway.observe.record import Record
from gateway.observe.recorder import Recorder
from gateway.runtime import RuntimeHolder, redacted_config
from gateway.scheduler import RequestQueue

MAX_BODY = 32_000_000  # bytes of a request to be explained
BATCH = 20  # Records that are written at once: half a millisecond
FRESH = 0.5  # s that figures are shown to all who ask


class Admin:
    """Reads and shows what the gateway knows; changes nothing but by `reload`."""

    def __init__(
        self,
        registry: Registry,
        recorder: Recorder,
        decider: Decider,
        line: RequestQueue,
        runtime: RuntimeHolder,
        beacons: Beacons,
    ) -> None:
        self.registry, self.recorder, self.decider, self.line = registry, recorder, decider, line
        self.runtime, self.beacons = runtime, beacons
        self._figures: tuple[float, bytes] = (0.0, b"")  # when they were made
        self.reloading: Callable[[web.Request], Awaitable[web.StreamResponse]] = read_once

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/requests", self.requests)
        app.router.add_get("/routes", self.figures)
        app.router.add_get("/fleet", self.fleet)
        app.router.add_get("/config", self.config)
        app.router.add_get("/dashboard", dashboard)
        app.router.add_post("/explain", self.explain)
        app.router.add_post("/ttft", self.beacon)
        app.router.add_post("/reload", self.reload)
        return app

    async def reload(self, http: web.Request) -> web.StreamResponse:
        """Read the configuration again: what changed, or why it stays as it is."""
        return await self.reloading(http)

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        return await exposed(self.registry, http)

    async def requests(self, http: web.Request) -> web.StreamResponse:
        """Recent Records; which of them, `gateway.admin.request_query` says."""
        routes = [route.name for route in self.runtime.current.routes.all]
        try:
            found = wanted(single(http), routes, self.runtime.current.pools).of(self.recorder.recent)
        except ApiError as refusal:
            return reply(refusal)
        return respond(200, await _written(found))

    async def figures(self, http: web.Request) -> web.StreamResponse:
        """What live views need of routes, counted since the start."""
        made_at, page = self._figures
        if (now := monotonic()) - made_at > FRESH:
            known = kept(self.registry.collectors)
            page = encode(route_stats(known, self.runtime.current.routes.all, time()))
            self._figures = now, page
        return respond(200, page)

    async def fleet(self, http: web.Request) -> web.StreamResponse:
        """Every endpoint: its health and why, its load, and what was learned of it."""
        now = monotonic()
        known = self.decider.monitor.fleet
        found = [fleet.shown(known.statistics(endpoint, now), now) for endpoint in known.snapshot(now).loads]
        return respond(200, encode(found))

    async def config(self, http: web.Request) -> web.StreamResponse:
        return respond(200, encode(redacted_config(self.runtime.current.config)))

    async def explain(self, http: web.Request) -> web.StreamResponse:
        """POST a request as to the data port: the candidates and the reasons; nothing is sent, held or counted.

        No key is asked for here; one that is given says whose caches to look at.
        """
        path = http.query.get("path", Operation.CHAT.value)
        runtime = self.runtime.current
        operations = {operation.value: operation for operation in Operation}
        try:
            if path not in operations:
                raise ApiError(400, f"path must be one of {', '.join(operations)}.", param="path")
            headers = {name.lower(): value for name, value in http.headers.items()}
            given = headers.get("authorization")
            tenant = ANYONE if given is None else runtime.keys.tenant(given)
            if (fault := framing_error(headers, True, http.content_length or 0, MAX_BODY)) is not None:
                raise fault
            raw = await http.read()
            request = await self.decider.parse(
                operations[path], raw, headers, monotonic(), "explain", runtime.wanted_headers
            )
            route = runtime.routes.match(request.model)
            estimate = await self.decider.estimate(request, route, tenant)
            decision = self.decider.decide(request, route, estimate, tenant, self.line.ordinal + 1)
            return respond(200, encode(explain(decision, estimate, self.line.depth(), runtime.pools)))
        except ApiError as refusal:
            return reply(refusal)

    async def beacon(self, http: web.Request) -> web.StreamResponse:
        """POST {request_id, ttft_ms}, as whatever type: `navigator.sendBeacon` says text/plain."""
        try:
            self.beacons.take(await beacon_of(http))
        except ApiError as refusal:
            return reply(refusal)
        return web.Response(status=204)


async def read_once(http: web.Request) -> web.StreamResponse:
    return reply(ApiError(409, "This gateway was not told where its configuration comes from.", code="no_source"))


class Page:
    """What a registry's collectors say now, for an encoder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._found = list(registry.collect())

    def collect(self) -> list[Metric]:
        return self._found


async def exposed(registry: CollectorRegistry, http: web.Request) -> web.Response:
    """In Prometheus' text format, or OpenMetrics for those that say so; written in a thread, since a page of ten routes
    and five pools takes 30 ms."""
    encoder, content_type = choose_encoder(http.headers.get("accept", ""))
    body = await asyncio.get_running_loop().run_in_executor(None, encoder, Page(registry))
    return web.Response(body=body, headers={"content-type": content_type})


def single(http: web.Request) -> dict[str, str]:
    """The query, each name once. Raises Refusal."""
    query = dict(http.query)
    if len(query) != len(http.query):
        raise ApiError(400, "Give each filter once.")
    return query


async def beacon_of(http: web.Request) -> bytes:
    """The body, which is small. Raises Refusal."""
    headers = {name.lower(): value for name, value in http.headers.items()}
    if (fault := framing_error(headers, True, http.content_length or 0, MAX_BEACON)) is not None:
        raise fault
    body = b""
    async for part in http.content.iter_any():
        body += part
        if len(body) > MAX_BEACON:
            raise ApiError(413, f"A beacon is at most {MAX_BEACON} bytes.", close=True)
    return body


async def _written(records: Iterable[Record]) -> bytes:
    """A JSON array; the loop gets its turn between its parts."""
    shown, parts = list(records), []
    for at in range(0, len(shown), BATCH):
        parts.append(_joined([record.as_json() for record in shown[at : at + BATCH]]))
        await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _joined(shown: list[dict[str, Any]]) -> bytes:
    """The members of an array."""
    try:
        return encode(shown)[1:-1]
    except UnicodeEncodeError:  # a lone surrogate, in an error of a backend's
        return json.dumps(shown).encode()[1:-1]
