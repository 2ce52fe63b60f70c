"""The child process that replays traffic: started on the first question, ended with the gateway.

Rules:
- It is another command of this installation (`firsttoken replicas`), found by its entry point: this process imports
  none of its modules.
- A question without an answer in TIMEOUT, or with a wrong one, ends the child; the next question starts another. What
  such a question cost is not known: its time, MAX_CPU at most.
- Rows are encoded a few at a time: the loop serves callers.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

import msgspec

from gateway.autoscale.replay_messages import (
    LONGEST_LINE,
    MAX_CPU,
    DemandRow,
    ReplicasAnswer,
    ReplicasJob,
    decode_answer,
    encode,
)

COMMAND = (sys.executable, "-m", "firsttoken", "replicas")
TIMEOUT = 300.0  # s: a machine that is busy leaves a process of the lowest priority little
AT_ONCE = 200  # rows encoded in one turn of the loop


class ChildFailed(Exception):
    """There is no answer; the reason. `cpu`: s, at most."""

    def __init__(self, reason: str, cpu: float) -> None:
        super().__init__(reason)
        self.cpu = cpu


class ReplayChild:
    """`command`: with its arguments."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: Process | None = None
        self._turn = asyncio.Lock()  # one question at a time

    async def ask(self, job: ReplicasJob, rows: Sequence[DemandRow]) -> ReplicasAnswer:
        """Raises ChildFailed."""
        began = monotonic()
        try:
            async with self._turn, asyncio.timeout(TIMEOUT):
                answer = await self._answer(job, rows)
        except TimeoutError:
            await self.close()
            raise ChildFailed(f"no answer within {TIMEOUT:g} s", MAX_CPU) from None
        except (OSError, ValueError, msgspec.DecodeError) as error:
            await self.close()
            raise ChildFailed(f"{type(error).__name__}: {error}", min(monotonic() - began, MAX_CPU)) from None
        if answer.error:
            await self.close()  # it may have left rows unread
            raise ChildFailed(answer.error, answer.cpu)
        return answer

    async def _answer(self, job: ReplicasJob, rows: Sequence[DemandRow]) -> ReplicasAnswer:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(encode(job) + b"\n")
        for start in range(0, len(rows), AT_ONCE):
            process.stdin.write(b"".join(encode(row) + b"\n" for row in rows[start : start + AT_ONCE]))
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise ValueError("the process has ended")
        return decode_answer(line)

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=LONGEST_LINE
            )
        return self._process

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
