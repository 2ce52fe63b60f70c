"""Relays an answer to the client: the body verbatim, nothing awaited per chunk.

The head is held until the first token, and both go out in one write. From then on every read of the upstream becomes
a chunk to the client, in the callback of the read; a read of exactly one chunk keeps the framing. A client that does
not read pauses the upstream; after STALL seconds the client is disconnected. A broken stream ends with an explicit
error event, never in silence. Headers of the backend are relayed by allow-list only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

from backends.interface import Failure, FailureKind
from backends.stream.continuation import Diverged, RewriterChain
from backends.stream.redaction import CachedCountMasker, Rewriter, SecretMasker
from backends.stream.sse import JunkFilter, UsageStripper, WholeEvents
from backends.translation.answer import ReplyShapeError, StreamTranslator
from gateway.admission.quotas import quota_headers
from gateway.api.api_error import REASONS, ApiError
from gateway.api.dialects import error_event
from gateway.downstream.http_request import HttpRequest, date_line
from gateway.observe.metrics.series import STALL as LOOP_STALL
from gateway.observe.record import RELAY, STAGE_NAMES, RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.upstream.stream_rescue import StreamRescue
from gateway.upstream.upstream_request import UpstreamRequest
from policies.types import FOREVER, AttemptOutcome

UNRESCUED = Failure(FailureKind.RESET, "The backend broke in the middle of the answer, and no other could continue it.")
LATE_TIMER = 0.005  # s of tolerated delay of a timer
READ_FIRST = 0.01  # s in which sockets are read after a stall of the event loop
STALL = 60.0  # s with a full buffer unread by the client
TRUNCATED = Failure(FailureKind.RESET, "The backend ended the stream before the answer was complete.")
SILENT = Failure(FailureKind.TIMEOUT, "The backend stopped sending in the middle of the answer.")
DIVERGED = Failure(
    FailureKind.PROTOCOL, "The backend broke in the middle of the answer, and another wrote other words."
)
LATE = Failure(FailureKind.TIMEOUT, "The answer took longer than its route allows.", 504, code="timeout")
UNTRANSLATED = Failure(FailureKind.PROTOCOL, "The backend sent an event of no known shape.")
STOPPED = Failure(FailureKind.OVERLOADED, "The gateway was stopped in the middle of the answer; try again.")
STAGE_TIMINGS = tuple(f"{name};dur=%.2f" for name in STAGE_NAMES)  # ms
KNOWN_BEFORE = ("x-request-id", "request-id", "x-firsttoken-route", "x-firsttoken-ttft-budget-ms", "x-ratelimit-")

# A backend may tell a caller nothing else besides the body: no key, cookie, server name or rate limit.
ANTHROPIC = ("messages", "count_tokens")  # operations whose clients read the header `request-id`
ALLOWED = ("content-type", "content-encoding")


class Relay:
    """An answer on the way to a client. `done` is resolved at the end, or gets the error if there is no answer.

    `idle`: seconds without a byte until the answer is given up. `masked_pools`: pools whose backends may not tell a
    caller which part of a prompt was cached. `limit_at`: end of the time for the answer.
    """

    def __init__(
        self,
        http: HttpRequest,
        timeline: RequestTimeline,
        *,
        strip_usage: bool,
        idle: float,
        masked_pools: frozenset[str] = frozenset(),
        limit_at: float = FOREVER,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.http = http
        self.timeline = timeline
        self.writer = http.writer
        self.transport = http.writer.transport
        self.rescue: StreamRescue | None = None
        self.strip_usage = strip_usage
        self.masked_pools = masked_pools
        self.idle = idle
        self.limit_at = limit_at
        self.begun = False
        self.drops_junk = False
        self.diverged = False  # the winner's answer is another one than the answer so far
        self.winner: UpstreamRequest  # the winning attempt, once begun
        self.rewriter: Rewriter | None = None
        self.base_rewriter: Rewriter | None = None  # of every part of a joined stream
        self.translator: StreamTranslator | None = None  # of the stream into the caller's dialect
        self.chunked = http.http11
        self.idle_timer: asyncio.TimerHandle | None = None
        self.stall_timer: asyncio.TimerHandle | None = None
        self.limit_timer: asyncio.TimerHandle | None = None

    def begin(self, winner: UpstreamRequest) -> None:
        """Relay the winning attempt: head and all buffered bytes, in one write."""
        http, self.winner, self.begun = self.http, winner, True
        self.rewriter = self.base_rewriter = self._rewriter()
        whole = not winner.stream and not self.strip_usage and http.comments is None
        buffered = winner.take_buffered()
        length = winner.headers.get("content-length") if whole else None
        if whole and winner.over:
            length = str(len(buffered))
        self.chunked = http.http11 and length is None
        if not http.http11:
            http.keep_alive = False
        self.writer.flow_control = self
        if winner.tap.junk:
            self._drop_junk()
        if self.rewriter is not None:
            buffered = self._first(buffered)
        committed, http.comments = http.comments is not None and http.comments.stop(), None
        first = (b"" if committed else self._head(length)) + self._frame(buffered)
        http.begun = True
        if not self.transport.is_closing():
            self.writer.write(first)
        self.timeline.first_token_out(monotonic(), winner.status)
        if self.limit_at < FOREVER and not winner.over:
            self.limit_timer = self.loop.call_later(self.limit_at - monotonic(), self._end_late)
        self._follow(winner)

    def _first(self, buffered: bytes) -> bytes:
        """Rewrite the buffered bytes. Raises ApiError for events that cannot be translated."""
        assert self.rewriter is not None
        try:
            return self.rewriter.feed(buffered)
        except ReplyShapeError:
            self.winner.stop(AttemptOutcome.BROKEN)
            raise ApiError(502, UNTRANSLATED.message, type="server_error") from None

    def _follow(self, winner: UpstreamRequest) -> None:
        """Receive the rest of the winner's answer."""
        winner.body_sink = self
        if not winner.over:
            self._check_silence_in(self._patience())
        if self.writer.paused:
            self.on_write_paused()

    def resume(self, winner: UpstreamRequest, continuation: Rewriter) -> None:
        """Relay the rest of a broken answer from a further attempt."""
        assert self.base_rewriter is not None  # of every stream
        self.base_rewriter.drop()
        if self._is_masked(winner) and not self._is_masked(self.winner):
            self.base_rewriter = CachedCountMasker(self.base_rewriter)
        self.winner, self.rewriter = winner, RewriterChain(continuation, self.base_rewriter)
        self.body(winner.take_buffered())
        self._follow(winner)

    def _rewriter(self) -> Rewriter | None:
        backend = self.winner.upstream.backend
        rewriter: Rewriter | None = None
        if self.winner.stream:
            rewriter = UsageStripper() if self.strip_usage else WholeEvents()
            if self.winner.answer is not None:
                stream = self.winner.answer.stream()
                self.translator = stream if isinstance(stream, StreamTranslator) else None
                rewriter = RewriterChain(stream, rewriter)
            if self.rescue is not None:
                rewriter = RewriterChain(self.rescue.events, rewriter)
        elif backend.secret:
            rewriter = SecretMasker(backend.secret)
        return CachedCountMasker(rewriter) if self.masked_pools and self._is_masked(self.winner) else rewriter

    def _drop_junk(self) -> None:
        """Relay no event that is no JSON. A `Continuation` passes none."""
        if self.rewriter is not None and self.rewriter is self.base_rewriter and not self.drops_junk:
            self.rewriter = self.base_rewriter = RewriterChain(self.rewriter, JunkFilter())
            self.drops_junk = True

    def _is_masked(self, winner: UpstreamRequest) -> bool:
        return winner.attempt.candidate.endpoint.pool in self.masked_pools

    def release(self) -> None:
        """Detach from the connection, which may serve another request next."""
        self.writer.flow_control = None
        for timer in (self.idle_timer, self.stall_timer, self.limit_timer):
            if timer is not None:
                timer.cancel()
        self.idle_timer = self.stall_timer = None  # a timer references the relay
        self.limit_timer = None

    # -- BodySink ---------------------------------------------------------------------

    def body(self, data: bytes, framed: bytes = b"") -> None:
        """Write a read of the upstream at once, unless the client is gone."""
        if self.transport.is_closing():
            return
        if self.winner.tap.junk:
            self._drop_junk()
        try:
            rewritten = data if self.rewriter is None else self.rewriter.feed(data)
        except Diverged:
            self._on_diverged()
            return
        except ReplyShapeError:
            self._end_untranslatable()
            return
        if framed and self.chunked and rewritten == data:
            self.writer.write_through(framed)
        elif rewritten:
            self.writer.write_through(self._frame(rewritten))

    def replace_held(self, data: bytes) -> None:
        """Write complete events in place of the held bytes."""
        torn = b"" if self.rewriter is None else self.rewriter.drop()
        self.body(data or torn)

    def end(self) -> None:
        """The body is complete; the tap knows if the answer is."""
        if self.diverged:
            return
        if self.winner.tap.spoiled:
            self.replace_held(b"")
        try:
            tail = self.rewriter.close() if self.rewriter is not None else b""
        except Diverged:
            self._on_diverged()
            return
        except ReplyShapeError:
            self._end_untranslatable()
            return
        if self.winner.answered:
            self._finish(self._last(self._with_end(tail)), RequestOutcome.COMPLETED)
        elif self.winner.stream:
            self.on_broken(self.winner.tap.failure or TRUNCATED)
        else:  # status 200 with an error in the body: complete, and the caller's to read
            error = _recorded(self.winner.tap.failure or TRUNCATED)
            self._finish(self._last(tail), RequestOutcome.UPSTREAM_BROKE, error)

    def _with_end(self, tail: bytes) -> bytes:
        """Some servers send no [DONE], or die before it; some clients wait for it."""
        missing = self.winner.tap.missing if self.translator is None else b""
        return tail + b"\n\n" + missing if tail and missing else tail + missing

    def on_broken(self, failure: Failure, error_event: bytes = b"") -> None:
        """The upstream broke after the first token: a peer continues, or an error event is written at once, the
        backend's own if there is one."""
        if self.diverged or (self.rescue is not None and self.rescue.take_over(self.winner, failure)):
            return
        if error_event and self.translator is None:
            event = error_event if self.base_rewriter is None else self.base_rewriter.feed(error_event)
            self._end_broken(event, RequestOutcome.UPSTREAM_BROKE, _recorded(failure))
        else:
            self._end_broken(self._error_event(failure), RequestOutcome.UPSTREAM_BROKE, failure.message)

    def _on_diverged(self) -> None:
        """Leave the winner, once the read in hand is over."""
        self.diverged = True
        self.winner.stop(AttemptOutcome.BROKEN)
        self.loop.call_soon(self._leave_diverged)

    def _leave_diverged(self) -> None:
        if not self.done.done():
            self.diverged = False
            self.on_broken(DIVERGED)

    def give_up(self) -> None:
        """No peer has continued the broken answer."""
        self._end_broken(self._error_event(UNRESCUED), RequestOutcome.UPSTREAM_BROKE, UNRESCUED.message)

    def _end_untranslatable(self) -> None:
        """An event of no known shape ends the stream."""
        self.winner.stop(AttemptOutcome.BROKEN)
        self._end_broken(self._error_event(UNTRANSLATED), RequestOutcome.UPSTREAM_BROKE, UNTRANSLATED.message)

    def _error_event(self, failure: Failure) -> bytes:
        return error_event(failure, self.http.path) if self.translator is None else self.translator.error(failure)

    def _end_broken(self, event: bytes, ending: RequestOutcome, error: str) -> None:
        self.http.keep_alive = False
        if self.winner.stream:
            torn = b"" if self.rewriter is None else self.rewriter.drop()
            self._finish(self._last(torn + event), ending, error)
        else:  # JSON leaves no sign but an incomplete body
            self._finish(b"", ending, error)
            self.writer.flush()
            self.transport.abort()

    def _finish(self, last: bytes, end: RequestOutcome, error: str = "") -> None:
        if self.done.done():
            return
        if last and not self.transport.is_closing():
            self.writer.write(last)
        self.timeline.finished(end, monotonic(), error)
        self.done.set_result(None)

    # -- WriteFlowControl ----------------------------------------------------------------

    def on_shutdown(self) -> None:
        """End the answer explicitly, like any broken stream."""
        self.winner.cancel()
        self._end_broken(self._error_event(STOPPED), RequestOutcome.CUT, STOPPED.message)

    def on_write_paused(self) -> None:
        self.winner.pause()
        if self.stall_timer is None:
            self.stall_timer = self.loop.call_later(STALL, self._disconnect)

    def on_write_resumed(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None
        self.winner.last_byte = monotonic()  # nothing was read
        self.winner.resume()

    def _disconnect(self) -> None:
        """The loss of the connection cancels the handler, which ends the upstream in turn."""
        self.timeline.note_error(f"the client read nothing for {STALL:g} s")
        self.transport.abort()

    # -- idle timeout --------------------------------------------------------------------

    def _patience(self) -> float:
        return self.idle if self.rescue is None else self.rescue.patience(self.winner)

    def _check_silence_in(self, delay: float) -> None:
        """A timer per stream is moved on rather than reset for every chunk."""
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        self.idle_timer = self.loop.call_later(delay, self._check_silence, monotonic() + delay)

    def _check_silence(self, due: float) -> None:
        now = monotonic()
        quiet, patience = now - self.winner.last_byte, self._patience()
        if self.winner.over:
            return
        if now - due > LATE_TIMER:  # a stall of this event loop is no silence of the engine: sockets are read first
            self._check_silence_in(READ_FIRST)
        elif quiet < patience or self.stall_timer is not None:
            self._check_silence_in(max(patience - quiet, 0.05))
        elif quiet < self.idle and not (self.rescue is not None and self.rescue.may_leave(self.winner)):
            self._check_silence_in(self.idle - quiet)
        elif self.winner.stream and self.winner.answered:  # after [DONE], an open connection is no failure
            self.winner.stop(AttemptOutcome.COMPLETED)
            self.winner.tap.close()
            self.end()
        else:
            self.winner.stop(AttemptOutcome.BROKEN)
            self.on_broken(SILENT)

    def _end_late(self) -> None:
        if not (self.winner.stream and self.winner.answered):
            self.winner.cancel()
            self._end_broken(self._error_event(LATE), RequestOutcome.UPSTREAM_BROKE, LATE.message)

    # -- framing -------------------------------------------------------------------------

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self.chunked else data

    def _last(self, data: bytes) -> bytes:
        return self._frame(data) + (b"0\r\n\r\n" if self.chunked else b"")

    def _head(self, length: str | None) -> bytes:
        status = self.winner.status
        headers = response_headers(self.winner.headers, self.timeline, streams=self.winner.stream)
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'OK')}", date_line(), *self.http.lines, *headers]
        if length is not None:
            lines.append(f"content-length: {length}")
        elif self.chunked:
            lines.append("transfer-encoding: chunked")
        if not self.http.keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _recorded(failure: Failure) -> str:
    """Error text for the Record. A backend's own words may quote the prompt, and are left out."""
    return f"the backend's own error: {failure.kind.value}"


# --------------------------------------------------------------------------- header lines


def response_headers(backend: Mapping[str, str], timeline: RequestTimeline, *, streams: bool) -> list[str]:
    """Header lines of an answer about to be written. `backend`: the headers of the backend's reply."""
    lines = [f"{name}: {backend[name]}" for name in ALLOWED if name in backend]
    if streams:
        lines += ["cache-control: no-cache", "x-accel-buffering: no"]
    return lines + gateway_headers(timeline, monotonic(), won=1)


def gateway_headers(timeline: RequestTimeline, now: float, won: int = 0) -> list[str]:
    """Header lines about the request up to `now`. `won`: attempts besides the lost attempts of the Record."""
    record = timeline.record
    lines = [
        f"x-request-id: {record.request_id}",
        f"x-firsttoken-route: {record.route}",
        f"x-firsttoken-pool: {record.pool}",
        f"x-firsttoken-model: {record.model}",
        f"x-firsttoken-attempts: {len(record.attempts) + won}",
        f"x-firsttoken-ttft-ms: {(now - record.arrival) * 1e3:.2f}",
    ]
    if record.ttft_budget is not None:
        lines.append(f"x-firsttoken-ttft-budget-ms: {record.ttft_budget * 1e3:.0f}")
    if record.ttft_predicted_p50 is not None:
        lines.append(f"x-firsttoken-ttft-predicted-ms: {record.ttft_predicted_p50 * 1e3:.1f}")
    if record.operation in ANTHROPIC:
        lines.append(f"request-id: {record.request_id}")
    if record.quota is not None:
        lines += quota_headers(record.quota)
    lines.append(server_timing(timeline, now))
    return lines


def waiting_headers(timeline: RequestTimeline) -> list[str]:
    """The header lines that are known before an endpoint has answered."""
    return [line for line in gateway_headers(timeline, monotonic()) if line.startswith(KNOWN_BEFORE)]


def server_timing(timeline: RequestTimeline, now: float) -> str:
    """W3C Server-Timing: milliseconds of each closed stage; `relay` is the time since the last stage.

    `loop_lag` is part of other stages, and is given where the event loop has stalled.
    """
    spent = timeline.record.spent
    timing = [form % (s * 1e3) for form, s in zip(STAGE_TIMINGS, spent, strict=True) if s is not None]
    timing.append(STAGE_TIMINGS[RELAY] % (max(now - timeline.mark, 0.0) * 1e3))
    lag = timeline.stalled(now)
    if lag >= LOOP_STALL:
        timing.append(f"loop_lag;dur={lag * 1e3:.2f}")
    return "server-timing: " + ", ".join(timing)
