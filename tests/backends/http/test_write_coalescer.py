"""Coalescing of writes in bursts."""

from __future__ import annotations

import asyncio

import pytest

from backends.http import connection as outbox
from backends.http.connection import BURST_GAP, WriteCoalescer

pytestmark = pytest.mark.virtual_time


class Clock:
    """A clock that the test advances."""

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
    """Records writes with the name of the socket, in order."""

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
    """Runs one turn of the event loop."""
    await asyncio.sleep(0)


async def test_a_single_write_is_not_delayed(clock: Clock, written: list[tuple[str, bytes]]) -> None:
    """After any number of writes, if BURST_GAP seconds have passed."""
    box, wire = WriteCoalescer(), Wire("a", written)
    for i in range(3):
        clock.now += 2 * BURST_GAP
        box.write(wire, b"%d" % i)
        assert len(written) == i + 1


async def test_writes_of_a_burst_are_joined_at_the_end_of_the_turn(
    clock: Clock, written: list[tuple[str, bytes]]
) -> None:
    """In order of the first write to each socket; one write per socket."""
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


async def test_writes_to_a_socket_stay_in_order(clock: Clock, written: list[tuple[str, bytes]]) -> None:
    """With a later single write, and with a write-through."""
    box, one, two = WriteCoalescer(), Wire("one", written), Wire("two", written)
    for wire in (one, one, two):
        box.write(wire, b"1")
    clock.now += 2 * BURST_GAP
    box.write(one, b"2")
    box.write_through(one, b"3")
    assert written == [("one", b"1"), ("one", b"12"), ("one", b"3")]
    await turn()
    assert written[3:] == [("two", b"1")]


async def test_flush_writes_buffered_bytes_before_a_close(clock: Clock, written: list[tuple[str, bytes]]) -> None:
    """Once; closed sockets receive no bytes."""
    box, one, two = WriteCoalescer(), Wire("one", written), Wire("two", written)
    for wire in (one, one, two):
        box.write(wire, b"x")
    box.flush_to(one)
    two.closing = True
    await turn()
    assert written == [("one", b"x"), ("one", b"x")]


async def test_nothing_is_written_to_a_closing_socket(clock: Clock, written: list[tuple[str, bytes]]) -> None:
    """Neither at once nor at the end of the turn: uvloop raises for a socket that its peer has just reset."""
    box, wire = WriteCoalescer(), Wire("a", written)
    wire.closing = True
    for _ in range(2):
        box.write(wire, b"x")
    await turn()
    assert written == []
