"""Restarts of worker processes by a slot."""

from __future__ import annotations

import os
import socket

from gateway.workers.worker import LONGEST_WAIT, MIN_UPTIME, SERVING, Child, WorkerSlot


def exited(slot: WorkerSlot, after: float) -> float:
    """Seconds until the next start, after a process has lived `after` seconds."""
    one, other = socket.socketpair()
    other.close()
    slot.child = Child(0, one, started_at=100.0)
    return slot.on_exit(100.0 + after)


def test_an_exited_process_is_replaced_at_once() -> None:
    """After any lifetime, the first time."""
    assert [exited(WorkerSlot("w", lambda line: 0), after) for after in (0.1, 1e6)] == [0.0, 0.0]


def test_repeated_early_exits_back_off() -> None:
    """A crash loop must not use up the machine; a process that lives ends the backoff."""
    slot = WorkerSlot("w", lambda line: 0)
    waits = [exited(slot, 0.1) for _ in range(10)]
    assert waits[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == LONGEST_WAIT
    assert exited(slot, MIN_UPTIME) == 0.0
    assert [exited(slot, 0.1), exited(slot, 0.1)] == [0.0, 0.5]


def test_a_slot_counts_starts_and_resets_its_state() -> None:
    """Reports of an exited process say nothing of the next."""
    slot = WorkerSlot("w", lambda channel: channel.send(SERVING) - 1)
    for starts in (1, 2):
        slot.start()
        assert slot.child is not None
        _, status = os.waitpid(slot.child.pid, 0)
        assert (slot.read_report(), slot.serving, slot.read_report()) == (True, True, False)
        slot.on_exit(slot.child.started_at + 1.0)
        assert (slot.starts, status, slot.child, slot.serving) == (starts, 0, None, False)
