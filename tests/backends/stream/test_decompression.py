"""Compressed replies: every coding that servers use without being asked, torn anywhere, and bounded."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.stream.held_reply import Decompressor, decompressor

TEXT = b'{"choices":[{"message":{"content":"hi"}}]}' * 20
PLENTY = 1 << 20


def zlib_deflate(data: bytes) -> bytes:
    return zlib.compress(data)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def stored_deflate(data: bytes) -> bytes:
    """Uncompressed blocks."""
    packer = zlib.compressobj(0, wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib_deflate),
    ("deflate", raw_deflate),
    ("deflate", stored_deflate),
]


def inflated(coding: str, *parts: bytes, limit: int = PLENTY) -> bytes:
    found = decompressor(coding, limit)
    assert found is not None
    return b"".join(found.feed(part) for part in parts)


@pytest.mark.parametrize(("coding", "pack"), CODINGS)
def test_every_coding_is_decompressed(coding: str, pack: Callable[[bytes], bytes]) -> None:
    """`deflate` is zlib by RFC 9110, and without a head at some servers."""
    assert inflated(coding, pack(TEXT)) == TEXT


@pytest.mark.parametrize(("coding", "pack"), CODINGS)
def test_bytes_torn_anywhere_are_decompressed_alike(coding: str, pack: Callable[[bytes], bytes]) -> None:
    """Reads of one byte, and empty ones."""
    packed = pack(TEXT)
    assert inflated(coding, b"", *[packed[i : i + 1] for i in range(len(packed))], b"") == TEXT


@given(st.binary(max_size=400), st.lists(st.integers(0, 500), max_size=6), st.sampled_from(CODINGS))
def test_any_body_comes_out_as_it_went_in(
    body: bytes, cuts: list[int], coding: tuple[str, Callable[[bytes], bytes]]
) -> None:
    packed = coding[1](body)
    ends = sorted({min(cut, len(packed)) for cut in cuts} | {len(packed)})
    parts = [packed[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert inflated(coding[0], *parts) == body


@pytest.mark.parametrize(("coding", "pack"), CODINGS)
def test_text_comes_out_with_the_read_that_completes_it(coding: str, pack: Callable[[bytes], bytes]) -> None:
    """A server that flushes after each event is read event by event."""
    kind = -zlib.MAX_WBITS if pack in (raw_deflate, stored_deflate) else zlib.MAX_WBITS
    packer = zlib.compressobj(wbits=kind + 16 if pack is gzip.compress else kind)
    found = decompressor(coding, PLENTY)
    assert found is not None
    for event in (b"data: one\n\n", b"data: two\n\n"):
        assert found.feed(packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)) == event


@pytest.mark.parametrize("coding", ["GZip", " gzip ", "DEFLATE"])
def test_the_name_of_a_coding_is_of_any_case(coding: str) -> None:
    assert decompressor(coding, PLENTY) is not None


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "", "identity"])
def test_another_coding_is_not_read(coding: str) -> None:
    """The attempt fails: what cannot be judged is no answer."""
    assert decompressor(coding, PLENTY) is None


# --------------------------------------------------------------------------- hostile bytes


@pytest.mark.parametrize(("coding", "pack"), CODINGS)
def test_a_bomb_is_stopped_at_the_limit(coding: str, pack: Callable[[bytes], bytes]) -> None:
    """A kilobyte may hold a megabyte."""
    with pytest.raises(ValueError, match="larger than the gateway accepts"):
        inflated(coding, pack(bytes(10_001)), limit=10_000)
    assert len(inflated(coding, pack(bytes(10_000)), limit=10_000)) == 10_000


def test_the_limit_counts_all_reads() -> None:
    packed = zlib_deflate(bytes(10_001))
    with pytest.raises(ValueError, match="larger than the gateway accepts"):
        inflated("deflate", *[packed[i : i + 1] for i in range(len(packed))], limit=10_000)


def test_bytes_beyond_the_limit_are_never_computed() -> None:
    """100 MB of zeros take no memory."""
    bomb, found = gzip.compress(bytes(100 << 20)), Decompressor(1000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="larger than the gateway accepts"):
            found.feed(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "malformed",
    [
        b"\x1f\x8b\xff" + bytes(20),
        b"\xff" * 20,
        gzip.compress(TEXT)[:10] + b"\xff" * 40,
        gzip.compress(TEXT)[:-8] + bytes(8),
        b"<html>no compression at all</html>",
    ],
    ids=["head", "no deflate", "body", "checksum", "plain text"],
)
def test_malformed_bytes_are_an_error(malformed: bytes) -> None:
    """As ValueError: the caller knows nothing of zlib."""
    with pytest.raises(ValueError, match=r"."):
        inflated("gzip", malformed)


def test_bytes_after_the_end_are_dropped() -> None:
    """No second answer follows the first."""
    assert inflated("gzip", gzip.compress(TEXT), b"more") == TEXT


# --------------------------------------------------------------------------- bounds of one read, and of an error


@pytest.mark.parametrize(("coding", "pack"), CODINGS[:-1])
def test_one_read_that_expands_beyond_its_bound_is_too_large(coding: str, pack: Callable[[bytes], bytes]) -> None:
    """Although the reply as a whole may be longer."""
    found = decompressor(coding, PLENTY, 1000)
    assert found is not None
    with pytest.raises(ValueError, match="larger than the gateway accepts"):
        found.feed(pack(bytes(1001)))


def test_many_small_reads_may_exceed_the_bound_of_one() -> None:
    """A long stream is no bomb."""
    packed, found = stored_deflate(TEXT * 100), Decompressor(PLENTY, 1000)
    assert b"".join(found.feed(packed[i : i + 900]) for i in range(0, len(packed), 900)) == TEXT * 100


@pytest.mark.parametrize("size", [1, 7, PLENTY])
@pytest.mark.parametrize(("coding", "pack"), CODINGS)
def test_a_cut_reply_yields_its_beginning_without_an_error(
    coding: str, pack: Callable[[bytes], bytes], size: int
) -> None:
    """In reads of any size."""
    found, packed = decompressor(coding, 500, cut=True), pack(TEXT)
    assert found is not None
    assert b"".join(found.feed(packed[i : i + size]) for i in range(0, len(packed), size)) == TEXT[:500]


def test_what_lies_above_a_cut_is_never_expanded() -> None:
    """Neither in the read that reaches the limit nor in later ones, even where it is malformed."""
    bomb, found = gzip.compress(bytes(100 << 20)), Decompressor(1000, cut=True)
    tracemalloc.start()
    try:
        assert [len(found.feed(part)) for part in (bomb[:50_000], bomb[50_000:], b"\xff" * 1000)] == [1000, 0, 0]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_bytes_after_the_end_take_no_memory() -> None:
    """zlib itself keeps them all."""
    found, junk = Decompressor(PLENTY), bytes(100_000)
    found.feed(gzip.compress(TEXT))
    tracemalloc.start()
    try:
        assert not any(found.feed(junk) for _ in range(100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
