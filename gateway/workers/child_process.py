"""A forked process and the line to it.

Rules:
- It is forked by a process without threads and without a loop: nothing that either needs is copied half done.
- It takes its orders from the line alone and ignores SIGINT, SIGTERM and SIGHUP. A terminal, a container and systemd
  send those to all processes of a service at once, and a second one means haste: so the supervisor alone counts them.
- The end of the line is an order too: a process whose supervisor is gone drains and ends.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

log = logging.getLogger("firsttoken")

GO, DRAIN, FORCE_STOP = b"g", b"d", b"h"  # orders; and
RELOAD, TOLD = b"r", b"t"  # there is something on the shelf: a configuration; for the desk, what became of one
PREPARED, SERVING, RELOADED = b"p", b"s", b"r"  # reports
ASKED = b"a"  # the desk's: somebody wants a reload
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


@dataclass(slots=True)
class Child:
    """As its parent sees it."""

    pid: int
    line: socket.socket
    born: float = field(default_factory=monotonic)

    def tell(self, order: bytes) -> None:
        """One that has ended hears nothing; its end is noticed elsewhere."""
        try:
            self.line.send(order)
        except OSError:
            log.debug("process %d has ended", self.pid)


def fork(work: Callable[[socket.socket], int]) -> Child:
    """Runs `work` in a process of its own, whose exit code it returns; it is given its end of the line."""
    sys.stdout.flush()
    sys.stderr.flush()  # or the child would write it too
    ours, theirs = socket.socketpair()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = os.fork()
    if pid == 0:
        _live(work, ours, theirs)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    theirs.close()
    ours.setblocking(False)
    return Child(pid, ours)


def _live(work: Callable[[socket.socket], int], ours: socket.socket, theirs: socket.socket) -> None:
    """Never returns: above is its parent's stack."""
    code = 1
    try:
        ours.close()
        _forget_signals()
        code = work(theirs)
    except BaseException:
        log.exception("internal error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


def told(status: int) -> str:
    """How a process ended, as `os.waitpid` says it."""
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
