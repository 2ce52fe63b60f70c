"""The data port over real sockets: requests, refusals, time limits, back-pressure and the end of connections."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from itertools import pairwise
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic, time
from typing import Any

import pytest
import uvloop
from aiohttp.streams import StreamReader
from aiohttp.web import BaseRequest, StreamResponse
from aiohttp.web_protocol import RequestHandler

from gateway.api.api_error import ApiError, bad_request
from gateway.downstream.http_request import HttpRequest, rendered
from gateway.downstream.http_server import (
    ABORTS,
    HIGH_WATER,
    MAX_BEHIND,
    SEND_BUFFER,
    DownstreamConnection,
    HttpServer,
    Precheck,
)
from gateway.downstream.limits import BODY_RATE, MAX_HEADERS, MAX_LINE, Intake, Timeouts, body_deadline
from lab.virtual_time import stall
from tests.support.builders import Caller, calling, post
from tests.support.simulated import eventually
from tests.support.upstream import NEVER

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
SMALL = 1000  # bytes of body that are accepted here


@asynccontextmanager
async def serving(
    handler: Callable[[HttpRequest], Awaitable[None]],
    precheck: Precheck = lambda _: None,
    max_body: int = SMALL,
    intake: Intake | None = None,
    **timeouts: float,
) -> AsyncIterator[Caller]:
    """A connection to a server of one handler."""
    server = HttpServer(handler, max_body=max_body, precheck=precheck, timeouts=Timeouts(**timeouts), intake=intake)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    async with calling(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as caller:
        yield caller
    listener.close()
    await server.shutdown(0.1)


class Clock:
    """Answers requests, and records the times of arrival and start."""

    def __init__(self, takes: float = 0.0) -> None:
        self.takes = takes
        self.seen: list[tuple[float, float]] = []

    async def __call__(self, http: HttpRequest) -> None:
        self.seen.append((http.arrival, monotonic()))
        await asyncio.sleep(self.takes)
        http.respond(200, b"{}")


class Echo:
    """Replies with the request, or with the fault that the server found."""

    def __init__(self) -> None:
        self.seen: list[HttpRequest] = []

    async def __call__(self, http: HttpRequest) -> None:
        self.seen.append(http)
        if http.fault is not None:
            http.refuse(http.fault)
        else:
            http.respond(200, http.body, (f"x-path: {http.path}", f"x-method: {http.method}"))


# --------------------------------------------------------------------------- arrival


async def test_a_request_arrives_with_its_first_byte() -> None:
    """Time for sending the rest counts against the budget."""
    clock = Clock()
    async with serving(clock) as caller:
        caller.writer.write(GET[:1])
        await asyncio.sleep(0.1)
        await caller.whole(GET[1:])
    ((arrived, begun),) = clock.seen
    assert begun - arrived >= 0.09


async def test_the_next_request_on_a_connection_arrives_with_its_own_first_byte() -> None:
    """The pause before and the body of the request before do not count."""
    clock = Clock()
    async with serving(clock) as caller:
        for _ in range(2):
            caller.writer.write(post(b"x" * 10)[:-5])
            await asyncio.sleep(0.02)
            await caller.whole(b"x" * 5)
            await asyncio.sleep(1.0)
    assert len(clock.seen) == 2
    assert all(begun - arrived < 1.0 for arrived, begun in clock.seen)


async def test_a_pipelined_request_arrives_when_its_turn_comes() -> None:
    """The wait was for an answer to the same caller."""
    clock = Clock(takes=0.1)
    async with serving(clock) as caller:
        caller.writer.write(GET * 2)
        for _ in range(2):
            _, headers = await caller.head()
            await caller.reader.readexactly(int(headers["content-length"]))
    (_, first), (arrived, _) = clock.seen
    assert arrived - first >= 0.09


# --------------------------------------------------------------------------- requests


CHUNKED = b"POST /a?b=c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_a_request_is_parsed_alike_at_any_split(piece: int) -> None:
    """Head, body, chunk sizes: TCP keeps no boundary. The query is not part of the path."""
    async with serving(echo := Echo()) as caller:
        raw = post(b"xyz", "X-One: 1", path="/p") + CHUNKED
        for at in range(0, len(raw), piece):
            caller.writer.write(raw[at : at + piece])
            await caller.writer.drain()
            await asyncio.sleep(0)
        first = await caller.head()
        assert (first[1]["x-path"], await caller.body(first[1])) == ("/p", b"xyz")
        second = await caller.head()
        assert (second[1]["x-path"], await caller.body(second[1])) == ("/a", b"abcde")
    assert echo.seen[0].headers["x-one"] == "1"


TRAILED = CHUNKED[:-2] + b"x-trailer: y\r\nauthorization: Bearer sk-other\r\n\r\n"


@pytest.mark.parametrize("raw", [TRAILED, TRAILED + GET], ids=["alone", "with a request behind it"])
async def test_trailers_are_headers_of_no_request(raw: bytes) -> None:
    """Not of the same request, nor of the next: a chunked request closes the connection."""
    async with serving(echo := Echo()) as caller:
        _, headers, body = await caller.whole(raw)
        assert await caller.rest() == b""
    assert (headers["connection"], body) == ("close", b"abcde")
    assert [http.headers for http in echo.seen] == [{"host": "x", "transfer-encoding": "chunked"}]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://x/v1/models?a=b", "/v1/models"),
        (b"/a/../%6Dodels", "/a/../%6Dodels"),
        (b"//v1/models", "//v1/models"),
        (b"http://x", ""),
    ],
)
async def test_the_path_is_the_undecoded_path_of_the_target(target: bytes, path: str) -> None:
    """A proxy's absolute form too (RFC 9112 section 3.2.2); nothing is decoded that could hide another path."""
    async with serving(Echo()) as caller:
        _, headers, _ = await caller.whole(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
    assert headers["x-path"] == path


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    """Any number in one packet, served one at a time."""
    async with serving(Echo()) as caller:
        caller.writer.write(b"".join(post(b"%d" % i) for i in range(50)))
        for i in range(50):
            _, headers = await caller.head()
            assert await caller.body(headers) == b"%d" % i


@pytest.mark.parametrize(("after", "status"), [(post(b"next"), 200), (b"no request\r\n\r\n", 400)])
async def test_what_arrives_with_the_end_of_a_body_is_no_part_of_it(after: bytes, status: int) -> None:
    """The next request, or an error in the next request, in the packet that completes a body which was waited for."""
    async with serving(Echo()) as caller:
        whole = post(b"x" * 900)
        caller.writer.write(whole[:-400])
        await asyncio.sleep(0.05)  # the connection reads the body
        caller.writer.write(whole[-400:] + after)
        _, headers = await caller.head()
        assert await caller.body(headers) == b"x" * 900
        assert (await caller.whole(b""))[0] == status


class Held(Echo):
    """Answers once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.waiting: list[HttpRequest] = []

    async def __call__(self, http: HttpRequest) -> None:
        self.waiting.append(http)
        await self.go.wait()
        await super().__call__(http)


async def test_what_is_read_behind_a_request_in_hand_is_bounded() -> None:
    """The rest waits in the caller's socket, and is answered in its turn."""
    size, count = MAX_BEHIND // 4, 200
    async with serving(held := Held(), max_body=size) as caller:
        caller.writer.write(post(b"first"))
        await eventually(lambda: held.waiting)
        connection = held.waiting[0].writer.transport
        for _ in range(count):
            caller.writer.write(post(b"x" * size))
        await eventually(lambda: not connection.is_reading())
        held.go.set()
        assert [len((await caller.whole(b""))[2]) for _ in range(count + 1)] == [5] + [size] * count
        assert connection.is_reading()
        assert (await caller.whole(post(b"last")))[2] == b"last"


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_caller_that_offers_another_protocol_is_served_in_this_one(method: str) -> None:
    """Java's HttpClient offers h2c with every first request; a server may ignore that (RFC 9110 section 7.8)."""
    body = b"abc" if method == "POST" else b""
    head = f"{method} /p HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    raw = head.encode() + b"HTTP2-Settings: AAMA\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with serving(Echo()) as caller:
        for request in (raw, post(b"next")):
            status, headers, said = await caller.whole(request)
            assert (status, said) == (200, body if request is raw else b"next")
        assert headers["x-method"] == "POST"


async def test_an_upgrade_to_websocket_is_declined() -> None:
    """The request is served as plain HTTP, and the connection stays open."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    async with serving(Echo()) as caller:
        caller.writer.write(GET[:-2] + upgrade + b"\r\n" + post(b"behind"))
        for body in (b"", b"behind"):
            status, headers = await caller.head()
            assert (status, await caller.body(headers)) == (200, body)


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key", "api-key"])
async def test_a_repeated_key_is_refused(name: str) -> None:
    """A proxy in front may have checked the first one; other headers may be repeated."""
    async with serving(echo := Echo()) as caller:
        assert (await caller.ask(post(b"x", "accept: a", "accept: b", f"{name}: k")))[0] == 200
        assert await caller.reader.readexactly(1) == b"x"
        status, headers, body = await caller.whole(post(b"x", f"{name}: k", f"{name.upper()}: other"))
        assert await caller.rest() == b""
    assert (status, headers["connection"]) == (400, "close")
    assert f"The header {name.lower()} is there 2 times".encode() in body
    assert echo.seen[-1].body == b""


@pytest.mark.parametrize("target", [b"example.org:443", b"/v1/models"])
async def test_a_tunnel_is_refused(target: bytes) -> None:
    """A 200 to CONNECT would promise a tunnel (RFC 9110 section 9.3.6)."""
    async with serving(Echo()) as caller:
        status, headers, _ = await caller.whole(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target + GET)
        assert await caller.rest() == b""
    assert (status, headers["connection"]) == (405, "close")


async def test_expect_100_continue_gets_100_before_the_body() -> None:
    """Expect: 100-continue (RFC 9110 section 10.1.1) before the body; curl waits a second."""
    raw = post(b"abc", "expect: 100-continue")
    async with serving(Echo()) as caller:
        caller.writer.write(raw[:-3])
        assert await caller.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await caller.whole(raw[-3:]))[2] == b"abc"


async def test_a_reply_to_head_has_no_body() -> None:
    """Content-Length is that of the reply to GET."""
    async with serving(Echo()) as caller:
        caller.writer.write(GET.replace(b"GET", b"HEAD", 1) + GET)
        assert (await caller.head())[0] == 200
        assert (await caller.head())[1]["x-method"] == "GET"


# --------------------------------------------------------------------------- refusals


FAULTS = {
    "a body longer than it may be": (post(b"x" * (SMALL + 1)), 413),
    "one in chunks that is longer": (CHUNKED.replace(b"2\r\nde", b"fff\r\n" + b"x" * 4095), 413),
    "a compressed body": (post(b"x", "content-encoding: gzip"), 415),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
}


@pytest.mark.parametrize(("raw", "status"), FAULTS.values(), ids=FAULTS)
async def test_a_request_at_fault_is_refused_by_the_handler(raw: bytes, status: int) -> None:
    """Such requests get a Record. The connection ends: unread bytes are left."""
    async with serving(echo := Echo()) as caller:
        found, headers, body = await caller.whole(raw)
        assert await caller.rest() == b""
    assert (found, headers["connection"], json.loads(body)["error"]["type"]) == (
        status,
        "close",
        "invalid_request_error",
    )
    assert [http.fault is not None for http in echo.seen] == [True]


async def test_a_declared_length_is_refused_before_the_body_comes() -> None:
    """A body of 4 GB is not uploaded for a 413."""
    async with serving(Echo()) as caller:
        status, _, _ = await caller.whole(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000000\r\n\r\n")
    assert status == 413


async def test_a_head_that_will_be_refused_is_not_waited_for() -> None:
    """A caller without a key gets 401 before the body has arrived; later bytes are read and dropped."""
    asked: list[str] = []

    def precheck(http: HttpRequest) -> ApiError | None:
        asked.append(http.headers.get("authorization", ""))
        return ApiError(401, "No key.")

    async with serving(Echo(), precheck) as caller:
        raw = post(b"x" * 900)
        status, headers, _ = await caller.whole(raw[:-900])
        caller.writer.write(raw[-900:])
        assert await caller.rest() == b""
    assert (status, headers["connection"], asked) == (401, "close", [""])


async def test_a_request_in_one_read_skips_the_early_check() -> None:
    """The handler makes the same checks."""

    def precheck(http: HttpRequest) -> ApiError | None:
        raise AssertionError

    async with serving(Echo(), precheck) as caller:
        assert (await caller.whole(post(b"abc")))[2] == b"abc"


@pytest.mark.parametrize("endless", [b"POST /", b"POST / HTTP/1.1\r\nx: "], ids=["path", "head"])
async def test_a_head_without_end_is_refused(endless: bytes) -> None:
    """Request line and headers are bounded."""
    async with serving(Echo()) as caller:
        caller.writer.write(endless)
        for _ in range(2 * MAX_LINE // 1000):
            caller.writer.write(b"x" * 1000)
            await asyncio.sleep(0)
        status, _ = await caller.head()
    assert status == 431


@pytest.mark.parametrize("piece", [1000, 100_000])
async def test_the_lines_of_a_head_are_bounded_in_all(piece: int) -> None:
    """Of 128 headers of 16 KiB each a thousand callers would fill 2 GB."""
    raw = GET[:-2] + b"".join(b"x-%d: %b\r\n" % (i, b"y" * 1000) for i in range(40)) + b"\r\n"
    async with serving(Echo()) as caller:
        for at in range(0, len(raw), piece):
            caller.writer.write(raw[at : at + piece])
            await asyncio.sleep(0)
        status, _, body = await caller.whole(b"")
        assert await caller.rest() == b""
    assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")


async def test_a_refused_body_is_neither_parsed_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-byte chunks of a caller without a key would cost 1 us each."""
    held: list[HttpRequest] = []
    parsed: list[int] = []
    parse = RequestHandler.data_received

    def data_received(self: RequestHandler, data: bytes) -> None:
        parsed.append(len(data))
        parse(self, data)

    async def handler(http: HttpRequest) -> None:
        held.append(http)
        assert http.fault is not None
        http.refuse(http.fault)

    monkeypatch.setattr(RequestHandler, "data_received", data_received)
    async with serving(handler, lambda _: ApiError(401, "No key."), linger=0.3) as caller:
        caller.writer.write(CHUNKED[: CHUNKED.index(b"2\r\nde")])
        assert (await caller.head())[0] == 401
        before = sum(parsed)
        connection = held[0].writer.transport.get_protocol()
        for _ in range(20):
            caller.writer.write(b"1\r\na\r\n" * 10_000)
            await asyncio.sleep(0.001)
        await eventually(lambda: not connection.connected)  # type: ignore[attr-defined]
    assert sum(parsed) == before > 0


@pytest.mark.parametrize("pieces", [1, 20])
async def test_one_byte_chunks_are_refused_by_their_framing(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one read or many; no turn of the loop parses more of 40,000 chunks than the read buffer holds."""
    raw = CHUNKED[: CHUNKED.index(b"3\r\nabc")] + b"1\r\na\r\n" * 40_000 + b"0\r\n\r\n"
    size = len(raw) // pieces + 1
    parsed, feed = [0], StreamReader.feed_data

    def feed_data(self: StreamReader, *piece: Any) -> bool:
        parsed[-1] += 1
        return bool(feed(self, *piece))

    def tick() -> None:
        parsed.append(0)
        timer.append(asyncio.get_running_loop().call_later(0, tick))

    monkeypatch.setattr(StreamReader, "feed_data", feed_data)
    timer: list[asyncio.TimerHandle] = []
    async with serving(Echo()) as caller:
        tick()
        for at in range(0, len(raw), size):
            caller.writer.write(raw[at : at + size])
            await asyncio.sleep(0.001)
        status, _ = await caller.head()
        timer[-1].cancel()
    assert status == 413
    assert 0 < max(parsed) < 5_000


async def test_a_get_with_a_body_still_to_come_is_refused() -> None:
    async with serving(Echo()) as caller:
        status, _, _ = await caller.whole(b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n")
    assert status == 413


LONG = f"x-long: {'x' * (MAX_LINE + 1)}"


@pytest.mark.parametrize("headers", [[LONG], ["x-many: x"] * MAX_HEADERS], ids=["a long one", "many"])
async def test_a_too_long_head_in_one_read_is_refused(headers: list[str]) -> None:
    """In one read or many, with the same result."""
    async with serving(Echo()) as caller:
        status, _, body = await caller.whole(post(b"x", *headers))
    assert (status, json.loads(body)["error"]["type"]) == (431, "invalid_request_error")
    assert b"xx" not in body


async def test_garbage_after_a_request_does_not_affect_its_answer() -> None:
    """The answer is complete; then the connection ends, as no next request can be found."""
    async with serving(Clock(takes=0.1)) as caller:
        caller.writer.write(GET)
        await asyncio.sleep(0.03)
        status, _, body = await caller.whole(b"\0garbage\r\n\r\n")
        assert (status, body) == (200, b"{}")
        assert (await caller.head())[0] == 400
        await caller.rest()


async def test_a_body_that_is_not_http_never_reaches_the_handler() -> None:
    """The sender can read the error while still sending."""
    async with serving(echo := Echo()) as caller:
        caller.writer.write(CHUNKED.replace(b"2\r\nde", b"z\r\nde"))
        for _ in range(10):
            await asyncio.sleep(0)
            caller.writer.write(b"x" * 10_000)
        status, headers = await caller.head()
        assert json.loads(await caller.body(headers))["error"]["message"].startswith("The request is not valid HTTP: ")
        assert await caller.rest() == b""
    assert (status, headers["connection"], echo.seen) == (400, "close", [])


@pytest.mark.parametrize(("more", "status"), [(b"", 408), (b"x" * 100_000, 413)], ids=["and stops", "and goes on"])
@pytest.mark.parametrize("end", [b"z\r\nde", b"0\r\ntrailer: " + b"x" * MAX_LINE], ids=["chunk", "trailer"])
async def test_what_is_not_http_ends_a_body_that_is_waited_for(end: bytes, more: bytes, status: int) -> None:
    """aiohttp tells nobody of an error within a body: the bounds on its time and on its framing end it."""
    async with serving(echo := Echo(), body=0.1) as caller:
        caller.writer.write(CHUNKED[: CHUNKED.index(b"2\r\nde")])
        await asyncio.sleep(0.02)
        caller.writer.write(end + more)
        found, headers, body = await caller.whole(b"")
        assert await caller.rest() == b""
    assert (found, headers["connection"]) == (status, "close")
    assert b"chunk" in body
    assert [http.fault is not None for http in echo.seen] == [True]


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: CANARY\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: no host\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        post(b"x", "transfer-encoding: chunked"),
    ],
)
async def test_malformed_http_is_refused_with_a_json_error(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """400 with one line of text; no handler is called, no content logged."""

    async def handler(http: HttpRequest) -> None:
        raise AssertionError

    async with serving(handler) as caller:
        status, _, body = await caller.whole(raw)
        assert await caller.rest() == b""
    message = json.loads(body)["error"]["message"]
    assert status == 400
    assert message.startswith("The request is not valid HTTP: ")
    assert message.isprintable()
    assert caplog.records == []


# --------------------------------------------------------------------------- time


@pytest.mark.parametrize(("limit", "sent"), [("head", GET[:10]), ("idle", b""), ("body", post(b"abc")[:-1])])
async def test_nothing_is_waited_for_for_ever(limit: str, sent: bytes) -> None:
    """Slow heads, slow bodies and idle connections are closed."""
    async with serving(Echo(), **{limit: 0.1, "linger": 0.1}) as caller:
        caller.writer.write(sent)
        rest = b""
        with suppress(ConnectionResetError):
            rest = await caller.rest()
    assert rest.startswith(b"HTTP/1.1 408 " if limit == "body" else b"")
    assert bool(rest) == (limit == "body")


@pytest.mark.parametrize(
    ("now", "received", "deadline"),
    [
        (100.0, 0, 160.0),  # nothing came
        (150.0, 8 * BODY_RATE, 168.0),  # a drip: the rate bounds it
        (500.0, 800 * BODY_RATE, 560.0),  # a slow link has as long as its bytes take
        (110.0, 4000 * BODY_RATE, 170.0),  # a fast sender may not stop for an hour
    ],
)
def test_a_body_has_60_s_without_progress_and_at_least_the_rate(now: float, received: int, deadline: float) -> None:
    assert body_deadline(60.0, 100.0, now, received) == deadline


async def test_every_part_of_a_body_moves_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, ...]] = []

    def passed(limit: float, began: float, now: float, received: int) -> float:
        asked.append((limit, received))
        return began

    monkeypatch.setattr("gateway.downstream.body_reader.body_deadline", passed)
    async with serving(Echo(), body=60.0, linger=0.1) as caller:
        caller.writer.write(post(b"abcdef")[:-6])
        await asyncio.sleep(0)
        caller.writer.write(b"abc")
        assert (await caller.rest()).startswith(b"HTTP/1.1 408 ")
    assert asked == [(60.0, 3)]


async def test_connections_that_time_out_together_are_closed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand at once would stop the event loop for 30 ms, and all answers with it."""
    monkeypatch.setattr("gateway.downstream.http_server.SWEEP", 0.05)
    server, loop = HttpServer(Echo(), timeouts=Timeouts(head=0.2)), asyncio.get_running_loop()
    listener = await loop.create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(100)]
    await eventually(lambda: len(server.connections) == 100)
    for writer in writers:
        writer.write(GET[:-1])
    left = [100]
    async with asyncio.timeout(NEVER):
        while left[-1]:
            await asyncio.sleep(0)
            left.append(len(server.connections))
    assert max(before - after for before, after in pairwise(left)) <= ABORTS
    listener.close()
    await server.shutdown(0.1)


async def test_a_head_without_end_is_aborted_before_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its lines is short, and so many are allowed that a head could fill 2 MB."""
    monkeypatch.setattr("gateway.downstream.http_server.SWEEP", 0.02)
    async with serving(Echo(), head=NEVER) as caller:
        caller.writer.write(GET[:-2] + b"".join(b"x-%d: %b\r\n" % (i, b"y" * 1000) for i in range(40)))
        with suppress(ConnectionResetError):
            assert await caller.rest() == b""


async def test_a_long_body_behind_its_head_is_no_long_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often connections are checked while it arrives."""
    monkeypatch.setattr("gateway.downstream.http_server.SWEEP", 0.0)
    async with serving(Echo(), max_body=10**7) as caller:
        for _ in range(20):
            assert len((await caller.whole(post(b"x" * 300_000)))[2]) == 300_000


@pytest.mark.virtual_time
async def test_a_head_that_came_in_during_a_stall_of_the_loop_is_not_late() -> None:
    """Seen where the machine stood still for half a minute: connections with a whole request were aborted."""
    async with serving(Echo(), head=0.2) as caller:
        caller.writer.write(GET[:-1])
        await asyncio.sleep(0.1)
        stall(30.0)
        assert (await caller.whole(GET[-1:]))[0] == 200


@pytest.mark.virtual_time
async def test_a_body_that_came_in_during_a_stall_of_the_loop_is_not_late() -> None:
    async with serving(Echo(), body=60.0) as caller:
        caller.writer.write(post(b"abcdef")[:-3])
        await asyncio.sleep(0.1)
        caller.writer.write(b"def")
        stall(70.0)
        assert (await caller.whole(b""))[0] == 200


async def test_request_timeouts_do_not_limit_the_answer() -> None:
    """Limits apply to receiving requests, each on its own."""
    async with serving(Clock(takes=0.3), head=0.05, idle=0.2, body=0.05) as caller:
        for _ in range(2):
            assert (await caller.whole(GET))[0] == 200


async def test_the_end_of_an_answer_is_not_kept_for_ever_for_a_caller_that_does_not_read() -> None:
    """The connection is aborted, and the buffer freed."""
    held: list[asyncio.Transport] = []

    async def handler(http: HttpRequest) -> None:
        http.keep_alive = False
        held.append(http.writer.transport)
        http.respond(200, b"x" * 20_000_000)

    async with serving(handler, unread=0.1) as caller:
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(GET)
        await eventually(lambda: held and held[0].is_closing() and held[0].get_write_buffer_size() > 0)
        await eventually(lambda: held[0].get_write_buffer_size() == 0)


# --------------------------------------------------------------------------- back-pressure


async def test_flow_control_callbacks_follow_the_write_buffer() -> None:
    """Buffers are bounded, in the process and in the kernel."""
    heard: list[str] = []

    class Reader:
        def on_write_paused(self) -> None:
            heard.append("full")

        def on_write_resumed(self) -> None:
            heard.append("drained")

        def on_shutdown(self) -> None:
            heard.append("shutdown")

    async def handler(http: HttpRequest) -> None:
        writer = http.writer
        writer.flow_control = Reader()
        written = 0
        while not writer.paused:
            writer.transport.write(b"x" * 10_000)
            written += 10_000
        kernel = writer.transport.get_extra_info("socket").getsockopt(SOL_SOCKET, SO_SNDBUF)
        assert writer.transport.get_write_buffer_size() <= HIGH_WATER + 10_000
        assert kernel <= 2 * SEND_BUFFER
        caller.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await eventually(lambda: not writer.paused)
        heard.append(str(written))
        http.keep_alive = False

    async with serving(handler) as caller:
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(GET)
        await eventually(lambda: len(heard) == 3)
        assert len(await caller.rest()) == int(heard[2])
    assert heard[:2] == ["full", "drained"]


# --------------------------------------------------------------------------- ends


async def test_an_answer_written_by_its_handler_is_unchanged() -> None:
    """Nothing is added; the handler decides on keep-alive."""

    async def handler(http: HttpRequest) -> None:
        http.writer.write(OK)
        http.keep_alive = len(answers) < 3

    answers: list[bytes] = []
    async with serving(handler) as caller:
        for _ in range(3):
            answers.append(b"")
            caller.writer.write(GET)
            answers[-1] = await caller.reader.readexactly(len(OK))
        assert await caller.rest() == b""
    assert answers == [OK] * 3


async def test_a_caller_that_leaves_cancels_its_handler() -> None:
    """At once: cancellation is how an engine is freed."""
    ends: list[str] = []

    async def handler(http: HttpRequest) -> None:
        ends.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async with serving(handler) as caller:
        caller.writer.write(GET)
        await eventually(lambda: ends)
        caller.writer.transport.abort()
        await eventually(lambda: len(ends) == 2)
    assert ends == ["begun", "cancelled"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_caller_that_half_closes_is_gone(version: bytes) -> None:
    """`printf ... | nc` ends its side at once; a caller that left looks the same, and its engine is freed at once."""
    ends: list[str] = []

    async def handler(http: HttpRequest) -> None:
        ends.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async with serving(handler) as caller:
        caller.writer.write(GET.replace(b"1.1", version))
        await eventually(lambda: ends)
        caller.writer.write_eof()
        assert await caller.rest() == b""
        await eventually(lambda: len(ends) == 2)
    assert ends == ["begun", "cancelled"]


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("half_closed_for", [None, 0.0, 0.01])
def test_a_caller_that_leaves_without_a_reset_cancels_its_handler_soon(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], half_closed_for: float | None
) -> None:
    """A half-close and a close look the same until something is written."""
    ends: list[float] = []

    async def handler(http: HttpRequest) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ends.append(monotonic())

    async def leave() -> float:
        async with serving(handler) as caller:
            caller.writer.write(GET)
            await asyncio.sleep(0.05)
            if half_closed_for is not None:
                caller.writer.write_eof()
                await asyncio.sleep(half_closed_for)
            left = monotonic()
            caller.writer.close()
            await eventually(lambda: ends)
            return ends[0] - left

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(leave()) < 5  # 0.2 s on an idle machine; without a look it is an hour


async def test_a_caller_that_leaves_between_two_requests_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of input comes when the answer is written, before the server waits for the next request."""
    serve = DownstreamConnection.serve

    async def serve_then_end(self: DownstreamConnection, raw: BaseRequest) -> StreamResponse:
        answer = await serve(self, raw)
        if not self.eof_received():  # as asyncio does
            self.writer.transport.close()
        return answer

    monkeypatch.setattr(DownstreamConnection, "serve", serve_then_end)
    async with serving(Echo()) as caller:
        await caller.whole(GET)
        async with asyncio.timeout(NEVER):
            assert await caller.rest() == b""


async def test_a_body_that_ends_early_is_the_end_of_the_caller() -> None:
    async with serving(echo := Echo()) as caller:
        caller.writer.write(post(b"abc")[:-1])
        await asyncio.sleep(0.02)
        caller.writer.write_eof()
        assert await caller.rest() == b""
    assert echo.seen == []


async def test_an_internal_error_is_a_500_server_error(caplog: pytest.LogCaptureFixture) -> None:
    """The exception's text is only logged."""

    async def handler(http: HttpRequest) -> None:
        raise KeyError("CANARY")

    with caplog.at_level(logging.ERROR, "firsttoken"):
        async with serving(handler) as caller:
            status, headers, body = await caller.whole(GET)
    assert (status, headers["connection"], headers["content-type"]) == (500, "close", "application/json")
    assert json.loads(body)["error"]["message"] == "The gateway failed; the fault is ours."
    assert "CANARY" in caplog.text


async def test_an_internal_error_within_an_answer_closes_the_connection() -> None:
    """A second head would be taken for body."""

    async def handler(http: HttpRequest) -> None:
        http.writer.write(OK[:-1])
        http.begun = True
        await asyncio.sleep(0)
        raise KeyError

    async with serving(handler) as caller:
        caller.writer.write(GET)
        rest = b""
        with suppress(ConnectionResetError):
            rest = await caller.rest()
    assert rest in (b"", OK[:-1])


async def test_a_server_that_ends_lets_requests_finish_for_a_while() -> None:
    """Then requests are cancelled and all connections closed."""
    ends: list[str] = []

    async def handler(http: HttpRequest) -> None:
        try:
            await asyncio.sleep(0.05 if http.path == "/quick" else 60)
            http.respond(200, b"{}")
            ends.append("answered")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    server = HttpServer(handler)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with calling(url) as quick, calling(url) as slow, calling(url) as idle:
        quick.writer.write(GET.replace(b"/", b"/quick", 1))
        slow.writer.write(GET)
        await eventually(lambda: len([c for c in server.connections if c.request]) == 2)  # type: ignore[attr-defined]
        listener.close()
        await server.shutdown(0.5)
        assert ends == ["answered", "cancelled"]
        assert (await quick.whole(b""))[0] == 200
        with suppress(ConnectionResetError):
            assert await idle.rest() == b""
    assert not server.connections


# --------------------------------------------------------------------------- replies


def test_error_replies_are_json_without_a_server_name() -> None:
    """A version would help only an attacker."""
    reply = rendered(200, b"{}", ["x-one: 1"], "GET", keep_alive=True)
    head, _, body = reply.partition(b"\r\n\r\n")
    status, date, *rest = head.decode().split("\r\n")
    lines = ["content-type: application/json", "content-length: 2", "server: firsttoken", "x-one: 1"]
    assert (status, rest, body) == ("HTTP/1.1 200 OK", lines, b"{}")
    assert abs(parsedate_to_datetime(date.removeprefix("date: ")).timestamp() - time()) < 2


async def test_an_api_error_closes_the_connection_only_on_demand() -> None:
    """An invalid body keeps the connection; unread bytes close it."""
    refusals = [bad_request("No."), ApiError(413, "Too large.", headers={"x-one": "1"}, close=True)]

    async def handler(http: HttpRequest) -> None:
        http.refuse(refusals.pop(0))

    async with serving(handler) as caller:
        status, headers, body = await caller.whole(GET)
        assert (status, headers.get("connection"), body) == (400, None, bad_request("No.").body())
        status, headers, _ = await caller.whole(GET)
        assert (status, headers["connection"], headers["x-one"]) == (413, "close", "1")
        assert await caller.rest() == b""
