"""Responses over WebSocket: each message is served as a request of its own, one after the other.

Rules (Open Responses, section "WebSocket Transport"):
- A turn is an HTTP request in all but its transport: it goes through `Proxy.infer`, where its key is checked, its quota
  counted and its Record written; or through `Proxy.aside` for the same, if no backend is to be asked.
- One response at a time: a message that comes meanwhile waits, also until the caller has read the answer, for STALL at
  most. A caller that closes the socket ends its turn.
- A socket lives for LIFETIME, and ends at a shutdown: at once if idle, else after its turn.
- Sockets that do nothing hold a connection each, so a caller may hold a share of all connections, and no more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic, time

from aiohttp import WSCloseCode

from backends.http.connection import WriteCoalescer
from backends.interface import Operation
from backends.translation.registry import RESPONSES_TO_CHAT
from gateway.admission.auth import Tenant
from gateway.api.api_error import ApiError, retry_later, stopped
from gateway.api.request_headers import new_request_id
from gateway.core.part import Part
from gateway.downstream.http_request import HttpRequest, ResponseWriter, too_large
from gateway.downstream.limits import SMALL_BODY
from gateway.observe.timeline import RequestTimeline
from gateway.parts.responses.answer_frames import AnswerFrames, LastResponse, refusal_message
from gateway.parts.responses.kept_turns import KeptTurn, KeptTurns
from gateway.parts.responses.socket_turn import SocketTurn, UnmatchedOutput, read_turn
from gateway.proxy import LABELS, Proxy
from gateway.strict_json import encode
from gateway.upstream.answer import STALL
from gateway.wiring import Core

LIFETIME = 3600.0  # s
SHARE = 8  # a caller may hold one of so many connections as sockets
_OF_HANDSHAKE = ("upgrade", "connection", "x-request-id", "content-length", "transfer-encoding", "expect")

Serve = Callable[[HttpRequest], Awaitable[None]]
Answer = Callable[[HttpRequest], None]  # writes an answer, or raises ApiError


def websocket_refused() -> ApiError:
    """Coding agents ask for a WebSocket first; after this status alone they go on with HTTP at once (Codex 0.118 and
    later). The reply names the protocol to use (RFC 9110, section 15.5.22)."""
    message = "Responses are not served over WebSocket here. Send POST /v1/responses over HTTP, with stream: true."
    headers = {"upgrade": "HTTP/1.1", "connection": "upgrade"}
    return ApiError(426, message, code="websocket_not_supported", headers=headers, close=True)


class ResponsesSockets(Part):
    """The sockets of a process."""

    def __init__(self, core: Core) -> None:
        self._proxy = core.proxy
        self.socket_paths = {Operation.RESPONSES.value: self}
        self.turns = KeptTurns()
        self.held: Counter[str] = Counter()  # by caller

    def precheck(self, http: HttpRequest) -> ApiError | None:
        proxy, offer = self._proxy, http.websocket
        if not proxy.runtime.current.config.server.websockets or offer is None or not offer.is_acceptable:
            return websocket_refused()
        return stopped() if proxy.draining else proxy.precheck_caller(http)

    async def serve(self, http: HttpRequest) -> None:
        """Each turn checks the key again; of a proxy that drains, it is the last. Raises ApiError (429)."""
        proxy = self._proxy
        caller = proxy.reader.caller(http, proxy.reader.authorize(http))
        most = proxy.runtime.current.config.server.max_connections
        if self.held[caller] >= max(1, most // SHARE):
            raise _too_many()
        self.held[caller] += 1
        try:
            await ResponsesSocket(http, caller, self.turns, proxy).run()
        finally:
            self.held[caller] -= 1
            if not self.held[caller]:
                del self.held[caller]


class ResponsesSocket:
    """One socket. The flow control of its connection, for as long as the socket is open."""

    def __init__(self, http: HttpRequest, caller: str, turns: KeptTurns, proxy: Proxy) -> None:
        assert http.websocket is not None  # by `Proxy.precheck`
        self._http, self._socket = http, http.websocket
        self._caller = caller
        self._turns = turns
        self._proxy = proxy
        self._infer: Serve = partial(proxy.infer, operation=Operation.RESPONSES)
        self._headers = {
            name: value
            for name, value in http.headers.items()
            if name not in _OF_HANDSHAKE and not name.startswith("sec-websocket-")
        }
        self._answer: ResponseWriter | None = None  # of the turn in progress
        self._stopping = False
        self._closing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        http, ends = self._http, monotonic() + LIFETIME
        http.begun, http.keep_alive = True, False
        http.writer.flow_control = self
        try:
            await self._socket.open()
            ahead: bytes | None = None
            while not self._stopping:
                message = await self._next(ends) if ahead is None or monotonic() > ends else ahead
                if message is None:
                    return
                ahead = await self._turn(message)
            await self._socket.close(WSCloseCode.GOING_AWAY)
        finally:
            self._socket.end()
            http.writer.flow_control = None
            self._turns.drop(self._caller, self)

    async def _next(self, ends: float) -> bytes | None:
        """The next message; None: the socket is closed, or has lived for LIFETIME."""
        try:
            async with asyncio.timeout(ends - monotonic()):
                return await self._socket.receive()
        except TimeoutError:
            code = "websocket_connection_limit_reached"
            message = f"A WebSocket is open for at most {LIFETIME / 60:g} minutes; open a new one."
            self._socket.send(refusal_message(ApiError(400, message, code=code)))
            await self._socket.close(WSCloseCode.OK)
            return None

    # -- a turn -------------------------------------------------------------------------------

    async def _turn(self, message: bytes) -> bytes | None:
        """Answer a message, and read on: a close, answered by aiohttp, ends the connection and so the turn. Returns
        the message that has come meanwhile, if any."""
        turn, ahead = asyncio.create_task(self._answered(message)), asyncio.create_task(self._socket.receive())
        try:
            await asyncio.wait((turn, ahead), return_when=asyncio.FIRST_COMPLETED)
            await turn
            await self._http.writer.drain(STALL)
            came = ahead.result() if ahead.done() else None
            self._stopping |= self._proxy.draining
            self._socket.release(len(came or b""))
            return came
        finally:
            for task in (turn, ahead):
                task.cancel()
            await asyncio.gather(turn, ahead, return_exceptions=True)

    async def _answered(self, message: bytes) -> None:
        """Answer a turn. A turn of a key at its limits is refused unread; every other turn counts as a request, also
        without a backend and with an invalid body."""
        if (fault := self._proxy.precheck_key(self._http)) is not None:
            await self._exchange(b"", self._infer, fault)
            return
        kept = self._turns.get(self._caller, self)
        try:
            turn = await self._read(message, kept)
        except ApiError as refusal:
            await self._exchange(b"", self._aside(partial(refuse, refusal)))
            if isinstance(refusal, UnmatchedOutput):
                self._turns.drop(self._caller, self)
            return
        last = await self._exchange(turn.body, self._infer if turn.generates else self._aside(prepare))
        if (found := turn.kept(last)) is not None:
            self._turns.put(self._caller, self, found)
        elif kept is not None and kept.response_id == turn.previous:
            self._turns.drop(self._caller, self)

    def _aside(self, answer: Answer) -> Serve:
        """Serves a turn for which no backend is asked."""

        async def write(http: HttpRequest, tenant: Tenant, timeline: RequestTimeline) -> None:
            answer(http)
            timeline.delivered(200, monotonic())

        return partial(self._proxy.aside, operation=LABELS[Operation.RESPONSES], answer=write)

    async def _read(self, message: bytes, kept: KeptTurn | None) -> SocketTurn:
        """Read a message, in a thread if slow. Raises ApiError."""
        if len(message) + (0 if kept is None else len(kept.items)) > SMALL_BODY:
            turn = await asyncio.to_thread(read_turn, message, kept)
        else:
            turn = read_turn(message, kept)
        if len(turn.body) > self._socket.max_message:
            raise too_large(self._socket.max_message)
        return turn

    async def _exchange(self, body: bytes, serve: Serve, fault: ApiError | None = None) -> LastResponse | None:
        """Serve a turn as a request over HTTP, and send its answer."""
        frames = AnswerFrames(self._socket)
        writer = self._answer = ResponseWriter(frames, WriteCoalescer())
        writer.paused = self._http.writer.paused
        request = HttpRequest(
            method="POST",
            path=Operation.RESPONSES.value,
            headers=self._headers,
            arrival=monotonic(),
            http11=False,
            keep_alive=False,
            writer=writer,
            body=body,
            fault=fault,
        )
        try:
            await serve(request)
        finally:
            self._answer = None
        writer.flush()
        frames.finish()
        return frames.last

    # -- the connection -------------------------------------------------------------------------

    def on_write_paused(self) -> None:
        if self._answer is not None:
            self._answer.on_write_paused()

    def on_write_resumed(self) -> None:
        if self._answer is not None:
            self._answer.on_write_resumed()

    def on_shutdown(self) -> None:
        """An idle socket is closed at once; a stream ends by an error, and the socket after it."""
        self._stopping = True
        if self._answer is None:
            self._closing = asyncio.create_task(self._socket.close(WSCloseCode.GOING_AWAY))
        elif self._answer.flow_control is not None:
            self._answer.flow_control.on_shutdown()


def prepare(http: HttpRequest) -> None:
    """Answer `generate: false`: the items are kept for the next turn, and no backend is asked."""
    stream = RESPONSES_TO_CHAT.stream({})
    chunk = {"id": new_request_id(), "created": int(time()), "choices": [{"finish_reason": "stop", "delta": {}}]}
    http.begun = True
    http.writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    http.writer.write(stream.feed(b"data: " + encode(chunk) + b"\n\n") + stream.close())


def refuse(refusal: ApiError, http: HttpRequest) -> None:
    """Raises the reason that a message is no turn."""
    raise refusal


def _too_many() -> ApiError:
    message = "Too many WebSockets are open for this caller; close some, or send POST /v1/responses."
    headers = retry_later(1.0)
    return ApiError(429, message, type="rate_limit_error", code="too_many_websockets", headers=headers, close=True)
