"""`firsttoken serve` in a separate process."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.forked import ROOT, ForkedProcess, forked

SLOW = "event loop stalled"
SERVING = re.compile(r"firsttoken: serving (?P<url>https?://[^/]+)/v1, admin (?P<admin>http://[^,\s]+)")


def write_config(path: Path, endpoints: str, backend: str = "compatible") -> Path:
    """Write a configuration with one pool, on free ports. `endpoints`: URLs, separated by commas."""
    path.write_text(
        "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
        f"pools: {{only: {{backend: {backend}, model: served, endpoints: [{endpoints}]}}}}\n"
        "routes: {chat: {tiers: [only]}}\n"
        "telemetry: {access_log: stdout}\n"
    )
    return path


class Served:
    """The process, with the URLs of both ports."""

    def __init__(self, process: Process | ForkedProcess, first_line: str) -> None:
        self.process = process
        self.first_line = first_line
        found = SERVING.match(first_line)
        self.url, self.admin = (found["url"], found["admin"]) if found else ("", "")

    async def line(self) -> str:
        """The next line on standard error."""
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            return await read_line(self.process.stderr)

    async def ends(self) -> tuple[int, str, str]:
        """Exit code, and the rest of standard output and error."""
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        stderr_lines = [line for line in err.decode().splitlines(keepends=True) if SLOW not in line]
        return self.process.returncode, out.decode(), "".join(stderr_lines)


async def read_line(stderr: asyncio.StreamReader) -> str:
    """The next line, without the warnings of a slow machine."""
    while SLOW in (line := (await stderr.readline()).decode()):
        pass
    return line


@asynccontextmanager
async def serving(config: Path, *more: str, prefix: tuple[str, ...] = ()) -> AsyncIterator[Served]:
    """`prefix`: words before the command; it is started as an operator's then, and forked otherwise."""
    arguments = ("serve", "--config", str(config), *more)
    process = await (started(prefix, arguments) if prefix else forked(*arguments))
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            line = first = await read_line(process.stderr)
            while line and not SERVING.match(line):  # the first line of an error names the cause
                line = await read_line(process.stderr)
            served = Served(process, line or first)
        yield served
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if isinstance(process, ForkedProcess):
            process.close()


async def started(prefix: tuple[str, ...], arguments: tuple[str, ...]) -> Process:
    command = (*prefix, sys.executable, "-m", "gateway.cli", *arguments)
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
