"""Chunks that are passed on as they are framed."""

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
    """The server's end, of which nothing is asked."""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """It knows what it will say."""

    def abort(self) -> None:
        """Nothing to be seen."""

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
    """What a sink hears of a reply that comes in these reads."""
    upstream, listener = Connection(Idle()), Listener()
    upstream.connection_made(Wire())
    upstream.send(Exchange(b"", listener))
    for data in reads:
        upstream.data_received(data)
    return listener


async def test_a_read_of_one_whole_chunk_is_also_told_as_it_is_framed() -> None:
    """Behind the first, which says where chunks begin; so a relay need not frame it anew."""
    heard = await read(STREAM_HEAD + chunk(b"one"), chunk(b"two"), b"A\r\n" + b"x" * 10 + b"\r\n", LAST_CHUNK)
    assert heard.framed == [chunk(b"two"), b"A\r\n" + b"x" * 10 + b"\r\n"]
    assert (heard.body, heard.calls[-1]) == (b"onetwo" + b"x" * 10, "end")


@pytest.mark.parametrize(
    "data",
    [
        chunk(b"a") + chunk(b"b"),  # two
        chunk(b"abc")[:-1],  # not all of one
        chunk(b"3\r\nabc\r\n")[:-2],  # one that looks like two
        b"3;name=value\r\nabc\r\n",  # an extension
        b"03\r\nabc\r\n",  # odd, but a number
        b"5\r\nab\r\nc\r\n"[:-1],
    ],
)
async def test_any_other_read_goes_through_the_parser(data: bytes) -> None:
    """And what it makes of it is what counts."""
    plain = await read(STREAM_HEAD + chunk(b"x"), *(data[i : i + 1] for i in range(len(data))))
    heard = await read(STREAM_HEAD + chunk(b"x"), data)
    assert (heard.body, heard.calls[-1]) == (plain.body, plain.calls[-1])


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8), st.data())
async def test_chunks_torn_anywhere_are_the_same_body(parts: list[bytes], data: st.DataObject) -> None:
    """Wherever reads end: in a size, between CR and LF, behind a whole chunk, in data that looks like a chunk."""
    stream = STREAM_HEAD + b"".join(map(chunk, parts)) + LAST_CHUNK
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=12)))
    heard = await read(*(stream[start:end] for start, end in pairwise([0, *cuts, len(stream)])))
    assert (heard.body, heard.calls[-1]) == (b"".join(parts), "end")


@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8))
async def test_chunks_in_reads_of_their_own_are_the_same_body(parts: list[bytes]) -> None:
    """The usual way, with any data, line ends among it."""
    heard = await read(STREAM_HEAD, *map(chunk, parts), LAST_CHUNK)
    assert (heard.body, heard.calls[-1]) == (b"".join(parts), "end")
    assert heard.framed == [chunk(part) for part in parts[1:]]


async def test_a_large_chunk_in_a_read_of_its_own_keeps_its_framing() -> None:
    """However many digits its size has."""
    parts = [b"x" * size for size in (0xFFF, 0x1000, 0x10000, 0x100000)]
    heard = await read(STREAM_HEAD + chunk(b"one"), *map(chunk, parts), LAST_CHUNK)
    assert (heard.framed, heard.calls[-1]) == ([chunk(part) for part in parts], "end")


async def test_reads_of_a_stream_leave_nothing_in_memory() -> None:
    """No table of what was read grows with the answers: neither with their number nor with their size."""
    marker = b"y" * 5000
    await read(STREAM_HEAD + chunk(b"one"), chunk(marker), chunk(marker)[:-1], b"\n", LAST_CHUNK)
    tables = [held for held in vars(connection).values() if isinstance(held, dict | list | set)]
    assert not any(isinstance(key, bytes) and marker in key for table in tables for key in table)


async def test_no_read_is_kept_after_it_was_passed_on() -> None:
    """Memory for two thousand large chunks of different content, answered one after the other, stays bounded."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(2_000):
        await read(STREAM_HEAD + chunk(b"x"), chunk(number.to_bytes(8) * 1024), LAST_CHUNK)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1_000_000, "16 MB passed"
