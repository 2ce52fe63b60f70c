"""`firsttoken demo`: a single command that shows the gateway at work, and leaves no process behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest

from lab.demo.scene import CAST
from tests.support.builders import get
from tests.support.simulated import eventually

ROOT = Path(__file__).parents[3]
DEMO = ("lab", "demo", "--port", "0", "--admin-port", "0")


class Demo:
    """The demo command in a separate process. `family`: ids of the living processes started by the demo, itself
    included."""

    def __init__(self, process: Process, mark: str) -> None:
        self.process, self.mark = process, mark

    @property
    def family(self) -> set[int]:
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
        return found

    async def first_match(self, pattern: str) -> str:
        """First group of the first output line that matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while line := (await self.process.stdout.readline()).decode():
                if match := re.search(pattern, line):
                    return match[1]
        raise AssertionError(f"no demo output matched {pattern}")

    async def ends(self) -> tuple[int | None, str, str]:
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def running(*command: str) -> AsyncIterator[Demo]:
    mark = f"FIRSTTOKEN_TEST={uuid4()}"
    name, _, value = mark.partition("=")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, cwd=ROOT, env={**os.environ, name: value}, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    demo = Demo(process, mark)
    try:
        yield demo
    finally:
        for left in demo.family:
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        await process.wait()


async def completed(admin: str) -> bool:
    """True if some request of the demo's own callers has been answered."""
    requests = json.loads((await get(admin, "/requests"))[2])
    return any(request["end"] == "completed" for request in requests)


async def test_the_demo_ends_after_its_seconds() -> None:
    """The demo prints the base URL and the table; then exit code 0, and no child process."""
    async with running(*DEMO, "--seconds", "4") as demo:
        url = await demo.first_match(r"base_url +(http://127\.0\.0\.1:\d+)/v1")
        models = json.loads((await get(url, "/v1/models"))[2])
        assert {model["id"] for model in models["data"]} == {"chat", "agent", "code"}
        await eventually(lambda: len(demo.family) == 3)  # itself, the engines, the callers
        code, out, err = await demo.ends()
        assert (code, err, demo.family) == (0, "", set())
    assert {"route", "chat", "agent", "code"} <= {line.split()[0] for line in out.splitlines() if line.strip()}


async def test_an_interrupt_ends_the_demo_cleanly() -> None:
    """Ctrl-C: exit code 0, no traceback, no child process; the last table shows the pools that answered."""
    async with running(*DEMO) as demo:
        admin = await demo.first_match(r"metrics +(http://127\.0\.0\.1:\d+)/metrics")
        await eventually(lambda: len(demo.family) == 3)
        async with asyncio.timeout(60):
            while not await completed(admin):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        demo.process.send_signal(signal.SIGINT)
        code, out, err = await demo.ends()
        assert (code, err, demo.family) == (0, "", set())
    assert re.search(r"^ *(chat|agent|code) .* (small|large|api) +\d+%", out, re.MULTILINE)


async def test_a_port_that_is_taken_is_exit_code_2() -> None:
    """A single error line; the engines started so far are stopped."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with running("lab", "demo", "--port", port, "--admin-port", "0") as demo:
            code, out, err = await demo.ends()
            assert (code, out, err.count("\n"), demo.family) == (2, "", 1, set())
    assert err.startswith(f"firsttoken: cannot listen on port {port}")


@pytest.mark.parametrize("role", [("engines",), ("callers", "http://127.0.0.1:9")])
async def test_a_child_ends_with_its_parents_pipe(role: tuple[str, ...]) -> None:
    """The end of the parent, SIGKILL included, closes the pipe."""
    async with running("lab.demo.scene", *role) as child:
        if role == ("engines",):
            assert child.process.stdout is not None
            urls = json.loads(await child.process.stdout.readline())
            assert {pool: len(found) for pool, found in urls.items()} == {cast.pool: cast.count for cast in CAST}
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert await child.ends() == (0, "", "")
