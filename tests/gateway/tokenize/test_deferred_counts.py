"""Counts after the send: in slices, within a share of the time, and within a backlog."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from gateway.tokenize import estimator as module
from gateway.tokenize.estimator import DeferredCounts


class Clock:
    """`perf_counter` for the module: a step of a count takes `step` seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "perf_counter", found)
    monkeypatch.setattr(module, "SHARE", 1.0)  # no pause
    return found


def counting(clock: Clock, name: str, steps: int, done: list[str], seconds: float = 0.0002) -> Iterator[None]:
    for _ in range(steps):
        clock.now += seconds
        done.append(name)
        yield


async def finished(counts: DeferredCounts) -> int:
    """Turns of the loop until nothing waits."""
    for turns in range(1000):
        if not counts.bytes:
            return turns
        await asyncio.sleep(0)
    raise AssertionError("counts never end")


async def test_nothing_is_counted_before_the_caller_yields(clock: Clock) -> None:
    """The request is decided and sent in the same callback."""
    counts, done = DeferredCounts(), list[str]()
    counts.add(10, counting(clock, "a", 2, done))
    assert done == []
    await finished(counts)
    assert done == ["a", "a"]


async def test_prompts_are_counted_in_order_of_arrival(clock: Clock) -> None:
    counts, done = DeferredCounts(), list[str]()
    for name in "ab":
        counts.add(10, counting(clock, name, 2, done))
    await finished(counts)
    assert done == ["a", "a", "b", "b"]


async def test_a_slice_ends_after_its_time(clock: Clock) -> None:
    """Other callbacks of the loop run between two slices."""
    counts, done = DeferredCounts(), list[str]()
    counts.add(10, counting(clock, "a", 30, done))
    assert await finished(counts) >= 10
    assert len(done) == 30


async def test_slices_take_their_share_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of 0.5 ms is followed by a pause of nineteen times as long."""
    delays: list[float] = []
    monkeypatch.setattr(module, "SHARE", 0.05)
    counts = DeferredCounts()
    monkeypatch.setattr(counts, "_schedule", delays.append)
    counts.add(10, counting(clock, "a", 9, [], seconds=0.00025))
    counts._slice()
    assert delays == [0.0, pytest.approx(19 * 0.0005)]


async def test_a_thousand_prompts_at_once_keep_a_bounded_backlog(clock: Clock) -> None:
    """The rest is dropped: their requests were sent, and they stay estimated."""
    counts, done = DeferredCounts(backlog=1_000_000), list[str]()
    for number in range(1000):
        counts.add(100_000, counting(clock, str(number), 1, done))
        assert counts.bytes <= 1_000_000
    assert counts.dropped == 990
    await finished(counts)
    assert done == [str(number) for number in range(10)]


async def test_a_prompt_larger_than_the_backlog_is_not_counted(clock: Clock) -> None:
    counts, done = DeferredCounts(backlog=100), list[str]()
    counts.add(101, counting(clock, "a", 1, done))
    await asyncio.sleep(0)
    assert (counts.bytes, counts.dropped, done) == (0, 1, [])


async def test_a_prompt_that_cannot_be_counted_stops_no_other(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterator[None]:
        yield
        raise ValueError("no such text")

    counts, done = DeferredCounts(), list[str]()
    counts.add(1, broken())
    counts.add(1, counting(clock, "b", 1, done))
    await finished(counts)
    assert (done, "a prompt cannot be counted" in caplog.text) == (["b"], True)
