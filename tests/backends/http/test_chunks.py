"""Chunks passed on with their framing."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.http import connection
from backends.http.connection import Connection, Exchange, WriteCoalescer
from tests.support.upstream import LAST_CHUNK, STREAM_HEAD, Listener, chunk


class Wire(asyncio.Transport):
    """The server's transport; records no data."""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """Does nothing."""

    def abort(self) -> None:
        """Does nothing."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Idle:
    """The pool of one connection."""

    def opened(self) -> None: ...

    coalescer = WriteCoalescer()

    def release(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...

    def resend(self, exchange: Exchange) -> bool:
        return False


async def read(*reads: bytes) -> Listener:
    """Calls of a sink for a reply in these reads."""
    upstream, listener = Connection(Idle()), Listener()
    upstream.connection_made(Wire())
    upstream.send(Exchange(b"", listener))
    for data in reads:
        upstream.data_received(data)
    return listener


async def test_a_read_of_one_whole_chunk_keeps_its_framing() -> None:
    """Except the first, which shows where chunks begin. A relay need not frame the bytes anew."""
    listener = await read(STREAM_HEAD + chunk(b"one"), chunk(b"two"), b"A\r\n" + b"x" * 10 + b"\r\n", LAST_CHUNK)
    assert listener.framed == [chunk(b"two"), b"A\r\n" + b"x" * 10 + b"\r\n"]
    assert (listener.body, listener.calls[-1]) == (b"onetwo" + b"x" * 10, "end")


@pytest.mark.parametrize(
    "data",
    [
        chunk(b"a") + chunk(b"b"),  # two
        chunk(b"abc")[:-1],  # an incomplete chunk
        chunk(b"3\r\nabc\r\n")[:-2],  # a chunk that looks like two
        b"3;name=value\r\nabc\r\n",  # an extension
        b"03\r\nabc\r\n",  # odd, but a number
        b"5\r\nab\r\nc\r\n"[:-1],
    ],
)
async def test_any_other_read_goes_through_the_parser(data: bytes) -> None:
    """The parser's result counts."""
    plain = await read(STREAM_HEAD + chunk(b"x"), *(data[i : i + 1] for i in range(len(data))))
    listener = await read(STREAM_HEAD + chunk(b"x"), data)
    assert (listener.body, listener.calls[-1]) == (plain.body, plain.calls[-1])


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
async def test_chunks_split_anywhere_are_the_same_body(parts: list[bytes], data: st.DataObject) -> None:
    """For reads that end in a size, between CR and LF, behind a whole chunk, or in data that looks like a chunk."""
    stream = STREAM_HEAD + b"".join(map(chunk, parts)) + LAST_CHUNK
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    listener = await read(*(stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])))
    assert (listener.body, listener.calls[-1]) == (b"".join(parts), "end")


@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8))
async def test_one_chunk_per_read_is_the_same_body(parts: list[bytes]) -> None:
    """The usual case, with any data, line ends included."""
    listener = await read(STREAM_HEAD, *map(chunk, parts), LAST_CHUNK)
    assert (listener.body, listener.calls[-1]) == (b"".join(parts), "end")
    assert listener.framed == [chunk(part) for part in parts[1:]]


async def test_a_large_chunk_keeps_its_framing() -> None:
    """For sizes of three to six hex digits."""
    parts = [b"x" * size for size in (0xFFF, 0x1000, 0x10000, 0x100000)]
    listener = await read(STREAM_HEAD + chunk(b"one"), *map(chunk, parts), LAST_CHUNK)
    assert (listener.framed, listener.calls[-1]) == ([chunk(part) for part in parts], "end")


async def test_reads_of_a_stream_leave_nothing_in_memory() -> None:
    """No table grows with the number or size of answers."""
    marker = b"y" * 5000
    await read(STREAM_HEAD + chunk(b"one"), chunk(marker), chunk(marker)[:-1], b"\n", LAST_CHUNK)
    tables = [held for held in vars(connection).values() if isinstance(held, dict | list | set)]
    assert not any(isinstance(key, bytes) and marker in key for table in tables for key in table)


async def test_reads_are_released_after_passing_on() -> None:
    """Memory for two thousand large chunks of different content, answered one after the other, stays bounded."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(2_000):
        await read(STREAM_HEAD + chunk(b"x"), chunk(number.to_bytes(8) * 1024), LAST_CHUNK)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1_000_000, "16 MB passed"
