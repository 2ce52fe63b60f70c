"""Faults of a simulated server, seen from outside."""

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.support.engine_callers import chat, events, eventually, post, serving

pytestmark = pytest.mark.virtual_time

STREAM = chat(stream=True, max_tokens=10, ignore_eos=True)


async def test_a_silent_server_never_answers():
    """The server accepts the request and sends nothing until the caller leaves."""
    async with serving() as server:
        server.faults.silent = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(server, "/v1/chat/completions", STREAM), 0.05)
        assert len(server.requests) == 1


@pytest.mark.parametrize("fault", [{"headers_then_silence": True}, {"stall_share": 1.0}])
async def test_headers_then_silence(fault: dict[str, Any]):
    """200 at once, and never a token."""
    async with serving() as server, aiohttp.ClientSession(server.url) as session:
        await session.post("/simulate/faults", json=fault)
        reply = await session.post("/v1/chat/completions", json=STREAM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reply.content.readany(), 0.05)
        assert reply.status == 200


async def test_a_stall_in_mid_stream_ends_when_its_time_is_over():
    """No token is lost."""
    async with serving() as server:
        server.faults.stall_share, server.faults.stall_after_tokens, server.faults.stall_seconds = 1.0, 4, 0.05
        _, _, raw = await post(server, "/v1/chat/completions", STREAM)
    assert (len(events(raw)), events(raw)[-1]) == (12, b"[DONE]")


async def test_a_share_of_requests_is_refused_with_a_status():
    """About half of the requests, with the configured Retry-After."""
    async with serving() as server:
        server.faults.status, server.faults.status_share, server.faults.retry_after = 529, 0.5, 1.5
        replies = [await post(server, "/v1/chat/completions", chat(max_tokens=1)) for _ in range(40)]
    refused = [(status, headers["Retry-After"]) for status, headers, _ in replies if status != 200]
    assert (set(refused), 8 < len(refused) < 32) == ({(529, "1.5")}, True)


async def test_a_stream_is_cut_after_so_many_tokens():
    """The connection is reset, with neither [DONE] nor the end of the body; other callers are not affected."""
    async with serving() as server, aiohttp.ClientSession(server.url) as session:
        server.faults.cut_after_tokens = 3
        reply = await session.post("/v1/chat/completions", json=STREAM)
        got = [await reply.content.readuntil(b"\n\n") for _ in range(1 + 3)]
        with pytest.raises(aiohttp.ClientError):
            await reply.content.read()
        await eventually(server, unfinished=0)
        assert (len(got), server.aborts) == (4, 0)


async def test_an_error_event_ends_a_stream():
    """Inside a 200, as an engine that fails in mid-stream."""
    async with serving() as server:
        server.faults.error_after_tokens = 2
        _, _, raw = await post(server, "/v1/chat/completions", STREAM)
    assert len(events(raw)) == 1 + 2 + 1 + 1
    assert msgspec.json.decode(events(raw)[3])["error"]["code"] == 500


async def test_one_event_can_be_garbage():
    """In place of a token; the stream goes on."""
    async with serving() as server:
        server.faults.garbage_after_tokens = 2
        _, _, raw = await post(server, "/v1/chat/completions", STREAM)
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(events(raw)[3])
    assert len(events(raw)) == 12


async def test_a_stream_can_lack_its_end():
    """finish_reason is there, [DONE] is not."""
    async with serving() as server:
        server.faults.omit_done = True
        _, _, raw = await post(server, "/v1/chat/completions", STREAM)
    assert msgspec.json.decode(events(raw)[-1])["choices"][0]["finish_reason"] == "length"


async def test_a_slow_server_takes_longer_by_its_factor():
    """The server's own metrics show the factor."""

    async def itl() -> float:
        _, _, raw = await post(server, "/v1/chat/completions", chat(max_tokens=100, ignore_eos=True))
        return float(msgspec.json.decode(raw)["metrics"]["mean_itl_ms"])

    async with serving() as server:
        usual = await itl()
        server.faults.slow = 4.0
        assert 3.5 < await itl() / usual < 4.5


async def test_faults_are_set_as_a_whole_over_http():
    """Omitted faults are healed; an unknown name is refused and changes nothing."""
    async with serving() as server:
        server.faults.silent = True
        status, _, raw = await post(server, "/simulate/faults", {"slow": 2.0})
        wrong, _, message = await post(server, "/simulate/faults", {"slo": 3.0})
    assert (status, server.faults.silent, server.faults.slow) == (200, False, 2.0)
    assert (wrong, b"unknown field `slo`" in message, msgspec.json.decode(raw)["slow"]) == (400, True, 2.0)


async def test_a_killed_server_resets_its_connections_and_comes_back_empty():
    """On the same port, with a fresh engine."""
    async with serving(speed=1.0) as server:
        body = chat(stream=True, max_tokens=5000, ignore_eos=True)
        asking = asyncio.create_task(post(server, "/v1/chat/completions", body))
        await eventually(server, running=1)
        await server.kill()
        with pytest.raises(aiohttp.ClientError):
            await asking
        with pytest.raises(aiohttp.ClientConnectorError):
            await post(server, "/v1/chat/completions", chat())
        await server.start()
        status, _, _ = await post(server, "/v1/chat/completions", chat())
        assert (status, server.aborts) == (200, 0)
