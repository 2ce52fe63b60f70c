"""Events of any size are relayed; memory is bounded for a server that never ends one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.record import RequestOutcome
from tests.support.builders import DONE, FINISH, TOKEN, calling, conversing, last, post
from tests.support.served import serving, write_config
from tests.support.simulated import eventually
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Upstream, chunk

MIB = 1 << 20
ASKED: dict[str, Any] = {"model": "chat", "stream": True, "messages": [{"role": "user", "content": "draw"}]}
REQUEST = post(ASKED)


def image(size: int) -> bytes:
    """An event with an image of `size` base64 characters, as OpenRouter sends one."""
    url = "data:image/png;base64," + "iVBORw0K" * (size // 8)
    delta = {"role": "assistant", "content": "", "images": [{"type": "image_url", "image_url": {"url": url}}]}
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


def chunks(data: bytes, size: int = 64 * 1024) -> Iterator[bytes]:
    return (chunk(data[at : at + size]) for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [MIB, 8 * MIB])
@pytest.mark.parametrize("before", [b"", TOKEN])
async def test_an_event_of_any_size_is_relayed_byte_for_byte(size: int, before: bytes) -> None:
    """As the first token, and after it; the stream goes on behind it."""
    stream = before + image(size) + TOKEN + FINISH + DONE
    async with conversing([STREAM_HEAD, *chunks(stream), LAST_CHUNK]) as (gateway, caller, _):
        await caller.ask(REQUEST)
        assert b"".join(await caller.chunks()) == stream
        await eventually(lambda: gateway.recorder.recent)
        assert last(gateway).end is RequestOutcome.COMPLETED


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_large_event_is_translated_whole(path: str) -> None:
    """3 MiB of text in one event of a chat, for callers of other dialects."""
    text = "word " * (3 * MIB // 5)
    said = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"
    asked = {"model": "chat", "stream": True, "max_tokens": 9, "messages": ASKED["messages"], "input": "draw"}
    body = {name: asked[name] for name in asked if name != ("input" if path == "/v1/messages" else "messages")}
    if path == "/v1/responses":
        del body["max_tokens"]
    async with conversing([STREAM_HEAD, *chunks(TOKEN + said + FINISH + DONE), LAST_CHUNK]) as (gateway, caller, _):
        await caller.ask(post(body, path=path))
        relayed = b"".join(await caller.chunks())
        await eventually(lambda: gateway.recorder.recent)
        assert last(gateway).end is RequestOutcome.COMPLETED
    assert text.encode() in relayed


async def test_a_stream_that_ends_in_a_large_event_ends_in_a_readable_error() -> None:
    """The error event stands behind a blank line, on lines of its own."""
    torn = TOKEN + image(3 * MIB)[: 2 * MIB]
    async with conversing([STREAM_HEAD, *chunks(torn), LAST_CHUNK]) as (gateway, caller, _):
        await caller.ask(REQUEST)
        body = b"".join(await caller.chunks())
    *_, error, rest = body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert rest == b""
    assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE


ENDLESS = {
    "string": (b'data: {"choices": [{"index": 0, "delta": {"content": "', b"x" * 65536),
    "line": (b"data: ", b"x" * 65536),
    "object": (b'data: {"a": 0', b', "a": 0' * 8192),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_endless_event_needs_no_memory(tmp_path: Path, kind: str) -> None:
    """64 MiB behind a token, in a gateway process of its own. What is no string ends the stream."""
    begun, more = ENDLESS[kind]
    endless = [STREAM_HEAD, chunk(TOKEN + begun), *[chunk(more)] * (64 * MIB // len(more)), LAST_CHUNK]
    async with (
        Upstream([STREAM_HEAD, *chunks(image(8 * MIB) + FINISH), LAST_CHUNK], endless) as upstream,
        serving(write_config(tmp_path / "one.yaml", upstream.url), prefix=OWN) as served,
        calling(served.url) as caller,
    ):
        await caller.ask(REQUEST)
        await caller.chunks()
        before = peak(served.process.pid)
        await caller.ask(REQUEST)
        relayed = b"".join(await caller.chunks())
        assert peak(served.process.pid) - before < 16 * MIB
    assert (len(relayed) > 64 * MIB) == (kind == "string")
    assert b'"error"' in relayed[-1000:]


OWN = ("env",)  # started, not forked: its memory is that of an operator's


def peak(pid: int) -> int:
    """Of the resident set so far, bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
