"""SIGTERM behind a load balancer: no stream is lost, and no connection is refused before deregistration."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders import CHAT, DONE, FINISH, STREAMED, TOKEN, Caller, calling, get, post
from tests.support.served import Served, serving, write_config
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = post({**CHAT, "stream": True})
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
STREAMS = 500
CHECK_INTERVAL = 0.05  # s between two checks of the balancer
DRAIN = "drain: {wait: 3s, grace: 60s}"


@pytest.fixture(autouse=True)
def raised_file_limit() -> Iterator[None]:
    """Raises the limit of open files: the test holds both ends of every stream but the gateway's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard != resource.RLIM_INFINITY else 8192, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def open_stream(served: Served) -> Caller:
    """A stream with a first token, on a connection that only the gateway closes."""
    caller = Caller(*await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2])))
    assert (await caller.ask(STREAM))[0] == 200
    return caller


async def completes(caller: Caller) -> bool:
    try:
        async with asyncio.timeout(30):
            rest = await caller.reader.readuntil(LAST_CHUNK)
        return rest == chunk(TOKEN) + chunk(FINISH + DONE) + LAST_CHUNK
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    finally:
        caller.writer.transport.abort()


async def new_caller_is_served(served: Served) -> bool:
    try:
        async with calling(served.url) as caller:
            return (await caller.ask(STREAM))[0] == 200 and b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
    except (OSError, asyncio.IncompleteReadError):
        return False


async def deregistered(served: Served) -> None:
    """Waits like a load balancer: until two consecutive checks are not ready."""
    failed = 0
    while failed < 2:
        await asyncio.sleep(CHECK_INTERVAL)
        failed = failed + 1 if (await get(served.url, "/ready"))[0] == 503 else 0


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_sigterm_with_500_streams_loses_none_and_refuses_no_connection(workers: str, tmp_path: Path) -> None:
    """New connections are served until deregistration; running streams complete; exit code 0."""
    async with Upstream(*[SLOW] * STREAMS, [STREAMED]) as upstream:
        config = write_config(tmp_path / "f.yaml", upstream.url)
        config.write_text(config.read_text().replace("server: {", f"server: {{{DRAIN}, "))
        async with serving(config, "--workers", workers) as served:
            callers = [await open_stream(served) for _ in range(STREAMS)]
            served.process.send_signal(signal.SIGTERM)
            balancer, served_new = asyncio.create_task(deregistered(served)), list[bool]()
            while not balancer.done():
                served_new.append(await new_caller_is_served(served))
            await balancer
            assert served_new
            assert all(served_new)
            for _ in callers:
                upstream.proceed()
            assert all(await asyncio.gather(*map(completes, callers)))
            code, out, err = await served.ends()
    assert code == 0
    assert "firsttoken: draining, in 3 s, 60 s at most" in err
    assert [json.loads(line)["end"] for line in out.splitlines()] == ["completed"] * (STREAMS + len(served_new))


async def test_streams_that_outlast_the_drain_grace_end_in_an_error_event(tmp_path: Path) -> None:
    """Each caller receives the event, each request has a Record, and the log states the number of streams."""
    async with Upstream(SLOW) as upstream:
        config = write_config(tmp_path / "f.yaml", upstream.url)
        config.write_text(config.read_text().replace("server: {", "server: {drain: {grace: 200ms}, "))
        async with serving(config) as served:
            callers = [await open_stream(served) for _ in range(20)]
            served.process.send_signal(signal.SIGTERM)
            received = await asyncio.gather(*(caller.rest() for caller in callers))
            code, out, err = await served.ends()
    assert all(
        b'data: {"error":{"message":"The gateway was stopped' in one and one.endswith(LAST_CHUNK) for one in received
    )
    assert [json.loads(line)["end"] for line in out.splitlines()] == ["cut"] * 20
    assert (code, "shutdown grace expired: aborting 20 running requests" in err) == (0, True)
