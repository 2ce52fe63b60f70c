"""Hostile and invalid input is refused in the OpenAI envelope, at once, and never reaches a backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.app import Gateway
from tests.support.gateways import pool, running

pytestmark = pytest.mark.virtual_time

GOOD = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


class CountingUpstream:
    """An upstream that counts connections."""

    def __init__(self) -> None:
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[Gateway, CountingUpstream]]:
    upstream = CountingUpstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running({"only": pool(url)}, defaults={"max_body": "1MB"}) as running_gateway:
        yield running_gateway, upstream
    server.close()


def http(body: bytes, *, path: str = "/v1/chat/completions", method: str = "POST", extra: bytes = b"") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
        + extra
        + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


async def send(gateway: Gateway, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the first reply to raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(5):
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
            return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


def chat(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


BODIES = {
    "empty": b"",
    "not json": b"hello",
    "cut off": b'{"model":"chat","messages":[',
    "trailing bytes": chat() + b"x",
    "an array": b"[]",
    "a string": b'"chat"',
    "nested 100k deep": b'{"model":"chat","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects 100k deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "NaN": b'{"model":"chat","temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
    "Infinity": b'{"model":"chat","temperature":Infinity,"messages":[{"role":"user","content":"x"}]}',
    "1e999": b'{"model":"chat","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
    "a 5000-digit integer": b'{"model":"chat","seed":' + b"1" * 5000 + b',"messages":[{"role":"user","content":"x"}]}',
    "a lone surrogate": b'{"model":"chat","messages":[{"role":"user","content":"\\ud800"}]}',
    "invalid UTF-8": b'{"model":"chat","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "UTF-16": chat().decode().encode("utf-16"),
    "UTF-32": chat().decode().encode("utf-32"),
    "a byte order mark": b"\xef\xbb\xbf" + chat(),
    "duplicate keys": b'{"model":"chat","model":"other","messages":[{"role":"user","content":"x"}]}',
    "duplicate keys, spaced": b'{"model":"chat","messages":[{"role":"user","role" :"system","content":"x"}]}',
    "duplicate keys, escaped": b'{"model":"chat","\\u006dodel":"other","messages":[{"role":"user","content":"x"}]}',
    "no model": b'{"messages":[{"role":"user","content":"x"}]}',
    "model is a number": chat(model=1),
    "model is empty": chat(model=""),
    "unknown model": chat(model="nope"),
    "unknown model, hostile": chat(model="x\r\nset-cookie: a=b\u2028" * 1000),
    "no messages": b'{"model":"chat"}',
    "messages is a string": chat(messages="hello"),
    "messages is empty": chat(messages=[]),
    "a message is a string": chat(messages=["hello"]),
    "role is missing": chat(messages=[{"content": "x"}]),
    "content is a number": chat(messages=[{"role": "user", "content": 1}]),
    "a content part is a string": chat(messages=[{"role": "user", "content": ["x"]}]),
    "stream is a string": chat(stream="yes"),
    "stream_options is a list": chat(stream_options=[]),
    "max_tokens is text": chat(max_tokens="many"),
    "n is zero": chat(n=0),
    "n is huge": chat(n=10**6),
    "tools is an object": chat(tools={}),
    "response_format is text": chat(response_format="json"),
    "oversize": chat(messages=[{"role": "user", "content": "x" * 1_100_000}]),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_bad_body_is_a_4xx_in_the_openai_envelope(name: str, gateway: tuple[Gateway, CountingUpstream]) -> None:
    """The error names the mistake; the upstream receives no connection."""
    front, upstream = gateway
    status, headers, body = await send(front, http(BODIES[name]))
    error = json.loads(body)["error"]
    assert 400 <= status < 500
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "set-cookie" not in headers
    assert upstream.connections == 0


PATHS = [
    "/",
    "/v1",
    "/v1/",
    "/v1/chat/completions/",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/./chat/completions",
    "/v1/chat/../chat/completions",
    "/v1/chat%2fcompletions",
    "/%761/chat/completions",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/V1/chat/completions",
    "/v1/chat/completions;x",
    "http://127.0.0.1:9/v1/nope",
    "/metrics",
    "/fleet",
    "/requests",
    "/config",
    "/invocations",
    "/pause",
    "/sleep",
    "/v1/load_lora_adapter",
    "/server_info",
    "/v1/model/chat",
    "*",
    "/../../etc/passwd",
    "/v1/embeddings/",
]


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_path_is_404_and_never_reaches_a_backend(
    path: str, gateway: tuple[Gateway, CountingUpstream]
) -> None:
    """Paths are compared verbatim: not decoded, merged or resolved."""
    front, upstream = gateway
    status, _, body = await send(front, http(chat(), path=path))
    assert status in (400, 404)
    assert json.loads(body)["error"]["message"]
    assert upstream.connections == 0


POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
FRAMING = {
    "TE with CL": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "TE on HTTP/1.0": POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two content-lengths": POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "negative content-length": POST + b"content-length: -5\r\n\r\n",
    "content-length with plus": POST + b"content-length: +5\r\n\r\nhello",
    "declared over the limit": POST + b"content-length: 99999999999\r\n\r\n",
    "an unknown coding": POST + b"transfer-encoding: gzip\r\n\r\n",
    "chunked twice": POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    "gzip body": POST + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
    "a giant header": POST + b"x: " + b"a" * 100_000 + b"\r\n\r\n",
    "too many headers": POST + b"x: y\r\n" * 1000 + b"\r\n",
    "a space before the colon": b"POST /v1/chat/completions HTTP/1.1\r\nhost : x\r\n\r\n",
    "a NUL in a header": POST + b"x: a\0b\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a bad method": b"GE(T /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", FRAMING)
async def test_ambiguous_framing_is_refused_before_anything_is_sent(
    name: str, gateway: tuple[Gateway, CountingUpstream]
) -> None:
    """Framing that two parsers might read differently is refused, with an error in JSON."""
    front, upstream = gateway
    status, _, body = await send(front, FRAMING[name])
    assert 400 <= status < 500
    assert json.loads(body)["error"]["message"]
    assert upstream.connections == 0


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_a_wrong_method_is_405_with_allow(method: str, gateway: tuple[Gateway, CountingUpstream]) -> None:
    """RFC 9110 section 15.5.6 requires Allow."""
    status, headers, _ = await send(gateway[0], http(b"", method=method))
    assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-slo-ttft-ms", "soon"), ("x-slo-ttft-ms", "-1"), ("x-slo-tpot-ms", "NaN"), ("x-priority", "high")],
)
async def test_an_invalid_header_is_400_and_named(
    header: str, value: str, gateway: tuple[Gateway, CountingUpstream]
) -> None:
    """A misspelt budget must not silently mean no budget."""
    status, _, body = await send(gateway[0], http(chat(), extra=f"{header}: {value}\r\n".encode()))
    assert status == 400
    assert header in json.loads(body)["error"]["message"]


async def test_a_refused_body_leaves_the_connection_usable(gateway: tuple[Gateway, CountingUpstream]) -> None:
    """Keep-alive survives an invalid body, so that the next request needs no new connection."""
    port = int(gateway[0].url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(http(b"{}"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
    writer.close()
