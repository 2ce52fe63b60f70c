"""Streams pass byte for byte, for any chunking upstream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import ANY

import pytest

from tests.support.builders import CHAT, DONE, FINISH, calling, post
from tests.support.gateways import pool, running
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk, reply

pytestmark = pytest.mark.virtual_time

STREAMS = 1000
PATIENT = {"connect": "60s", "stream_idle": "60s"}  # callers, gateway and upstream share one busy loop here
TEXT = "täglich 猫 \N{GRINNING FACE} \\u0041 \\n {} [] data: : "


def event(text: str) -> bytes:
    return f'data: {{"id":"x","choices":[{{"index":0,"delta":{{"content":"{text}"}}}}]}}\n\n'.encode()


def answer(seed: int) -> bytes:
    """Stream of events with seeded text in several scripts, comments and unusual line ends."""
    rng = random.Random(seed)
    parts = [b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n']
    for _ in range(rng.randint(3, 12)):
        parts.append(event("".join(rng.choices(TEXT.replace("\\", ""), k=rng.randint(1, 40)))))
        parts.append(rng.choice([b"", b": keep-alive\n\n", b"\r\n", b"event: x\nid: 1\n\n"]))
    parts.append(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
    return b"".join(parts)


def cut(data: bytes, rng: random.Random, longest: int) -> list[bytes]:
    """Splits `data` at random positions: within UTF-8, lines and chunk headers."""
    pieces, at = [], 0
    while at < len(data):
        size = rng.randint(1, longest)
        pieces.append(data[at : at + size])
        at += size
    return pieces


@asynccontextmanager
async def random_upstream() -> AsyncIterator[str]:
    """Serves answer(seed), with random chunks written in other random pieces; the request's body names the seed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return writer.close()
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            seed = int(body.split(b'"seed":')[1].split(b",")[0].split(b"}")[0])
            rng = random.Random(-seed - 1)
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in cut(answer(seed), rng, 200))
            reply = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            for piece in cut(reply + chunks + b"0\r\n\r\n", rng, 150):
                writer.write(piece)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()


async def ask(port: int, seed: int) -> bytes:
    """Sends one streamed request over a raw socket; returns the de-chunked body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = (
        b'{"model":"chat","stream":true,"stream_options":{"include_usage":true},"seed":%d,"messages":[{"role":"user","content":"x"}]}'
        % seed
    )
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK"), head
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    writer.close()
    return b"".join(parts)


async def test_a_thousand_concurrent_streams_arrive_byte_for_byte() -> None:
    """Each caller receives exactly the sent bytes, for all chunk boundaries."""
    async with random_upstream() as url, running({"only": pool(url)}, defaults=PATIENT) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        got = await asyncio.gather(*(ask(port, seed) for seed in range(STREAMS)))
    assert [seed for seed in range(STREAMS) if got[seed] != answer(seed)] == []
    assert len({r.end.value for r in gateway.recorder.recent}) == 1


PLACEHOLDERS = ("none", "EMPTY", "test", "token", "x", "ollama", "dummy")
WORDS = "Nonetheless none of the latest tokens of an EMPTY index are dummy ollama words."


@pytest.mark.parametrize("key", [*PLACEHOLDERS, "completion_tokens"])
async def test_a_backend_key_rewrites_no_answer(key: str) -> None:
    """A placeholder, or a key that is a word of the answer: text, names and numbers pass, whole and streamed."""
    whole = b'{"choices":[{"message":{"content":"%b"}}],"usage":{"completion_tokens":7}}' % WORDS.encode()
    streamed = event(WORDS) + FINISH + DONE
    scripts = [reply(whole, "200 OK", "content-type: application/json")], [STREAM_HEAD + chunk(streamed) + LAST_CHUNK]
    async with (
        Upstream(*scripts) as upstream,
        running({"only": pool(upstream.url, api_key=key)}) as gateway,
        calling(gateway.url) as caller,
    ):
        assert await caller.whole(post(CHAT)) == (200, ANY, whole)
        assert (await caller.ask(post({**CHAT, "stream": True})))[0] == 200
        assert b"".join(await caller.chunks()) == streamed
