"""Signals, as something that a selector waits for with everything else.

Their handlers do nothing, so that none interrupts what the supervisor is at: each is looked at in its turn.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.workers.child_process import HANDLED


@contextmanager
def heard() -> Iterator[socket.socket]:
    """Their numbers, as bytes to be read; while the block runs they do nothing else."""
    read, write = socket.socketpair()
    with read, write:
        for end in (read, write):
            end.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in HANDLED}
        fd = signal.set_wakeup_fd(write.fileno())
        try:
            yield read
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in before.items():
                signal.signal(number, handler)
