"""`firsttoken serve` in a process of its own, as run by an operator."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SLOW = "event loop stalled"
SERVING = re.compile(r"firsttoken: serving (?P<url>http://[^/]+)/v1, admin (?P<admin>http://[^,\s]+)")


def written(path: Path, endpoints: str, backend: str = "compatible") -> Path:
    """A configuration with one pool, on free ports. `endpoints`: URLs, separated by commas."""
    path.write_text(
        "server: {listen: 127.0.0.1:0, admin: 127.0.0.1:0}\n"
        f"pools: {{only: {{backend: {backend}, model: served, endpoints: [{endpoints}]}}}}\n"
        "routes: {chat: {tiers: [only]}}\n"
        "telemetry: {access_log: stdout}\n"
    )
    return path


class Served:
    """The process, and its listening addresses."""

    def __init__(self, process: Process, said: str) -> None:
        self.process, self.said = process, said
        found = SERVING.match(said)
        self.url, self.admin = (found["url"], found["admin"]) if found else ("", "")

    async def line(self) -> str:
        """The next line on standard error."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            return await spoken(self.process.stderr)

    async def ends(self) -> tuple[int, str, str]:
        """Exit code, and the rest of standard output and error."""
        async with asyncio.timeout(20):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        said = [line for line in err.decode().splitlines(keepends=True) if SLOW not in line]
        return self.process.returncode, out.decode(), "".join(said)


async def spoken(stderr: asyncio.StreamReader) -> str:
    """The next line, without the warnings of a slow machine."""
    while SLOW in (line := (await stderr.readline()).decode()):
        pass
    return line


@asynccontextmanager
async def serving(config: Path, *more: str) -> AsyncIterator[Served]:
    command = (sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), *more)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            said = first = await spoken(process.stderr)
            while said and not SERVING.match(said):  # the first line of an error names the cause
                said = await spoken(process.stderr)
            served = Served(process, said or first)
        yield served
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
