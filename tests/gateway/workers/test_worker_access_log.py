"""One access log written by several processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from gateway.observe.logs import AccessLog
from gateway.workers.worker import fork
from tests.support.builders import record

LONG = "x" * 20_000  # several times the atomic write of a pipe
LINES = 40


def writing(lock: Path, target: int, name: str) -> Callable[[socket.socket], int]:
    async def write() -> None:
        log = AccessLog(f"/dev/fd/{target}", lock)
        for _ in range(LINES):
            log(record(request_id=LONG, tenant=name))
        log.close()

    def work(line: socket.socket) -> int:
        asyncio.run(write())
        return 0

    return work


def test_concurrent_access_log_lines_stay_whole(tmp_path: Path) -> None:
    """Longer than an atomic write to a pipe, from three processes at a time."""
    read, write = os.pipe()
    writers = [fork(writing(tmp_path / "lock", write, name)) for name in "abc"]
    os.close(write)
    with open(read, "rb") as pipe:
        found = [json.loads(line) for line in pipe]
    assert [os.waitpid(writer.pid, 0)[1] for writer in writers] == [0, 0, 0]
    assert sorted(line["tenant"] for line in found) == sorted("abc" * LINES)
    assert {line["request_id"] for line in found} == {LONG}
