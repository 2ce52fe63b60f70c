"""Server-sent events."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.stream.sse import (
    EVENT_LIMIT,
    EXCERPT_LIMIT,
    HELD_LIMIT,
    ExcerptDecoder,
    ServerSentEvent,
    SseDecoder,
    StreamError,
    UsageStripper,
    WholeEvents,
    excerpt,
)

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


@pytest.mark.parametrize("kind", [SseDecoder, ExcerptDecoder])
@pytest.mark.parametrize("line", [b"x" * 65536, b"data: " + b"x" * 65536, b"data: x\n" * 8192])
def test_lines_and_events_are_bounded(kind: type[SseDecoder], line: bytes) -> None:
    """A line, or an event of many lines, above the limit ends the stream; the decoder forgets the event."""
    decoder = kind()
    for _ in range(decoder.limit // len(line) - 1):
        decoder.feed(line)
    with pytest.raises(StreamError):
        decoder.feed(line * 2)
    assert decoder.feed(b"\ndata: x\n\n") == [ServerSentEvent(b"", b"x")]


# --------------------------------------------------------------------------- large events

LONG = "x" * 700
TEXTS = st.sampled_from(["", "a", LONG, LONG + '\\"', '"' * 300, "\\" * 301, "ä猫\N{GRINNING FACE}" * 200, "\n" * 300])
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8
)


def shortened(value: object) -> object:
    if isinstance(value, str):
        return "x" if len(json.dumps(value, ensure_ascii=False).encode()) > 256 else value
    if isinstance(value, list):
        return [shortened(each) for each in value]
    if isinstance(value, dict):
        return {shortened(name): shortened(each) for name, each in value.items()}
    return value


@given(VALUES, st.lists(st.integers(0, 9000), max_size=5))
def test_an_excerpt_of_json_has_its_short_strings_and_its_structure(value: object, cuts: list[int]) -> None:
    """Torn anywhere, with an excerpt of each beginning: within an escape, and within a character."""
    written = json.dumps(value, ensure_ascii=False).encode()
    text = b""
    for part in pieces(written, cuts):
        text = excerpt(text + part)
    read = json.loads(text)
    if not cuts:
        assert read == shortened(value)
    assert len(text) <= len(written)
    assert json.loads(excerpt(written)) == shortened(value)


@pytest.mark.parametrize("split", [4096, 65536])
def test_an_event_with_a_large_string_keeps_all_else(split: int) -> None:
    """Of 8 MiB, 1 MiB at most is held."""
    event = b'data: {"a": 1, "url": "data:image/png;base64,%b", "b": {"c": 2}}\n\n' % (b"iVBOR" * (8 << 18))
    decoder, found, most = ExcerptDecoder(), [], 0
    for at in range(0, len(event), split):
        found += decoder.feed(event[at : at + split])
        most = max(most, decoder.held_bytes)
    (one,) = found
    assert (json.loads(one.data)["b"], json.loads(one.data)["url"][:1]) == ({"c": 2}, "x")
    assert most <= EXCERPT_LIMIT
    assert decoder.shortened is False


def test_an_event_that_has_to_be_whole_may_have_megabytes() -> None:
    """As translators need it."""
    event = ServerSentEvent(b"", b'"%b"' % (b"x" * (EVENT_LIMIT - 100)))
    assert decoded([bytes(event)[:-3], bytes(event)[-3:]]) == [event]


@settings(deadline=None)
@given(st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 2 * HELD_LIMIT + 500), max_size=8))
def test_a_large_event_passes_and_those_after_it_are_held_whole(end: bytes, cuts: list[int]) -> None:
    """All bytes pass, in order; half an event after the large one is held again."""
    large = b"data: " + b"x" * (2 * HELD_LIMIT) + end + end
    stream = b"data: 1" + end + end + large + b"data: 2" + end + end
    events = WholeEvents()
    passed = b"".join(map(events.feed, pieces(stream, cuts)))
    passed += events.feed(b"data: x" + end + end + b"data: half an event")
    assert passed == stream + b"data: x" + end + end
    assert events.close() == b"data: half an event"


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
        b'data: {"choices":[],"usage":{"price":"\xa3"}}\n\n',
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
    assert len(stripper.held) <= HELD_LIMIT
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
