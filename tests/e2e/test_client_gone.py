"""A caller that disconnects frees the engine at once: queued, before the first token, mid-stream, unstreamed."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from tests.support.builders import CHAT, calling, post
from tests.support.gateways import running
from tests.support.simulated import engine_pool, engines, eventually

pytestmark = pytest.mark.virtual_time


async def disconnect_when(gateway: Gateway, body: dict[str, object], ready: object) -> None:
    """Sends a request over a raw socket and aborts the connection when `ready()` holds, or after a token if None."""
    raw = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "word " * 3000}], **body}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    if ready is None:
        await reader.readuntil(b"data:")
    else:
        await eventually(ready)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("moment", "body"),
    [
        ("before the first token", {"stream": True, "max_tokens": 500}),
        ("mid-stream", {"stream": True, "max_tokens": 5000}),
        ("unstreamed", {"stream": False, "max_tokens": 5000}),
    ],
)
async def test_a_disconnected_caller_aborts_its_request_in_the_engine(moment: str, body: dict[str, object]) -> None:
    """The upstream connection closes, the engine drops the request, no tokens stay in flight, the Record is
    CLIENT_GONE."""
    async with engines(1) as (engine,), running({"only": engine_pool(engine)}) as gateway:
        mid_stream = moment == "mid-stream"
        await disconnect_when(
            gateway, body, None if mid_stream else lambda: engine.engine.running + engine.engine.waiting
        )
        await eventually(lambda: engine.engine.running + engine.engine.waiting == 0)
        await eventually(lambda: gateway.recorder.recent)
        assert [r.end for r in gateway.recorder.recent] == [RequestOutcome.CLIENT_GONE]
        assert engine.aborts == 1
        load = next(iter(gateway.monitor.loads().values()))
        assert (load.in_flight, load.prefilling, load.queued_tokens) == (0, 0, 0.0)


async def test_a_caller_that_half_closes_aborts_its_request_in_the_engine() -> None:
    """The end of its input looks as that of a caller that left, as most that half-close have."""
    async with engines(1) as (engine,), running({"only": engine_pool(engine)}) as gateway:
        async with calling(gateway.url) as caller:
            caller.writer.write(post({**CHAT, "max_tokens": 5000}))
            await eventually(lambda: engine.engine.running)
            caller.writer.write_eof()
            assert await caller.rest() == b""
        await eventually(lambda: engine.aborts == 1)
        await eventually(lambda: gateway.recorder.recent)
        assert gateway.recorder.recent[0].end is RequestOutcome.CLIENT_GONE


async def test_a_disconnected_caller_is_dropped_from_the_engines_queue() -> None:
    """A request in the engine's queue is aborted like a running one."""
    async with engines(1, profile="8b-l4") as (engine,), running({"only": engine_pool(engine)}) as gateway:
        for count in (1, 2, 3):
            asking = disconnect_when(
                gateway, {"stream": True, "max_tokens": 50}, lambda n=count: len(engine.requests) >= n
            )
            await asking
        await eventually(lambda: engine.engine.running + engine.engine.waiting == 0)
        await eventually(lambda: len(gateway.recorder.recent) == 3)
        assert {r.end for r in gateway.recorder.recent} == {RequestOutcome.CLIENT_GONE}


async def test_a_hundred_random_disconnects_leak_nothing() -> None:
    """Gauges, in-flight tokens and connections return to zero."""
    async with engines(2) as (one, two), running({"both": engine_pool(one, two)}) as gateway:

        async def disconnect_early(i: int) -> None:
            raw = json.dumps(
                {
                    "model": "chat",
                    "stream": i % 2 == 0,
                    "max_tokens": 300,
                    "messages": [{"role": "user", "content": f"{i} word " * 200}],
                }
            ).encode()
            _reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
                % (len(raw), raw)
            )
            await asyncio.sleep(0.002 * (i % 50))
            writer.transport.abort()

        await asyncio.gather(*(disconnect_early(i) for i in range(100)))
        await eventually(lambda: gateway.recorder.live == 0)
        await eventually(lambda: all(s.engine.running + s.engine.waiting == 0 for s in (one, two)))
        assert [(load.in_flight, load.queued_tokens) for load in gateway.monitor.loads().values()] == [
            (0, 0.0),
            (0, 0.0),
        ]
        await eventually(lambda: all(up.connections.active == 0 for up in gateway.runtime.current.upstreams.values()))
