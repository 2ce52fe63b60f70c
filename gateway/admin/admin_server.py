"""The admin port: HTTP handlers for operators and Prometheus, over the data of one gateway or of several workers.

Rules:
- One table of paths serves both cases; `AdminData` makes the difference.
- No reply carries `access-control-*`: pages of other origins cannot read the port, and their requests are refused by
  `Host` and `Origin`. No admin path is on the data port.
- The content security policy of the dashboard names script and style by digest: text of requests cannot run in the
  page, and nothing is sent to another origin.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from io import StringIO
from types import SimpleNamespace
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from backends.interface import Operation
from gateway.admin.admin_replies import Handler, accepts_gzip, json_errors, json_response, lowercase_headers, read_body
from gateway.admin.drain_path import DrainedFleet, DrainPath
from gateway.admin.key_paths import KeyPaths
from gateway.admin.request_query import RequestQuery, parse_format, parse_minutes, parse_query, parse_span, parse_window
from gateway.admin.verdict_view import verdict_window, verdicts_view
from gateway.api.api_error import ApiError
from gateway.api.same_origin import SameOrigin
from gateway.config.models import Config, Key
from gateway.observe.record_columns import RECORD
from gateway.runtime import redacted_config
from gateway.strict_json import decode, encode

MAX_BODY = 32_000_000  # bytes of a request to be explained
MAX_BEACON = 4096  # bytes of a POST /ttft
BEACONS = "/ttft"  # its path
GZIP_LEVEL = 1  # a tenth of the size in a third of the time of level 6
SCRIPT = (
    "",
    "_routes",
    "_engines",
    "_incidents",
    "_misses",
    "_live",
)  # of one script: dashboard.js, ...


class AdminData(DrainedFleet, Protocol):
    """Answers of one gateway, or of several workers merged. Every method may raise ApiError."""

    @property
    def config(self) -> Config:
        """The configuration in force."""

    async def metrics(self) -> CollectorRegistry:
        """Collectors, up to date."""

    async def requests(self, query: RequestQuery) -> bytes:
        """A JSON array of recent Records."""

    async def route_stats(self) -> bytes:
        """Counts since the start by route, as JSON: see `gateway.observe.metrics.scrape_collectors`."""

    async def windows(self, window: str) -> bytes:
        """Counts of a window by route, as JSON: see `gateway.observe.windows.route_windows`."""

    async def causes(self, route: str, minutes: int) -> Mapping[str, Any]:
        """Slow requests of a route by cause, in a window and in the one before."""

    async def incidents(self, minutes: int) -> Mapping[str, Any]:
        """Slow and failed requests of all routes by culprit: see `policies.diagnosis.incident_groups`."""

    async def advice(self) -> Mapping[str, Any]:
        """Sums of breaks and prompts: see `policies.prefix_doctor.prefix_ledger`."""

    async def prefixes(self) -> Sequence[Mapping[str, Any]]:
        """The hottest prefixes, and which endpoints hold them."""

    async def known_keys(self) -> Sequence[Key]:
        """Stored keys as the gateway knows them, also where the store has lost them."""

    async def learned(self) -> Mapping[str, Any]:
        """Learned state by endpoint, as it is saved: for `firsttoken autoscale`."""

    async def explain(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> web.Response:
        """The decision for a request, which is neither sent, queued nor counted."""

    async def report_ttft(self, beacon: bytes) -> web.Response:
        """A caller's own TTFT measurement: see `gateway.admin.gateway_admin`."""

    def reload(self) -> Awaitable[web.Response]:
        """Read the configuration again; the reply names the changes, or the errors."""


class AdminServer:
    def __init__(self, data: AdminData) -> None:
        self.data = data

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[json_errors, self.refuse_pages])
        app.add_routes(
            [
                web.get("/", home),
                web.get("/metrics", self.metrics),
                web.get("/requests", self.requests),
                web.get("/causes", self.causes),
                web.get("/incidents", self.incidents),
                web.get("/advise", replying(self.data.advice)),
                web.get("/routes", self.routes),
                web.get("/windows", self.windows),
                web.get("/verdicts", self.verdicts),
                web.get("/fleet", replying(self.data.fleet)),
                web.get("/learned", replying(self.data.learned)),
                web.get("/scale", scale),
                web.get("/prefixes", replying(self.data.prefixes)),
                web.get("/config", self.config),
                web.get("/dashboard", dashboard),
                web.post("/explain", self.explain),
                web.post(BEACONS, self.ttft),
                web.post("/reload", self.reload),
                *DrainPath(self.data).routes(),
                *KeyPaths(lambda: self.data.config, self.data.known_keys).routes(),
            ]
        )
        return app

    @web.middleware
    async def refuse_pages(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse what a web page sends, but for a beacon, which pages of every origin may send; the aggregator asks
        over Unix sockets."""
        server, transport = self.data.config.server, request.transport
        if transport is not None and not isinstance(transport.get_extra_info("sockname"), str):
            headers = lowercase_headers(request)
            if request.path == BEACONS:
                headers.pop("origin", None)
            SameOrigin(server.admin.loopback, server.hosts).check(headers, transport)
        return await handler(request)

    async def metrics(self, http: web.Request) -> web.StreamResponse:
        """Prometheus text, or OpenMetrics where accepted, compressed where accepted. Made in a thread: 30 ms for ten
        routes and five pools."""
        metrics = list((await self.data.metrics()).collect())
        encoder, content_type = choose_encoder(http.headers.get("accept", ""))
        headers = {"content-type": content_type, "vary": "accept, accept-encoding"}
        page = SimpleNamespace(collect=lambda: metrics)
        if not accepts_gzip(http.headers.getall("accept-encoding", ())):
            return web.Response(body=await asyncio.to_thread(encoder, page), headers=headers)
        body = await asyncio.to_thread(lambda: gzip.compress(encoder(page), GZIP_LEVEL))
        return web.Response(body=body, headers=headers | {"content-encoding": "gzip"})

    async def requests(self, http: web.Request) -> web.StreamResponse:
        filters = dict(http.query)
        if len(filters) != len(http.query):
            raise ApiError(400, "Give each filter once.")
        form = parse_format(filters)
        routes = [route.name for route in self.data.config.all_routes]
        query = parse_query(filters, routes, self.data.config.pools)
        found = await self.data.requests(query)
        if form == "json":
            return json_response(200, found)
        headers = {"content-disposition": 'attachment; filename="requests.csv"', "server": "firsttoken"}
        table = await asyncio.to_thread(lambda: requests_csv(decode(found)))
        return web.Response(body=table, content_type="text/csv", charset="utf-8", headers=headers)

    async def causes(self, http: web.Request) -> web.StreamResponse:
        route, minutes = parse_window(http.query, [route.name for route in self.data.config.all_routes])
        return json_response(200, encode(await self.data.causes(route, minutes)))

    async def incidents(self, http: web.Request) -> web.StreamResponse:
        return json_response(200, encode(await self.data.incidents(parse_minutes(http.query))))

    async def routes(self, http: web.Request) -> web.StreamResponse:
        return json_response(200, await self.data.route_stats())

    async def windows(self, http: web.Request) -> web.StreamResponse:
        return json_response(200, await self.data.windows(parse_span(http.query)))

    async def verdicts(self, http: web.Request) -> web.StreamResponse:
        """A sentence per route. The window `now` is too short for a verdict."""
        window, minutes = verdict_window(parse_span(http.query))
        figures, incidents = decode(await self.data.windows(window)), await self.data.incidents(minutes)
        return json_response(200, encode(verdicts_view(figures, incidents)))

    async def config(self, http: web.Request) -> web.StreamResponse:
        return json_response(200, encode(redacted_config(self.data.config)))

    async def explain(self, http: web.Request) -> web.StreamResponse:
        """POST a request as to the data port. No key is required; a given key selects the cache group."""
        path = http.query.get("path", Operation.CHAT.value)
        operations = {each.value: each for each in (Operation.CHAT, Operation.COMPLETION)}
        if path not in operations:
            raise ApiError(400, f"path must be one of {', '.join(operations)}.", param="path")
        body = await read_body(http, MAX_BODY)
        return await self.data.explain(operations[path], lowercase_headers(http), body)

    async def ttft(self, http: web.Request) -> web.StreamResponse:
        """POST {request_id, ttft_ms} of any content type: `navigator.sendBeacon` sends text/plain."""
        return await self.data.report_ttft(await read_body(http, MAX_BEACON))

    async def reload(self, http: web.Request) -> web.StreamResponse:
        return await self.data.reload()


def replying(answer: Callable[[], Awaitable[Any]]) -> Handler:
    """A handler that replies with an answer of `AdminData` as JSON."""

    async def reply(http: web.Request) -> web.StreamResponse:
        return json_response(200, encode(await answer()))

    return reply


async def scale(http: web.Request) -> web.StreamResponse:
    raise ApiError(410, "The gateway counts no engines any more: firsttoken autoscale does.", code="removed")


# -- dashboard -----------------------------------------------------------------------------


async def home(http: web.Request) -> web.StreamResponse:
    """Leads to the page."""
    return web.Response(status=302, headers={"location": "/dashboard", "server": "firsttoken"})


async def dashboard(http: web.Request) -> web.StreamResponse:
    page, policy = dashboard_page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
        "server": "firsttoken",
    }
    return web.Response(text=page, content_type="text/html", charset="utf-8", headers=headers)


@cache
def dashboard_page() -> tuple[str, str]:
    """The page with style and script inlined, and the content security policy."""
    folder = files("gateway.admin")
    page = (folder / "dashboard.html").read_text("utf-8")
    script = "".join((folder / f"dashboard{name}.js").read_text("utf-8") for name in SCRIPT)
    parts = (folder / "dashboard.css").read_text("utf-8"), f"(() => {{\n{script}}})();"
    for mark, text in zip(("/*style*/", "/*script*/"), parts, strict=True):
        page = page.replace(mark, text)
    style, script = (f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in parts)
    return page, (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# -- GET /requests as CSV --------------------------------------------------------------------------
#
# GET /requests as CSV: a line for each Record, for a spreadsheet.
#
# Text that a spreadsheet would take for a formula is quoted by an apostrophe: request ids are named by callers.


OF_CAUSE = ("over_ms", "evidence", "mend")  # members of `why`
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def requests_csv(records: Iterable[Mapping[str, Any]]) -> bytes:
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(("arrived", *(each.name for each in RECORD.table), *OF_CAUSE))
    for record in records:
        arrived = datetime.fromtimestamp(record["wall"], UTC).isoformat(timespec="milliseconds")
        why = record.get("why") or {}
        cells = (*(record[each.name] for each in RECORD.table), *(why.get(name) for name in OF_CAUSE))
        writer.writerow((arrived, *map(_cell, cells)))
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) and value != "-" else value
