"""Writes that are made together while there are many."""

from __future__ import annotations

import asyncio

import pytest

from backends.http import connection as outbox
from backends.http.connection import BURST_GAP, WriteCoalescer


class Clock:
    """Time stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(outbox, "monotonic", made)
    return made


class Wire(asyncio.WriteTransport):
    """What is written to it, in whose order."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.name, self.written, self.closing = name, written, False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        self.written.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
def written() -> list[tuple[str, bytes]]:
    return []


async def turn() -> None:
    """Of the loop."""
    await asyncio.sleep(0)


async def test_a_write_that_is_alone_waits_for_nothing(clock: Clock, written: list[tuple[str, bytes]]) -> None:
    """However many there were before, if that was a while ago."""
    box, wire = WriteCoalescer(), Wire("a", written)
    for i in range(3):
        clock.now += 2 * BURST_GAP
        box.write(wire, b"%d" % i)
        assert len(written) == i + 1


async def test_writes_that_follow_closely_are_made_together_at_the_end_of_the_turn(
    clock: Clock, written: list[tuple[str, bytes]]
) -> None:
    """In the order in which their sockets were written to first; what goes to one, in one piece."""
    box, one, two = WriteCoalescer(), Wire("one", written), Wire("two", written)
    for wire, data in ((one, b"a"), (one, b"b"), (two, b"c"), (one, b"d")):
        box.write(wire, data)
        clock.now += BURST_GAP / 2
    assert written == [("one", b"a")]
    await turn()
    assert written == [("one", b"a"), ("one", b"bd"), ("two", b"c")]
    box.write(one, b"e")
    await turn()
    assert written[-1] == ("one", b"e"), "the next turn is asked for again"


async def test_a_socket_gets_nothing_before_what_waits_for_it(clock: Clock, written: list[tuple[str, bytes]]) -> None:
    """Neither a write that comes after a rest, nor one that would not wait itself."""
    box, one, two = WriteCoalescer(), Wire("one", written), Wire("two", written)
    for wire in (one, one, two):
        box.write(wire, b"1")
    clock.now += 2 * BURST_GAP
    box.write(one, b"2")
    box.write_through(one, b"3")
    assert written == [("one", b"1"), ("one", b"12"), ("one", b"3")]
    await turn()
    assert written[3:] == [("two", b"1")]


async def test_what_waits_is_written_before_the_socket_is_closed(
    clock: Clock, written: list[tuple[str, bytes]]
) -> None:
    """Once; and who has gone by then is written to no more."""
    box, one, two = WriteCoalescer(), Wire("one", written), Wire("two", written)
    for wire in (one, one, two):
        box.write(wire, b"x")
    box.flush_to(one)
    two.closing = True
    await turn()
    assert written == [("one", b"x"), ("one", b"x")]
