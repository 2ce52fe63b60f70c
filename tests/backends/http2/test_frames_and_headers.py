"""Frames and header blocks as RFC 9113 has them, sections 3.4, 4, 6.1, 6.2, 6.10 and 8.3: tests name the sections."""

from __future__ import annotations

import pytest
from hpack import Decoder

from backends.http2.frame_reader import FRAMES, MAX_BLOCK, MAX_PIECES
from backends.http2.frames import (
    END_HEADERS,
    END_STREAM,
    MAX_FRAME,
    PADDED,
    PREFACE,
    PRIORITY,
    ErrorCode,
    FrameType,
    Http2Error,
    frame,
    settings_frame,
)
from backends.http2.header_blocks import MAX_LIST, encoded
from backends.http2.server import (
    Http2Server,
    RequestReceived,
)
from tests.support.http2_peer import ALL, REQUEST, STREAMS, WINDOW, Peer


def test_3_4_a_connection_begins_with_the_preface_at_any_split() -> None:
    server = Http2Server(STREAMS, WINDOW, ALL)
    for byte in PREFACE + settings_frame({}) + frame(FrameType.HEADERS, END_HEADERS, 1, encoded(REQUEST)):
        events = server.receive(bytes([byte]), 0.0)
    assert events == [RequestReceived(1, "/a.B/C", False)]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.1", PREFACE + frame(FrameType.PING, 0, 0, b"8" * 8)]
)
def test_3_4_another_beginning_is_a_connection_error(data: bytes) -> None:
    """Other bytes, and a first frame that is no SETTINGS."""
    with pytest.raises(Http2Error) as error:
        Http2Server(STREAMS, WINDOW, ALL).receive(data, 0.0)
    assert error.value.code is ErrorCode.PROTOCOL_ERROR


def test_4_1_frames_of_unknown_types_are_ignored(peer: Peer) -> None:
    assert peer.send(frame(0x77, 0xFF, 9, b"x" * 90)) == []
    assert peer.begin() == [RequestReceived(1, "/a.B/C", False)]


def test_4_2_a_frame_that_is_too_long_is_refused_by_its_head(peer: Peer) -> None:
    with pytest.raises(Http2Error) as error:
        peer.send((MAX_FRAME + 1).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01")
    assert error.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_a_read_handles_few_frames(peer: Peer) -> None:
    data = frame(FrameType.PING, 0, 0, b"12345678") * (2 * FRAMES)
    peer.server.receive(data, 0.0)
    assert (len(peer.frames()), peer.server.is_behind) == (FRAMES, True)
    peer.server.receive(b"", 0.0)
    assert len(peer.frames()) == FRAMES
    peer.server.receive(b"", 0.0)
    assert not peer.server.is_behind


@pytest.mark.parametrize("count", [1, 3])
def test_a_read_handles_few_bytes_of_headers(peer: Peer, count: int) -> None:
    """In one frame or in more."""
    peer.server = Http2Server(1_000, WINDOW, ALL)
    block = encoded([*REQUEST, ("x", "y" * (MAX_FRAME - 200))])
    size = -(-len(block) // count)
    first, *rest = [block[at : at + size] for at in range(0, len(block), size)]
    last = frame(FrameType.CONTINUATION, END_HEADERS, 0)
    data = b"".join(
        frame(FrameType.HEADERS, 0, stream, first)
        + b"".join(frame(FrameType.CONTINUATION, 0, stream, piece) for piece in rest)
        + last[:5]
        + stream.to_bytes(4, "big")
        for stream in range(1, 20, 2)
    )
    events = peer.server.receive(PREFACE + settings_frame({}) + data, 0.0)
    assert (len(events) <= 1, peer.server.is_behind) == (True, True)
    assert len(peer.send(b"")) + len(events) == 10


def literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


@pytest.mark.parametrize("size", [1, 7, 40])
def test_6_10_headers_come_in_pieces(peer: Peer, size: int) -> None:
    block = encoded(REQUEST)
    pieces = [block[at : at + size] for at in range(0, len(block), size)][: MAX_PIECES - 1]
    rest = block[len(b"".join(pieces)) :]
    peer.begin(1, pieces[0], flags=0)
    for piece in pieces[1:]:
        assert peer.send(frame(FrameType.CONTINUATION, 0, 1, piece)) == []
    assert peer.send(frame(FrameType.CONTINUATION, END_HEADERS, 1, rest)) == [RequestReceived(1, "/a.B/C", False)]


@pytest.mark.parametrize(
    "between",
    [
        frame(FrameType.PING, 0, 0, b"12345678"),
        frame(FrameType.CONTINUATION, END_HEADERS, 3),
        frame(FrameType.HEADERS, END_HEADERS, 1),
        frame(0x77, 0, 1),
    ],
    ids=["PING", "another stream", "HEADERS", "unknown"],
)
def test_6_10_nothing_comes_between_the_pieces_of_headers(peer: Peer, between: bytes) -> None:
    peer.begin(1, encoded(REQUEST), flags=0)
    with pytest.raises(Http2Error, match="CONTINUATION") as error:
        peer.send(between)
    assert error.value.code is ErrorCode.PROTOCOL_ERROR


def test_6_10_a_continuation_of_nothing_is_a_connection_error(peer: Peer) -> None:
    with pytest.raises(Http2Error, match="CONTINUATION"):
        peer.send(frame(FrameType.CONTINUATION, END_HEADERS, 1))


@pytest.mark.parametrize("piece", [b"", literal(b"a", b"b"), b"x" * MAX_FRAME])
def test_a_flood_of_continuation_ends_the_connection(peer: Peer, piece: bytes) -> None:
    """CVE-2024-27316: headers that have no end, in pieces of any size."""
    peer.begin(1, encoded(REQUEST), flags=0)
    with pytest.raises(Http2Error, match="headers of") as error:
        peer.send(frame(FrameType.CONTINUATION, 0, 1, piece) * MAX_PIECES)
    assert error.value.code is ErrorCode.ENHANCE_YOUR_CALM
    assert len(peer.server._reader._block.data) <= MAX_BLOCK + MAX_FRAME  # type: ignore[union-attr]


def test_a_small_block_that_expands_ends_the_connection(peer: Peer) -> None:
    """HPACK bomb: an entry of the table, named again and again (CVE-2016-1544)."""
    stored = b"\x40\x01x\x7f\xbf\x1e" + b"y" * 4_030
    with pytest.raises(Http2Error, match="more than") as error:
        peer.begin(1, encoded(REQUEST)[1:] + stored + b"\xbe" * (MAX_LIST // 4_000 + 2))
    assert error.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("block", [b"\xff" + b"\x80" * 40, b"\x00\x05ab", b"\xc0", b"\x3f\xff\xff\x7f"])
def test_4_3_a_block_that_cannot_be_decoded_is_a_connection_error(peer: Peer, block: bytes) -> None:
    """An endless integer, a short string, an index of nothing, a table larger than it may be."""
    with pytest.raises(Http2Error) as error:
        peer.begin(1, block)
    assert error.value.code is ErrorCode.COMPRESSION_ERROR


def test_4_3_sizes_of_the_table_beyond_two_are_a_connection_error(peer: Peer) -> None:
    """RFC 7541, section 4.2: the smallest and the last one. A block of nothing else would take 50 ms."""
    sizes = b"\x20\x3f\xe1\x1f"
    assert peer.begin(1, sizes + encoded(REQUEST)[1:]) == [RequestReceived(1, "/a.B/C", False)]
    with pytest.raises(Http2Error) as error:
        peer.begin(3, sizes + encoded(REQUEST))
    assert error.value.code is ErrorCode.COMPRESSION_ERROR


def test_headers_as_long_as_a_caller_may_send_them_to_a_data_plane_are_read(peer: Peer) -> None:
    """Envoy takes 60 KB, and sends the caller's `tracestate` on: the connection, with the calls of others, stays."""
    block = encoded([*REQUEST, ("tracestate", "x" * 60_000)])
    pieces = [block[at : at + MAX_FRAME] for at in range(0, len(block), MAX_FRAME)]
    peer.begin(1, pieces[0], flags=0)
    for piece in pieces[1:]:
        peer.send(frame(FrameType.CONTINUATION, END_HEADERS * (piece is pieces[-1]), 1, piece))
    assert peer.events == [RequestReceived(1, "/a.B/C", False)]


def test_6_2_padding_and_priority_are_skipped(peer: Peer) -> None:
    block = b"\x03" + b"\x80\x00\x00\x05\x10" + encoded(REQUEST) + b"\x00" * 3
    found = peer.begin(1, block, flags=END_HEADERS | PADDED | PRIORITY | END_STREAM)
    assert found == [RequestReceived(1, "/a.B/C", True)]


@pytest.mark.parametrize(
    ("kind", "flags", "payload"),
    [
        (FrameType.DATA, PADDED, b"\x03ab"),
        (FrameType.DATA, PADDED, b""),
        (FrameType.HEADERS, PADDED | PRIORITY | END_HEADERS, b"\x01\x00\x00\x00\x00\x00"),
        (FrameType.HEADERS, PRIORITY | END_HEADERS, b"\x00"),
    ],
)
def test_6_1_padding_longer_than_its_frame_is_a_connection_error(
    peer: Peer, kind: FrameType, flags: int, payload: bytes
) -> None:
    peer.begin()
    with pytest.raises(Http2Error) as error:
        peer.send(frame(kind, flags, 1 if kind is FrameType.DATA else 3, payload))
    assert error.value.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "headers",
    [
        REQUEST[1:],
        [*REQUEST, (":path", "/other")],
        [*REQUEST[:4], (":path", "/other")],
        [*REQUEST[:3], ("a", "b"), (":authority", "late")],
        [*REQUEST, (":status", "200")],
        [*REQUEST[:2], (":path", "")],
        [*REQUEST, ("Upper", "case")],
        [*REQUEST, ("a b", "c")],
        [*REQUEST, ("", "c")],
        [*REQUEST, ("a", "b\r\nc: d")],
        [*REQUEST, ("a", "\x00")],
        [*REQUEST, ("a", " b")],
        [*REQUEST[:2], (":path", "/a\nb")],
        [*REQUEST, ("connection", "close")],
        [*REQUEST, ("transfer-encoding", "chunked")],
        [*REQUEST[:4], ("te", "gzip")],
    ],
    ids=lambda headers: str(headers[-1]),
)
def test_8_3_a_malformed_request_is_a_stream_error(peer: Peer, headers: list[tuple[str, str]]) -> None:
    """Sections 8.2.1, 8.2.2 and 8.3.1. Other streams go on."""
    assert peer.begin(1, encoded(headers)) == []
    assert peer.reset_codes() == [(1, ErrorCode.PROTOCOL_ERROR)]
    assert peer.begin(3) == [RequestReceived(3, "/a.B/C", False)]


def test_a_block_that_is_known_means_the_same_until_the_table_changes(peer: Peer) -> None:
    """Indexed headers: the same bytes name another path, once another entry is the newest."""
    rest = b"\x83\x86"  # POST, http
    peer.begin(1, rest + b"\x44\x02/a")  # stored as entry 62
    assert peer.begin(3, rest + b"\xbe") == [RequestReceived(3, "/a", False)]
    peer.send(frame(FrameType.RST_STREAM, 0, 3, b"\x00" * 4))
    assert peer.begin(5, rest + b"\xbe") == [RequestReceived(5, "/a", False)]
    peer.send(frame(FrameType.RST_STREAM, 0, 5, b"\x00" * 4))
    assert peer.begin(7, rest + b"\x44\x02/b") == [RequestReceived(7, "/b", False)]
    peer.send(frame(FrameType.RST_STREAM, 0, 7, b"\x00" * 4))
    assert peer.begin(9, rest + b"\xbe") == [RequestReceived(9, "/b", False)]


def test_blocks_that_are_known_have_a_bound(peer: Peer) -> None:
    for number in range(200):
        peer.begin(2 * number + 1, encoded([*REQUEST[:2], (":path", f"/{number}")]))
        peer.send(frame(FrameType.RST_STREAM, 0, 2 * number + 1, b"\x00" * 4))
        peer.now += 1.0
    assert len(peer.server._decoder._known) <= 16


def test_headers_of_the_server_need_no_table_of_the_peer(peer: Peer) -> None:
    """RFC 7541, section 4.2: a peer may allow a table of 0 bytes, and wants to be told that it is."""
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    assert decoder.decode(encoded([("grpc-message", "x" * 300)])) == [("grpc-message", "x" * 300)]
