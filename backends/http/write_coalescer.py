"""Socket writes, coalesced under load.

A write wakes the process at the other end; on the same host that wake-up is most of the cost of a write (15 of 20 us
on a virtual machine), and a process that is awake already need not be woken. Rules:
- A write that does not closely follow another one is made at once: a lone request never waits.
- Other writes wait for the end of the event loop's turn and are then made one right after the other.
- Writes to one socket keep their order and are joined.
- A token in the middle of a stream does not wait (`write_on`): its reader is seldom asleep, and waiting costs 3 us.
"""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic

BURST_GAP = 0.0002  # s; about the work for one request, so a loop without a pause coalesces


class WriteCoalescer:
    """Pending writes of the sockets of one event loop."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.WriteTransport, list[bytes]] = {}
        self._last_write = -inf

    def write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write now, or at the end of this turn of the loop."""
        now = monotonic()
        pending = self._pending.get(transport)
        if pending is not None:
            pending.append(data)
        elif now - self._last_write > BURST_GAP:
            transport.write(data)
        else:
            if not self._pending:
                asyncio.get_running_loop().call_soon(self.flush)
            self._pending[transport] = [data]
        self._last_write = now

    def write_on(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        """Write now, after what is pending for this socket."""
        if self._pending:
            self.flush_to(transport)
        transport.write(data)

    def flush(self) -> None:
        """Write all that is pending."""
        for transport in list(self._pending):
            self.flush_to(transport)

    def flush_to(self, transport: asyncio.WriteTransport) -> None:
        """Write what is pending for one socket; required before any other operation on that socket."""
        pending = self._pending.pop(transport, None)
        if pending is not None and not transport.is_closing():
            transport.write(b"".join(pending))
