"""One HTTP request on its way through Envoy, as ext_proc tells of it.

    HEADERS --body--> PICKED --response--> ANSWERED --last chunk--> OVER

Rules:
- The body mode that Envoy states decides what is answered when: BUFFERED wants its headers answered before the body is
  sent, FULL_DUPLEX_STREAMED wants nothing before the last chunk, and every chunk back.
- What served is learned, never what was picked: Envoy may take another address of the list, or one of its own.
- A message out of order is answered without a change: a request is never held by our own view of it.
- Bytes of a body that waits for its end count in `Intake`, as those of the data port do: many large bodies at once are
  refused, never one small one.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic

from backends.ext_proc.messages import (
    BodyMode,
    EnvoyMessage,
    MessageKind,
    Mutation,
    answer,
    body_answers,
    immediate,
)
from gateway.api.api_error import ApiError
from gateway.downstream.intake import Intake
from gateway.observe.record import RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.picker.picker import CONTROL, DESTINATION, Asked, Pick, Picker
from gateway.picker.served_answer import ServedAnswer

LB = "envoy.lb"
SUBSET = "envoy.lb.subset_hint"
SERVED = "upstream.address"


class RequestPhase(Enum):
    HEADERS = "headers"
    PICKED = "picked"
    ANSWERED = "answered"
    OVER = "over"


class EnvoyRequest:
    """Answers the messages of one request. `on` returns what Envoy is told."""

    def __init__(self, picker: Picker, timeline: RequestTimeline, max_body: int, intake: Intake) -> None:
        self._picker = picker
        self._timeline = timeline
        self._max_body = max_body
        self._intake = intake
        self._status = 0
        self._phase = RequestPhase.HEADERS
        self._modes = BodyMode.NONE, BodyMode.NONE
        self._head = EnvoyMessage()
        self._body = bytearray()
        self._pick: Pick | None = None
        self._served: ServedAnswer | None = None

    async def on(self, message: EnvoyMessage) -> list[bytes]:
        match message.kind:
            case MessageKind.REQUEST_HEADERS:
                return await self._on_request_headers(message)
            case MessageKind.REQUEST_BODY if self._phase is RequestPhase.HEADERS:
                return await self._on_request_body(message)
            case MessageKind.REQUEST_TRAILERS if self._phase is RequestPhase.HEADERS:
                return [*await self._on_whole_duplex_body(is_last=False), answer(MessageKind.REQUEST_TRAILERS)]
            case MessageKind.RESPONSE_HEADERS:
                self._on_response_headers(message)
            case MessageKind.RESPONSE_BODY:
                return self._on_response_body(message)
            case MessageKind.RESPONSE_TRAILERS:
                self._ended()
        return [] if message.kind is None else [answer(message.kind)]

    # -- the request ----------------------------------------------------------------------

    async def _on_request_headers(self, message: EnvoyMessage) -> list[bytes]:
        self._head = message
        self._modes = message.modes or self._modes
        waits_for_body = self._modes[0] in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX) and not message.end_of_stream
        if not waits_for_body:
            return await self._picked(MessageKind.REQUEST_HEADERS)
        return [answer(MessageKind.REQUEST_HEADERS)] if self._modes[0] is BodyMode.BUFFERED else []

    async def _on_request_body(self, message: EnvoyMessage) -> list[bytes]:
        self._body += message.body
        self._intake.body_bytes += len(message.body)
        if len(self._body) > self._max_body:
            return self._refused(ApiError(413, f"The body is longer than {self._max_body} bytes."))
        if (busy := self._intake.too_many_bytes(len(self._body))) is not None:
            return self._refused(busy)
        if not message.end_of_stream and self._modes[0] is BodyMode.FULL_DUPLEX:
            return []
        if self._modes[0] is not BodyMode.FULL_DUPLEX:
            return await self._picked(MessageKind.REQUEST_BODY)
        return await self._on_whole_duplex_body(is_last=True)

    async def _on_whole_duplex_body(self, *, is_last: bool) -> list[bytes]:
        """The choice, and the body behind it; trailers follow where it is not the last."""
        body = bytes(self._body)
        found = await self._picked(MessageKind.REQUEST_HEADERS)
        if self._phase is RequestPhase.PICKED:
            found += body_answers(MessageKind.REQUEST_BODY, body, is_last)
        return found

    async def _picked(self, kind: MessageKind) -> list[bytes]:
        """The choice, as the answer to a message of this kind."""
        hint = self._head.metadata.get(SUBSET, {}).get(f"{DESTINATION}-subset", "")
        subset = frozenset(address.strip() for address in hint.split(",") if address.strip())
        asked = Asked(self._head.headers, bytes(self._body), self._timeline.record.arrival, subset)
        try:
            self._pick = pick = await self._picker.pick(asked, self._timeline)
        except ApiError as refusal:
            return self._refused(refusal)
        self._phase, chosen = RequestPhase.PICKED, ",".join(pick.addresses)
        self._drop_body()
        self._note_sent(pick.addresses[0])
        self._picker.on_sent(pick)
        removed = [name for name in CONTROL if name in self._head.headers and name != DESTINATION]
        return [answer(kind, Mutation({DESTINATION: chosen}, removed, {LB: {DESTINATION: chosen}}))]

    def _drop_body(self) -> None:
        self._intake.body_bytes -= len(self._body)
        self._body.clear()

    def _refused(self, refusal: ApiError) -> list[bytes]:
        self._phase = RequestPhase.OVER
        self._drop_body()
        now, end = monotonic(), RequestOutcome.SHED if refusal.status in (429, 503) else RequestOutcome.REFUSED
        self._timeline.refused(refusal.status, refusal.logged, end, now)
        headers = {"content-type": "application/json", **refusal.headers}
        if refusal.status in (429, 503):
            reason = "rejected-saturated" if refusal.status == 429 else "rejected-no-endpoints"
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
        self._status = int(message.headers.get(":status", "0") or 0)
        if self._served is not None:
            self._served.on_head(self._status, message.headers)
        if message.end_of_stream:
            self._ended()

    def _on_response_body(self, message: EnvoyMessage) -> list[bytes]:
        if self._served is not None:
            self._served.on_body(message.body, monotonic(), self._timeline)
        if message.end_of_stream:
            self._ended()
        if self._modes[1] is BodyMode.FULL_DUPLEX:
            return body_answers(MessageKind.RESPONSE_BODY, message.body, message.end_of_stream)
        return [answer(MessageKind.RESPONSE_BODY)]

    def _ended(self) -> None:
        """The last byte of the answer is out."""
        if self._phase is RequestPhase.OVER:
            return
        self._phase, now = RequestPhase.OVER, monotonic()
        self._timeline.delivered(self._status, now)
        has_failed = self._status >= 500 if self._served is None else not self._served.end(now)
        if has_failed:
            self._timeline.finished(RequestOutcome.FAILED, now)

    def close(self) -> None:
        """The call is over: with the request where no body of the answer is seen, else the caller is gone."""
        self._drop_body()
        if self._phase is RequestPhase.OVER:
            return
        if self._phase is RequestPhase.ANSWERED and self._modes[1] in (BodyMode.NONE, BodyMode.BUFFERED):
            self._ended()
            return
        self._phase, now = RequestPhase.OVER, monotonic()
        if self._served is not None:
            self._served.leave(now)
        self._timeline.finished(RequestOutcome.CLIENT_GONE, now)
