"""A restart of the only gateway: SIGUSR2 starts a new process on the same sockets, and the old one drains."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.test_drain import completes, new_caller_is_served, open_stream
from tests.support.builders import DONE, FINISH, STREAMED, TOKEN, get
from tests.support.served import Served, serving, write_config
from tests.support.simulated import eventually
from tests.support.upstream import GATE, LAST_CHUNK, STREAM_HEAD, Script, Upstream, chunk

SLOW: Script = [STREAM_HEAD + chunk(TOKEN), GATE, chunk(FINISH + DONE) + LAST_CHUNK]
STREAMS = 20
EVERY = 0.02  # s between two new connections
SUCCESSOR = re.compile(r"process (?P<new>\d+) serves in place of process (?P<old>\d+)")


@asynccontextmanager
async def started(config: Path) -> AsyncIterator[Served]:
    """A gateway as an operator starts it, and an end of the process that follows it."""
    successors: list[int] = []
    async with serving(config, prefix=("env",)) as served:
        served.successors = successors  # type: ignore[attr-defined]
        try:
            yield served
        finally:
            for process in successors:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if served.process.returncode is None:
                served.process.kill()
            await served.ends()  # of the pipes too


async def handed_over(served: Served) -> int:
    """Process id of the successor."""
    served.process.send_signal(signal.SIGUSR2)
    while (found := SUCCESSOR.search(line := await served.line())) is None:
        assert line, "the process has ended"
    served.successors.append(int(found["new"]))  # type: ignore[attr-defined]
    assert int(found["old"]) == served.process.pid
    return int(found["new"])


async def test_a_restart_refuses_no_connection_and_cuts_no_stream(tmp_path: Path) -> None:
    """New connections all the time; streams that began before, and end after the old process has left its sockets."""
    async with (
        Upstream([STREAMED]) as quick,
        Upstream(SLOW) as slow,
        started(write_config(tmp_path / "gateway.yaml", slow.url)) as served,
    ):
        streams = [await open_stream(served) for _ in range(STREAMS)]
        write_config(tmp_path / "gateway.yaml", quick.url)  # for the successor alone
        over, calls = asyncio.Event(), list[asyncio.Task[bool]]()

        async def call_all_the_time() -> None:
            while not over.is_set():
                calls.append(asyncio.create_task(new_caller_is_served(served)))
                await asyncio.sleep(EVERY)

        successor = await handed_over(served)
        calling = asyncio.create_task(call_all_the_time())
        await asyncio.sleep(1)
        for _ in streams:
            slow.proceed()
        assert all(await asyncio.gather(*map(completes, streams)))
        await eventually(lambda: served.process.returncode is not None, 60)  # its pipes stay open in the successor
        assert served.process.returncode == 0
        over.set()
        await calling
        assert len(calls) > 50
        assert all(await asyncio.gather(*calls))
        assert (await get(served.url, "/ready"))[0] == 200
        os.kill(successor, signal.SIGTERM)


async def test_a_successor_that_cannot_start_changes_nothing(tmp_path: Path) -> None:
    """A broken file: the old process says so, and serves on, as often as it is asked."""
    async with Upstream([STREAMED]) as quick, started(config := write_config(tmp_path / "g.yaml", quick.url)) as served:
        config.write_text("pools: {only: {backend: nonsense}}")
        for _ in range(2):
            served.process.send_signal(signal.SIGUSR2)
            while "did not serve (exit code 2)" not in (line := await served.line()):
                assert line
            assert await new_caller_is_served(served)
        write_config(config, quick.url)
        os.kill(await handed_over(served), signal.SIGTERM)


async def test_systemd_is_told_of_the_start_and_of_the_new_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with Upstream([STREAMED]) as quick, started(write_config(tmp_path / "g.yaml", quick.url)) as served:
            assert await asyncio.to_thread(manager.recv, 64) == b"READY=1"
            successor = await handed_over(served)
            told = {await asyncio.to_thread(manager.recv, 64) for _ in range(2)}
            assert told == {b"READY=1", f"MAINPID={successor}".encode()}


async def test_several_workers_say_that_they_hand_nothing_over(tmp_path: Path) -> None:
    async with (
        Upstream([STREAMED]) as quick,
        serving(write_config(tmp_path / "g.yaml", quick.url), "--workers", "2") as served,
    ):
        served.process.send_signal(signal.SIGUSR2)
        assert "several workers hand no sockets over" in await served.line()
        assert await new_caller_is_served(served)
