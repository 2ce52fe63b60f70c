"""The answer to one caller: a chain of filters between the attempt and the relay, the head before it, and its end.

The filters of a stream, in order: the link of a part to the rest of a broken answer (put at the head once it has
broken), links of parts, the translation into the caller's dialect or ids, the usage that the caller has not asked for,
counts of cached tokens, events that are no JSON. No filter is added anywhere else.

Rules:
- The chain is built once, at the first token; whatever continues the answer goes through the same chain.
- A read goes through the filters and to the caller in one call. A read that no filter has changed keeps its framing.
- Where a filter cannot go on, the failure is returned: what violates the server's own dialect is the server's fault,
  what the gateway cannot express is the gateway's.
- The head goes out with the first bytes. A whole answer is rewritten whole. Until an answer that is put together from a
  stream is complete, nothing of it is written, so its failure can be hidden like any failure before the first token.
- A part that was written cannot be hidden any more. A request ends exactly once: with its answer, or by an error. Where
  nothing was written, that is an ApiError, which the waiting task raises; in a stream an error event; else a body that
  stays incomplete.

The caller's socket: begin, write, pause, stall, end. Nothing is awaited per chunk.

The head is held until the first token, and both go out in one write. From then on every write is a chunk to the caller;
a read of exactly one chunk keeps its framing. A caller that reads nothing for STALL seconds is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from backends.failures import NOT_ASSEMBLED, TRUNCATED
from backends.interface import Assembler, Failure, Tap
from backends.stream.cost_writer import CostWriter
from backends.stream.redaction import CachedCountMasker, Rewriter, RewritingError, SecretMasker, mask_error_body
from backends.stream.sse import JunkFilter, UsageStripper, WholeEvents
from backends.translation.reply_translation import StreamTranslator
from gateway.api.dialects import error_event
from gateway.downstream.answer_headers import answer_head
from gateway.downstream.http_request import HttpRequest
from gateway.observe.record import RequestOutcome
from gateway.refusals import refusal_of
from gateway.upstream.attempt import BrokenOff, WireAttempt
from gateway.upstream.routed_request import Rewriting, RoutedRequest
from policies.types import AttemptOutcome

STALL = 60.0  # s with a full buffer unread by the client


class Relay:
    """An answer on the way to a caller."""

    def __init__(self, http: HttpRequest) -> None:
        self.http = http
        self.begun = False
        self.stalled = ""  # the reason for which the caller was disconnected
        self.chunked = http.http11
        self._loop = asyncio.get_running_loop()
        self._writer = http.writer
        self._transport = http.writer.transport
        self._pending = http.writer.pending
        self._stall_timer: asyncio.TimerHandle | None = None

    def begin(self, head: bytes, first: bytes, length: int | None) -> None:
        """Write the head and the first bytes, in one write. `length`: of the body, where it is known."""
        http, self.begun = self.http, True
        self.chunked = http.http11 and length is None
        committed, http.comments = http.comments is not None and http.comments.stop(), None
        http.begun = True
        if not self._transport.is_closing():
            self._writer.write((b"" if committed else head) + self._frame(first))

    def write(self, data: bytes, framed: bytes = b"") -> None:
        """Write at once, unless the caller is gone. `framed`: the data with chunk framing; empty: without."""
        if self._transport.is_closing():
            return
        if self._pending:  # of any socket; pending bytes of this socket go first
            self._writer.flush()
        if framed and self.chunked:
            self._transport.write(framed)
        elif data:
            self._transport.write(self._frame(data))

    def end(self, last: bytes = b"") -> None:
        data = self._frame(last) + (b"0\r\n\r\n" if self.chunked else b"")
        if data and not self._transport.is_closing():
            self._writer.write(data)

    def abort(self) -> None:
        """End a body that is incomplete: JSON leaves no other sign."""
        self._writer.flush()
        self._transport.abort()

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self.chunked else data

    # -- a caller that does not read ------------------------------------------------------

    def pause(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self._loop.call_later(STALL, self._disconnect)

    def resume(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _disconnect(self) -> None:
        """The loss of the connection cancels the handler, which ends the upstream in turn."""
        self.stalled = f"the client read nothing for {STALL:g} s"
        self._transport.abort()

    def release(self) -> None:
        """Detach from the connection, which may serve another request next."""
        self._writer.flow_control = None
        if self._stall_timer is not None:
            self.resume()


KEPT = 64 * 1024  # bytes
JSON_HEADERS = {"content-type": "application/json"}


class Answer:
    """Of a request, whichever of its `attempts` answers. `done`: set at the end. `whole`: what is put together from a
    stream; None: reads go to the caller as they come. `only`: the only filter, where a token passes it as it is, unless
    the filter holds something; None: tokens go through all."""

    def __init__(
        self,
        routed: RoutedRequest,
        relay: Relay,
        attempts: Mapping[int, WireAttempt],
        done: asyncio.Future[None],
    ) -> None:
        self.relay = relay
        self.write = relay.write
        self.done = done
        self.whole: WholeAnswer | None = None
        self.only: WholeEvents | None = None
        self.unwritten = False  # words of the last read have gone through links of parts, and not to the caller
        self._routed = routed
        self._attempts = attempts
        self._filters: tuple[Rewriter, ...] = ()
        self._base: tuple[Rewriter, ...] = ()  # without the link to a rest
        self._translator: StreamTranslator | None = None  # the filter into the caller's dialect
        self._tap: Tap | None = None  # of the attempt that has begun the answer
        self._removes_junk = False

    # -- the beginning ------------------------------------------------------------------------

    def start(self, wire: WireAttempt, links: Sequence[Rewriter]) -> bytes | Failure:
        """Build the answer that begins with the bytes held. Returns the first bytes for the caller. `links`: filters of
        parts."""
        if wire.assembled:
            assembler = wire.upstream.backend.assembler(wire.request)
            self.whole = WholeAnswer(assembler, wire.rewriting, wire.tap, wire.counted)
            return self.whole.feed(wire.held.take()) or b""
        self.whole = None
        cost = self.cost_usd if self._routed.request.wants_cost else None
        self.filter_by(*_chain(self._routed, wire.rewriting, links, cost), wire.tap)
        if wire.tap.junk:
            self._remove_junk()
        data = wire.held.take()
        try:
            for each in self._filters:
                data = each.feed(data)
        except RewritingError as error:
            return error.failure
        return data

    def filter_by(self, filters: Sequence[Rewriter], translator: StreamTranslator | None, tap: Tap) -> None:
        """Pass reads on through these. Once the tap has met with an event that is no JSON, a last filter removes such
        events."""
        self._filters = self._base = tuple(filters)
        self._translator, self._tap = translator, tap
        only = filters[0] if len(filters) == 1 else None
        self.only = only if isinstance(only, WholeEvents) and type(only) in (WholeEvents, UsageStripper) else None
        self._removes_junk = False

    def begin(self, wire: WireAttempt, first: bytes) -> None:
        """The attempt has won: write the first bytes, unless the answer is written at its end."""
        if wire.whole is not None:
            self._write_head(wire, wire.whole, len(wire.whole))
        elif self.whole is None:
            self._write_head(wire, first, wire.content_length)

    def _write_head(self, wire: WireAttempt, first: bytes, length: int | None) -> None:
        http, streams = self.relay.http, self._routed.request.stream
        headers = wire.headers if not wire.assembled else JSON_HEADERS
        cost = 0.0 if streams or wire.outcome is not AttemptOutcome.COMPLETED else self.cost_usd()
        if not http.http11:
            http.keep_alive = False
        head = answer_head(http, wire.status, headers, self._routed.timeline, length, streams, cost)
        self.relay.begin(head, first, length)
        self._routed.timeline.first_token_out(monotonic(), wire.status)

    def cost_usd(self) -> float:
        """USD of all attempts up to now. 0: their pools have no price, or the cost would tell what is in a cache that
        several tenants share."""
        attempts = self._attempts.values()
        if any(each.rewriting.masks_counts for each in attempts):
            return 0.0
        return sum(each.cost_usd() for each in attempts)

    # -- the body -----------------------------------------------------------------------------

    def body(self, data: bytes, framed: bytes = b"") -> Failure | None:
        """Body bytes of a read; `framed`: the same with HTTP framing, if the read was exactly one chunk."""
        if self.whole is not None:
            return self.whole.body(data)
        if not self._removes_junk and self._tap is not None and self._tap.junk:
            self._remove_junk()
        rewritten = data
        try:
            for each in self._filters:
                rewritten = each.feed(rewritten)
        except RewritingError as error:
            self.unwritten = each is not self._filters[0]
            return error.failure
        self.relay.write(rewritten, framed if rewritten == data else b"")
        return None

    def replace_held(self, data: bytes) -> Failure | None:
        """Complete events in place of all bytes held back; nothing else of the body follows."""
        if self.whole is not None:  # the events before an error or junk, which no whole answer may hold
            return None
        torn = self._drop()
        return self.body(data or torn)

    def _drop(self) -> bytes:
        """Forget what is held back. Returns the end of an event that has passed in part."""
        torn = b""
        for each in self._filters:
            torn = each.drop() or torn
        return torn

    def continue_with(self, head: Rewriter, begun: bytes) -> Failure | None:
        """Another attempt writes the rest. `begun`: its first events, which `head` has rewritten."""
        for each in self._base:
            each.drop()
        self._filters, self.only = self._base, None
        self.unwritten = False
        failure = self.body(begun) if begun else None
        self._filters = (head, *self._base)
        return failure

    def _remove_junk(self) -> None:
        """Add the last filter, which no answer without junk has a need of."""
        junk = JunkFilter()
        self._filters, self._base = (*self._filters, junk), (*self._base, junk)
        self.only, self._removes_junk = None, True

    # -- the end ------------------------------------------------------------------------------

    def complete(self, wire: WireAttempt) -> Failure | None:
        """The reply is over: write the rest. Returns the reason for which there is no complete answer."""
        tail = b"" if wire.whole is not None else self._rest(wire)
        if isinstance(tail, Failure):
            return tail
        if not self.relay.begun:
            self._write_head(wire, tail, len(tail))
            tail = b""
        if wire.outcome is AttemptOutcome.COMPLETED:
            self.end(tail, RequestOutcome.COMPLETED)
        else:  # status 200 with an error in a body too long to be held: complete, and the caller's to read
            self.end(tail, RequestOutcome.UPSTREAM_BROKE, (wire.failure or TRUNCATED).said)
        return None

    def _rest(self, wire: WireAttempt) -> bytes | Failure:
        """The last bytes for the caller, with the last event where the server has not sent it."""
        if wire.tap.spoiled:  # the last event is incomplete
            self.replace_held(b"")
        if self.whole is not None:
            return self.whole.finish()
        missing = wire.tap.missing if self._translator is None else b""
        tail = b""
        try:
            for each in self._filters:
                tail = (each.feed(tail) if tail else b"") + each.close()
        except RewritingError as error:
            return error.failure
        return tail + b"\n\n" + missing if tail and missing else tail + missing

    def break_off(self, broken: BrokenOff, outcome: RequestOutcome = RequestOutcome.UPSTREAM_BROKE) -> None:
        """End the answer by an explicit error."""
        if not self.relay.begun:
            self.refuse(refusal_of(broken.failure))
            return
        self.relay.http.keep_alive = False
        if self._routed.request.stream:
            self.end(self._error(broken.failure, broken.error_event), outcome, broken.failure.said)
        else:
            self.end(None, outcome, broken.failure.said)
            self.relay.abort()

    def _error(self, failure: Failure, own_event: bytes) -> bytes:
        """The last bytes of a stream that cannot be completed. `own_event`: the server's own error event."""
        torn = self._drop()
        if self._translator is not None:
            return torn + self._translator.error(failure)
        if not own_event:
            return torn + error_event(failure, self._routed.path)
        for each in self._base:
            own_event = each.feed(own_event)
        return torn + own_event

    def refuse(self, error: Exception) -> None:
        """End the request by an exception, which the waiting task raises."""
        if not self.done.done():
            self.done.set_exception(error)

    def end(self, last: bytes | None, outcome: RequestOutcome, error: str = "") -> None:
        """`last`: the last bytes of the answer; None: the answer stays incomplete."""
        if self.done.done():
            return
        if last is not None:
            self.relay.end(last)
        self._routed.timeline.finished(outcome, monotonic(), error)
        self.done.set_result(None)


class WholeAnswer:
    """Events are put together; the whole is rewritten and written at the end. Reads of tokens alone are put together
    KEPT bytes at a time, or with the next read of another form. `counted`: tokens of prompt and answer by the gateway's
    count."""

    def __init__(
        self, assembler: Assembler, rewriting: Rewriting, tap: Tap, counted: Callable[[], tuple[int, int]]
    ) -> None:
        self.assembler = assembler
        self._rewriting = rewriting
        self._tap = tap
        self._counted = counted
        self._reads: list[bytes] = []
        self._size = 0

    def body(self, data: bytes) -> Failure | None:
        self._reads.append(data)
        self._size += len(data)
        return None if self._tap.is_token and self._size < KEPT else self._read_all()

    def _read_all(self) -> Failure | None:
        reads, self._reads, self._size = b"".join(self._reads), [], 0
        return self.feed(reads) if reads else None

    def feed(self, data: bytes) -> Failure | None:
        self.assembler.feed(data)
        return NOT_ASSEMBLED if self.assembler.obstacle else None

    def finish(self) -> bytes | Failure:
        if self._read_all() is not None:
            return NOT_ASSEMBLED
        try:
            whole = self.assembler.whole(self._counted)
        except ValueError:
            return NOT_ASSEMBLED
        return whole_reply(self._rewriting, whole)


# --------------------------------------------------------------------------- building


def _chain(
    routed: RoutedRequest, rewriting: Rewriting, links: Sequence[Rewriter], cost: Callable[[], float] | None
) -> tuple[Sequence[Rewriter], StreamTranslator | None]:
    """The filters of a stream, or of a whole answer that is too long to be held, and the one that writes the errors.
    `links`: of parts. `cost`: of the answer so far, in USD, for a caller that wants it."""
    translator: Rewriter | None = None
    filters: list[Rewriter] = [*links]
    if routed.request.stream:
        translator = None if rewriting.answer is None else rewriting.answer.stream()
        filters += [] if translator is None else [translator]
        filters.append(UsageStripper() if routed.hides_usage else WholeEvents() if cost is None else CostWriter(cost))
    else:
        filters.append(SecretMasker(rewriting.secret))
    if rewriting.masks_counts:
        filters.append(CachedCountMasker())
    return filters, translator if isinstance(translator, StreamTranslator) else None


def whole_reply(rewriting: Rewriting, reply: bytes) -> bytes | Failure:
    """A complete reply as the caller gets it."""
    reply = mask_error_body(reply, rewriting.secret)
    if rewriting.answer is not None:
        try:
            reply = rewriting.answer.whole(reply)
        except RewritingError as error:
            return error.failure
    return CachedCountMasker().feed(reply) if rewriting.masks_counts else reply
