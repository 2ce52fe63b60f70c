"""When the next process of a place is to start."""

from __future__ import annotations

import socket

from gateway.workers.child_process import Child
from gateway.workers.worker_slot import LONGEST_WAIT, YOUNG, WorkerSlot


def ended(place: WorkerSlot, after: float) -> float:
    """Seconds to wait for the next, once one has lived so long."""
    one, other = socket.socketpair()
    other.close()
    place.began(Child(0, one, born=100.0))
    return place.ended(100.0 + after)


def test_one_that_dies_is_replaced_at_once() -> None:
    """However short its life was, the first time."""
    assert [ended(WorkerSlot("w", lambda line: 0), after) for after in (0.1, 1e6)] == [0.0, 0.0]


def test_those_that_die_young_wait_longer_each_time() -> None:
    """A crash loop must not take the machine; it ends with one that lives."""
    place = WorkerSlot("w", lambda line: 0)
    waits = [ended(place, 0.1) for _ in range(10)]
    assert waits[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == LONGEST_WAIT
    assert ended(place, YOUNG) == 0.0
    assert [ended(place, 0.1), ended(place, 0.1)] == [0.0, 0.5]


def test_it_counts_its_processes_and_forgets_the_last() -> None:
    """What one had reported says nothing of the next."""
    place = WorkerSlot("w", lambda line: 0)
    place.prepared = place.serving = True
    ended(place, 1.0)
    assert (place.starts, place.child, place.prepared, place.serving) == (1, None, False, False)
