"""Server-sent events."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.stream.redaction import UsageStripper
from backends.stream.sse import LINE_LIMIT, ServerSentEvent, SseDecoder, StreamError

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts"

STREAM = (
    b"\xef\xbb\xbfdata: one\n"
    b": a comment\n\n"
    b"event: named\r\ndata:two\r\ndata:  three\r\n\r\n"
    b"data\rdata\r\r"
    b"id: 7\nretry: 100\nevent: lost\n\n"
    b"data: \xc3\xa9: x\r\n\n"
    b"data: left"
)
EVENTS = [
    ServerSentEvent(b"", b"one"),
    ServerSentEvent(b"named", b"two\n three"),
    ServerSentEvent(b"", b"\n"),
    ServerSentEvent(b"", b"\xc3\xa9: x"),
]


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at each of these offsets."""
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def decoded(parts: list[bytes]) -> list[ServerSentEvent]:
    decoder = SseDecoder()
    return [event for part in parts for event in decoder.feed(part)]


def test_a_stream_is_decoded_by_the_specification() -> None:
    """Comments, names, several data lines, one space, all three line ends, a byte order mark, a dropped rest."""
    assert decoded([STREAM]) == EVENTS


def test_a_stream_split_at_any_byte_is_decoded_alike() -> None:
    """Every split in two, and byte by byte."""
    for cut in range(len(STREAM) + 1):
        assert decoded([STREAM[:cut], STREAM[cut:]]) == EVENTS
    assert decoded([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(
    st.lists(st.sampled_from([b"data: a", b"data:b", b"", b": c", b"event: e", b"\xef\xbb\xbf", b"x"])),
    st.sampled_from([b"\r", b"\r\n"]),
    st.lists(st.integers(0, 500)),
)
def test_splits_and_line_ends_never_matter(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    """Any lines with any ends, at any splits, equal the events of the same lines with line feeds."""
    stream, plain = (b"".join(line + ending for line in lines) for ending in (end, b"\n"))
    assert decoded(pieces(stream, cuts)) == decoded([plain])


def test_pending_is_true_within_an_event() -> None:
    """Between events a decoder has no state."""
    decoder = SseDecoder()
    seen = []
    for part in (b"", b"data: x", b"\n", b"\n", b"event: e\n", b"\n"):
        decoder.feed(part)
        seen.append(decoder.pending)
    assert seen == [False, True, True, False, True, False]


def test_the_last_event_may_lack_its_blank_line() -> None:
    """`flush` returns the event, as OpenAI's clients do; a second call returns none."""
    decoder = SseDecoder()
    decoder.feed(b"data: [DONE]")
    assert [decoder.flush(), decoder.flush()] == [[ServerSentEvent(b"", b"[DONE]")], []]


@pytest.mark.parametrize("line", [b"x" * 65536, b"data: " + b"x" * 65536, b"data: x\n" * 8192])
def test_lines_and_events_are_bounded(line: bytes) -> None:
    """A line, or an event of many lines, above a megabyte ends the stream."""
    decoder = SseDecoder()
    for _ in range(LINE_LIMIT // len(line) - 1):
        decoder.feed(line)
    with pytest.raises(StreamError):
        decoder.feed(line * 2)
    assert decoder.feed(b"\ndata: x\n\n") == [ServerSentEvent(b"", b"x")]


# --------------------------------------------------------------------------- usage removal


def stripped(parts: list[bytes]) -> bytes:
    stripper = UsageStripper()
    return b"".join([*map(stripper.feed, parts), stripper.close()])


def usage_event(separator: bytes = b"", end: bytes = b"\n\n") -> bytes:
    return b'data: {"id":"x","choices":' + separator + b'[],"usage":{"prompt_tokens":1}}' + end


@pytest.mark.parametrize("name", ["vllm_chat_stream.sse", "vllm_chat_stream_cached.sse", "vllm_completion_stream.sse"])
def test_a_real_stream_loses_its_usage_event_and_nothing_else(name: str) -> None:
    """At every split; compared with the transcript without that event."""
    stream = (TRANSCRIPTS / name).read_bytes()
    events = re.split(rb"(?<=\n\n)", stream)
    expected = b"".join(event for event in events if b'"choices":[]' not in event)
    assert len(expected) < len(stream)
    for cut in range(len(stream) + 1):
        assert stripped([stream[:cut], stream[cut:]]) == expected


@pytest.mark.parametrize("name", ["vllm_chat_stream_without_usage.sse", "vllm_engine_died_mid_stream.sse"])
def test_a_stream_without_a_usage_event_passes_verbatim(name: str) -> None:
    """Byte by byte."""
    stream = (TRANSCRIPTS / name).read_bytes()
    assert stripped([stream[i : i + 1] for i in range(len(stream))]) == stream


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[],"usage":null,"prompt_filter_results":[]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"choices\\":[],\\"usage\\":{}"}}],"usage":null}\n\n',
        b'data: {"choices":[],"usage":\n\n',
        b': "usage" "choices":[]\n\n',
        b'"usage" in "choices":[]\n\n',
    ],
)
def test_only_a_pure_usage_event_is_removed(event: bytes) -> None:
    """Usage beside content, text that looks like usage, and unreadable events are kept."""
    stream = b"data: 1\n\n" + event + b"data: [DONE]\n\n"
    assert stripped([stream]) == stream
    assert stripped([stream[i : i + 1] for i in range(len(stream))]) == stream


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
@pytest.mark.parametrize("separator", [b"", b" ", b"\ndata: "])
def test_a_usage_event_is_removed_in_any_form(separator: bytes, end: bytes) -> None:
    """White space, a second data line, any line ends, at every split."""
    before, after = b"data: 1" + end, b"data: [DONE]" + end
    stream = before + usage_event(separator, end) + after
    for cut in range(len(stream) + 1):
        assert stripped([stream[:cut], stream[cut:]]) == before + after


def test_only_an_incomplete_event_is_buffered() -> None:
    """Whole events pass at once, in the same read."""
    stripper = UsageStripper()
    assert stripper.feed(b"data: 1\n\ndata: 2\n\nda") == b"data: 1\n\ndata: 2\n\n"
    assert stripper.feed(b"ta: 3\n") == b""
    assert stripper.feed(b"\n") == b"data: 3\n\n"
    assert stripper.close() == b""


def test_a_final_usage_event_without_a_blank_line_is_removed() -> None:
    """A stream may end without its last line feed."""
    assert stripped([b"data: 1\n\n" + usage_event(end=b"\n")]) == b"data: 1\n\n"
    assert stripped([b"data: 1\n\ndata: 2"]) == b"data: 1\n\ndata: 2"


def test_an_event_beyond_the_buffer_passes() -> None:
    """Too large for usage; memory stays bounded, and every byte passes."""
    stripper = UsageStripper()
    out = b"".join(stripper.feed(b"x" * 65536) for _ in range(40))
    assert len(stripper._held) <= LINE_LIMIT
    assert out + stripper.close() == b"x" * 65536 * 40


@example([b"", b"", usage_event(end=b""), b'data: {"usage":1}'], b"\n", [3])
@given(
    st.lists(
        st.sampled_from([b"data: 1", usage_event(end=b""), b": c", b"", b"event: e", b'data: {"usage":1}']), max_size=12
    ),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 1000)),
)
def test_usage_removal_is_the_same_at_any_split(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    """The remaining bytes do not depend on the reads."""
    stream = b"".join(line + end + end for line in lines)
    assert stripped(pieces(stream, cuts)) == stripped([stream])
