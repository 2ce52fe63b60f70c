"""The admin port: what operators and Prometheus read. Nothing here is on the data port."""

from __future__ import annotations

from time import monotonic
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from backends.interface import Operation
from gateway import ingress
from gateway.decider import Decider
from gateway.http import misframed
from gateway.keys import ANYONE, Keys
from gateway.line import Line
from gateway.observe.explain import explain
from gateway.observe.recorder import Recorder
from gateway.observe.replies import reply, respond
from gateway.refusal import Refusal
from gateway.routes import Routes
from gateway.strictjson import encode

MAX_BODY = 32_000_000  # bytes of a request to be explained


class Admin:
    """`shown_config`: the config as it may be shown, without secrets."""

    def __init__(
        self, registry: CollectorRegistry, recorder: Recorder, decider: Decider, line: Line, keys: Keys, routes: Routes,
        shown_config: dict[str, Any],
    ) -> None:  # fmt: skip
        self.registry, self.recorder, self.decider, self.line = registry, recorder, decider, line
        self.keys, self.routes, self.shown_config = keys, routes, shown_config

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/requests", self.requests)
        app.router.add_get("/fleet", self.fleet)
        app.router.add_get("/config", self.config)
        app.router.add_post("/explain", self.explain)
        return app

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        return exposed(self.registry, http)

    async def requests(self, http: web.Request) -> web.StreamResponse:
        """Recent Records, newest last; `?last=N` for fewer."""
        try:
            last = how_many(http)
        except Refusal as refusal:
            return reply(refusal)
        recent = list(self.recorder.recent)
        return respond(200, encode([record.as_json() for record in recent[max(0, len(recent) - last) :]]))

    async def fleet(self, http: web.Request) -> web.StreamResponse:
        """Every endpoint: its load and what was learned of it."""
        now = monotonic()
        fleet = self.decider.monitor.fleet
        return respond(200, encode([fleet.statistics(endpoint, now) for endpoint in fleet.snapshot(now).loads]))

    async def config(self, http: web.Request) -> web.StreamResponse:
        return respond(200, encode(self.shown_config))

    async def explain(self, http: web.Request) -> web.StreamResponse:
        """POST a request as to the data port: the candidates and the reasons; nothing is sent, held or counted.

        No key is asked for here; one that is given says whose caches to look at.
        """
        path = http.query.get("path", Operation.CHAT.value)
        operations = {operation.value: operation for operation in Operation}
        try:
            if path not in operations:
                raise Refusal(400, f"path must be one of {', '.join(operations)}.", param="path")
            headers = {name.lower(): value for name, value in http.headers.items()}
            given = headers.get("authorization")
            tenant = ANYONE if given is None else self.keys.tenant(given)
            if (fault := misframed(headers, True, http.content_length or 0, MAX_BODY)) is not None:
                raise fault
            raw = await http.read()
            request = ingress.parse(operations[path], raw, headers, monotonic(), "explain", self.decider.wanted_headers)
            route = self.routes.match(request.model)
            estimate = await self.decider.estimate(request, route, tenant)
            decision = self.decider.decide(request, route, estimate, tenant, self.line.ordinal + 1)
            return respond(200, encode(explain(decision, estimate, self.line.depth())))
        except Refusal as refusal:
            return reply(refusal)


def exposed(registry: CollectorRegistry, http: web.Request) -> web.Response:
    """In Prometheus' text format, or OpenMetrics for those that say so."""
    encoder, content_type = choose_encoder(http.headers.get("accept", ""))
    return web.Response(body=encoder(registry), headers={"content-type": content_type})


def how_many(http: web.Request) -> int:
    """Raises Refusal."""
    last = http.query.get("last", "200")
    if not (last.isdecimal() and len(last) < 10):
        raise Refusal(400, "last must be a whole number.", param="last")
    return int(last)
