"""Taps: tokens, usage, times, ends and errors of a reply, read in passing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface import EngineTimes, FailureKind, Usage
from backends.stream import taps
from backends.stream.sse import EXCERPT_LIMIT
from backends.stream.taps import BodyTap, StreamTap

TRANSCRIPTS = Path(__file__).parent.parent / "transcripts"


def transcript(name: str) -> bytes:
    return (TRANSCRIPTS / name).read_bytes()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(finish: Any = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def read(parts: Sequence[bytes], choices: int = 1) -> StreamTap:
    tap = StreamTap(choices)
    for part in parts:
        tap.feed(part)
    tap.close()
    return tap


def state(tap: StreamTap | BodyTap) -> tuple[object, ...]:
    return tap.tokens, tap.usage, tap.times, tap.ended, tap.failure


def fed(tap: StreamTap | BodyTap, data: bytes | None) -> set[str]:
    """Feeds `data`, or closes the tap; returns the names of the changes."""
    usage, ended, failed = replace(tap.usage), tap.ended, tap.failure is not None
    content = False if data is None else tap.feed(data)
    if data is None:
        tap.close()
    seen = {"content": content, "usage": tap.usage != usage}
    seen |= {"end": tap.ended and not ended, "error": tap.failure is not None and not failed}
    return {name for name, happened in seen.items() if happened}


# --------------------------------------------------------------------------- real streams


def test_a_real_stream_has_tokens_usage_and_times() -> None:
    """Six content chunks, the last with the finish reason; the usage chunk has the engine's own times."""
    tap = read([transcript("vllm_chat_stream.sse")])
    assert (tap.tokens, tap.ended, tap.failure) == (6, True, None)
    assert tap.usage == Usage(prompt=20, completion=6, cached=0)
    queue, prefill = 2.5777999780984828e-05, 0.009018358000048465
    assert tap.times == EngineTimes(queue, prefill, 0.006448477200046909, ttft=prefill + queue)


@pytest.mark.parametrize(
    ("name", "tokens", "cached"),
    [
        ("vllm_chat_stream_cached.sse", 3, 64),
        ("vllm_completion_stream.sse", 4, 0),
        ("vllm_chat_stream_without_usage.sse", 3, None),
    ],
)
def test_chats_completions_and_cached_tokens_are_read(name: str, tokens: int, cached: int | None) -> None:
    """`prompt_tokens_details.cached_tokens` is the true state of the prefix cache."""
    tap = read([transcript(name)])
    assert (tap.tokens, tap.usage.cached, tap.ended) == (tokens, cached, True)


@pytest.mark.parametrize("name", ["vllm_chat_tool_stream.sse", "vllm_chat_named_tool_stream.sse"])
def test_tool_call_deltas_are_tokens(name: str) -> None:
    """Each delta with a name or arguments counts, and the role preamble does not."""
    stream = transcript(name)
    calls = sum(stream.count(key) for key in (b'"name":', b'"arguments":'))
    assert read([stream]).tokens == calls


def test_signals_come_with_their_read() -> None:
    """The preamble has no signal, the last content signals the end, and usage follows."""
    tap = StreamTap()
    events = transcript("vllm_chat_stream.sse").split(b"\n\n")[:9]
    tokens = [{"content"}] * 5
    assert [fed(tap, each + b"\n\n") for each in events] == [set(), *tokens, {"content", "end"}, {"usage"}, set()]


@pytest.mark.parametrize(
    ("name", "tokens"), [("vllm_engine_died_before_token.sse", 0), ("vllm_engine_died_mid_stream.sse", 2)]
)
def test_a_done_after_an_error_is_no_success(name: str, tokens: int) -> None:
    """vLLM sends `[DONE]` after its error event."""
    tap = read([transcript(name)])
    assert (tap.tokens, tap.ended) == (tokens, False)
    assert tap.failure is not None
    assert tap.failure.kind is FailureKind.SERVER
    assert tap.failure.message.startswith("The backend failed: EngineCore encountered an issue.")


@pytest.mark.parametrize(
    "name",
    [
        "vllm_chat_stream.sse",
        "vllm_chat_tool_stream.sse",
        "vllm_completion_stream.sse",
        "vllm_engine_died_mid_stream.sse",
    ],
)
def test_a_stream_split_at_any_byte_is_read_alike(name: str) -> None:
    """Every split in two, and byte by byte."""
    stream = transcript(name)
    whole = state(read([stream]))
    for cut in range(len(stream) + 1):
        assert state(read([stream[:cut], stream[cut:]])) == whole
    assert state(read([stream[i : i + 1] for i in range(len(stream))])) == whole


@pytest.mark.parametrize(
    "stream",
    [
        b'event: error\ndata: {"message":"m","code":400}\n\n',
        b'data: {"choices":[{"delta":\ndata: {"content":"a"}}]}\n\n',
        b'\xef\xbb\xbfdata: {"choices":[{"text":"a"}]}\n\n',
    ],
)
def test_an_event_of_several_lines_is_read_the_same_at_any_split(stream: bytes) -> None:
    """A read that looks like a whole event may be the rest of an event."""
    whole = state(read([stream]))
    assert whole != state(StreamTap())
    for cut in range(len(stream) + 1):
        assert state(read([stream[:cut], stream[cut:]])) == whole


CONTENTS = (
    *(b"a", b"\xc3\xa9", rb"\n", rb"\u00e9", b"", b'"', b"\\", b"\0", b"\xff"),
    *(b'"}}]}\n\ndata: [DONE]\n\n', b'b","refusal":"c'),
)


def read_until_spoiled(parts: Sequence[bytes]) -> StreamTap:
    """As the relay does."""
    tap = StreamTap()
    for part in parts:
        if not tap.spoiled:
            tap.feed(part)
    if not tap.spoiled:
        tap.close()
    return tap


@given(st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=5), st.sets(st.integers(2, 5)))
def test_several_tokens_in_one_read_are_read_like_one_after_the_other(contents: list[bytes], cuts: set[int]) -> None:
    """Also where a content is empty, broken or has JSON of its own, and the form of the tokens is known."""
    events = [b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % each for each in (b"a", *contents)]
    groups = [b"".join(events[start:end]) for start, end in pairwise([0, 1, *sorted(cuts), None])]
    apart, together = read_until_spoiled(events), read_until_spoiled(groups)
    assert state(together) == state(apart)
    assert together.junk == apart.junk


@given(st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=9), st.sets(st.integers(1, 500), max_size=6))
def test_tokens_in_reads_torn_anywhere_are_read_like_one_after_the_other(contents: list[bytes], cuts: set[int]) -> None:
    """Also where known events stand between torn ones."""
    events = [
        b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % each for each in (b"a", *contents, b"b")
    ]
    stream = b"".join(events)
    torn = [stream[start:end] for start, end in pairwise([0, *sorted(cuts), None])]
    assert state(read_until_spoiled(torn)) == state(read_until_spoiled(events))


def test_known_events_between_torn_ones_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where every read has held several events, as from a server that writes many at a time."""
    decoded: list[bytes] = []
    decode = taps._decode_chunk
    monkeypatch.setattr(taps, "_decode_chunk", lambda data: decoded.append(data) or decode(data))
    stream = 100 * delta(content="word").replace(b": ", b":").replace(b"data:", b"data: ")
    tap = StreamTap()
    for start in range(0, len(stream), 1000):
        assert tap.feed(stream[start : start + 1000])
    assert tap.tokens == 100
    assert len(decoded) < 100 // 4


def test_before_a_broken_event_all_of_a_torn_read_is_sound() -> None:
    """Whichever line ends follow: known events before it are not lost."""
    tap, token, broken = StreamTap(), delta(content="a"), b'data: {"error":{"message":"boom"}}\r\n\r\n'
    tap.feed(token)
    tap.feed(token[:9])
    tap.feed(token[9:] + 2 * token + broken)
    assert tap.spoiled
    assert tap.sound.count(b'"a"') == 3


def test_tokens_in_one_read_are_counted() -> None:
    """As output, without a second reading."""
    tap, token = StreamTap(), b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    assert tap.feed(token)
    assert tap.feed(3 * token)
    assert tap.tokens == 4


@given(st.lists(st.integers(0, 2200), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_splits_and_line_ends_read_the_same(cuts: list[int], end: bytes) -> None:
    """With any number of events in one read."""
    stream = transcript("vllm_chat_stream.sse")
    whole = state(read([stream]))
    stream = stream.replace(b"\n", end)
    bounds = [0, *sorted(cuts), len(stream)]
    assert state(read([stream[a:b] for a, b in pairwise(bounds)])) == whole


# --------------------------------------------------------------------------- tokens


CITATION = {"type": "url_citation", "url_citation": {"url": "https://a.example", "title": "A", "start_index": 0}}
ANSWERS: list[dict[str, Any]] = [
    {"content": "a"},
    {"content": " "},
    {"content": [{"type": "text", "text": "a"}]},
    {"content": [{"type": "reference", "reference_ids": [0]}]},  # Mistral
    {"refusal": "a"},
    {"tool_calls": [{"index": 0, "function": {"name": "f"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    {"tool_calls": [{"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "f", "input": ""}}]},
    {"tool_calls": [{"index": 0, "custom": {"input": "SELECT"}}]},
    {"function_call": {"name": "f"}},
    {"role": "assistant", "content": "a"},
    {"audio": {"id": "audio_1", "data": "UklGRg=="}},
    {"audio": {"id": "audio_1", "transcript": "a"}},
    {"images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}, "index": 0}]},
    {"annotations": [CITATION]},
    {"citations": ["https://a.example"]},
]
THOUGHTS: list[dict[str, Any]] = [
    {"reasoning": "a"},
    {"reasoning": "a", "content": "", "role": "assistant"},
    {"reasoning_content": "a", "content": None},
    {"reasoning_text": "a"},
    {"reasoning_details": [{"type": "reasoning.text", "text": "a", "index": 0, "format": "unknown"}]},
    {"reasoning_details": [{"type": "reasoning.summary", "summary": "a"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "a"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]},  # Mistral
    {"content": "<thought>a", "extra_content": {"google": {"thought": True}}},  # Gemini
]


@pytest.mark.parametrize("fields", ANSWERS)
def test_output_of_any_kind_begins_the_answer(fields: dict[str, Any]) -> None:
    """Text, a refusal, a tool call of either type, audio, an image, a citation."""
    tap = StreamTap()
    assert fed(tap, delta(**fields)) == {"content"}
    assert (tap.answer_begun, tap.reasoning_begun, tap.tokens) == (True, False, 1)


@pytest.mark.parametrize("fields", THOUGHTS)
def test_reasoning_of_any_name_is_a_token_and_no_answer(fields: dict[str, Any]) -> None:
    """Each provider has its own member for the reasoning."""
    tap = StreamTap()
    assert fed(tap, delta(**fields)) == {"content"}
    assert (tap.answer_begun, tap.reasoning_begun, tap.tokens) == (False, True, 1)
    assert fed(tap, delta(content="a")) == {"content"}
    assert (tap.answer_begun, tap.reasoning_begun, tap.tokens) == (True, True, 2)


def test_a_delta_of_both_kinds_begins_both() -> None:
    """One token, of a server that sends the last thought with the first word."""
    tap = StreamTap()
    assert fed(tap, delta(reasoning="a", content="b")) == {"content"}
    assert (tap.answer_begun, tap.reasoning_begun, tap.tokens) == (True, True, 1)


@pytest.mark.parametrize(
    "data",
    [
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta(),
        delta(tool_calls=[]),
        delta(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"arguments": ""}}]),
        delta(tool_calls=[None, {"function": None}]),
        delta(tool_calls={"name": "f"}),
        delta(function_call={}),
        delta(tool_calls=[{"index": 0, "id": "call_1", "type": "custom", "custom": {"name": "", "input": ""}}]),
        delta(content=[{"type": "text", "text": ""}]),
        delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": ""}]}]),
        delta(reasoning="", reasoning_content="", content=""),
        delta(reasoning_details=[]),
        delta(reasoning_details=[{"type": "reasoning.encrypted", "data": "gAAAAA", "id": "rs_1"}]),
        delta(thinking_blocks=[{"type": "thinking", "thinking": "", "signature": "EqQB"}]),
        delta(content="", extra_content={"google": {"thought": True, "thought_signature": "EqQB"}}),
        delta(audio={"id": "audio_1"}),
        delta(audio={"expires_at": 1}),
        delta(audio=[]),
        delta(images=[]),
        delta(images=[{"type": "image_url", "image_url": {"url": ""}, "index": 0}]),
        delta(annotations=[]),
        delta(citations=[]),
        event({"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
        event({"choices": []}),
        event({"choices": None}),
        event({"choices": [{"delta": None}]}),
        event({"error": None}),
        event({}),
        b": OPENROUTER PROCESSING\n\n",
        b"event: ping\n\n",
        b"\n\n",
        b"",
    ],
)
def test_invisible_events_are_no_content(data: bytes) -> None:
    """Preambles, empty deltas, comments, pings, and objects without choices."""
    tap = StreamTap()
    assert (fed(tap, data), tap.tokens) == (set(), 0)


def test_content_that_looks_like_protocol_is_content() -> None:
    """An answer about this protocol does not end its own stream."""
    words = 'data: [DONE]\n\n{"error": 1, "finish_reason": "stop", "usage": {}}'
    tap = StreamTap()
    assert fed(tap, delta(content=words)) == {"content"}
    assert (tap.ended, tap.failure, tap.usage) == (False, None, Usage())


def test_each_choice_of_several_is_a_token_and_all_must_end() -> None:
    """With `n` of two, the stream ends with the second finish reason."""
    tap = StreamTap(choices=2)
    both = {"choices": [{"index": i, "delta": {"content": "a"}} for i in (0, 1)]}
    assert (fed(tap, event(both)), tap.tokens) == ({"content"}, 2)
    assert (fed(tap, delta("stop")), tap.ended) == (set(), False)
    assert (fed(tap, delta("stop")), tap.ended) == (set(), False)  # the same choice
    second = event({"choices": [{"index": 1, "delta": {}, "finish_reason": "length"}]})
    assert (fed(tap, second), tap.ended) == ({"end"}, True)


# --------------------------------------------------------------------------- ends and errors


@pytest.mark.parametrize("data", [delta("stop"), delta("tool_calls"), b"data: [DONE]\n\n", b"data: [DONE]"])
def test_a_finish_reason_or_done_ends_a_stream(data: bytes) -> None:
    """Not all servers send both, and the last blank line may be missing."""
    tap = StreamTap()
    assert fed(tap, data) | fed(tap, None) == {"end"}
    assert tap.ended


def test_an_error_after_the_end_is_ignored() -> None:
    """The answer is complete."""
    tap = read([delta("stop"), event({"error": {"message": "m"}}), b"data: {broken\n\n"])
    assert (tap.ended, tap.failure) == (True, None)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (event({"error": {"message": "m", "code": 429}}), FailureKind.RATE_LIMITED),
        (event({"error": "m"}), FailureKind.SERVER),
        (b'event: error\ndata: {"message":"m","code":400}\n\n', FailureKind.CLIENT),
        (b'event: error\ndata: {"error":{"message":"m","code":503}}\n\n', FailureKind.OVERLOADED),
        (b"event: error\ndata: it broke\n\n", FailureKind.SERVER),
        (delta("error"), FailureKind.SERVER),
        (
            event({"error": {"message": "m", "code": 400}, "choices": [{"delta": {}, "finish_reason": "error"}]}),
            FailureKind.CLIENT,
        ),
        (event([]), FailureKind.PROTOCOL),
        (event("ping"), FailureKind.PROTOCOL),
        (event(1), FailureKind.PROTOCOL),
        (b"data:\n\n", FailureKind.PROTOCOL),
        (b"data: {broken\n\n", FailureKind.PROTOCOL),
        (b"data: {broken}\n\n", FailureKind.PROTOCOL),
        (b"data: <html>\n\n", FailureKind.PROTOCOL),
        (b"data: \xff\xfe\n\n", FailureKind.PROTOCOL),
        (b"data: {" + b'"a":{' * 100_000 + b"}\n\n", FailureKind.PROTOCOL),
    ],
)
def test_errors_inside_a_stream_are_failures(data: bytes, kind: FailureKind) -> None:
    """Error objects, error events, finish reason `error`, and unreadable events."""
    tap = StreamTap()
    assert fed(tap, data) == {"error"}
    assert tap.failure is not None
    assert tap.failure.kind is kind


def test_the_first_failure_is_kept() -> None:
    """Signalled once."""
    tap = StreamTap()
    bad = event({"error": {"message": "m", "code": 400}})
    assert [fed(tap, bad), fed(tap, bad), fed(tap, delta("stop"))] == [{"error"}, set(), set()]
    assert tap.ended is False


def test_nan_is_accepted() -> None:
    """OpenAI's Python SDK accepts NaN."""
    data = b'data: {"choices":[{"delta":{"content":"a"},"logprobs":NaN}],"usage":{"prompt_tokens":3}}\n\n'
    tap = StreamTap()
    assert (fed(tap, data), tap.usage.prompt) == ({"content", "usage"}, 3)


IMAGE = delta(
    images=[{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * (1 << 17)}}]
)


def test_a_large_event_is_output_and_its_stream_goes_on() -> None:
    """1.4 MiB of image in one event, at any reads; the end in the same event is seen."""
    finished = json.loads(IMAGE[6:])
    finished["choices"][0]["finish_reason"] = "stop"
    finished["usage"] = {"prompt_tokens": 3}
    for split in (1000, 65536, 1 << 22):
        stream = IMAGE + event(finished)
        tap = read([stream[at : at + split] for at in range(0, len(stream), split)])
        assert (tap.tokens, tap.answer_begun, tap.ended, tap.failure, tap.usage.prompt) == (2, True, True, None, 3)


@pytest.mark.parametrize("ahead", [2, 3, 100])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_before_a_broken_event_the_rest_of_a_large_event_is_sound(ahead: int, end: bytes) -> None:
    """The beginning was relayed when it arrived; `ahead`: bytes of the large event in the read of the broken one."""
    large = IMAGE.removesuffix(b"\n\n") + end
    tap = StreamTap()
    for data in (large[: -ahead - len(end)], large[-ahead - len(end) :] + event({"choices": []}) + b"data: {junk\n\n"):
        tap.feed(data)
    assert tap.spoiled
    assert (tap.rest, tap.sound) == (large[-ahead - len(end) :], event({"choices": []}))


def test_deep_output_is_read_within_bounds() -> None:
    """A hostile server cannot exhaust the stack."""
    deep: Any = "a"
    for _ in range(300):
        deep = [deep]
    assert fed(StreamTap(), delta(content=deep, images=deep)) == set()


def test_an_endless_line_is_a_failure_with_bounded_memory() -> None:
    """Ten megabytes on one line: one failure."""
    tap = StreamTap()
    seen = [fed(tap, b"data: " + b"x" * 65536) for _ in range(160)]
    assert seen.count({"error"}) == 1
    assert tap.held_bytes <= EXCERPT_LIMIT


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"data: ", b"\n\n", b'{"choices":[{', b"[DONE]", b"error"])))
def test_no_bytes_break_a_tap(parts: list[bytes]) -> None:
    """Garbage is at most a failure, for both kinds of tap."""
    read(parts)
    body = BodyTap()
    for part in parts:
        body.feed(part)
    body.close()


# --------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}, Usage(3, 2, 1)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, Usage(3, None, None)),
        ({"prompt_tokens": 3, "prompt_cache_hit_tokens": 2}, Usage(3, None, 2)),
        ({"prompt_tokens": "3", "completion_tokens": -1, "prompt_tokens_details": {"cached_tokens": True}}, Usage()),
        ({"prompt_tokens": 3.0, "completion_tokens": 2.5, "prompt_tokens_details": {"cached_tokens": 1e300}}, Usage(3)),
        ("none", Usage()),
    ],
)
def test_usage_accepts_valid_counts_only(said: Any, usage: Usage) -> None:
    """OpenAI's details, DeepSeek's own name, and junk."""
    assert read([event({"choices": [], "usage": said})]).usage == usage


def test_the_last_usage_counts() -> None:
    """With continuous usage every chunk has one."""
    tap = read([event({"usage": {"prompt_tokens": 5, "completion_tokens": i}}) for i in (1, 2, 3)])
    assert tap.usage == Usage(5, 3, None)


@pytest.mark.parametrize("said", ["x", {"queue_time_ms": "1", "mean_itl_ms": -1, "time_to_first_token_ms": None}])
def test_invalid_engine_times_are_none(said: Any) -> None:
    """Engine times are optional."""
    assert read([event({"usage": {}, "metrics": said})]).times == EngineTimes()


# --------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        ("vllm_chat.json", Usage(20, 6, 0)),
        ("vllm_chat_tool.json", Usage(104, 59, 96)),
        ("vllm_completion.json", Usage(2, 4, 0)),
    ],
)
def test_a_whole_reply_is_content_at_once_and_read_at_its_end(name: str, usage: Usage) -> None:
    """Usage and times as in a stream."""
    body = transcript(name)
    tap = BodyTap()
    assert [fed(tap, body[:1]), fed(tap, body[1:]), fed(tap, None)] == [{"content"}, set(), {"end", "usage"}]
    assert (tap.usage, tap.ended, tap.failure) == (usage, True, None)
    assert tap.times.ttft is not None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error":{"message":"m","code":503}}', FailureKind.OVERLOADED),
        (transcript("vllm_500_engine_died.json"), FailureKind.SERVER),
        (b'{"choices":[', FailureKind.PROTOCOL),
        (b"[1]", FailureKind.PROTOCOL),
        (b"", FailureKind.PROTOCOL),
    ],
)
def test_a_whole_reply_without_an_answer_is_a_failure(body: bytes, kind: FailureKind) -> None:
    """An error under a 200, or a truncated body."""
    tap = BodyTap()
    tap.feed(body)
    assert (fed(tap, None), tap.ended) == ({"error"}, False)
    assert tap.failure is not None
    assert tap.failure.kind is kind


def test_a_reply_beyond_the_buffer_is_assumed_complete() -> None:
    """The reply is relayed, its usage is unknown, and no byte is kept."""
    tap = BodyTap()
    for _ in range(6):
        tap.feed(b"x" * (1 << 20))
    assert tap.held_bytes == 0
    assert (fed(tap, None), tap.ended, tap.usage) == ({"end"}, True, Usage())


def test_the_usage_behind_a_large_image_is_read() -> None:
    """8 MiB of base64; all but the long strings is kept."""
    tap, image = BodyTap(), b"iVBORw0K" * (1 << 20)
    body = b'{"choices":[{"message":{"images":["%b"]}}],"usage":{"prompt_tokens":3}}' % image
    for at in range(0, len(body), 65536):
        tap.feed(body[at : at + 65536])
        assert tap.held_bytes <= 4 << 20
    assert (fed(tap, None), tap.usage) == ({"end", "usage"}, Usage(3, None, None))
