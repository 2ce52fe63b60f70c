"""The exchange of ext_proc messages about one HTTP request that Envoy carries.

    HEADERS --body--> PICKED --response--> ANSWERED --last chunk, or entry of the access log--> OVER

Rules:
- The body mode that Envoy states decides what is answered when: BUFFERED wants its headers answered before the body is
  sent, FULL_DUPLEX_STREAMED wants nothing before the last chunk, and every chunk back.
- The endpoint that served is learned from, not the endpoint that was picked: Envoy may take another address of the
  list, or one of its own.
- Where the data plane logs to this picker, an answer in STREAMED mode is read to its first token, and the log tells
  its end: each chunk costs a message in both directions. One of WATCHED is read whole, for the engine's own counts.
  Never in FULL_DUPLEX_STREAMED: an answer would lose its last chunk there.
- Without the body, or where it comes whole at the end (BUFFERED), no first token is known. The answer is over when the
  call ends: of a request in FULL_DUPLEX_STREAMED without a body of the answer, with its head.
- A message out of order is answered without a change: no disagreement about the order holds a request up. Nothing is
  sent behind an answer that Envoy takes for the last: an immediate one, and the end of a body in FULL_DUPLEX_STREAMED.
- Bytes of a body that waits for its end count in `Intake`, as those of the data port do: many large bodies at once are
  refused, never one small one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from time import monotonic

from backends.engine_members import ENGINE_HEADERS
from backends.ext_proc.messages import (
    CALLER_GONE,
    ENGINE_BROKE,
    BodyMode,
    EnvoyMessage,
    LogEntry,
    MessageKind,
    Mutation,
    answer,
    body_answers,
    immediate,
    more_time,
)
from gateway.api.api_error import ApiError
from gateway.downstream.limits import Intake
from gateway.observe.part_notes import SIGHT, AnswerSight
from gateway.observe.record import RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.parts.picker.envoy_log import LB, PICK, EnvoyLog, ExpectedEntry
from gateway.parts.picker.named_model import rewritten
from gateway.parts.picker.picker import CONTROL, DESTINATION, Asked, Pick, Picker
from gateway.parts.picker.served_answer import ServedAnswer

SUBSET = "envoy.lb.subset_hint"
REMOVED = (*(name for name in CONTROL if name != DESTINATION), *ENGINE_HEADERS)  # of the caller's headers
SERVED = "upstream.address"
WATCHED = 32
AS_WRITTEN = (BodyMode.STREAMED, BodyMode.FULL_DUPLEX)  # modes in which an answer is shown as it comes
OF_REQUEST = (MessageKind.REQUEST_HEADERS, MessageKind.REQUEST_BODY, MessageKind.REQUEST_TRAILERS)
# Values of `x-llm-d-request-dropped-reason` by status: of requests that load refuses, not of those that are wrong.
DROPPED_REASON = {429: "rejected-saturated", 503: "rejected-no-endpoints"}


class RequestPhase(Enum):
    HEADERS = "headers"
    PICKED = "picked"
    ANSWERED = "answered"
    OVER = "over"


class EnvoyRequest:
    """Answers the messages of one request. `on` returns the encoded replies to a message. `log`: of its connection;
    None: there is none. `send`: sends what is no reply."""

    def __init__(
        self,
        picker: Picker,
        timeline: RequestTimeline,
        max_body: int,
        intake: Intake,
        log: EnvoyLog | None,
        send: Callable[[bytes], None],
    ) -> None:
        self._picker = picker
        self._timeline = timeline
        self._max_body = max_body
        self._intake = intake
        self._log = log
        self._send = send
        self._entry: ExpectedEntry | None = None
        self._status = 0
        self._phase = RequestPhase.HEADERS
        self._is_refused = False
        self._modes = BodyMode.NONE, BodyMode.NONE
        self._head = EnvoyMessage()
        self._body = bytearray()  # in FULL_DUPLEX_STREAMED: else it comes whole
        self._size = 0
        self._pick: Pick | None = None
        self._served: ServedAnswer | None = None

    async def on(self, message: EnvoyMessage) -> list[bytes]:
        if self._is_behind_last(message.kind):
            return []
        match message.kind:
            case MessageKind.REQUEST_HEADERS if self._phase is RequestPhase.HEADERS:
                return await self._on_request_headers(message)
            case MessageKind.REQUEST_BODY if self._phase is RequestPhase.HEADERS:
                return await self._on_request_body(message)
            case MessageKind.REQUEST_TRAILERS if self._phase is RequestPhase.HEADERS:
                return [*await self._on_whole_duplex_body(is_last=False), answer(MessageKind.REQUEST_TRAILERS)]
            case MessageKind.RESPONSE_HEADERS:
                self._on_response_headers(message)
            case MessageKind.RESPONSE_BODY:
                return await self._on_response_body(message)
            case MessageKind.RESPONSE_TRAILERS:
                self._ended()
        return [] if message.kind is None else [answer(message.kind)]

    def _is_behind_last(self, kind: MessageKind | None) -> bool:
        """Envoy takes no more answers to messages of this kind."""
        is_of_request = kind in OF_REQUEST
        is_duplex = self._modes[0 if is_of_request else 1] is BodyMode.FULL_DUPLEX
        is_over = self._phase is not RequestPhase.HEADERS if is_of_request else self._phase is RequestPhase.OVER
        return self._is_refused or (is_duplex and is_over)

    def too_long(self) -> list[bytes]:
        """The answer to a body that is longer than `max_body`, or to a message that could hold it."""
        return self._refused(ApiError(413, f"The body is longer than {self._max_body} bytes."))

    # -- the request ----------------------------------------------------------------------

    async def _on_request_headers(self, message: EnvoyMessage) -> list[bytes]:
        self._head = message
        self._modes = message.modes or self._modes
        waits_for_body = self._modes[0] in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX) and not message.end_of_stream
        if not waits_for_body:
            return await self._picked(MessageKind.REQUEST_HEADERS)
        return [answer(MessageKind.REQUEST_HEADERS)] if self._modes[0] is BodyMode.BUFFERED else []

    async def _on_request_body(self, message: EnvoyMessage) -> list[bytes]:
        self._size += len(message.body)
        self._intake.body_bytes += len(message.body)
        if self._size > self._max_body:
            return self.too_long()
        if (busy := self._intake.too_many_bytes(self._size)) is not None:
            return self._refused(busy)
        if self._modes[0] is not BodyMode.FULL_DUPLEX:
            return await self._picked(MessageKind.REQUEST_BODY, message.body)
        self._body += message.body
        return await self._on_whole_duplex_body(is_last=True) if message.end_of_stream else []

    async def _on_whole_duplex_body(self, *, is_last: bool) -> list[bytes]:
        """The choice, then the body. `is_last`: no trailers follow."""
        body = bytes(self._body)
        try:
            chosen = await self._chosen(body)
        except ApiError as refusal:
            return self._refused(refusal)
        sent, mutation = body if chosen.body is None else chosen.body, replace(chosen, body=None)
        return [
            answer(MessageKind.REQUEST_HEADERS, mutation),
            *body_answers(MessageKind.REQUEST_BODY, sent, is_last),
        ]

    async def _picked(self, kind: MessageKind, body: bytes = b"") -> list[bytes]:
        """The choice, as the answer to a message of this kind."""
        try:
            return [answer(kind, await self._chosen(body))]
        except ApiError as refusal:
            return self._refused(refusal)

    async def _chosen(self, body: bytes) -> Mutation:
        """The choice, with the body where it changes: another name of the model, members of an engine's own. Raises
        ApiError."""
        arrival, subset = self._timeline.record.arrival, subset_of(self._head)
        asked = Asked(self._head.headers, body, arrival, self._more_time, subset)
        self._pick = pick = await self._picker.pick(asked, self._timeline)
        self._phase, headers = RequestPhase.PICKED, {DESTINATION: ",".join(pick.addresses)}
        self._drop_body()
        self._note_sent(pick.addresses[0])
        self._picker.on_sent(pick)
        metadata = dict(headers)
        if self._log is not None:
            self._entry = self._log.expect()
            metadata[PICK] = self._entry.number
        removed = [name for name in REMOVED if name in self._head.headers]
        is_clean = pick.routed is not None and not pick.routed.request.withheld  # else nobody has looked
        changed = rewritten(body, pick.model) if pick.model or not is_clean else None
        if changed is not None and "content-length" in self._head.headers:
            headers["content-length"] = str(len(changed))
        return Mutation(headers, removed, {LB: metadata}, changed)

    def _more_time(self, seconds: float) -> None:
        if self._modes[0] is BodyMode.BUFFERED:  # in FULL_DUPLEX_STREAMED Envoy has no clock
            self._send(more_time(seconds))

    def _drop_body(self) -> None:
        self._intake.body_bytes -= self._size
        self._size = 0
        self._body.clear()

    def _refused(self, refusal: ApiError) -> list[bytes]:
        self._phase, self._is_refused = RequestPhase.OVER, True
        self._drop_body()
        reason = DROPPED_REASON.get(refusal.status)
        end = RequestOutcome.SHED if reason else RequestOutcome.REFUSED
        self._timeline.refused(refusal.status, refusal.logged, end, monotonic())
        headers = {"content-type": "application/json", **refusal.headers}
        if reason:
            headers["x-llm-d-request-dropped-reason"] = reason
        return [immediate(refusal.status, headers, refusal.body(), "firsttoken")]

    def _note_sent(self, address: str) -> None:
        pick = self._pick
        if pick is not None and pick.routed is not None and (candidate := pick.candidates.get(address)) is not None:
            self._served = ServedAnswer(self._picker.fleet, pick.routed, candidate)

    # -- the answer -----------------------------------------------------------------------

    def _on_response_headers(self, message: EnvoyMessage) -> None:
        if self._phase is RequestPhase.OVER:
            return
        told = message.metadata.get(LB, {}).get(f"{DESTINATION}-served") or message.attributes.get(SERVED, "")
        if self._pick is not None and told and told != self._pick.addresses[0]:
            if self._served is not None:
                self._served.leave(monotonic())
            self._served = None
            self._note_sent(told)
        self._phase = RequestPhase.ANSWERED
        SIGHT.put(self._timeline.record, AnswerSight.HEADERS if self._modes[1] is BodyMode.NONE else AnswerSight.BODY)
        self._status = status_of(message.headers)
        if self._served is not None:
            shows_body = self._modes[1] is not BodyMode.NONE and not message.end_of_stream
            shows_pace = self._modes[1] in AS_WRITTEN
            self._served.on_head(self._status, message.headers, shows_body=shows_body, shows_pace=shows_pace)
        if message.end_of_stream:
            self._ended()

    async def _on_response_body(self, message: EnvoyMessage) -> list[bytes]:
        """Sends the first token on before it is learned from: its caller waits."""
        now, replies = monotonic(), [answer(MessageKind.RESPONSE_BODY)]
        if self._modes[1] is BodyMode.FULL_DUPLEX:
            replies = body_answers(MessageKind.RESPONSE_BODY, message.body, message.end_of_stream)
        if self._served is None or self._served.is_begun:
            self._read(message, now)
            return replies
        for each in replies:
            self._send(each)
        try:
            await asyncio.sleep(0)  # the event loop writes the replies
        finally:
            self._read(message, now)
        return []

    def _read(self, message: EnvoyMessage, now: float) -> None:
        if self._served is not None:
            self._served.on_body(message.body, now)
        if message.end_of_stream:
            self._ended()

    @property
    def has_seen_enough(self) -> bool:
        """The rest of the answer need not be shown."""
        if self._entry is None or self._served is None or self._phase is not RequestPhase.ANSWERED:
            return False
        is_watched = self._entry.turn % WATCHED == 0
        return self._modes[1] is BodyMode.STREAMED and self._served.is_begun and not is_watched

    @property
    def is_to_be_logged(self) -> bool:
        """The call is over before the answer, whose end comes by the access log."""
        return self._entry is not None and self._phase in (RequestPhase.PICKED, RequestPhase.ANSWERED)

    async def until_logged(self) -> None:
        """Waits for the end of the answer, as the access log tells it."""
        if self._entry is None:
            return
        if self._served is not None:
            self._served.look_away(monotonic())
        entry = await self._entry.wait(self._is_over_by_load)
        SIGHT.put(self._timeline.record, AnswerSight.HEADERS if entry is None else AnswerSight.ACCESS_LOG)
        if entry is None:
            self._ended()
        elif entry.flags & CALLER_GONE:
            self._left()
        else:
            self._status = entry.status or self._status
            self._on_logged(entry)

    def _is_over_by_load(self) -> bool:
        return self._served is None or self._served.is_over_by_load(monotonic())

    def _on_logged(self, entry: LogEntry) -> None:
        at = monotonic()
        if entry.last_byte is not None:
            at = min(at, self._timeline.record.arrival + entry.last_byte)
        if self._served is not None:
            self._served.on_logged(self._status, entry.body_bytes, at, is_broken=bool(entry.flags & ENGINE_BROKE))
        self._ended(at)

    def _ended(self, at: float | None = None) -> None:
        """The last byte of the answer is out. `at`: None: now."""
        if self._phase is RequestPhase.OVER:
            return
        self._phase, now = RequestPhase.OVER, monotonic() if at is None else at
        has_failed = self._status >= 500 if self._served is None else not self._served.end(now)
        self._timeline.delivered(self._status, now)
        if has_failed:
            self._timeline.finished(RequestOutcome.FAILED, now)

    def close(self) -> None:
        """The call is over. The request is complete where Envoy does not show the body; else the caller is gone."""
        self._drop_body()
        if self._log is not None and self._entry is not None:
            self._log.forget(self._entry)
        if self._phase is RequestPhase.OVER:
            return
        if self._phase is RequestPhase.ANSWERED and self._modes[1] in (BodyMode.NONE, BodyMode.BUFFERED):
            self._ended()
        else:
            self._left()

    def _left(self) -> None:
        """The caller is gone."""
        self._phase, now = RequestPhase.OVER, monotonic()
        if self._served is not None:
            self._served.leave(now)
        self._timeline.finished(RequestOutcome.CLIENT_GONE, now)


def subset_of(head: EnvoyMessage) -> frozenset[str]:
    """Addresses among which to pick; empty: all."""
    hint = head.metadata.get(SUBSET, {}).get(f"{DESTINATION}-subset", "")
    return frozenset(address.strip() for address in hint.split(",") if address.strip())


def status_of(headers: Mapping[str, str]) -> int:
    """0: no status of HTTP."""
    told = headers.get(":status", "")
    return int(told) if len(told) == 3 and told.isascii() and told.isdigit() else 0
