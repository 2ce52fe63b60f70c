"""Delivers an answer to its caller: the head, the body, the end. A part that was written cannot be hidden any more.

Rules:
- The answer is built once, at the first token; whatever continues it goes through the same chain.
- The head goes out with the first bytes. An answer that is put together is written whole, with a length, at its end.
- A request ends exactly once: with its answer, or by an error. Where nothing was written, that is an ApiError, which
  the waiting task raises; in a stream an error event; else a body that stays incomplete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic

from backends.failures import TRUNCATED
from backends.interface import Failure
from backends.stream.redaction import Rewriter
from gateway.downstream.answer_headers import answer_head
from gateway.observe.record import RequestOutcome
from gateway.refusals import refusal_of
from gateway.upstream.answer import AssembledAnswer, StreamedAnswer, streamed_answer
from gateway.upstream.attempt import BrokenOff, WireAttempt
from gateway.upstream.relay import Relay
from gateway.upstream.routed_request import RoutedRequest
from policies.types import AttemptOutcome

JSON_HEADERS = {"content-type": "application/json"}


class Delivery:
    """The answer to a caller. `done`: set at the end. `attempts`: of the request, by number."""

    def __init__(self, routed: RoutedRequest, relay: Relay, attempts: Mapping[int, WireAttempt]) -> None:
        self.relay = relay
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer: StreamedAnswer | AssembledAnswer | None = None
        self._routed = routed
        self._attempts = attempts

    # -- the beginning ------------------------------------------------------------------------

    def start(self, wire: WireAttempt, links: Sequence[Rewriter]) -> bytes | Failure:
        """Build the answer that begins with the bytes held. Returns the first bytes for the caller. `links`: filters of
        parts."""
        if wire.assembled:
            self.answer = AssembledAnswer(
                wire.upstream.backend.assembler(wire.request), wire.rewriting, wire.tap, wire.counted
            )
        else:
            cost = self.cost_usd if self._routed.request.wants_cost else None
            self.answer = streamed_answer(self.relay, self._routed, wire.rewriting, wire.tap, links, cost)
        return self.answer.start(wire.held.take())

    def begin(self, wire: WireAttempt, first: bytes) -> None:
        """The attempt has won: write the first bytes, unless the answer is written at its end."""
        if wire.whole is not None:
            self._write_head(wire, wire.whole, len(wire.whole))
        elif self.answer is not None and self.answer.written:
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
        assert self.answer is not None
        if wire.tap.spoiled:  # the last event is incomplete
            self.answer.replace_held(b"")
        return self.answer.finish(wire.tap.missing)

    def break_off(self, broken: BrokenOff, outcome: RequestOutcome = RequestOutcome.UPSTREAM_BROKE) -> None:
        """End the answer by an explicit error."""
        if not self.relay.begun:
            self.refuse(refusal_of(broken.failure))
            return
        self.relay.http.keep_alive = False
        if self._routed.request.stream and isinstance(self.answer, StreamedAnswer):
            self.end(self.answer.error(broken.failure, broken.error_event), outcome, broken.failure.said)
        else:
            self.end(None, outcome, broken.failure.said)
            self.relay.abort()

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
