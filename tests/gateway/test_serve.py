"""`firsttoken serve`: from the command to a signal, and the requests in between."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from pathlib import Path

import pytest

from gateway.app import Gateway
from gateway.config.field_types import ListenAddress
from gateway.config.models import Config
from gateway.observe.record import RequestOutcome
from gateway.process import HANDLER_GRACE, bind
from gateway.serve import serve
from tests.support.builders import CHAT, DONE, FINISH, TOKEN, calling, get, last, post
from tests.support.gateways import document, pool, running
from tests.support.served import serving, write_config
from tests.support.simulated import eventually
from tests.support.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]


async def test_sigterm_drains_running_requests(tmp_path: Path) -> None:
    """The first line shows the address. After SIGTERM no connection is accepted and running requests complete; exit
    code 0."""
    async with Upstream(SLOW) as upstream, serving(write_config(tmp_path / "f.yaml", upstream.url)) as served:
        assert served.first_line.startswith("firsttoken: serving http://127.0.0.1:")
        async with calling(served.url) as idle, calling(served.url) as caller:
            assert (await idle.whole(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"))[0] == 200
            await caller.ask(post(STREAM))
            served.process.send_signal(signal.SIGTERM)
            assert served.process.stderr is not None
            assert (await served.process.stderr.readline()).startswith(b"firsttoken: draining")
            assert (await idle.whole(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"))[0] == 503
            with pytest.raises(ConnectionRefusedError):
                async with calling(served.url):
                    pass
            upstream.proceed()
            assert b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
        code, out, err = await served.ends()
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert '"end":"completed"' in out


async def test_sigint_stops_an_idle_gateway(tmp_path: Path) -> None:
    """At once: no traceback, exit code 0."""
    async with serving(write_config(tmp_path / "f.yaml", "http://127.0.0.1:9")) as served:
        assert (await get(served.url, "/health"))[0] == 200
        served.process.send_signal(signal.SIGINT)
        code, out, err = await served.ends()
    assert (code, out, err.count("\n")) == (0, "", 1)
    assert err.startswith("firsttoken: draining")


async def test_a_second_signal_aborts_running_requests(tmp_path: Path) -> None:
    """Aborted requests are in the access log."""
    async with (
        Upstream(SLOW) as upstream,
        serving(write_config(tmp_path / "f.yaml", upstream.url)) as served,
        calling(served.url) as caller,
    ):
        await caller.ask(post(STREAM))
        for _ in range(2):
            served.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)  # pending signals of one kind are merged
        code, out, _ = await served.ends()
    assert code == 0
    assert out.count("\n") == 1
    assert '"end":"cut"' in out


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("port", ["listen", "admin"])
def test_a_port_in_use_is_exit_code_2(port: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line. A port is not shared with workers of another gateway either."""
    with bind(ListenAddress("127.0.0.1", 0), shared=True) as taken:
        taken.listen()
        free = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "workers": workers}
        server = {**free, port: f"127.0.0.1:{taken.getsockname()[1]}"}
        config = Config.model_validate({**document({"only": pool("http://127.0.0.1:9")}), "server": server})
        assert serve(config) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"firsttoken: cannot listen on {server[port]} (server.{port}): ")
    assert os.strerror(errno.EADDRINUSE).lower() in err.lower()


# --------------------------------------------------------------------------- stopping, in one process


async def started(upstream: Upstream) -> Gateway:
    gateway = Gateway(Config.model_validate(document({"only": pool(upstream.url)})))
    await gateway.start()
    return gateway


async def test_requests_beyond_the_grace_period_are_aborted_and_recorded() -> None:
    """No engine continues without a caller, and the Record is written before the access log closes."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as upstream:
        gateway = await started(upstream)
        async with calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            await gateway.stop(grace=0.1)
            await upstream.until(lambda seen: seen.hangups == 1)
            body = await caller.rest()
    assert body.startswith(chunk(TOKEN))
    assert b'data: {"error":{"message":"The gateway was stopped in the middle of the answer; try again."' in body
    assert body.endswith(LAST_CHUNK)
    assert (last(gateway).end, gateway.recorder.live) == (RequestOutcome.CUT, 0)


async def test_requests_without_a_first_token_after_the_grace_period_get_503() -> None:
    """With Retry-After: no byte was written, so another gateway can serve the request."""
    async with Upstream([HANG]) as upstream:
        gateway = await started(upstream)
        async with calling(gateway.url) as caller:
            asking = asyncio.create_task(caller.whole(post(STREAM)))
            await upstream.until(lambda seen: len(seen.requests) == 1)
            await gateway.stop(grace=0.05)
            status, headers, _ = await asking
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            await upstream.until(lambda seen: seen.hangups == 1)
    assert last(gateway).end is RequestOutcome.CUT


@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_a_caller_that_leaves_while_requests_are_cut_is_no_fault_of_the_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection takes no error reply any more: uvloop refuses to write there."""
    async with Upstream([HANG]) as upstream:
        gateway = await started(upstream)
        async with calling(gateway.url) as caller:
            caller.writer.write(post(STREAM))
            await upstream.until(lambda seen: len(seen.requests) == 1)
            gateway.proxy.stopping = True  # as `stop` does before it cancels requests
            caller.writer.transport.abort()
            await eventually(lambda: not gateway.recorder.live)
        await gateway.stop()
    assert last(gateway).end is RequestOutcome.CLIENT_GONE
    assert [told.getMessage() for told in caplog.records if told.levelno >= logging.ERROR] == []


async def test_during_the_shutdown_delay_requests_are_served() -> None:
    """/ready is 503 for `wait` seconds, for load balancers; a second signal ends the wait."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN + FINISH + DONE) + LAST_CHUNK]) as upstream:
        gateway = await started(upstream)
        stopping = asyncio.create_task(gateway.stop(grace=60, wait=60))
        await eventually(lambda: gateway.proxy.draining)
        assert (await get(gateway.url, "/ready"))[0] == 503
        async with calling(gateway.url) as caller:
            status, headers = await caller.ask(post(STREAM))
            assert (status, headers["connection"]) == (200, "close")
            assert b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
        gateway.force_stop = True
        async with asyncio.timeout(30):
            await stopping
        with pytest.raises(ConnectionRefusedError):
            await get(gateway.url, "/ready")


async def test_stopping_ends_with_the_last_request() -> None:
    """The grace period is an upper bound."""
    async with Upstream(SLOW) as upstream:
        gateway = await started(upstream)
        async with calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            stopping = asyncio.create_task(gateway.stop(grace=60))
            await eventually(lambda: gateway.proxy.draining)
            await asyncio.sleep(3 * HANDLER_GRACE)  # extra time of a handler after the grace period
            upstream.proceed()
            assert b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
            async with asyncio.timeout(30):
                await stopping
    assert last(gateway).end is RequestOutcome.COMPLETED


async def test_a_stopped_gateway_leaves_nothing() -> None:
    """No task, no listener, no connection to an engine."""
    before = asyncio.all_tasks()
    async with Upstream([STREAM_HEAD + chunk(TOKEN + FINISH + DONE) + LAST_CHUNK]) as upstream:
        async with running({"only": pool(upstream.url)}) as gateway, calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            await caller.chunks()
        await eventually(
            lambda: all(
                upstream_address.connections.idle + upstream_address.connections.active == 0
                for upstream_address in gateway.runtime.current.upstreams.values()
            )
        )
    for url in (gateway.url, gateway.admin_url):
        with pytest.raises(ConnectionRefusedError):
            await get(url, "/health")
    await eventually(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
