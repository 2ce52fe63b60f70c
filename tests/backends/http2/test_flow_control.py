"""Windows in both directions as RFC 9113 has them, sections 5.2 and 6.9: tests name the sections."""

from __future__ import annotations

import pytest

from backends.http2.frames import (
    END_STREAM,
    MAX_FRAME,
    MAX_WINDOW,
    PADDED,
    ErrorCode,
    FrameType,
    Http2Error,
    Setting,
    frame,
    settings_frame,
    window_update,
)
from backends.http2.outbound import FIRST_WINDOW, Outbound
from backends.http2.server import (
    AnswerSent,
    DataReceived,
    StreamReset,
)
from backends.http2.stream import Stream
from tests.support.http2_peer import ALL, HEADERS, TRAILERS, WINDOW, Peer, cut


def test_6_9_data_beyond_the_window_of_a_stream_is_a_stream_error(peer: Peer) -> None:
    peer.begin()
    for _ in range(WINDOW // MAX_FRAME):
        peer.data(1, b"x" * MAX_FRAME)
    assert peer.data(1, b"x") == [StreamReset(1)]
    assert peer.reset_codes() == [(1, ErrorCode.FLOW_CONTROL_ERROR)]


def test_6_9_data_beyond_the_window_of_the_connection_is_a_connection_error(peer: Peer) -> None:
    """Of streams that are over too."""
    for stream in (1, 3):
        peer.begin(stream)
        for _ in range(WINDOW // MAX_FRAME):
            peer.data(stream, b"x" * MAX_FRAME)
    peer.send(frame(FrameType.RST_STREAM, 0, 3, b"\x00" * 4))
    with pytest.raises(Http2Error) as error:
        peer.data(3, b"x")
    assert error.value.code is ErrorCode.FLOW_CONTROL_ERROR


def test_6_9_what_is_acknowledged_may_be_sent_again_padding_included(peer: Peer) -> None:
    """Ten times the windows pass through."""
    peer.begin()
    sent = 0
    while sent < 10 * ALL:
        (event,) = peer.data(1, b"\x05" + b"x" * 8_000 + b"\x00" * 5, PADDED)
        assert isinstance(event, DataReceived)
        assert (len(event.data), event.size) == (8_000, 8_006)
        peer.server.acknowledge(1, event.size)
        sent += event.size


def test_data_of_a_stream_that_is_over_is_returned_to_the_connection(peer: Peer) -> None:
    peer.begin()
    peer.send(frame(FrameType.RST_STREAM, 0, 1, b"\x00" * 4))
    for _ in range(10 * ALL // MAX_FRAME):
        peer.data(1, b"x" * MAX_FRAME)
    assert {(kind, stream) for kind, _, stream, _ in peer.frames()} == {(FrameType.WINDOW_UPDATE, 0)}


def test_6_9_answers_wait_for_the_windows(peer: Peer) -> None:
    """Of the stream, then of the connection; the end comes behind them."""
    peer.begin()
    peer.send(settings_frame({Setting.INITIAL_WINDOW_SIZE: 10}))
    peer.server.headers(1, HEADERS)
    peer.server.data(1, b"x" * 30_000)
    peer.server.end(1, TRAILERS)
    assert [len(data) for kind, _, _, data in peer.frames() if kind == FrameType.DATA] == [10]
    assert (peer.server.unsent(1), peer.server.has_unsent) == (29_990, True)
    assert peer.send(window_update(1, 20_000)) == [AnswerSent(1)]
    assert [len(data) for *_, data in peer.frames()] == [16_384, 3_616]
    assert peer.send(window_update(1, 9_990)) == [AnswerSent(1)]
    assert [(kind, flags & END_STREAM) for kind, flags, _, _ in peer.frames()] == [
        (FrameType.DATA, 0),
        (FrameType.HEADERS, END_STREAM),
    ]
    assert (peer.server.unsent(1), peer.server.has_unsent) == (0, False)


def test_6_9_the_window_of_the_connection_holds_all_streams_back(peer: Peer) -> None:
    for stream in (1, 3):
        peer.begin(stream)
        peer.send(window_update(stream, 1 << 20))
        peer.server.data(stream, b"x" * 50_000)
    assert sum(len(data) for kind, _, _, data in peer.frames() if kind == FrameType.DATA) == FIRST_WINDOW
    assert peer.send(window_update(0, 1 << 20)) == [AnswerSent(3)]
    assert sum(len(data) for *_, data in peer.frames()) == 100_000 - FIRST_WINDOW


def test_6_9_small_answers_wait_for_the_window_of_the_connection_too(peer: Peer) -> None:
    peer.begin(1)
    peer.server.data(1, b"x" * FIRST_WINDOW)
    peer.begin(3)
    peer.frames()
    peer.server.data(3, b"small")
    assert peer.frames() == []
    assert peer.send(window_update(0, 5)) == [AnswerSent(3)]
    assert [data for *_, data in peer.frames()] == [b"small"]


def test_an_answer_is_sent_in_order_where_a_window_opens_in_between() -> None:
    out, stream = Outbound(), Stream(1, sendable=0, receivable=0)
    out.data(stream, b"first")
    out.widen_stream(stream, 100)
    out.data(stream, b"second")
    assert b"".join(data for *_, data in cut(out.take())) == b"firstsecond"


def test_6_9_2_settings_make_a_window_smaller_than_nothing(peer: Peer) -> None:
    peer.begin()
    peer.server.data(1, b"x" * 60_000)
    peer.send(settings_frame({Setting.INITIAL_WINDOW_SIZE: 0}))
    peer.server.data(1, b"y")
    peer.frames()
    assert peer.send(window_update(1, 60_000)) == []  # the window is 0 then
    assert peer.send(window_update(1, 1)) == [AnswerSent(1)]
    assert [data for *_, data in peer.frames()] == [b"y"]


@pytest.mark.parametrize("stream", [0, 1])
def test_6_9_1_a_window_that_overflows_is_an_error(peer: Peer, stream: int) -> None:
    """Of the connection, or of the stream alone."""
    peer.begin()
    if stream:
        assert peer.send(window_update(1, MAX_WINDOW)) == [StreamReset(1)]
        assert peer.reset_codes() == [(1, ErrorCode.FLOW_CONTROL_ERROR)]
    else:
        with pytest.raises(Http2Error) as error:
            peer.send(window_update(0, MAX_WINDOW))
        assert error.value.code is ErrorCode.FLOW_CONTROL_ERROR


def test_6_9_2_settings_that_make_a_window_overflow_are_a_connection_error(peer: Peer) -> None:
    peer.begin()
    peer.send(window_update(1, 1 << 20))
    with pytest.raises(Http2Error) as error:
        peer.send(settings_frame({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}))
    assert error.value.code is ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("stream", [0, 1])
def test_6_9_a_window_update_of_nothing_is_an_error(peer: Peer, stream: int) -> None:
    peer.begin()
    if stream:
        assert peer.send(window_update(1, 0)) == [StreamReset(1)]
    else:
        with pytest.raises(Http2Error):
            peer.send(window_update(0, 0))
