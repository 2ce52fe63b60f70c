"""Windows in both directions: answers wait for those of the peer, and h2 holds the peer to ours."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes

from backends.http2.frame_walk import DATA, HEADERS, MAX_FRAME, WINDOW_UPDATE, Http2Error
from backends.http2.server import FIRST_WINDOW, AnswerSent, DataReceived, StreamReset
from tests.support.http2_peer import (
    ALL,
    ANSWER,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    PADDED,
    TRAILERS,
    WINDOW,
    Peer,
    reset,
    settings,
    window_update,
)

MAX_WINDOW = (1 << 31) - 1


@pytest.mark.parametrize("streams", [(1,), (1, 3)])
def test_data_beyond_a_window_ends_the_connection(peer: Peer, streams: tuple[int, ...]) -> None:
    """Of a stream, and of the connection."""
    for stream in streams:
        peer.begin(stream)
        for _ in range(WINDOW // MAX_FRAME):
            peer.data(stream, b"x" * MAX_FRAME)
    peer.begin(5)
    with pytest.raises(Http2Error) as error:
        peer.data(5 if len(streams) > 1 else 1, b"x")
    assert error.value.code is ErrorCodes.FLOW_CONTROL_ERROR


def test_what_is_acknowledged_may_be_sent_again_padding_included(peer: Peer) -> None:
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
    peer.send(reset(1))
    for _ in range(10 * ALL // MAX_FRAME):
        peer.data(1, b"x" * MAX_FRAME)
    assert (WINDOW_UPDATE, 0) in {(kind, stream) for kind, _, stream, _ in peer.frames()}


def test_answers_wait_for_the_windows(peer: Peer) -> None:
    """Of the stream, then of the connection; the end comes behind them."""
    peer.begin()
    peer.send(settings({INITIAL_WINDOW_SIZE: 10}))
    peer.server.headers(1, ANSWER)
    peer.server.data(1, b"x" * 30_000)
    peer.server.end(1, TRAILERS)
    assert [len(data) for kind, _, _, data in peer.frames() if kind == DATA] == [10]
    assert (peer.server.unsent(1), peer.server.has_unsent) == (29_990, True)
    assert peer.send(window_update(1, 20_000)) == [AnswerSent(1)]
    assert [len(data) for *_, data in peer.frames()] == [16_384, 3_616]
    assert peer.send(window_update(1, 9_990)) == [AnswerSent(1)]
    assert [(kind, flags & END_STREAM) for kind, flags, _, _ in peer.frames()] == [(DATA, 0), (HEADERS, END_STREAM)]
    assert (peer.server.unsent(1), peer.server.has_unsent) == (0, False)


def test_the_window_of_the_connection_holds_all_streams_back(peer: Peer) -> None:
    for stream in (1, 3):
        peer.begin(stream)
        peer.send(window_update(stream, 1 << 20))
        peer.server.headers(stream, ANSWER)
        peer.server.data(stream, b"x" * 50_000)
    assert sum(len(data) for kind, _, _, data in peer.frames() if kind == DATA) == FIRST_WINDOW
    assert peer.send(window_update(0, 1 << 20)) == [AnswerSent(3)]
    assert sum(len(data) for *_, data in peer.frames()) == 100_000 - FIRST_WINDOW


def test_settings_make_a_window_smaller_than_nothing(peer: Peer) -> None:
    peer.begin()
    peer.server.headers(1, ANSWER)
    peer.server.data(1, b"x" * 60_000)
    peer.send(settings({INITIAL_WINDOW_SIZE: 0}))
    peer.server.data(1, b"y")
    peer.frames()
    assert peer.send(window_update(1, 60_000)) == []  # the window is 0 then
    assert peer.send(window_update(1, 1)) == [AnswerSent(1)]
    assert [data for *_, data in peer.frames()] == [b"y"]


@pytest.mark.parametrize("stream", [0, 1])
def test_a_window_that_overflows_is_an_error(peer: Peer, stream: int) -> None:
    """Of the connection, or of the stream alone."""
    peer.begin()
    if stream:
        assert peer.send(window_update(1, MAX_WINDOW)) == [StreamReset(1)]
        assert peer.reset_codes() == [(1, ErrorCodes.FLOW_CONTROL_ERROR)]
    else:
        with pytest.raises(Http2Error) as error:
            peer.send(window_update(0, MAX_WINDOW))
        assert error.value.code is ErrorCodes.FLOW_CONTROL_ERROR
