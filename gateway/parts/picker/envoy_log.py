"""Envoy's gRPC access log: the ends of answers that the picker reads no further than to the first token.

Rules:
- An entry is looked for on the connection of its call alone. A worker thread of Envoy has one connection to a picker,
  for calls and log: of several pickers, the one that it logs to is the one that gets its entries.
- An entry is known by a number that the picker has named in the dynamic metadata of the request: no caller sees it.
- No entry comes for sure. `ExpectedEntry.wait` ends with the log, after LIMIT, or when `is_over` says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from time import monotonic

from backends.ext_proc.messages import LogEntry, decode_log
from gateway.parts.picker.grpc_server import INVALID_ARGUMENT, Call, GrpcError

STREAM_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
LB = "envoy.lb"  # the namespace of metadata that data planes take from a picker
PICK = "firsttoken-pick"  # in it, the number of a pick
CHECK = 5.0  # s between two looks at the engine of an answer whose entry has not come
LIMIT = 3600.0  # s


class ExpectedEntry:
    """The entry of the pick of this number."""

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.number = str(turn)
        self._entry: asyncio.Future[LogEntry | None] = asyncio.get_running_loop().create_future()

    def come(self, entry: LogEntry | None) -> None:
        if not self._entry.done():
            self._entry.set_result(entry)

    async def wait(self, is_over: Callable[[], bool]) -> LogEntry | None:
        """None: no entry will come."""
        until = monotonic() + LIMIT
        while not (await asyncio.wait([self._entry], timeout=CHECK))[0]:
            if monotonic() > until or is_over():
                return None
        return self._entry.result()


class EnvoyLog:
    """The access log of one connection."""

    def __init__(self, numbers: count[int]) -> None:
        self.streams = 0
        self._numbers = numbers
        self._expected: dict[str, ExpectedEntry] = {}

    def expect(self) -> ExpectedEntry:
        """Ended by `forget`."""
        expected = ExpectedEntry(next(self._numbers))
        self._expected[expected.number] = expected
        return expected

    def forget(self, expected: ExpectedEntry) -> None:
        self._expected.pop(expected.number, None)

    def on_entry(self, entry: LogEntry) -> None:
        number = entry.metadata.get(LB, {}).get(PICK, "")
        if (expected := self._expected.get(number)) is not None:
            expected.come(entry)

    def close(self) -> None:
        """Entries that are expected do not come."""
        for expected in self._expected.values():
            expected.come(None)


class EnvoyLogs:
    """By connection, as long as its data plane logs to this picker."""

    def __init__(self) -> None:
        self._open: dict[object, EnvoyLog] = {}
        self._numbers = count(1)

    def of(self, call: Call) -> EnvoyLog | None:
        return self._open.get(call.peer)

    async def serve(self, call: Call) -> None:
        """Raises GrpcError."""
        call.has_no_end = True
        log = self._open.setdefault(call.peer, EnvoyLog(self._numbers))
        log.streams += 1
        try:
            async for data in call:
                for entry in decoded(data):
                    log.on_entry(entry)
        finally:
            log.streams -= 1
            if not log.streams:
                del self._open[call.peer]
                log.close()


def decoded(data: bytes) -> list[LogEntry]:
    """Raises GrpcError."""
    try:
        return [*decode_log(data)]
    except ValueError as error:
        raise GrpcError(INVALID_ARGUMENT, str(error)) from None
