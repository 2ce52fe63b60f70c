"""`firsttoken serve`: from the command to a signal, and what becomes of the requests in between."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.app import CUT, Gateway
from gateway.config.models import Config
from gateway.observe.record import End
from gateway.serve import serve
from tests.gateway.builders import CHAT, DONE, FINISH, TOKEN, calling, get, last, post
from tests.kit.gateways import document, pool, running
from tests.kit.simulated import eventually
from tests.kit.upstream import GATE, HANG, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

ROOT = Path(__file__).parents[2]
STREAM = {**CHAT, "stream": True}
SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]


def written(path: Path, upstream: str) -> Path:
    path.write_text(
        "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
        f"pools: {{only: {{backend: compatible, model: served, endpoints: [{upstream}]}}}}\n"
        "routes: {chat: {tiers: [only]}}\n"
        "telemetry: {access_log: stdout}\n"
    )
    return path


class Served:
    """`firsttoken serve` in a process of its own, and where it says that it listens."""

    def __init__(self, process: Process, said: str) -> None:
        self.process, self.said = process, said
        self.url = said.split()[2].removesuffix("/v1,") if "serving" in said else ""

    async def ends(self) -> tuple[int, str, str]:
        """Exit code, and what was on standard output and error after the first line."""
        async with asyncio.timeout(20):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def serving(config: Path) -> AsyncIterator[Served]:
    command = (sys.executable, "-m", "gateway.cli", "serve", "--config", str(config))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(20):
            yield Served(process, (await process.stderr.readline()).decode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_signal_ends_it_when_its_requests_have_ended(tmp_path: Path) -> None:
    """It says where it serves; after SIGTERM it takes no connection and completes what runs; then exit code 0."""
    async with Upstream(SLOW) as upstream, serving(written(tmp_path / "f.yaml", upstream.url)) as served:
        assert served.said.startswith("firsttoken: serving http://127.0.0.1:")
        async with calling(served.url) as idle, calling(served.url) as caller:
            assert (await idle.whole(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 200
            await caller.ask(post(STREAM))
            served.process.send_signal(signal.SIGTERM)
            assert served.process.stderr is not None
            assert (await served.process.stderr.readline()).startswith(b"firsttoken: draining")
            assert (await idle.whole(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"))[0] == 503
            with pytest.raises(ConnectionRefusedError):
                async with calling(served.url):
                    pass
            upstream.proceed()
            assert b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
        code, out, err = await served.ends()
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert '"end":"completed"' in out


async def test_an_interrupt_ends_it_as_well(tmp_path: Path) -> None:
    """At once, with nothing running: no traceback, exit code 0."""
    async with serving(written(tmp_path / "f.yaml", "http://127.0.0.1:9")) as served:
        assert (await get(served.url, "/health"))[0] == 200
        served.process.send_signal(signal.SIGINT)
        code, out, err = await served.ends()
    assert (code, out, err.count("\n")) == (0, "", 1)
    assert err.startswith("firsttoken: draining")


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """What runs is cut, and is in the access log all the same."""
    async with (
        Upstream(SLOW) as upstream,
        serving(written(tmp_path / "f.yaml", upstream.url)) as served,
        calling(served.url) as caller,
    ):
        await caller.ask(post(STREAM))
        for _ in range(2):
            served.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)  # signals of one kind that are not taken yet are one
        code, out, _ = await served.ends()
    assert code == 0
    assert out.count("\n") == 1
    assert '"end":"client_gone"' in out


def test_a_port_that_is_taken_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line: the mend is the operator's."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = {"listen": f"127.0.0.1:{taken.getsockname()[1]}", "admin": "127.0.0.1:0"}
        config = Config.model_validate({**document({"only": pool("http://127.0.0.1:9")}), "server": server})
        assert serve(config) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("firsttoken: cannot listen: ")
    assert os.strerror(errno.EADDRINUSE).lower() in err.lower()


# --------------------------------------------------------------------------- stopping, in one process


async def started(upstream: Upstream) -> Gateway:
    gateway = Gateway(Config.model_validate(document({"only": pool(upstream.url)})))
    await gateway.start()
    return gateway


async def test_what_outlasts_its_grace_is_cut_and_recorded() -> None:
    """No engine is left working for nobody, and the Record is written before the access log closes."""
    async with Upstream([STREAM_HEAD + chunk(TOKEN), HANG]) as upstream:
        gateway = await started(upstream)
        async with calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            await gateway.stop(grace=0.1)
            await upstream.until(lambda seen: seen.hangups == 1)
            assert await caller.rest() in (b"", chunk(TOKEN))
    assert (last(gateway).end, gateway.recorder.live) == (End.CLIENT_GONE, 0)


async def test_stopping_waits_no_longer_than_it_has_to() -> None:
    """The grace is a bound: it ends with the last request."""
    async with Upstream(SLOW) as upstream:
        gateway = await started(upstream)
        async with calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            stopping = asyncio.create_task(gateway.stop(grace=60))
            await eventually(lambda: gateway.proxy.draining)
            await asyncio.sleep(3 * CUT)  # what a handler gets once its grace is over
            upstream.proceed()
            assert b"".join(await caller.chunks()) == TOKEN + FINISH + DONE
            async with asyncio.timeout(5):
                await stopping
    assert last(gateway).end is End.COMPLETED


async def test_nothing_is_left_of_a_gateway_that_has_stopped() -> None:
    """No task, no listener, no connection to an engine."""
    before = asyncio.all_tasks()
    async with Upstream([STREAM_HEAD + chunk(TOKEN + FINISH + DONE) + LAST_CHUNK]) as upstream:
        async with running({"only": pool(upstream.url)}) as gateway, calling(gateway.url) as caller:
            await caller.ask(post(STREAM))
            await caller.chunks()
        await eventually(lambda: all(way.origin.idle + way.origin.active == 0 for way in gateway.upstreams.values()))
    for url in (gateway.url, gateway.admin_url):
        with pytest.raises(ConnectionRefusedError):
            await get(url, "/health")
    await eventually(lambda: asyncio.all_tasks() <= before | {asyncio.current_task()})
