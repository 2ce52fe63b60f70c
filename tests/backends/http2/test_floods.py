"""Floods of frames that cost the server more than their sender."""

from __future__ import annotations

import pytest
from h2.errors import ErrorCodes

from backends.http2.frame_walk import (
    DATA,
    GOAWAY,
    HEADERS,
    LIMITS,
    MAX_PIECES,
    PERIOD,
    PING,
    PRIORITY,
    SETTINGS,
    Flood,
    Http2Error,
)
from backends.http2.server import ACK, StreamReset
from tests.support.http2_peer import (
    ANSWER,
    END_HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    REQUEST,
    TRAILERS,
    Peer,
    encoded,
    frame,
    reset,
    settings,
    window_update,
)

FLOODS = {
    "PING": (Flood.EMPTY, frame(PING, 0, 0, b"12345678")),
    "PRIORITY": (Flood.EMPTY, frame(PRIORITY, 0, 1, b"\x00" * 5)),
    "empty DATA": (Flood.EMPTY, frame(DATA, 0, 1)),
    "padding": (Flood.EMPTY, frame(DATA, PADDED, 1, b"\x00")),
    "unknown": (Flood.EMPTY, frame(0x99, 0, 0)),
    "GOAWAY": (Flood.EMPTY, frame(GOAWAY, 0, 0, bytes(8))),
    "answers to SETTINGS": (Flood.EMPTY, frame(SETTINGS, ACK, 0)),
    "SETTINGS": (Flood.SETTINGS, settings({INITIAL_WINDOW_SIZE: 9})),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_the_connection_and_the_same_frames_over_time_do_not(
    peer: Peer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, one = FLOODS[name]
    monkeypatch.setitem(LIMITS, kind, 50)
    peer.begin()
    for _ in range(300):
        peer.now += 1.01 * PERIOD / 50
        peer.send(one)
    with pytest.raises(Http2Error, match=f"50 {kind.value}") as error:
        peer.send(one * 60)
    assert error.value.code is ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "end",
    [reset, lambda stream: window_update(stream, (1 << 31) - 1)],
    ids=["by the peer", "provoked"],
)
def test_a_flood_of_resets_ends_the_connection(peer: Peer, end: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2023-44487, and CVE-2025-8671: the peer has the server reset its streams."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 50)
    sent = b"".join(
        frame(HEADERS, END_HEADERS, stream, encoded(REQUEST)) + end(stream)  # type: ignore[operator]
        for stream in range(1, 200, 2)
    )
    with pytest.raises(Http2Error, match="50 resets") as error:
        peer.send(sent)
    assert error.value.code is ErrorCodes.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "again",
    [frame(DATA, 0, 1, b"x"), frame(HEADERS, END_HEADERS, 1, encoded(REQUEST))],
    ids=["DATA", "HEADERS"],
)
def test_frames_of_streams_that_are_over_are_a_flood(peer: Peer, again: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the server reset the stream once more."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 50)
    peer.begin()
    peer.send(reset(1))
    with pytest.raises(Http2Error, match="50 resets"):
        peer.send(again * 60)


def test_a_peer_that_ends_streams_by_resets_behind_the_answer_is_no_flood(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, Flood.RESETS, 5)
    for stream in range(1, 100, 2):
        peer.begin(stream)
        peer.server.headers(stream, ANSWER)
        peer.server.end(stream, TRAILERS)
        peer.send(reset(stream))


def test_resets_of_calls_that_were_answered_in_part_are_no_flood(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Envoy that has read what it wants ends its call by a reset: at 600 calls/s, its connection would end."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 5)
    for stream in range(1, 100, 2):
        peer.begin(stream)
        peer.server.headers(stream, ANSWER)
        peer.server.data(stream, b"picked")
        assert peer.send(reset(stream)) == [StreamReset(stream)]


def test_chunks_behind_the_end_of_the_answer_are_no_flood(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picker that has seen enough ends its call while the data plane still sends."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 5)
    peer.begin()
    peer.server.headers(1, ANSWER)
    peer.server.end(1, TRAILERS)
    for _ in range(20):
        peer.data(1, b"x")
    assert peer.reset_codes() == []


@pytest.mark.parametrize("piece", [b"", b"\x00\x01a\x01b", b"x" * 16_384], ids=["empty", "small", "whole frames"])
def test_a_flood_of_continuation_ends_the_connection(peer: Peer, piece: bytes) -> None:
    """CVE-2024-27316: headers that have no end, in pieces of any size."""
    peer.begin(1, encoded(REQUEST), flags=0)
    with pytest.raises(Http2Error, match="headers of") as error:
        peer.send(frame(9, 0, 1, piece) * MAX_PIECES)
    assert error.value.code is ErrorCodes.ENHANCE_YOUR_CALM
