"""Signs of life in shared memory, counted in ticks."""

from __future__ import annotations

import asyncio
import os

import pytest

from gateway.workers import shared_state as heartbeats
from gateway.workers.shared_state import NEVER, STALLED, Heartbeats, StallWatch


def test_a_heartbeat_of_another_process_is_seen() -> None:
    beats = Heartbeats(2)
    if (pid := os.fork()) == 0:
        beats._times[1] = 7.0
        os._exit(0)
    os.waitpid(pid, 0)
    assert (beats.last(0), beats.last(1)) == (NEVER, 7.0)
    beats.clear(1)
    assert beats.last(1) == NEVER


def test_a_process_is_stalled_after_ticks_without_a_heartbeat_and_goes_on() -> None:
    watch = StallWatch()
    assert [watch.tick(1.0) for _ in range(STALLED)] == [0] * STALLED
    assert watch.ticks == STALLED - 1
    watch.tick(1.0)
    assert watch.ticks == STALLED
    assert watch.tick(2.0) == STALLED
    assert watch.ticks == 0


def test_a_pause_of_all_processes_is_one_tick() -> None:
    """However long it was: the supervisor counts no time."""
    watch = StallWatch()
    for beat in (1.0, 2.0, 2.0, 3_000.0):
        assert watch.tick(beat) == 0
        assert watch.ticks <= 1


def test_a_process_that_has_not_begun_or_was_replaced_is_not_stalled() -> None:
    watch = StallWatch()
    for _ in range(100):
        assert watch.tick(NEVER) == 0
    for _ in range(100):
        watch.tick(1.0)
    assert watch.tick(NEVER) == 0
    assert watch.ticks == 0
    assert watch.tick(2.0) == 0


async def test_the_event_loop_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "BEAT", 0.01)
    beats = Heartbeats(1)
    assert not beats.is_stalled(0)
    task = asyncio.create_task(beats.beat_forever(0))
    seen = set()
    while len(seen) < 4:
        seen.add(beats.last(0))
        await asyncio.sleep(0.01)
    assert not beats.is_stalled(0)
    task.cancel()
    beats._times[0] -= 1_000
    assert beats.is_stalled(0)
