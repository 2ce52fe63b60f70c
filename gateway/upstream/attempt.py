"""The wire side of one attempt: holds the server's reply until the commit, then relays the reply.

    CONNECTING --sent--> SENT --head--> HELD --join--> COMMITTED
         |                 |              |                |
         +-----------------+------over----+----------------+--> OVER

Rules:
- Before the commit the reply is held and judged (`backends.stream.held_reply`); the first visible output makes the
  attempt a candidate to win.
- After the commit every read goes to the answer in the same call (`gateway.upstream.attempt_sinks`).
- The meaning of a read or an end for the request is returned as a value (WireEvent): the attempt has no reference to
  the request.
- An attempt ends exactly once, and reports to the fleet. An attempt in OVER has no exchange.
- Blame is assigned here: an unknown model is the fault of the caller or the configuration, whichever named the model.
  Errors to callers reveal nothing of the configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from time import monotonic

from backends import rate_limit_headers
from backends.failures import (
    NOT_EVENTS,
    NOT_JSON,
    NOT_SERVED,
    PAGE,
    TRUNCATED,
    TransportError,
    of_callers_key,
    of_engine,
    of_unknown_model,
)
from backends.http.connection import Exchange, Sink
from backends.interface import BackendRequest, Failure, FailureKind, Tap, Usage
from backends.openai import asks_for_one
from backends.stream.held_reply import IDENTITY, PAGES, Decompressor, HeldReply, reply_decompressor, unread
from backends.stream.taps import BodyTap, output_tokens
from gateway.upstream.attempt_figures import NO_CONSUMPTION, AttemptTimes, Consumption
from gateway.upstream.routed_request import EVERYWHERE, UNCHANGED, Rewriting, Upstream
from gateway.upstream.usage_bounds import impossible
from policies.blame.blame import BLAME
from policies.fleet.fleet import AttemptReport, Fleet
from policies.rate_limit.send_limits import RateLimit
from policies.types import FOREVER, Attempt, AttemptOutcome

NOTHING_READ = BodyTap()


class WireState(Enum):
    CONNECTING = "connecting"
    SENT = "sent"
    HELD = "held"
    COMMITTED = "committed"
    OVER = "over"


class Milestone(Enum):
    """Progress of an attempt, reported to the request."""

    FIRST_TOKEN = "first token"  # the answer is worth passing on
    WHOLE = "whole"  # the whole answer is buffered: to be rewritten, and stopped as completed or failed
    ENDED = "ended"  # the committed answer is complete


@dataclass(slots=True)
class BrokenOff:
    """The committed answer broke. `error_event`: the server's own, if there is one."""

    failure: Failure
    error_event: bytes = b""


WireEvent = Milestone | Failure | BrokenOff | None  # a Failure: before the commit


class WireAttempt:
    """An attempt on the wire. `assembled`: the server streams, and the caller gets a whole answer. A rewritten whole
    answer is buffered to the end, whatever the length. `strict`: of the tap."""

    held: HeldReply  # from the head of the reply on

    def __init__(
        self,
        attempt: Attempt,
        upstream: Upstream,
        request: BackendRequest,
        fleet: Fleet,
        *,
        assembled: bool = False,
        rewriting: Rewriting = UNCHANGED,
        strict: bool = False,
    ) -> None:
        self.attempt = attempt
        self.upstream = upstream
        self.request = request
        self.stream = request.stream
        self.assembled = assembled
        self.rewriting = rewriting
        self._strict = strict
        self._held_whole = assembled or rewriting.answer is not None
        self.tap: Tap = NOTHING_READ  # until the head of the reply
        self.call = upstream.backend.call(request)
        self.state = WireState.CONNECTING
        now = monotonic()
        self.times = AttemptTimes(now, now)
        self.status = 0
        self.is_success = False
        self.headers: Mapping[str, str] = {}
        self.whole: bytes | None = None  # a complete answer, as the caller gets it
        self.outcome: AttemptOutcome | None = None
        self.failure: Failure | None = None  # the end of the attempt
        self.report: AttemptReport | None = None  # set at the end, like `consumption`
        self.consumption = NO_CONSUMPTION
        self.fleet = fleet
        self.connecting: asyncio.Task[None] | None = None  # of a request that waits for a connection
        self.disbelieved = ""  # implausible token report
        self.refusal = b""  # the body of an error reply, as far as it was read
        self.unassembled = ""  # reason why the stream could not be assembled
        self.decompressor: Decompressor | None = None
        self._exchange: Exchange | None = None
        self._received = 0  # bytes of a reply that is over

    # -- sending ------------------------------------------------------------------------

    def readdress(self, request: BackendRequest) -> None:
        """Replace the request, before the sending."""
        self.request, self.call = request, self.upstream.backend.call(request)

    def start(self, sink: Sink) -> bool:
        """Send on an idle connection, at once. False: there is none."""
        if (exchange := self.upstream.connections.start(self.call, sink)) is None:
            return False
        self.on_sent(exchange)
        return True

    async def connect(self, sink: Sink, waited: float = 0.0) -> None:
        """Send on a new connection, after having waited for the server so many seconds. A failure to connect is
        reported like any other."""
        try:
            exchange = await self.upstream.connections.open(self.call, sink)
        except TransportError as error:
            self.connecting = None
            sink.on_failure(error.failure)
        else:
            self.connecting = None
            exchange.connect_seconds += waited
            self.on_sent(exchange)
            self.fleet.on_connected(self, exchange.connect_seconds)

    def on_sent(self, exchange: Exchange) -> None:
        """The request is on the wire."""
        self._exchange, self.state = exchange, WireState.SENT
        self.times.sent = exchange.sent_at
        self.times.connected = min(self.times.opened + exchange.connect_seconds, exchange.sent_at)

    # -- the reply ----------------------------------------------------------------------

    def on_head(self, status: int, headers: Mapping[str, str]) -> WireEvent:
        self.status, self.headers = status, headers
        self.is_success, self.state = 200 <= status < 300, WireState.HELD
        self.times.head = monotonic()
        backend = self.upstream.backend
        if not (backend.local or backend.keyed_by_callers):  # a caller's limits are not the endpoint's
            self._report_rate_limits()
        content_type = headers.get("content-type", "").lower()
        if self.is_success and content_type.startswith(PAGES):
            return self.fail(PAGE)
        if self.assembled and self.is_success and "event-stream" not in content_type:
            self.stream = self.assembled = self.request.stream = False  # the server has sent a whole answer
        self.tap = self.upstream.backend.tap(self.request)
        self.tap.strict = self._strict
        self.held = HeldReply(
            self.tap, content_type, self.is_success, self.stream, len(self.call.body), to_the_end=self._held_whole
        )
        if headers.get("content-encoding", IDENTITY) == IDENTITY:
            return None
        coding = headers["content-encoding"]
        self.decompressor = reply_decompressor(coding, is_success=self.is_success, stream=self.stream)
        return None if self.decompressor is not None else self.fail(NOT_EVENTS if self.stream else NOT_JSON)

    def _report_rate_limits(self) -> None:
        if reports := rate_limit_headers.read(self.headers):
            now = monotonic()
            self.fleet.on_rate_limits(
                self, [RateLimit.reported(r.counts_tokens, r.remaining, r.limit, r.reset, now) for r in reports]
            )

    def on_body(self, data: bytes) -> WireEvent:
        """Hold a read, before the commit."""
        times = self.times
        times.last_byte = now = monotonic()
        if self.decompressor is not None:
            try:
                data = self.decompressor.feed(data)
            except ValueError as error:
                return self._not_read(error)
        if times.first_byte is None:
            times.first_byte = now
        found = self.held.feed(data)
        if isinstance(found, Failure):
            return self.fail(found)
        if not self.is_success and self.held.is_full:  # an error of any length: nothing further is read
            return self._refused()
        return self._first_token(now) if found else None

    def _refused(self) -> Failure:
        self.refusal = self.held.take()
        return self.fail(self.upstream.backend.failure(self.status, self.headers, self.refusal))

    def _not_read(self, error: ValueError) -> WireEvent:
        """Of an error reply the status tells enough."""
        if not self.is_success:
            return self.fail(self.upstream.backend.failure(self.status, self.headers, b""))
        return self.fail(unread(error))

    def on_end(self) -> WireEvent:
        if self._exchange is not None:
            self._received = self._exchange.bytes_in
            self._exchange = None
        if not self.is_success:
            return self._refused()
        self.tap.close()
        if self.state is WireState.COMMITTED:
            return self._complete()
        if (failure := self.held.judge(self.upstream.backend.secret.decode())) is not None:
            return self.fail(PAGE if self.held.is_page else failure)
        now = monotonic()
        self._first_token(now)
        if not self.stream:
            return Milestone.WHOLE
        self.stop(AttemptOutcome.COMPLETED)
        return Milestone.FIRST_TOKEN

    def on_failure(self, failure: Failure) -> WireEvent:
        """The connection is lost, or left."""
        if self.state is not WireState.COMMITTED:
            return self.fail(failure)
        if self.stream and self.tap.ended:  # nothing after [DONE] turns success into failure
            self.tap.close()
            return self._complete()
        return self.break_off(failure)

    def _first_token(self, now: float) -> Milestone:
        self.times.first_in = self.times.last_token = self.times.quiet_since = now
        self.note_kind(now)
        return Milestone.FIRST_TOKEN

    def note_kind(self, now: float) -> None:
        """Note the time of a first token of reasoning, or of the answer."""
        if self.times.reasoning_in is None and self.tap.reasoning_begun:
            self.times.reasoning_in = now
        if self.tap.answer_begun:
            self.times.answer_in = now

    # -- the answer ---------------------------------------------------------------------

    def commit(self, sink: Sink) -> None:
        """Every further read goes to `sink`."""
        self.state = WireState.COMMITTED
        if self._exchange is not None:
            self._exchange.sink = sink

    def _complete(self) -> WireEvent:
        """The reply is over; the tap knows if complete."""
        if (answered := self.answered) or not self.stream:
            self.stop(AttemptOutcome.COMPLETED if answered else AttemptOutcome.BROKEN, self.told_failure())
            return Milestone.ENDED
        return self.break_off(self.tap.failure or TRUNCATED)

    def break_off(self, failure: Failure) -> BrokenOff:
        failure = self._whose_key(failure)
        self.stop(AttemptOutcome.BROKEN, failure)
        return BrokenOff(failure)

    def pause(self) -> None:
        """The caller does not read: what is silent is not the server."""
        self.times.quiet_since = FOREVER
        if self._exchange is not None:
            self._exchange.pause()
            self.fleet.on_unread(self)

    def resume(self) -> None:
        """The caller reads: what comes from now on tells of the server."""
        self.times.quiet_since = self.times.last_byte = monotonic()
        if self._exchange is not None:
            self._exchange.resume()

    def rest(self, seconds: float) -> None:
        """Let tokens gather in the kernel before the next read."""
        if self._exchange is not None:
            self._exchange.rest(seconds)

    # -- the end ------------------------------------------------------------------------

    def _is_beside_single_ones(self) -> bool:
        """True if every request at the engine counts as a single engine request."""
        beside = self.fleet.view.attempts_at(self.attempt.candidate.endpoint.id)
        wires = (each for each in beside if isinstance(each, WireAttempt))
        return all(asks_for_one(each.request.body) for each in (self, *wires))

    def fail(self, failure: Failure) -> Failure:
        """End the attempt before the commit. Returns the failure as the caller may see it."""
        failure = self._whose_key(failure)
        if self.upstream.backend.local:
            failure = of_engine(failure, self._is_beside_single_ones)
        if self.request.operation not in EVERYWHERE and (self.status in (405, 501) or failure is NOT_SERVED):
            failure = replace(NOT_SERVED, kind=FailureKind.UNSUPPORTED, status=404, code="unsupported_operation")
        elif failure.kind is FailureKind.MISCONFIGURED:
            failure = of_unknown_model(failure, callers=self.request.model_is_callers)
        self.stop(BLAME[failure.kind.value].outcome, failure)
        return failure

    def told_failure(self) -> Failure | None:
        """The error that the stream told, if any."""
        return None if self.tap.failure is None else self._whose_key(self.tap.failure)

    def _whose_key(self, failure: Failure) -> Failure:
        return of_callers_key(failure) if self.upstream.backend.keyed_by_callers else failure

    def leave_read(self) -> None:
        """End the attempt after the last event of its answer. The end of the reply is still read, as the connection is
        worth more than that."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.drain()
        self.stop(AttemptOutcome.COMPLETED)

    def stop(self, outcome: AttemptOutcome, failure: Failure | None = None) -> None:
        """End the attempt, and close an open exchange; nothing is written on a connection that is still being made. No
        effect after the end."""
        if self.state is WireState.OVER:
            return
        if self._exchange is not None:
            self._received = self._exchange.bytes_in
            self._exchange.cancel()
        if self.connecting is not None:
            self.connecting.cancel()
        usage = self.tap.usage
        if (usage.prompt or 0) > len(self.call.body) or (usage.completion or 0) > self._received:
            self._check_usage(usage)
        self.state, self.times.ended = WireState.OVER, monotonic()
        self._exchange = self.connecting = None
        self.outcome, self.failure = outcome, failure
        output = output_tokens(self.tap)
        self.consumption = self._consumed(output)
        self.report = self._reported(output)
        if self.times.first_in is not None and self.stream:  # unknown yet where it ends in the call of the first token
            self.fleet.on_first_token(self, self.times.first_in)
        self.fleet.on_ended(self, outcome, self.times.ended, self.report)

    def _reported(self, output: int) -> AttemptReport:
        """The engine's own figures for this attempt. What asks for the rest of an answer holds the answer so far, and a
        compaction is billed beside the prompt: nothing to learn of either."""
        times, usage, failure = self.tap.times, self.tap.usage, self.failure
        if self.attempt.kind.continues or usage.compacted:
            usage = Usage(completion=usage.completion)
        return AttemptReport(
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            output_tokens=output,
            cost_usd=self.consumption.cost_usd,
            mean_itl=times.mean_itl or (self.times.tpot(output) if self.stream else None),
            engine_ttft=times.ttft,
            retry_after=None if failure is None else failure.retry_after,
            connected=failure is None or self.status != 0 or failure.kind not in UNREACHED,
            unknown_model=failure is not None and failure.kind is FailureKind.MISCONFIGURED and self.status != 0,
            blame=None if failure is None else BLAME[failure.kind.value],
            cause="" if failure is None else failure.said,
        )

    # -- figures ------------------------------------------------------------------------

    @property
    def accepted(self) -> bool:
        """The engine has accepted the request. The head of a stream precedes the computation of the prompt; the head
        of a whole answer does not, so there sending the request is enough."""
        return self.status != 0 if self.stream else self.times.sent is not None

    @property
    def content_length(self) -> int | None:
        """Content length of a whole answer as the server states it; None: not stated."""
        length = self.headers.get("content-length", "")
        known = length.isdecimal() and not self.stream and self.decompressor is None
        return int(length) if known else None

    @property
    def answered(self) -> bool:
        """The answer is complete: a stream has ended; a whole body is there and is no error."""
        return self.tap.ended if self.stream else self.tap.failure is None

    @property
    def output_tokens(self) -> int:
        """Of the answer so far."""
        return output_tokens(self.tap)

    def _consumed(self, output: int) -> Consumption:
        usage = self.tap.usage
        failed = self.tap.failure is not None or (self.status > 0 and not self.is_success) or self.failure is PAGE
        if self.times.sent is None or (self.times.first_in is None and failed):
            return NO_CONSUMPTION
        prompt = self.fleet.view.prompt_tokens(self, self.attempt.candidate) if usage.prompt is None else usage.prompt
        price, written = self.upstream.price, usage.cache_write or 0
        cost = price.of(prompt, output, usage.cached or 0, written, usage.cache_write_1h or 0)
        if price.speeds:  # of few models
            cost *= price.factor(self.tap.facts.speed)
        return Consumption(prompt + output, cost)

    def counted(self) -> tuple[int, int]:
        """Tokens of prompt and answer: as reported, else the gateway's own."""
        prompt = self.tap.usage.prompt
        known = self.fleet.view.prompt_tokens(self, self.attempt.candidate) if prompt is None else prompt
        return known, self.output_tokens

    def _check_usage(self, usage: Usage) -> None:
        """Forget a report of tokens that cannot be: the gateway's own counts stand."""
        received = self._received if self._exchange is None else self._exchange.bytes_in
        request = self.request
        local, sent = self.upstream.backend.local, self.call.body
        if found := impossible(usage, sent, request.body, request.max_tokens, received, local=local):
            self.disbelieved = found
            self.tap.usage = Usage(completion=None if usage.completion else usage.completion)

    def cost_usd(self) -> float:
        """As of now, or of the end. 0 for an answer that was bought in vain."""
        if self.unassembled:
            return 0.0
        if self.state is not WireState.OVER:
            self._check_usage(self.tap.usage)
            return self._consumed(self.output_tokens).cost_usd
        return self.consumption.cost_usd

    def tpot(self) -> float | None:
        """As of now, or of the end."""
        return self.times.tpot(self.output_tokens) if self.stream else None


UNREACHED = (FailureKind.CONNECT, FailureKind.UNRESOLVED, FailureKind.RESET)
