"""Floods of frames that cost the server more than their sender."""

from __future__ import annotations

import pytest

from backends.http2.flood import LIMITS, PERIOD, Flood
from backends.http2.frames import (
    END_HEADERS,
    PADDED,
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
    StreamReset,
)
from tests.support.http2_peer import HEADERS, REQUEST, TRAILERS, Peer

FLOODS = {
    "PING": (Flood.EMPTY, frame(FrameType.PING, 0, 0, b"12345678")),
    "PRIORITY": (Flood.EMPTY, frame(FrameType.PRIORITY, 0, 1, b"\x00" * 5)),
    "empty DATA": (Flood.EMPTY, frame(FrameType.DATA, 0, 1)),
    "padding": (Flood.EMPTY, frame(FrameType.DATA, PADDED, 1, b"\x00")),
    "unknown": (Flood.EMPTY, frame(0x99, 0, 0)),
    "SETTINGS": (Flood.SETTINGS, settings_frame({Setting.INITIAL_WINDOW_SIZE: 9})),
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
    assert error.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("of", ["peer", "server"])
def test_a_flood_of_resets_ends_the_connection(peer: Peer, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2023-44487, and CVE-2025-8671: the peer has the server reset its streams."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 50)
    end = frame(FrameType.RST_STREAM, 0, 1, b"\x00" * 4) if of == "peer" else window_update(1, 0)
    sent = b"".join(
        frame(FrameType.HEADERS, END_HEADERS, stream, encoded(REQUEST)) + end[:5] + stream.to_bytes(4, "big") + end[9:]
        for stream in range(1, 200, 2)
    )
    with pytest.raises(Http2Error, match="50 resets") as error:
        peer.send(sent)
    assert error.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_peer_that_ends_streams_by_resets_behind_the_answer_is_no_flood(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, Flood.RESETS, 5)
    for stream in range(1, 100, 2):
        peer.begin(stream)
        peer.server.end(stream, TRAILERS)
        peer.send(frame(FrameType.RST_STREAM, 0, stream, b"\x00" * 4))


def test_resets_of_calls_that_were_answered_in_part_are_no_flood(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Envoy that has read what it wants ends its call by a reset: at 600 calls/s, its connection would end."""
    monkeypatch.setitem(LIMITS, Flood.RESETS, 5)
    for stream in range(1, 100, 2):
        peer.begin(stream)
        peer.server.headers(stream, HEADERS)
        peer.server.data(stream, b"picked")
        assert peer.send(frame(FrameType.RST_STREAM, 0, stream, b"\x00" * 4)) == [StreamReset(stream)]


def test_settings_that_repeat_a_window_look_at_the_streams_once(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame holds 2,730 settings: with a thousand streams, 100 frames would take minutes."""
    looked = list[int]()
    monkeypatch.setattr(peer.server._out, "set_initial_window", lambda size, _: looked.append(size))
    peer.send(frame(FrameType.SETTINGS, 0, 0, b"".join(b"\x00\x04" + n.to_bytes(4, "big") for n in range(2_730))))
    assert looked == [2_729]
