"""An interactive bash in a pseudo-terminal, as a user types into it: with job control, line by line."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

PROMPT = "typed-shell> "
PATIENCE = 120.0  # s for a line, on a busy machine


class TypedShell:
    """`shown`: all that the terminal has shown."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.shown = ""

    async def type(self, line: str) -> str:
        """Types a line, and returns what is shown until the next prompt."""
        before = len(self.shown)
        os.write(self._terminal, line.encode() + b"\n")
        await self._until(lambda: PROMPT in self.shown[before:])
        return self.shown[before:]

    async def until(self, text: str) -> None:
        await self._until(lambda: text in self.shown)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds():
                self.shown += (await asyncio.to_thread(os.read, self._terminal, 65_536)).decode(errors="replace")


@asynccontextmanager
async def typed_shell(folder: Path, environ: Mapping[str, str]) -> AsyncIterator[TypedShell]:
    """Everything that it has started ends with it."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    shell = await asyncio.create_subprocess_exec(
        *("bash", "--norc", "--noprofile", "-i"),
        cwd=folder,
        env={**environ, "PS1": PROMPT, "TERM": "dumb", "HISTFILE": "", "COLUMNS": "200"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    typed = TypedShell(ours)
    try:
        await typed.until(PROMPT)
        await typed.type("stty cols 400; set +o history")
        yield typed
    finally:
        with suppress(TimeoutError, OSError):
            await typed.type("kill -CONT $(jobs -p); kill $(jobs -p); wait")
        for group in _groups(shell.pid):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        await shell.wait()
        os.close(ours)


def _groups(session: int) -> set[int]:
    """Process groups of a session."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.add(int(fields[2]))
    return found


def stopped(session_output: str) -> bool:
    """A job has been stopped by the terminal."""
    return re.search(r"\[\d+\]\+?\s+Stopped", session_output) is not None


def script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def firsttoken(path: Path, options: Mapping[str, str]) -> None:
    """A `firsttoken` with options of this machine, by command."""
    cases = " ".join(f'{name}) exec "{sys.executable}" -m gateway.cli "$@" {more};;' for name, more in options.items())
    script(path, f'case "$1" in {cases} *) exec "{sys.executable}" -m gateway.cli "$@";; esac')
