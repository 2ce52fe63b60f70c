"""What a peer may have the server hold or do at once."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes

from backends.http2.frame_walk import FRAMES, MAX_FRAME, PING, PREFACE, Http2Error
from backends.http2.server import MAX_LIST, Http2Server, RequestReceived
from tests.support.http2_peer import (
    ALL,
    END_HEADERS,
    REQUEST,
    STREAMS,
    WINDOW,
    Peer,
    encoded,
    frame,
    in_pieces,
    settings,
)

BEGUN = RequestReceived(1, "/a.B/C")


def test_a_connection_begins_with_the_preface_at_any_split() -> None:
    server = Http2Server(STREAMS, WINDOW, ALL)
    server.start()
    for byte in PREFACE + settings({}) + frame(1, END_HEADERS, 1, encoded(REQUEST)):
        events = server.receive(bytes([byte]), 0.0)
    assert events == [BEGUN]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.1"])
def test_another_beginning_is_a_connection_error(data: bytes) -> None:
    with pytest.raises(Http2Error) as error:
        Http2Server(STREAMS, WINDOW, ALL).receive(data, 0.0)
    assert error.value.code is ErrorCodes.PROTOCOL_ERROR


def test_a_frame_that_is_too_long_is_refused_by_its_head(peer: Peer) -> None:
    with pytest.raises(Http2Error) as error:
        peer.send((MAX_FRAME + 1).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01")
    assert error.value.code is ErrorCodes.FRAME_SIZE_ERROR


def test_a_read_handles_few_frames(peer: Peer) -> None:
    data = frame(PING, 0, 0, b"12345678") * (2 * FRAMES)
    peer.server.receive(data, 0.0)
    assert (len(peer.frames()), peer.server.is_behind) == (FRAMES, True)
    peer.server.receive(b"", 0.0)
    assert len(peer.frames()) == FRAMES
    peer.server.receive(b"", 0.0)
    assert not peer.server.is_behind


@pytest.mark.parametrize("count", [1, 3])
def test_a_read_handles_few_bytes_of_headers(count: int) -> None:
    """In one frame or in more."""
    peer = Peer(streams=1_000)
    block = encoded([*REQUEST, ("x", "y" * (MAX_FRAME - 200))])
    data = b"".join(in_pieces(stream, block, -(-len(block) // count)) for stream in range(1, 20, 2))
    events = peer.server.receive(data, 0.0)
    assert (len(events) <= 1, peer.server.is_behind) == (True, True)
    assert len(peer.send(b"")) + len(events) == 10


def test_headers_as_long_as_a_caller_may_send_them_to_a_data_plane_are_read(peer: Peer) -> None:
    """Envoy takes 60 KB, and sends the caller's `tracestate` on: the connection, with the calls of others, stays."""
    peer.send(in_pieces(1, encoded([*REQUEST, ("tracestate", "x" * 60_000)]), MAX_FRAME))
    assert peer.events == [BEGUN]


def test_a_small_block_that_expands_ends_the_connection(peer: Peer) -> None:
    """HPACK bomb: an entry of the table, named again and again (CVE-2016-1544)."""
    stored = b"\x40\x01x\x7f\xbf\x1e" + b"y" * 4_030
    with pytest.raises(Http2Error, match="larger than") as error:
        peer.begin(1, encoded(REQUEST) + stored + b"\xbe" * (MAX_LIST // 4_000 + 2))
    assert error.value.code is ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("block", [b"\xff" + b"\x80" * 40, b"\x00\x05ab", b"\xc0", b"\x3f\xff\xff\x7f"])
def test_a_block_that_cannot_be_decoded_is_a_connection_error(peer: Peer, block: bytes) -> None:
    """An endless integer, a short string, an index of nothing, a table larger than it may be."""
    with pytest.raises(Http2Error):
        peer.begin(1, block)


def test_streams_beyond_the_setting_end_the_connection(peer: Peer) -> None:
    for stream in range(1, 2 * STREAMS, 2):
        assert peer.begin(stream)
    with pytest.raises(Http2Error, match="streams"):
        peer.begin(2 * STREAMS + 1)


def test_a_table_of_the_peers_size_keeps_no_message_of_ours(peer: Peer) -> None:
    """SETTINGS_HEADER_TABLE_SIZE of 4 GB: messages of failed calls would fill it."""
    from gateway.parts.picker.grpc_server import trailers

    peer.send(settings({1: (1 << 32) - 1}))
    for stream in range(1, 100, 2):
        peer.begin(stream, flags=END_HEADERS | 1)
        peer.server.headers(stream, [(":status", "200")])
        peer.server.end(stream, trailers(3, f"message {stream}"))
    assert len(peer.server._h2.encoder.header_table.dynamic_entries) < 5
