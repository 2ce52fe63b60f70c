"""Comments before the first token of a stream, for balancers that close connections that are silent for a time.

A comment is a line that every reader of events skips (html.spec.whatwg.org, section 9.2.6). The first one commits the
reply: its head is written, with status 200. A request that fails afterwards ends by an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from gateway.core.hooks import NO_HOOKS, Ask, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.downstream.answer_headers import waiting_headers
from gateway.downstream.http_request import HttpRequest, date_line

COMMENT = b": keep-alive\n\n"
STREAM = ("content-type: text/event-stream; charset=utf-8", "cache-control: no-cache", "x-accel-buffering: no")


class Comments(Part):
    def on(self, plan: RoutePlan) -> Hooks:
        route, default = plan.route, plan.runtime.config.defaults.keepalive
        interval = default if route.keepalive is None else route.keepalive
        return NO_HOOKS if interval == "off" else Hooks(read=partial(begin, interval))


async def begin(interval: float, ask: Ask) -> None:
    if ask.request.stream:
        ask.http.comments = StreamComments(ask.http, interval, partial(waiting_headers, ask.timeline))


class StreamComments:
    """Writes a comment every `interval` seconds until `stop`. `head`: further header lines, as known by then."""

    def __init__(self, http: HttpRequest, interval: float, head: Callable[[], Iterable[str]]) -> None:
        self.committed = False
        self._http = http
        self._interval = interval
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval, self._write)

    def stop(self) -> bool:
        self._timer.cancel()
        return self.committed

    def end(self, event: bytes) -> None:
        last = b"0\r\n\r\n" if self._http.http11 else b""
        self._http.writer.write(self._framed(event) + last)

    def _write(self) -> None:
        writer = self._http.writer
        if writer.transport.is_closing():
            return
        if not self.committed:
            writer.write(self._commit() + self._framed(COMMENT))
        elif not writer.paused:
            writer.write(self._framed(COMMENT))
        self._timer = self._loop.call_later(self._interval, self._write)

    def _commit(self) -> bytes:
        http = self._http
        self.committed = http.begun = True
        lines = ["HTTP/1.1 200 OK", date_line(), *http.lines, *STREAM, *self._head()]
        if http.http11:
            lines.append("transfer-encoding: chunked")
        else:
            http.keep_alive = False
        if not http.keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._http.http11 else data
