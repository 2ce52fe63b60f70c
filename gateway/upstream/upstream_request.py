"""One attempt on the wire: what the upstream sends, held until it is worth committing to.

A Run is the `Sink` of its exchange. Before the commit it holds what came (a head, a preamble);
the first visible output makes it a candidate to win. After the commit it passes every read to
its receiver in the same call. However it ends, it ends once, and the monitor hears of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from backends.http.connection import Exchange
from backends.http.connection_pool import ConnectionPool
from backends.interface import Failure, FailureKind, HttpCall, Signal
from backends.stream.redaction import masked
from gateway.fleet.monitor import Monitor
from gateway.upstream.attempt_listener import DETACHED, AttemptListener, BodySink
from policies.fleet.fleet import AttemptReport
from policies.types import Attempt, AttemptOutcome

if TYPE_CHECKING:
    from backends.interface import Backend, Tap

MAX_HELD = 256 * 1024  # bytes before the first token; beyond it a preamble counts as an answer
MAX_ERROR = 64 * 1024  # bytes of an error reply that are read for its meaning

EMPTY = Failure(FailureKind.PROTOCOL, "The backend ended its reply before the first token.")

# By identity: a flag's `&` costs more than a tap.
CONTENT, NOTHING, ERROR = Signal.CONTENT, Signal.NOTHING, Signal.ERROR

DONE = b"data: [DONE]"
ERROR_EVENT = re.compile(rb'"error"\s*:')  # the member, not a finish_reason of that name

ENDINGS = {
    FailureKind.RATE_LIMITED: AttemptOutcome.RATE_LIMITED,
    FailureKind.OVERLOADED: AttemptOutcome.RATE_LIMITED,  # an engine that refuses for a while is not ill
    FailureKind.CLIENT: AttemptOutcome.REFUSED,
}


class UpstreamRequest:
    """One attempt. `opened`, `connected`, `sent`, `first_in`, `ended_at`: monotonic seconds."""

    __slots__ = (
        "attempt",
        "backend",
        "buffered",
        "call",
        "connected",
        "ended_at",
        "ending",
        "exchange",
        "first_in",
        "headers",
        "held_bytes",
        "last_byte",
        "last_token",
        "monitor",
        "opened",
        "origin",
        "over",
        "owner",
        "reached",
        "receiver",
        "report",
        "sent",
        "status",
        "tap",
        "tap_streams",
    )

    def __init__(
        self,
        attempt: Attempt,
        origin: ConnectionPool,
        backend: Backend,
        call: HttpCall,
        tap: Tap,
        *,
        streams: bool,
        owner: AttemptListener,
        monitor: Monitor,
    ) -> None:
        self.attempt, self.origin, self.backend, self.call, self.tap = attempt, origin, backend, call, tap
        self.tap_streams, self.monitor = streams, monitor
        self.owner: AttemptListener = owner
        self.exchange: Exchange | None = None
        self.receiver: BodySink | None = None
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.buffered: list[bytes] = []
        self.held_bytes = 0
        self.opened = monotonic()
        self.connected = self.sent = self.opened
        self.first_in: float | None = None
        self.last_token = self.last_byte = self.opened
        self.reached = True  # False: refused, or reset before any byte
        self.over = False  # the upstream will say nothing more
        self.ending: AttemptOutcome | None = None
        self.ended_at = 0.0
        self.report: AttemptReport | None = None  # once it is over

    def sent_on(self, exchange: Exchange) -> None:
        """The request is on the wire."""
        self.exchange = exchange
        self.sent = exchange.sent_at
        self.connected = min(self.opened + exchange.connect_seconds, self.sent)

    # -- Sink: what the transport says --------------------------------------------------

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        now = self.last_byte = monotonic()
        if not 200 <= self.status < 300:
            return self._hold(data, MAX_ERROR)
        signal = self.tap.feed(data)
        if self.receiver is not None:
            return self._pass(data, signal)
        content = signal is CONTENT or (signal is not NOTHING and bool(signal & CONTENT))
        failed = signal is not CONTENT and signal is not NOTHING and bool(signal & ERROR)
        self.buffered.append(data)
        self.held_bytes += len(data)
        if failed:
            return self._failed_before_commit(data, content)
        if content or self.held_bytes > MAX_HELD:
            self._first(now)
        return None

    def _pass(self, data: bytes, signal: Signal) -> None:
        assert self.receiver is not None
        if signal is CONTENT or signal & CONTENT:
            self.last_token = self.last_byte
        if signal is not CONTENT and signal & ERROR:
            self._broken_by_event(data)
        else:
            self.receiver.body(data)

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        receiver = self.receiver
        if receiver is None:
            return self.on_body(data)
        self.last_byte = monotonic()
        signal = self.tap.feed(data)
        if signal is CONTENT:
            self.last_token = self.last_byte
            return receiver.chunk(data, framed)
        return self._pass(data, signal)

    def on_end(self) -> None:
        self.over = True
        if not 200 <= self.status < 300:
            return self._fail(self.backend.failure(self.status, self.headers, b"".join(self.buffered)))
        self.tap.close()
        if self.first_in is None:  # an answer without visible output is still an answer, if it says that it is over
            if not self.tap.ended:
                return self._fail(EMPTY)
            self._first(monotonic())
        return self._complete()

    def _complete(self) -> None:
        """Nothing more will come; whether that is an answer, the tap knows."""
        self._close(AttemptOutcome.COMPLETED if self.answered else AttemptOutcome.BROKEN)
        if self.receiver is not None:
            self.receiver.end()

    def on_failure(self, failure: Failure) -> None:
        self.over = True
        if self.first_in is None:
            return self._fail(failure)
        if self.tap_streams and self.tap.ended:  # what follows [DONE] cannot turn success into failure
            return self._complete()
        self._close(AttemptOutcome.BROKEN)
        if self.receiver is not None:
            self.receiver.on_broken(failure)
        return None

    def _failed_before_commit(self, data: bytes, content: bool) -> None:
        """An error event: alone it can be mended; behind a token in the same read the answer has begun, and ended."""
        if not content:
            return self._fail(self.tap.failure or EMPTY)
        self._first(self.last_byte)
        self.stop(AttemptOutcome.BROKEN)
        if self.receiver is not None:  # which has written `data`, up to the error and with it
            self._end_in_error(b"", data)
        return None

    def _broken_by_event(self, data: bytes) -> None:
        """An error in mid-stream is the answer's end. vLLM sends [DONE] after it, as if all were well."""
        self.stop(AttemptOutcome.BROKEN)
        data = masked(data.partition(DONE)[0], self.backend.secret)
        self._end_in_error(data, data)

    def _end_in_error(self, left: bytes, data: bytes) -> None:
        """The backend's own error event in `data` will do; where it sent none (garbage, say), ours follows. `left` is
        what of it is still to be written."""
        assert self.receiver is not None
        failure = self.tap.failure or EMPTY
        if ERROR_EVENT.search(data):
            self.receiver.on_error_event(left, failure)
            return
        if left:
            self.receiver.body(left)
        self.receiver.on_broken(failure)

    def _hold(self, data: bytes, limit: int) -> None:
        if self.held_bytes < limit:
            self.buffered.append(data)
            self.held_bytes += len(data)

    def _first(self, now: float) -> None:
        self.first_in = self.last_token = now
        if self.tap_streams:
            self.monitor.first_token(self, now)
        self.owner.first_token(self)

    def _fail(self, failure: Failure) -> None:
        self.reached = self.status != 0 or failure.kind not in (FailureKind.CONNECT, FailureKind.RESET)
        self.stop(ENDINGS.get(failure.kind, AttemptOutcome.FAILED), failure.retry_after)
        self.owner.failed(self, failure)

    @property
    def accepted(self) -> bool:
        """Whether the engine had accepted it. A stream's head comes before its prompt is computed; a whole answer's
        does not, so there it is enough that the request went out."""
        return self.status != 0 if self.tap_streams else self.exchange is not None

    # -- for the relay ------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        """Whether the answer is complete: a stream says so; a whole body is, once it is all there and no error."""
        return self.tap.ended if self.tap_streams else self.tap.failure is None

    def take_held(self) -> bytes:
        held, self.buffered = self.buffered, []
        data = held[0] if len(held) == 1 else b"".join(held)
        if self.tap_streams and self.tap.failure is not None:
            return masked(data.partition(DONE)[0], self.backend.secret)
        return data

    def attach(self, receiver: BodySink) -> None:
        """From now on every read goes to `receiver`, which has written all that was held."""
        self.receiver = receiver

    def pause(self) -> None:
        if self.exchange is not None and not self.over:
            self.exchange.pause()

    def resume(self) -> None:
        if self.exchange is not None and not self.over:
            self.exchange.resume()

    def cancel(self) -> None:
        """The client is gone or another attempt has won: the engine hears of it at once."""
        self.stop(AttemptOutcome.CANCELLED)

    def detach(self) -> None:
        """Nobody is told anything more. Whoever leaves without an end (a bug of ours, say) still frees the engine."""
        self.stop_if_open()
        self.receiver = self.exchange = None
        self.owner = DETACHED

    def stop_if_open(self) -> None:
        """In a ledger it counts until then."""
        if self.ending is None:
            self.cancel()

    # -- the end ------------------------------------------------------------------------

    def stop(self, ending: AttemptOutcome, retry_after: float | None = None) -> None:
        """End the exchange if it still runs."""
        if not self.over and self.exchange is not None:
            self.exchange.cancel()
        self.over = True
        self._close(ending, retry_after)

    def _close(self, ending: AttemptOutcome, retry_after: float | None = None) -> None:
        if self.ending is not None:
            return
        self.ending, self.ended_at = ending, monotonic()
        self.report = self.reported(retry_after)
        self.monitor.ended(self, ending, self.ended_at, self.report)

    def reported(self, retry_after: float | None = None) -> AttemptReport:
        """What the engine said of this attempt."""
        usage, times = self.tap.usage, self.tap.times
        return AttemptReport(
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            mean_itl=times.mean_itl or self.tpot(),
            engine_ttft=times.ttft,
            retry_after=retry_after,
            connected=self.reached,
        )

    @property
    def output_tokens(self) -> int:
        """As reported; until then, or from an engine that does not say, as counted."""
        completion = self.tap.usage.completion
        return self.tap.tokens if completion is None else completion

    def tpot(self) -> float | None:
        """Seconds per output token after the first; None under two tokens or where the answer came whole."""
        if self.first_in is None or not self.tap_streams or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_in) / (self.output_tokens - 1)
