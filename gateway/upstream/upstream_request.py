"""An attempt on the wire: buffers the upstream's reply until the attempt is worth committing to.

An UpstreamRequest is the `Sink` of an exchange. Before the commit the reply is buffered (head, preamble); the first
visible output makes the attempt a candidate to win. An answer that is not streamed is buffered to its end and judged:
a 200 may hold an error, a page of HTML or half an answer. After the commit every read goes to the body sink in the
same call. Each attempt ends exactly once, and the fleet is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from backends.failures import NOT_EVENTS, NOT_JSON, NOT_SERVED, TOO_LARGE, WENT_SILENT, TransportError, of_body
from backends.http.connection import Exchange
from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, BackendRequest, Failure, FailureKind, Operation, Usage
from backends.stream.redaction import mask_secret
from backends.translation.answer import ReplyShapeError, RewrittenAnswer
from policies.fleet.fleet import AttemptReport, Fleet
from policies.rate_limit import RateLimit
from policies.types import FOREVER, Attempt, AttemptKind, AttemptOutcome, Price

MAX_HELD = 256 * 1024  # bytes before the first token; a longer preamble counts as an answer
ECHOES = 4  # Responses repeats instructions and tools in two events before the first token, in another spelling maybe
MAX_WHOLE = 1 << 20  # bytes held of an unstreamed answer; a longer answer is passed on before the end
MAX_REWRITTEN = 64 << 20  # bytes of a rewritten answer, held whole: may contain images
MAX_ERROR = 64 * 1024  # bytes of an error reply to read

EMPTY = Failure(FailureKind.PROTOCOL, "The backend ended its reply before the first token.")
UNKNOWN = Failure(FailureKind.MISCONFIGURED, "The backend does not know the configured model or path.")

EVERYWHERE = (Operation.CHAT, Operation.COMPLETION)  # served by every backend: a 404 is the server's fault

OUTCOMES = {
    FailureKind.RATE_LIMITED: AttemptOutcome.RATE_LIMITED,
    FailureKind.OVERLOADED: AttemptOutcome.RATE_LIMITED,  # an engine that refuses for a while is healthy
    FailureKind.CLIENT: AttemptOutcome.REFUSED,
    FailureKind.UNSUPPORTED: AttemptOutcome.REFUSED,
    FailureKind.AUTH: AttemptOutcome.MISCONFIGURED,
    FailureKind.MISCONFIGURED: AttemptOutcome.MISCONFIGURED,
    FailureKind.QUOTA: AttemptOutcome.QUOTA,
}


@dataclass(frozen=True, slots=True)
class Upstream:
    """Connections to an endpoint, and the dialect of the server."""

    connections: ConnectionPool
    backend: Backend
    model: str
    kv_events: bool = False  # the engine publishes cache events, in which the session id names the request
    priority: bool = False  # the engine schedules by priority
    traced: bool = True  # the endpoint gets the trace context, with tracing on
    price: Price = field(default_factory=Price)


class BodySink(Protocol):
    """Receiver of a committed answer. Called within the read that brought the bytes: no method may wait."""

    def body(self, data: bytes, framed: bytes = b"") -> None:
        """Body bytes of a read; `framed`: the same with HTTP framing, if the read was exactly one chunk."""
        ...

    def end(self) -> None: ...

    def replace_held(self, data: bytes) -> None:
        """Complete events in place of all bytes held back; nothing else of the body follows."""
        ...

    def on_broken(self, failure: Failure, error_event: bytes = b"") -> None:
        """`error_event`: the backend's own, if there is one."""
        ...


class AttemptListener(Protocol):
    """Receiver of the result of an attempt, before any byte reaches the client."""

    def first_token(self, upstream_request: UpstreamRequest) -> None: ...

    def failed(self, upstream_request: UpstreamRequest, failure: Failure) -> None: ...


class UpstreamRequest:
    """An attempt. `opened`, `connected`, `sent`, `first_in`, `reasoning_in`, `answer_in`, `ended_at`: monotonic
    seconds.

    `idle`: seconds without a byte until a buffered answer is given up. `answer`: into the caller's dialect or ids;
    None: the backend's bytes are the caller's.
    """

    def __init__(
        self,
        attempt: Attempt,
        upstream: Upstream,
        request: BackendRequest,
        listener: AttemptListener,
        fleet: Fleet,
        idle: float = FOREVER,
        answer: RewrittenAnswer | None = None,
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.fleet = fleet
        self.stream = request.stream
        self.idle = idle
        self.idle_timer: asyncio.TimerHandle | None = None
        self.operation = request.operation
        self.answer = answer
        self.model_is_callers = request.model_is_callers
        self.tap = upstream.backend.tap(request)
        self.call = upstream.backend.call(request)
        self.max_held = MAX_HELD + ECHOES * len(self.call.body)
        self.listener: AttemptListener | None = listener
        self.request_id = request.request_id
        self.continues = attempt.kind is AttemptKind.RESCUE
        self.connecting: asyncio.Task[None] | None = None  # runs `connect`
        self.exchange: Exchange | None = None
        self.on_wire = False  # the request has been sent
        self.body_sink: BodySink | None = None  # receiver of every read after the commit, set once all buffered is out
        self.status = 0
        self.is_success = False
        self.headers: Mapping[str, str] = {}
        self.buffered: list[bytes] = []
        self.buffered_bytes = 0
        self.opened = monotonic()
        self.connected = self.opened
        self.sent = self.opened
        self.first_in: float | None = None
        self.reasoning_in: float | None = None  # first token of reasoning before the answer
        self.answer_in: float | None = None  # first token of the answer
        self.last_token = self.opened
        self.last_byte = self.opened
        self.reached = True  # False: refused, or reset before any byte
        self.unknown_model = False  # the server does not know the model's name
        self.over = False  # the upstream sends nothing more
        self.ending: AttemptOutcome | None = None
        self.ended_at = 0.0
        self.report: AttemptReport | None = None  # set at the end

    # -- sending ------------------------------------------------------------------------

    def start(self) -> bool:
        """Send on an idle connection. False: there is none."""
        exchange = self.upstream.connections.start(self.call, self)
        if exchange is not None:
            self.sent_on(exchange)
        return exchange is not None

    async def connect(self) -> None:
        """Send on a new connection. A failure to connect is reported like any other. The end of the attempt cancels the
        connecting, and nothing is written."""
        try:
            exchange = await self.upstream.connections.open(self.call, self)
        except TransportError as error:
            self.on_failure(error.failure)
        else:
            self.sent_on(exchange)
        finally:
            self.connecting = None

    def sent_on(self, exchange: Exchange) -> None:
        """The request is on the wire."""
        self.exchange, self.on_wire = exchange, True
        self.sent = exchange.sent_at
        self.connected = min(self.opened + exchange.connect_seconds, self.sent)

    # -- Sink of the exchange -----------------------------------------------------------

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        self.is_success = 200 <= status < 300
        if not self.upstream.backend.local:
            self._read_rate_limits()
        if self.stream and self.is_success and headers.get("content-type", "").startswith("text/html"):
            self._fail(NOT_EVENTS)

    def _read_rate_limits(self) -> None:
        if reports := self.upstream.backend.rate_limits(self.headers):
            now = monotonic()
            self.fleet.on_rate_limits(
                self, [RateLimit.reported(r.counts_tokens, r.remaining, r.limit, r.reset, now) for r in reports]
            )

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        self.last_byte = now = monotonic()
        if self.body_sink is None:
            self._read_before_commit(data)
            return
        if self.tap.feed(data):
            self.last_token = now
            if self.answer_in is None:
                self._note_kind(now)
        if not self.tap.spoiled:
            self.body_sink.body(data, framed)
        else:
            self._end_spoiled()

    def on_end(self) -> None:
        self.over = True
        if not self.is_success:
            return self._fail(self.upstream.backend.failure(self.status, self.headers, b"".join(self.buffered)))
        self.tap.close()
        if self.first_in is None:
            if (failure := self._judged() or self._translate_whole()) is not None:
                return self._fail(failure)
            self._commit(monotonic())
        return self._complete()

    def on_failure(self, failure: Failure) -> None:
        self.over = True
        if self.first_in is None:
            self._fail(failure)
        elif self.stream and self.tap.ended:  # nothing after [DONE] turns success into failure
            self.tap.close()
            self._complete()
        else:
            self._close(AttemptOutcome.BROKEN)
            if self.body_sink is not None:
                self.body_sink.on_broken(failure)

    def _judged(self) -> Failure | None:
        """None: the reply is a complete answer, be it without visible output. A compressed one cannot be judged."""
        if self.stream:
            if self.tap.ended:
                return None
            return self.tap.failure or of_body(b"".join(self.buffered), self.upstream.backend.secret.decode()) or EMPTY
        return self.tap.failure if self.headers.get("content-encoding", "identity") == "identity" else None

    def _translate_whole(self) -> Failure | None:
        """Put the caller's dialect in place of a whole answer."""
        if self.answer is None or self.stream:
            return None
        try:
            self.buffered = [self.answer.whole(b"".join(self.buffered))]
        except ReplyShapeError:
            return NOT_JSON
        return None

    def _read_before_commit(self, data: bytes) -> None:
        if self.is_success or self.buffered_bytes < MAX_ERROR:
            self.buffered.append(data)
            self.buffered_bytes += len(data)
        if not self.is_success:
            return
        content, failure = self.tap.feed(data), self.tap.failure
        if not self.stream:
            self._hold_whole()
        elif failure is not None and not content:
            self._fail(failure)
        elif self.tap.spoiled:  # an error after a token in the same read: the answer has begun, and ended
            self.buffered.pop()
            self._commit(self.last_byte)
            self._end_spoiled()
        elif content or (
            self.buffered_bytes > self.max_held and "event-stream" in self.headers.get("content-type", "")
        ):
            self._commit(self.last_byte)
        elif self.buffered_bytes > self.max_held:
            self._fail(NOT_EVENTS)

    def _hold_whole(self) -> None:
        if self.buffered_bytes > MAX_WHOLE and self.answer is None:
            self._commit(self.last_byte)
        elif self.buffered_bytes > MAX_REWRITTEN:
            self._fail(TOO_LARGE)
        elif self.idle_timer is None and self.idle < FOREVER:
            self.idle_timer = asyncio.get_running_loop().call_later(self.idle, self._check_idle)

    def _check_idle(self) -> None:
        quiet = monotonic() - self.last_byte
        if self.over or self.first_in is not None:
            return
        if quiet < self.idle:
            self.idle_timer = asyncio.get_running_loop().call_later(max(self.idle - quiet, 0.05), self._check_idle)
        else:
            self._fail(WENT_SILENT)

    def _commit(self, now: float) -> None:
        self.first_in = self.last_token = now
        self._note_kind(now)
        if self.listener is not None:
            self.listener.first_token(self)
        if self.stream:  # after the write to the caller, who need not wait for it
            self.fleet.on_first_token(self, now)

    def _note_kind(self, now: float) -> None:
        """Note the time of a first token of reasoning, or of the answer."""
        if self.reasoning_in is None and self.tap.reasoning_begun:
            self.reasoning_in = now
        if self.tap.answer_begun:
            self.answer_in = now

    def _complete(self) -> None:
        """The reply is over; the tap knows if complete."""
        self._close(AttemptOutcome.COMPLETED if self.answered else AttemptOutcome.BROKEN)
        if self.body_sink is not None:
            self.body_sink.end()

    def _end_spoiled(self) -> None:
        """An error event or junk ends the stream, although vLLM sends [DONE] after an error."""
        self.stop(AttemptOutcome.COMPLETED if self.answered else AttemptOutcome.BROKEN)
        if self.body_sink is None:
            return
        if self.tap.rest:
            self.body_sink.body(self.tap.rest)
        self.body_sink.replace_held(self.tap.sound)
        if self.tap.failure is None:
            self.body_sink.end()
        else:
            event = mask_secret(self.tap.error_event, self.upstream.backend.secret)
            self.body_sink.on_broken(self.tap.failure, event)

    def _fail(self, failure: Failure) -> None:
        if self.operation not in EVERYWHERE and (self.status in (405, 501) or failure is NOT_SERVED):
            failure = replace(NOT_SERVED, kind=FailureKind.UNSUPPORTED, status=404, code="unsupported_operation")
        elif failure.kind is FailureKind.MISCONFIGURED:
            self.unknown_model = failure is not NOT_SERVED
            failure = self._blamed(failure)
        self.reached = self.status != 0 or failure.kind not in (FailureKind.CONNECT, FailureKind.RESET)
        self.stop(OUTCOMES.get(failure.kind, AttemptOutcome.FAILED), failure.retry_after)
        if self.listener is not None:
            self.listener.failed(self, failure)

    def _blamed(self, failure: Failure) -> Failure:
        """An unknown model is the fault of whoever has named it. A caller is told nothing of our configuration."""
        if not self.model_is_callers:
            return UNKNOWN
        return replace(failure, kind=FailureKind.CLIENT, status=min(failure.status, 404), code="model_not_found")

    # -- for the relay ------------------------------------------------------------------

    @property
    def accepted(self) -> bool:
        """The engine has accepted the request. The head of a stream precedes the computation of the prompt; the head
        of a whole answer does not, so there sending the request is enough."""
        return self.status != 0 if self.stream else self.exchange is not None

    @property
    def answered(self) -> bool:
        """The answer is complete: a stream has ended; a whole body is there and is no error."""
        return self.tap.ended if self.stream else self.tap.failure is None

    def take_buffered(self) -> bytes:
        """Return the buffered body bytes, once."""
        data = b"".join(self.buffered)
        self.buffered = []
        return data

    def pause(self) -> None:
        if self.exchange is not None and not self.over:
            self.exchange.pause()

    def resume(self) -> None:
        if self.exchange is not None and not self.over:
            self.exchange.resume()

    # -- the end ------------------------------------------------------------------------

    def cancel(self) -> None:
        """The client is gone or another attempt has won: the engine is told at once."""
        self.stop(AttemptOutcome.CANCELLED)

    def detach(self) -> None:
        """Report nothing more, and break the reference cycles. An attempt without an end (a bug) frees the engine."""
        if self.ending is None:
            self.cancel()
        self.body_sink = self.exchange = self.listener = None

    def stop_if_open(self) -> None:
        """The fleet counts an attempt until the end."""
        if self.ending is None:
            self.cancel()

    def stop(self, ending: AttemptOutcome, retry_after: float | None = None) -> None:
        """End an open exchange."""
        if not self.over:
            if self.connecting is not None:
                self.connecting.cancel()
            if self.exchange is not None:
                self.exchange.cancel()
        self.over = True
        self._close(ending, retry_after)

    def _close(self, ending: AttemptOutcome, retry_after: float | None = None) -> None:
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None
        if self.ending is None:
            self.ending = ending
            self.ended_at = monotonic()
            self.report = self.reported(retry_after)
            if (
                self.first_in is not None and self.stream
            ):  # the fleet knows, unless ended in the call of the first token
                self.fleet.on_first_token(self, self.first_in)
            self.fleet.on_ended(self, ending, self.ended_at, self.report)

    def reported(self, retry_after: float | None = None) -> AttemptReport:
        """The engine's own figures for this attempt. The prompt of a continuation holds an answer: nothing to learn."""
        times = self.tap.times
        usage = Usage(completion=self.tap.usage.completion) if self.continues else self.tap.usage
        return AttemptReport(
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            mean_itl=times.mean_itl or self.tpot(),
            engine_ttft=times.ttft,
            retry_after=retry_after,
            connected=self.reached,
            unknown_model=self.unknown_model,
        )

    def billable(self) -> tuple[int, int]:
        """Tokens of prompt and output that the server may bill: none of a request that was not sent, or was refused."""
        refused = self.first_in is None and (self.tap.failure is not None or (self.status > 0 and not self.is_success))
        if refused or not self.on_wire:
            return 0, 0
        prompt = self.tap.usage.prompt
        return self.attempt.candidate.prompt_tokens if prompt is None else prompt, self.output_tokens

    @property
    def cost_usd(self) -> float:
        """Cost of the billable tokens; cached tokens as reported by the server."""
        (prompt, output), usage = self.billable(), self.tap.usage
        return self.upstream.price.of(prompt, output, usage.cached or 0, usage.cache_write or 0)

    @property
    def output_tokens(self) -> int:
        """As reported by the engine; as counted until then, or without a report."""
        completion = self.tap.usage.completion
        return self.tap.tokens if completion is None else completion

    def tpot(self) -> float | None:
        """Seconds per output token after the first; None under two tokens or if the answer came whole."""
        tokens = self.output_tokens
        if self.first_in is None or not self.stream or tokens < 2:
            return None
        return (self.last_token - self.first_in) / (tokens - 1)
