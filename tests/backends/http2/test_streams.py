"""Streams and control frames as RFC 9113 has them, sections 5.1, 6.4 to 6.8 and 8.1: tests name the sections."""

from __future__ import annotations

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived as ClientData
from h2.events import StreamEnded, TrailersReceived
from h2.settings import SettingCodes

from backends.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    MAX_FRAME,
    MAX_WINDOW,
    ErrorCode,
    FrameType,
    Http2Error,
    Setting,
    frame,
    settings_frame,
    window_update,
)
from backends.http2.header_blocks import encoded
from backends.http2.server import (
    EARLY,
    DataReceived,
    Http2Server,
    PeerLeaves,
    PingAcknowledged,
    RequestReceived,
    StreamReset,
)
from tests.support.http2_peer import ALL, HEADERS, REQUEST, STREAMS, TRAILERS, WINDOW, Peer


@pytest.mark.parametrize(
    "sent",
    [
        frame(FrameType.DATA, 0, 1, b"x"),
        frame(FrameType.RST_STREAM, 0, 1, b"\x00" * 4),
        window_update(1, 5),
        frame(FrameType.DATA, 0, 0, b"x"),
        frame(FrameType.RST_STREAM, 0, 0, b"\x00" * 4),
        frame(FrameType.HEADERS, END_HEADERS, 2, encoded(REQUEST)),
        frame(FrameType.HEADERS, END_HEADERS, 0, encoded(REQUEST)),
        frame(FrameType.PUSH_PROMISE, END_HEADERS, 1, b"\x00\x00\x00\x02"),
        frame(FrameType.PRIORITY, 0, 0, b"\x00" * 5),
    ],
)
def test_5_1_frames_of_a_stream_that_was_not_begun_are_connection_errors(peer: Peer, sent: bytes) -> None:
    with pytest.raises(Http2Error) as error:
        peer.send(sent)
    assert error.value.code is ErrorCode.PROTOCOL_ERROR


def test_5_1_data_after_the_end_is_a_stream_error(peer: Peer) -> None:
    peer.begin(flags=END_HEADERS | END_STREAM)
    assert peer.data(1, b"x") == [StreamReset(1)]
    assert peer.reset_codes() == [(1, ErrorCode.STREAM_CLOSED)]


def test_5_1_frames_on_their_way_to_a_stream_that_is_over_are_ignored(peer: Peer) -> None:
    peer.begin()
    peer.send(frame(FrameType.RST_STREAM, 0, 1, b"\x00" * 4))
    peer.frames()
    reset = frame(FrameType.RST_STREAM, 0, 1, b"\x00" * 4)
    priority = frame(FrameType.PRIORITY, 0, 1, b"\x00" * 5)
    assert peer.send(frame(FrameType.DATA, 0, 1, b"x") + window_update(1, 5) + reset + priority) == []
    assert peer.frames() == []


def test_5_1_1_numbers_of_streams_grow(peer: Peer) -> None:
    peer.begin(5)
    peer.begin(3)
    assert peer.reset_codes() == [(3, ErrorCode.STREAM_CLOSED)]


def test_5_1_2_streams_beyond_the_setting_are_refused(peer: Peer) -> None:
    """A peer may try them elsewhere. Before it has read the setting, more are served."""
    for stream in range(1, 2 * STREAMS + 2, 2):
        assert peer.begin(stream)
    peer.acknowledge_settings()
    late = 2 * STREAMS + 3
    assert peer.begin(late) == []
    assert peer.reset_codes() == [(late, ErrorCode.REFUSED_STREAM)]


def test_streams_without_number_are_refused_before_the_settings_are_read(peer: Peer) -> None:
    for stream in range(1, 2 * EARLY * STREAMS + 1, 2):
        peer.begin(stream)
    assert peer.begin(2 * EARLY * STREAMS + 1) == []


def test_5_1_a_stream_is_forgotten_when_both_have_said_all(peer: Peer) -> None:
    """In any order: no stream is left behind a call."""
    for stream, peer_first in ((1, True), (3, False)):
        peer.begin(stream)
        if peer_first:
            peer.data(stream, b"", END_STREAM)
        peer.server.headers(stream, HEADERS)
        peer.server.end(stream, TRAILERS)
        if not peer_first:
            assert stream in peer.server._streams
            peer.data(stream, b"", END_STREAM)
        assert not peer.server._streams


def test_8_1_trailers_end_the_request(peer: Peer) -> None:
    peer.begin()
    found = peer.begin(1, encoded([("checksum", "1")]), flags=END_HEADERS | END_STREAM)
    assert found == [DataReceived(1, b"", 0, True)]


@pytest.mark.parametrize(("block", "flags"), [(b"", 0), (encoded([(":path", "/")]), END_STREAM)])
def test_8_1_trailers_that_are_malformed_are_a_stream_error(peer: Peer, block: bytes, flags: int) -> None:
    """Without the end of the stream, or with a pseudo-header."""
    peer.begin()
    assert peer.begin(1, block, flags=END_HEADERS | flags) == [StreamReset(1)]
    assert peer.reset_codes() == [(1, ErrorCode.PROTOCOL_ERROR)]


@pytest.mark.parametrize(
    ("kind", "flags", "stream", "size", "code"),
    [
        (FrameType.PING, 0, 0, 7, ErrorCode.FRAME_SIZE_ERROR),
        (FrameType.PING, 0, 1, 8, ErrorCode.PROTOCOL_ERROR),
        (FrameType.SETTINGS, 0, 0, 5, ErrorCode.FRAME_SIZE_ERROR),
        (FrameType.SETTINGS, ACK, 0, 6, ErrorCode.FRAME_SIZE_ERROR),
        (FrameType.SETTINGS, 0, 1, 0, ErrorCode.PROTOCOL_ERROR),
        (FrameType.GOAWAY, 0, 1, 8, ErrorCode.PROTOCOL_ERROR),
        (FrameType.GOAWAY, 0, 0, 7, ErrorCode.FRAME_SIZE_ERROR),
        (FrameType.RST_STREAM, 0, 1, 3, ErrorCode.FRAME_SIZE_ERROR),
        (FrameType.WINDOW_UPDATE, 0, 1, 5, ErrorCode.FRAME_SIZE_ERROR),
        (FrameType.PRIORITY, 0, 1, 4, ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_6_frames_of_a_wrong_size_or_stream_are_connection_errors(
    peer: Peer, kind: FrameType, flags: int, stream: int, size: int, code: ErrorCode
) -> None:
    peer.begin()
    with pytest.raises(Http2Error) as error:
        peer.send(frame(kind, flags, stream, b"\x00" * size))
    assert error.value.code is code


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        (Setting.ENABLE_PUSH, 2, ErrorCode.PROTOCOL_ERROR),
        (Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW + 1, ErrorCode.FLOW_CONTROL_ERROR),
        (Setting.MAX_FRAME_SIZE, MAX_FRAME - 1, ErrorCode.PROTOCOL_ERROR),
        (Setting.MAX_FRAME_SIZE, 1 << 24, ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_6_5_2_values_of_settings_have_bounds(peer: Peer, setting: Setting, value: int, code: ErrorCode) -> None:
    with pytest.raises(Http2Error) as error:
        peer.send(settings_frame({setting: value}))
    assert error.value.code is code


def test_6_5_3_settings_are_acknowledged_and_unknown_ones_ignored(peer: Peer) -> None:
    peer.send(frame(FrameType.SETTINGS, 0, 0, b"\xff\xff\x00\x00\x00\x01"))
    assert peer.frames() == [(FrameType.SETTINGS, ACK, 0, b"")]


def test_6_7_ping_is_answered_and_its_answer_reported(peer: Peer) -> None:
    peer.send(frame(FrameType.PING, 0, 0, b"12345678"))
    assert peer.frames() == [(FrameType.PING, ACK, 0, b"12345678")]
    assert peer.send(frame(FrameType.PING, ACK, 0, b"87654321")) == [PingAcknowledged(b"87654321")]
    assert peer.frames() == []


def test_6_8_goaway_of_the_peer_leaves_its_streams_open(peer: Peer) -> None:
    peer.begin()
    assert peer.send(frame(FrameType.GOAWAY, 0, 0, b"\x00" * 8 + b"bye")) == [PeerLeaves()]
    assert peer.data(1, b"x") == [DataReceived(1, b"x", 1, False)]


def test_6_8_goaway_names_the_last_stream(peer: Peer) -> None:
    """While it drains all that are on their way; at its end those that it has seen."""
    peer.begin(7)
    peer.server.drain()
    peer.server.close(ErrorCode.PROTOCOL_ERROR)
    (draining, closing) = [data for kind, *_, data in peer.frames() if kind == FrameType.GOAWAY]
    assert draining == MAX_WINDOW.to_bytes(4, "big") + b"\x00" * 4
    assert closing == (7).to_bytes(4, "big") + b"\x00\x00\x00\x01"


def test_a_whole_exchange_with_h2() -> None:
    server, client = Http2Server(STREAMS, WINDOW, ALL), H2Connection(H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    client.update_settings({SettingCodes.HEADER_TABLE_SIZE: 0})
    server.start()
    client.receive_data(server.take())
    for stream in (1, 3, 5):
        client.send_headers(stream, REQUEST)
        client.send_data(stream, b"question", end_stream=True, pad_length=7)
        events = server.receive(client.data_to_send(), 0.0)
        assert events == [RequestReceived(stream, "/a.B/C", False), DataReceived(stream, b"question", 16, True)]
        server.headers(stream, HEADERS)
        server.data(stream, b"answer")
        server.end(stream, TRAILERS)
        told = client.receive_data(server.take())
        assert [event.data for event in told if isinstance(event, ClientData)] == [b"answer"]
        assert [event.headers for event in told if isinstance(event, TrailersReceived)] == [[("grpc-status", "0")]]
        assert any(isinstance(event, StreamEnded) for event in told)
    assert server.take() == b""
