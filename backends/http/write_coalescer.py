"""Writes to sockets, made together while there are many.

A write wakes whoever reads at the other end, and where that is a process of the same machine, or of a neighbour on the
same host, waking it is most of what the write costs: 15 of 20 us on a virtual machine. Who is awake already need not be
woken. Rules:
- A write that does not follow closely on another is made at once: alone, a request waits for nothing.
- Others wait for the end of the loop's turn, and are then made one right after the other.
- What goes to one socket goes in order, and what waits for it in one piece.
- A token in the middle of a stream does not wait (`write_on`): its reader is seldom asleep, and to wait costs 3 us.
"""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic

CLOSELY = 0.0002  # s: about what the work for one request takes, so that a loop without a rest collects


class WriteCoalescer:
    """Of sockets whose writes may wait for each other, on one loop."""

    __slots__ = ("_due", "_last")

    def __init__(self) -> None:
        self._due: dict[asyncio.WriteTransport, list[bytes]] = {}
        self._last = -inf  # when something was written

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Now, or at the end of this turn of the loop."""
        due, now = self._due, monotonic()
        if (waiting := due.get(transport)) is not None:
            waiting.append(data)
        elif now - self._last > CLOSELY:
            transport.write(data)
        else:
            if not due:
                asyncio.get_running_loop().call_soon(self.flush)
            due[transport] = [data]
        self._last = now

    def write_on(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Now, behind what waits for this socket."""
        if self._due:
            self.flush_to(transport)
        transport.write(data)

    def flush(self) -> None:
        """All of it."""
        due, self._due = self._due, {}
        for transport, waiting in due.items():
            _write(transport, waiting)

    def flush_to(self, transport: asyncio.WriteTransport) -> None:
        """Before anything is done to this socket but writing."""
        if (waiting := self._due.pop(transport, None)) is not None:
            _write(transport, waiting)


def _write(transport: asyncio.WriteTransport, waiting: list[bytes]) -> None:
    """Whoever has gone meanwhile is written to no more."""
    if not transport.is_closing():
        transport.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))
