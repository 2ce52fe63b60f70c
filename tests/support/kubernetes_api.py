"""An API server of Kubernetes for tests: lists in pages, watches, bookmarks, and faults on demand.

The official Python client lists and watches it too (`tests/gateway/kubernetes/test_official_client.py`), so that it
stays like the real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
PODS = "/api/v1/namespaces/{}/pods"


@dataclass
class Change:
    """One write: the object before and after, None where there is none."""

    version: int
    path: str
    before: Json | None
    after: Json | None


@dataclass
class FakeApiServer:
    """`status`: of every reply, where it is not 200. `page`: objects in one reply of a list, at most. `in_stream`: an
    old version is refused by an event in the watch, else by the status of the reply. `token`: needed, unless empty.
    `list_status`, `watch_status`: of these alone. `endless`: a list always names another page: the `same`, or a `new`
    one. `deaf`: watches say nothing, and do not end."""

    status: int = 200
    list_status: int = 200
    watch_status: int = 200
    endless: str = ""
    deaf: bool = False
    page: int = 500
    in_stream: bool = True
    token: str = ""
    asked: list[web.Request] = field(default_factory=list)
    watches: int = 0
    url: str = ""
    _objects: dict[str, dict[str, Json]] = field(default_factory=dict)
    _changes: list[Change] = field(default_factory=list)
    _version: int = 100
    _oldest: int = 0  # version from which changes are known
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _cut: int = 0

    # -- what happens in the cluster ----------------------------------------------------

    def put(self, path: str, name: str, labels: dict[str, str] | None = None, **body: Any) -> None:
        self._version += 1
        metadata = {"name": name, "labels": labels or {}, "resourceVersion": str(self._version), "uid": f"uid-{name}"}
        metadata |= body.pop("metadata", {})
        self._change(path, name, {"metadata": metadata, **body})

    def delete(self, path: str, name: str) -> None:
        self._version += 1
        self._change(path, name, None)

    def compact(self) -> None:
        """Forget the changes so far: a watch from an older version is refused."""
        self._changes, self._oldest = [], self._version

    def bookmark(self) -> None:
        """Tell all watches the version, which has moved by changes elsewhere."""
        self._version += 10
        self._changes.append(Change(self._version, "", None, None))
        self._wake()

    def cut(self) -> None:
        """End all watches, in the middle of a line."""
        self._cut += 1
        self._wake()

    def _change(self, path: str, name: str, after: Json | None) -> None:
        known = self._objects.setdefault(path, {})
        before = known.pop(name, None)
        if after is not None:
            known[name] = after
        self._changes.append(Change(self._version, path, before, after))
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    # -- the API ------------------------------------------------------------------------

    async def answer(self, http: web.Request) -> web.StreamResponse:
        self.asked.append(http)
        if self.token and http.headers.get("authorization") != f"Bearer {self.token}":
            return refusal(401, "Unauthorized")
        if self.status != 200:
            return refusal(self.status, "as the test wants it")
        if http.query.get("watch") in ("1", "true", "True"):
            return await self._watch(http) if self.watch_status == 200 else refusal(self.watch_status, "no watch")
        return self._list(http) if self.list_status == 200 else refusal(self.list_status, "no list")

    def _list(self, http: web.Request) -> web.Response:
        """A token of a later page names the version of the first: here, objects do not change between pages."""
        if self.endless:
            page = int(http.query.get("continue", "0")) + (self.endless == "new")
            return web.json_response({"metadata": {"resourceVersion": "1", "continue": str(page)}, "items": []})
        begin = int(http.query.get("continue", "0"))
        limit = min(int(http.query.get("limit", "0")) or self.page, self.page)
        found = [one for one in self._objects.get(http.path, {}).values() if selected(http, one)]
        metadata: Json = {"resourceVersion": str(self._version)}
        if begin + limit < len(found):
            metadata["continue"] = str(begin + limit)
        return web.json_response({"kind": "List", "metadata": metadata, "items": found[begin : begin + limit]})

    async def _watch(self, http: web.Request) -> web.StreamResponse:
        version = int(http.query.get("resourceVersion") or self._version)
        if version < self._oldest and not self.in_stream:
            return refusal(410, "too old resource version")
        stream = web.StreamResponse(headers={"content-type": "application/json"})
        await stream.prepare(http)
        if version < self._oldest:
            await stream.write(line("ERROR", status(410, "too old resource version")))
            return stream
        self.watches += 1
        try:
            with suppress(TimeoutError):  # as the real one, which ends a watch in the time that it was asked for
                async with asyncio.timeout(None if self.deaf else float(http.query.get("timeoutSeconds", "1800"))):
                    await self._follow(http, stream, version)
        finally:
            self.watches -= 1
        return stream

    async def _follow(self, http: web.Request, stream: web.StreamResponse, version: int) -> None:
        cut = self._cut
        while True:
            woken = self._woken
            if self.deaf:
                await asyncio.Event().wait()
            for change in [each for each in self._changes if each.version > version]:
                version = change.version
                for event in self._events(http, change):
                    await stream.write(event)
            if self._cut != cut:
                await stream.write(b'{"type": "MODIF')
                assert http.transport is not None
                http.transport.abort()
                return
            await woken.wait()

    def _events(self, http: web.Request, change: Change) -> Iterator[bytes]:
        if not change.path:
            yield line("BOOKMARK", {"metadata": {"resourceVersion": str(change.version)}})
        if change.path != http.path:
            return
        before, after = (
            one if one is not None and selected(http, one) else None for one in (change.before, change.after)
        )
        if after is not None:
            yield line("ADDED" if before is None else "MODIFIED", after)
        elif before is not None:
            last = deepcopy(before)
            last["metadata"]["resourceVersion"] = str(change.version)
            yield line("DELETED", last)


def selected(http: web.Request, one: Json) -> bool:
    metadata = one["metadata"]
    labels = [pair.split("=") for pair in http.query.get("labelSelector", "").split(",") if pair]
    fields = [pair.split("=") for pair in http.query.get("fieldSelector", "").split(",") if pair]
    return all(metadata["labels"].get(name) == value for name, value in labels) and all(
        {"metadata.name": metadata["name"]}.get(name) == value for name, value in fields
    )


def line(kind: str, one: Json) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


def status(code: int, message: str) -> Json:
    reason = "Expired" if code == 410 else "Unknown"
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


def refusal(code: int, message: str) -> web.Response:
    return web.json_response(status(code, message), status=code)


@asynccontextmanager
async def api_server(**more: Any) -> AsyncIterator[FakeApiServer]:
    """On a free port of localhost."""
    server = FakeApiServer(**more)
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://localhost:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


# -- objects ------------------------------------------------------------------------------------


def endpoint(ip: str, uid: str = "", **conditions: bool | None) -> Json:
    """An endpoint of a slice. `conditions`: ready, serving, terminating."""
    target = {"targetRef": {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}} if uid else {}
    return {"addresses": [ip], "conditions": conditions, **target}


def put_slice(server: FakeApiServer, name: str, *endpoints: Json, port: int = 8000, **more: Any) -> None:
    """A slice of the service `default/vllm` with one port, `http`."""
    body = {"addressType": "IPv4", "ports": [{"name": "http", "port": port, "protocol": "TCP"}], **more}
    labels = {"kubernetes.io/service-name": "vllm"}
    server.put(SLICES.format("default"), name, labels, endpoints=list(endpoints), **body)


def put_pod(
    server: FakeApiServer, name: str, ip: str, *, ready: bool = True, app: str = "vllm", **metadata: Any
) -> None:
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    body = {"status": {"podIP": ip, "phase": "Running", "conditions": conditions}, "metadata": metadata}
    server.put(PODS.format("default"), name, {"app": app}, **body)


def put_pool(server: FakeApiServer, *ports: int, app: str = "vllm") -> None:
    """The InferencePool `default/vllm`."""
    spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]}
    server.put(POOLS.format("default"), "vllm", spec=spec)
