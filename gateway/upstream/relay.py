"""Bytes to the client: the body verbatim, nothing awaited per chunk.

The head waits for the first token and goes out with it in one write. From then on every read
of the upstream becomes one chunk to the client, in the callback that received it; one that was
a chunk already keeps its framing. A client
that does not read pauses its upstream; one that does not read for STALL seconds is cut off.
A stream that dies ends with an explicit error event, never in silence.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from backends.interface import Failure, FailureKind
from backends.stream.redaction import CachedCountMasker, SecretMasker
from backends.stream.sse import UsageStripper
from gateway.api.api_error import REASONS, envelope
from gateway.api.response_headers import response_headers
from gateway.api.strict_json import encode
from gateway.downstream.http_request import HttpRequest
from gateway.observe.record import RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.upstream_request import UpstreamRequest
from policies.types import AttemptOutcome

STALL = 60.0  # s that a reader may leave a full buffer unread
TRUNCATED = Failure(FailureKind.RESET, "The backend ended the stream before the answer was complete.")
SILENT = Failure(FailureKind.TIMEOUT, "The backend stopped sending in the middle of the answer.")
STOPPED = Failure(FailureKind.OVERLOADED, "The gateway was stopped in the middle of the answer; try again.")


class Relay:
    """One answer on its way to one client. `done` is resolved at its end, or refused by whoever finds no answer.

    `idle`: seconds without a byte after which it is given up. `private`: there are other tenants, and what of the
    prompt was cached may be told only by a backend that keeps their caches apart.
    """

    __slots__ = (
        "begun",
        "chunked",
        "clean",
        "done",
        "http",
        "idle",
        "length",
        "life",
        "loop",
        "private",
        "run",
        "stalled",
        "strip_usage",
        "stripper",
        "transport",
        "watchdog",
        "writer",
    )

    def __init__(
        self, http: HttpRequest, life: RequestTimeline, *, strip_usage: bool, idle: float, private: bool = False
    ) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.http, self.life, self.idle = http, life, idle
        self.writer = http.writer
        self.transport = http.writer.transport
        self.strip_usage, self.private = strip_usage, private
        self.begun = False
        self.run: UpstreamRequest  # that has won, once it has begun
        self.clean = True  # the bytes sent so far end between two events
        self.watchdog: asyncio.TimerHandle | None = None
        self.stalled: asyncio.TimerHandle | None = None

    def begin(self, run: UpstreamRequest) -> None:
        """This attempt has won: head and everything held so far, in one write."""
        self.run, self.begun = run, True
        self.stripper: UsageStripper | SecretMasker | CachedCountMasker | None = (
            UsageStripper() if self.strip_usage else None
        )
        if not run.tap_streams and run.backend.secret:
            self.stripper = SecretMasker(run.backend.secret)
        if self.private and not run.backend.salted:
            self.stripper = CachedCountMasker(self.stripper)
        self.length = None if self.strip_usage or run.tap_streams else run.headers.get("content-length")
        self.chunked = self.http.http11 and self.length is None
        if not self.http.http11:
            self.http.keep_alive = False
        self.writer.flow_control = self
        first = self._head() + self._frame(self._strip(run.take_held()))
        self.http.begun = True
        if not self.transport.is_closing():
            self.writer.write(first)
        self.life.first_token_out(monotonic(), run.status)
        run.attach(self)
        if not run.over:
            self.watchdog = self.loop.call_later(self.idle, self._watch)
        if self.writer.paused:
            self.on_write_paused()

    def release(self) -> None:
        """Detach from the connection, which may serve another request next."""
        self.writer.flow_control = None
        for timer in (self.watchdog, self.stalled):
            if timer is not None:
                timer.cancel()
        self.watchdog = self.stalled = None  # a timer holds its relay

    # -- from upstream ----------------------------------------------------------------

    def body(self, data: bytes) -> None:
        """One read of the upstream, written on at once. A client that has just gone is written to no more."""
        if self.transport.is_closing():
            return
        if self.stripper is not None:
            data = self.stripper.feed(data)
            if not data:
                return
        self.clean = data.endswith(b"\n\n")
        self.writer.write_on(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def chunk(self, data: bytes, framed: bytes) -> None:
        """One read that was one chunk, of content alone: it goes on as it came, framing and all."""
        if self.chunked and data.endswith(b"\n\n") and (self.stripper is None or self.stripper.idle):
            if not self.transport.is_closing():
                self.clean = True
                self.writer.write_on(framed)
        else:
            self.body(data)

    def end(self) -> None:
        """The body is complete; whether the answer is, only the tap knows."""
        tail = self.stripper.close() if self.stripper is not None else b""
        if self.run.answered:
            self._finish(self._last(tail), RequestOutcome.COMPLETED)
        elif self.run.tap_streams:
            self.on_broken(TRUNCATED)
        else:  # a 200 that holds an error: it is all there, and the caller's to read
            self._finish(self._last(tail), RequestOutcome.UPSTREAM_BROKE, _kind(self.run.tap.failure or TRUNCATED))

    def on_error_event(self, data: bytes, failure: Failure) -> None:
        """The backend has said it itself: its event is the explicit end."""
        self.http.keep_alive = False
        self._finish(self._last(self._strip(data)), RequestOutcome.UPSTREAM_BROKE, _kind(failure))

    def on_broken(self, failure: Failure, ending: RequestOutcome = RequestOutcome.UPSTREAM_BROKE) -> None:
        """The upstream died after its first token: say so, in the stream, at once."""
        self.http.keep_alive = False
        if self.run.tap_streams:
            event = b"data: " + encode(envelope(failure.message, failure.type, failure.code, None)) + b"\n\n"
            event = event if self.clean else b"\n\n" + event
            self._finish(self._last(event), ending, failure.message)
        else:  # an unfinished body is the only honest sign that JSON leaves
            self._finish(b"", ending, failure.message)
            self.writer.flush()
            self.transport.abort()

    def _finish(self, last: bytes, end: RequestOutcome, error: str = "") -> None:
        if self.done.done():
            return
        if last and not self.transport.is_closing():
            self.writer.write(last)
        self.life.finished(end, monotonic(), error)
        self.done.set_result(None)

    def on_shutdown(self) -> None:
        """No time is left: an explicit end, as for any stream that breaks off."""
        self.run.cancel()
        self.on_broken(STOPPED, RequestOutcome.CUT)

    # -- from the client's socket --------------------------------------------------------

    def on_write_paused(self) -> None:
        self.run.pause()
        if self.stalled is None:
            self.stalled = self.loop.call_later(STALL, self._cut)

    def on_write_resumed(self) -> None:
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None
        self.run.resume()

    def _cut(self) -> None:
        """The handler is cancelled by the connection's loss, and ends the upstream in turn."""
        self.life.note_error(f"the client read nothing for {STALL:g} s")
        self.transport.abort()

    # -- time ----------------------------------------------------------------------------

    def _watch(self) -> None:
        """One timer a stream, moved on rather than reset for every chunk."""
        quiet = monotonic() - self.run.last_byte
        if quiet >= self.idle and self.stalled is None:
            self._give_up()
        else:
            self.watchdog = self.loop.call_later(max(self.idle - quiet, 0.05), self._watch)

    def _give_up(self) -> None:
        """Silence after [DONE] is only a connection that was not closed."""
        if self.run.tap_streams and self.run.answered:
            self.run.stop(AttemptOutcome.COMPLETED)
            self.end()
        else:
            self.run.cancel()
            self.on_broken(SILENT)

    # -- framing -------------------------------------------------------------------------

    def _strip(self, data: bytes) -> bytes:
        return self.stripper.feed(data) if self.stripper is not None else data

    def _frame(self, data: bytes) -> bytes:
        if not data:
            return b""
        self.clean = data.endswith(b"\n\n")
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def _last(self, data: bytes) -> bytes:
        return self._frame(data) + (b"0\r\n\r\n" if self.chunked else b"")

    def _head(self) -> bytes:
        status = self.run.status
        headers = response_headers(self.run.headers, self.life, streams=self.run.tap_streams)
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'OK')}", *headers]
        if self.length is not None:
            lines.append(f"content-length: {self.length}")
        elif self.chunked:
            lines.append("transfer-encoding: chunked")
        if not self.http.keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _kind(failure: Failure) -> str:
    """For the Record: a backend's own words may quote the prompt."""
    return f"the backend's own error: {failure.kind.value}"
