"""Streams, GOAWAY and PING as the picker uses them."""

from __future__ import annotations

import pytest

from backends.http2.frame_walk import DATA, GOAWAY, HEADERS, PING, RST_STREAM, Http2Error
from backends.http2.server import (
    ACK,
    DataReceived,
    PeerLeaves,
    PingAcknowledged,
    RequestEnded,
    RequestReceived,
    StreamReset,
)
from tests.support.http2_peer import ANSWER, END_HEADERS, END_STREAM, REQUEST, TRAILERS, Peer, encoded, frame, reset


def test_frames_of_unknown_types_are_ignored(peer: Peer) -> None:
    assert peer.send(frame(0x77, 0xFF, 9, b"x" * 90)) == []
    assert peer.begin() == [RequestReceived(1, "/a.B/C")]


def test_data_after_the_end_is_a_stream_error(peer: Peer) -> None:
    peer.begin(flags=END_HEADERS | END_STREAM)
    assert peer.data(1, b"x") == [StreamReset(1)]
    assert [kind for kind, *_ in peer.frames()] == [RST_STREAM]


def test_a_stream_is_forgotten_when_both_have_said_all(peer: Peer) -> None:
    """In any order: no stream is left behind a call."""
    for stream, peer_first in ((1, True), (3, False)):
        peer.begin(stream)
        if peer_first:
            peer.data(stream, b"", END_STREAM)
        peer.server.headers(stream, ANSWER)
        peer.server.end(stream, TRAILERS)
        if not peer_first:
            assert stream in peer.server._streams
            peer.data(stream, b"", END_STREAM)
        assert not peer.server._streams


def test_a_stream_that_was_reset_takes_nothing(peer: Peer) -> None:
    peer.begin()
    peer.server.headers(1, ANSWER)
    peer.send(reset(1))
    peer.frames()
    peer.server.data(1, b"late")
    peer.server.end(1, TRAILERS)
    peer.server.acknowledge(1, 100)
    assert peer.frames() == []


def test_trailers_end_the_request(peer: Peer) -> None:
    peer.begin()
    found = peer.begin(1, encoded([("checksum", "1")]), flags=END_HEADERS | END_STREAM)
    assert found == [RequestEnded(1)]


def test_ping_is_answered_and_its_answer_reported(peer: Peer) -> None:
    peer.send(frame(PING, 0, 0, b"12345678"))
    assert peer.frames() == [(PING, ACK, 0, b"12345678")]
    assert peer.send(frame(PING, ACK, 0, b"87654321")) == [PingAcknowledged(b"87654321")]
    assert peer.frames() == []


def test_goaway_of_the_peer_leaves_its_streams_open(peer: Peer) -> None:
    """Between other frames of a read."""
    peer.begin()
    sent = frame(DATA, 0, 1, b"x") + frame(GOAWAY, 0, 0, bytes(8) + b"bye") + frame(DATA, 0, 1, b"y")
    assert peer.send(sent) == [DataReceived(1, b"x", 1), DataReceived(1, b"y", 1), PeerLeaves()]
    peer.server.headers(1, ANSWER)
    assert [kind for kind, *_ in peer.frames()] == [HEADERS]


def test_a_server_that_drains_serves_streams_on_their_way(peer: Peer) -> None:
    """GOAWAY names the largest stream, and comes before the PING whose answer tells that it was read."""
    peer.server.ping(b"87654321")
    peer.server.drain()
    assert peer.frames() == [
        (GOAWAY, 0, 0, b"\x7f\xff\xff\xff" + bytes(4)),
        (PING, 0, 0, b"87654321"),
    ]
    assert peer.begin(7) == [RequestReceived(7, "/a.B/C")]


def test_a_peer_that_breaks_the_protocol_is_told_and_nothing_else_is_sent(peer: Peer) -> None:
    peer.begin(7)
    with pytest.raises(Http2Error) as error:
        peer.send(frame(HEADERS, END_HEADERS, 2, encoded(REQUEST)))
    peer.server.close(error.value.code)
    peer.server.headers(7, ANSWER)
    peer.server.data(7, b"late")
    peer.server.acknowledge(7, 5)
    assert peer.frames() == [(GOAWAY, 0, 0, (7).to_bytes(4, "big") + b"\x00\x00\x00\x01")]
