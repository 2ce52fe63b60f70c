"""One connection: framing of replies, and their end."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from backends.failures import NOT_READ
from backends.http.connection import HEAD_LIMIT
from backends.http.connection_pool import ConnectionPool
from backends.interface import FailureKind, HttpCall
from tests.support.scripted_connection import GET, HEAD, POST, TRANSCRIPTS, ask, played
from tests.support.upstream import (
    CLOSE,
    GATE,
    HANG,
    LAST_CHUNK,
    STREAM_HEAD,
    Listener,
    Script,
    Upstream,
    chunk,
    chunked,
    reply,
    turn_until,
)

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

# --------------------------------------------------------------------------- the request


async def test_a_request_has_host_and_content_length() -> None:
    """Both set by the transport; a GET without a body has no length."""
    async with played([reply()]) as (origin, upstream):
        await ask(origin)
        await ask(origin, GET)
        post, get = upstream.requests
        assert (post.method, post.target, post.body) == ("POST", "/v1/chat/completions", b'{"model":"m"}')
        assert post.headers == {
            "host": origin.address.authority,
            "content-type": "application/json",
            "content-length": "13",
        }
        assert (get.method, get.target, get.headers) == ("GET", "/health", {"host": origin.address.authority})


async def test_header_values_are_sent_byte_for_byte() -> None:
    """A caller's id may contain bytes of no encoding (aiohttp: surrogateescape)."""
    async with played([reply()]) as (origin, upstream):
        await ask(origin, HttpCall("GET", "/x", {"x-request-id": b"\xff\xc3\xa9".decode("utf-8", "surrogateescape")}))
        assert upstream.requests[0].headers["x-request-id"].encode("latin-1") == b"\xff\xc3\xa9"


async def test_a_large_body_arrives_whole() -> None:
    """Two megabytes, of every byte value."""
    body = bytes(range(256)) * 8192
    async with played([reply()]) as (origin, upstream):
        await ask(origin, HttpCall("POST", "/v1/x", {}, body))
        assert upstream.requests[0].body == body


@pytest.mark.parametrize("value", ["a\r\nx-smuggled: 1", "a\nb", "a\rb"])
async def test_a_header_with_a_line_break_is_never_sent(value: str) -> None:
    """A line break could begin another header, or another request."""
    async with played([reply()]) as (origin, upstream):
        with pytest.raises(ValueError, match="line break"):
            await origin.open(HttpCall("GET", "/x", {"x-request-id": value}), Listener())
        assert upstream.connections == 0


# --------------------------------------------------------------------------- the reply


@pytest.mark.parametrize(
    ("script", "call", "status", "body", "kept"),
    [
        ([reply(b"hello")], POST, 200, b"hello", True),
        ([reply(b"")], POST, 200, b"", True),
        ([chunked(b"one", b"two")], POST, 200, b"onetwo", True),
        ([chunked(b"one")[: -len(LAST_CHUNK)] + b"0\r\nx-trailer: 1\r\n\r\n"], POST, 200, b"one", True),
        ([b"HTTP/1.1 200 OK\r\n\r\nto the end", CLOSE], POST, 200, b"to the end", False),
        ([b"HTTP/1.0 200 OK\r\n\r\nto the end", CLOSE], POST, 200, b"to the end", False),
        ([b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi"], POST, 200, b"hi", False),
        ([b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nhi"], POST, 200, b"hi", True),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nto the end", CLOSE], POST, 200, b"to the end", False),
        ([reply(b"hello", "200 OK", "connection: close")], POST, 200, b"hello", False),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], POST, 204, b"", True),
        ([b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n"], POST, 304, b"", True),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"], HEAD, 200, b"", False),
        ([b"HTTP/1.1 307 Moved\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"], POST, 307, b"", True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + reply(b"hello")], POST, 200, b"hello", True),
        (
            [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", b"HTTP/1.1 102 Processing\r\n\r\n", reply(b"hello")],
            POST,
            200,
            b"hello",
            True,
        ),
        ([reply(b"hello", "200 OK", "upgrade: h2c", "connection: upgrade")], POST, 200, b"hello", True),
        ([b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nhi"], POST, 200, b"hi", True),
    ],
)
async def test_the_end_of_a_reply_follows_from_its_head(
    script: Script, call: HttpCall, status: int, body: bytes, kept: bool
) -> None:
    """RFC 9112, section 6.3. Only a connection without possible further bytes is kept."""
    async with played(script) as (origin, _):
        listener = await ask(origin, call)
        assert (listener.done.result(), listener.status, listener.body) == (None, status, body)
        assert listener.calls[0] == "head"
        assert listener.calls[-1] == "end"
        assert set(listener.calls[1:-1]) <= {"body"}
        assert origin.idle == kept


async def test_header_names_are_lower_case_and_the_last_repetition_counts() -> None:
    """Interim heads and trailers are ignored."""
    early = b"HTTP/1.1 103 Early\r\nX-Early: 1\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a:2\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with played([early + head + b"0\r\nx-late: 1\r\n\r\n"]) as (origin, _):
        assert (await ask(origin)).headers == {"x-a": "2", "transfer-encoding": "chunked"}


async def test_a_trailer_leaves_nothing_to_the_next_reply() -> None:
    """On the same connection: a limit in a trailer would be read as one of the next request."""
    trailing = chunked(b"one")[: -len(LAST_CHUNK)] + b"0\r\nRetry-After: 60\r\n\r\n"
    async with played([trailing], [chunked(b"two")]) as (origin, upstream):
        first, second = await ask(origin), await ask(origin)
        assert (first.body, second.body, upstream.connections) == (b"one", b"two", 1)
        assert "retry-after" not in {**first.headers, **second.headers}


async def test_a_reply_split_at_any_byte_is_the_same() -> None:
    """A real stream of vLLM, with head and chunk framing, in two segments each."""
    raw = (TRANSCRIPTS / "vllm_chat_stream.http").read_bytes().replace(b"connection: close\r\n", b"")
    body = (TRANSCRIPTS / "vllm_chat_stream.sse").read_bytes()
    cuts = range(1, len(raw), 7)
    async with played(*([raw[:cut], raw[cut:]] for cut in cuts)) as (origin, upstream):
        for _ in cuts:
            listener = await ask(origin)
            assert (listener.done.result(), listener.body) == (None, body)
        assert (upstream.connections, repr(origin)) == (
            1,
            f"<ConnectionPool {origin.address.authority} idle=1 active=0>",
        )


async def test_a_reply_in_single_bytes_is_the_same() -> None:
    """Byte by byte."""
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"hello", b"world")
    async with played([raw[i : i + 1] for i in range(len(raw))]) as (origin, _):
        assert (await ask(origin)).body == b"helloworld"


async def test_the_chunks_of_one_read_are_one_call() -> None:
    """A sink writes once per read, whatever the framing."""
    async with played([STREAM_HEAD, chunk(b"a") + chunk(b"b") + chunk(b"c"), LAST_CHUNK]) as (origin, _):
        assert (await ask(origin)).reads == [b"abc"]


async def test_body_bytes_are_passed_on_at_once() -> None:
    """A partial chunk is not waited for."""
    async with played([STREAM_HEAD, b"a\r\n01234", GATE, b"56789\r\n" + LAST_CHUNK]) as (origin, upstream):
        listener = Listener()
        exchange = await origin.open(POST, listener)
        await turn_until(lambda: listener.reads)
        assert listener.reads == [b"01234"]
        assert exchange.bytes_in == len(STREAM_HEAD) + 8
        upstream.proceed()
        assert (await listener.ended(), listener.body) == (None, b"0123456789")


# --------------------------------------------------------------------------- malformed replies


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"HTTP/1.1 000 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx y: 1\r\n\r\n",
        STREAM_HEAD + b"zz\r\n",
        STREAM_HEAD + b"fffffffffffffffff\r\n",
        STREAM_HEAD + b"3\r\nabcdef\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
async def test_garbage_is_a_protocol_failure(garbage: bytes) -> None:
    """The peer is no HTTP/1.1 server; the connection is closed."""
    async with played([garbage, HANG]) as (origin, upstream):
        failure = (await ask(origin)).done.result()
        assert failure is not None
        assert failure.kind is FailureKind.PROTOCOL
        await upstream.until(lambda up: up.hangups == 1)


async def test_valid_bytes_before_garbage_reach_the_sink() -> None:
    """The sink receives the head and the valid body, then the failure."""
    async with played([STREAM_HEAD + chunk(b"fine") + b"zz\r\n", HANG]) as (origin, _):
        listener = await ask(origin)
        assert (listener.calls, listener.body) == (["head", "body", "failure"], b"fine")


@pytest.mark.parametrize(
    "endless",
    [
        b"HTTP/1.1 200 OK\r\nx-endless: ",
        b"HTTP/1.1 200 OK\r\n" + b"x-many: 1\r\n" * (HEAD_LIMIT // 8),
        STREAM_HEAD + b"0\r\nx-trailer: ",
        STREAM_HEAD + b"1;extension=",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4096,
    ],
)
async def test_heads_trailers_and_extensions_are_bounded(endless: bytes) -> None:
    """Ten megabytes of header, trailer or chunk extension are cut off at 64 KiB plus one read."""
    async with played([endless, *[b"x" * 65536] * 160, HANG]) as (origin, upstream):
        listener = Listener()
        exchange = await origin.open(POST, listener)
        failure = await listener.ended()
        assert failure is not None
        assert failure.kind is FailureKind.PROTOCOL
        assert exchange.bytes_in < 1 << 20
        await upstream.until(lambda up: up.hangups == 1)


async def test_chunks_in_pieces_are_no_endless_head() -> None:
    """A server may write size, data and line end separately for ever."""
    pieces = [b"1;" + b"x" * (HEAD_LIMIT // 4) + b"\r\n", b"a", b"\r\n"] * 20
    async with played([STREAM_HEAD, *pieces, LAST_CHUNK]) as (origin, _):
        assert (await ask(origin)).body == b"a" * 20


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 200 OK\r\n\r\n", b"garbage", b"\r\ngarbage"])
async def test_bytes_after_a_reply_end_the_connection_not_the_reply(surplus: bytes) -> None:
    """Surplus bytes must not answer the next request."""
    async with played([reply(b"one") + surplus], [reply(b"two")]) as (origin, upstream):
        assert (await ask(origin)).body == b"one"
        assert origin.idle == 0
        assert (await ask(origin)).body == b"two"
        assert upstream.connections == 2


async def test_bytes_on_an_idle_connection_close_the_connection() -> None:
    """A proxy's 408 before a close is no reply to the next request."""
    async with played([reply(b"one"), GATE, b"HTTP/1.1 408 Request Timeout\r\n\r\n"], [reply(b"two")]) as (
        origin,
        upstream,
    ):
        await ask(origin)
        upstream.proceed()
        await upstream.until(lambda up: up.hangups == 1)
        assert (await ask(origin)).body == b"two"


async def test_a_refusal_before_the_request_was_read_ends_the_connection() -> None:
    """An early 413: the rest of the body would be read as a request."""
    async with Upstream(banner=[GATE, reply(b"", "413 Content Too Large"), HANG]) as upstream:
        origin = ConnectionPool(upstream.url, connect_timeout=2)
        listener = Listener()
        await origin.open(HttpCall("POST", "/v1/x", {}, b"x" * (64 << 20)), listener)
        upstream.proceed()
        assert (await listener.ended(), listener.status, origin.idle) == (None, 413, 0)


# --------------------------------------------------------------------------- errors of the sink


class Faulty(Listener):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def _check(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError(method)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._check("head")
        super().on_head(status, headers)

    def on_body(self, data: bytes, framed: bytes = b"") -> None:
        self._check("framed" if framed else "body")
        super().on_body(data, framed)

    def on_end(self) -> None:
        self._check("end")
        super().on_end()


CHUNKS: Script = [STREAM_HEAD, chunk(b"one"), GATE, chunk(b"two"), GATE, LAST_CHUNK]
UNTIL_CLOSED: Script = [b"HTTP/1.1 200 OK\r\n\r\none", GATE, b"two", GATE, CLOSE]


@pytest.mark.parametrize(
    ("method", "script"),
    [*((method, CHUNKS) for method in ("head", "body", "framed", "end")), ("end", UNTIL_CLOSED)],
)
async def test_an_error_of_the_sink_is_reported_as_a_failure(
    method: str, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the request would have no end. The error is logged, and the connection is not used again."""
    async with played(script, [reply(b"next")]) as (origin, upstream):
        await origin.open(POST, listener := Faulty(method))
        await turn_until(lambda: listener.reads or listener.done.done())
        upstream.proceed()
        await turn_until(lambda: len(listener.reads) == 2 or listener.done.done())
        upstream.proceed()
        assert await listener.ended() is NOT_READ
        assert "could not read a backend's reply" in caplog.text
        assert (await ask(origin)).body == b"next"
