"""Hostile callers and hostile servers in every dialect, over real sockets.

- Whatever JSON a caller sends to whatever path: an answer, or a 4xx in the dialect of the path.
- Whatever bytes a server answers with, whole or streamed: an answer, or an error in the caller's dialect; never a 500.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.stream.sse import ServerSentEvent, SseDecoder
from backends.translation import translation
from gateway.app import Gateway
from gateway.observe.record import RequestOutcome
from tests.support.builders import CHAT, calling, last, post
from tests.support.gateways import pool, running
from tests.support.upstream import CLOSE, LAST_CHUNK, STREAM_HEAD, Act, Pause, Received, Upstream, chunk, chunked, reply

pytestmark = pytest.mark.virtual_time

CHATS = "/v1/chat/completions"
_CHAT = b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {
        "model": "chat",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                ],
            },
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "n": 1,
        "stop": ["x"],
        "temperature": 0.5,
        "reasoning_effort": "low",
    },
    "/v1/completions": {"model": "chat", "prompt": ["a", [1, 2]], "max_tokens": 5, "n": 1, "stop": "x"},
    "/v1/responses": {
        "model": "chat",
        "instructions": "i",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "conversation": None,
        "store": False,
        "max_output_tokens": 5,
        "metadata": {},
        "prompt_cache_key": "k",
    },
    "/v1/messages": {
        "model": "chat",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                    {
                        "type": "document",
                        "title": "t",
                        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "r"}],
                        "is_error": True,
                    }
                ],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "stop_sequences": ["x"],
        "service_tier": "auto",
    },
    "/v1/embeddings": {"model": "chat", "input": ["a", [1, 2]], "dimensions": 5},
    "/v1/rerank": {
        "model": "chat",
        "query": {"content": [{"type": "text", "text": "q"}]},
        "documents": ["a", {"text": "b"}],
    },
    "/v1/score": {"model": "chat", "text_1": "a", "text_2": ["b"]},
    "/tokenize": {
        "model": "chat",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [_CALL], "name": "n"}],
        "tools": [{"type": "function", "function": _FUNCTION}],
    },
}
BODIES["/v1/messages/count_tokens"] = {
    name: value for name, value in BODIES["/v1/messages"].items() if name not in ("max_tokens", "metadata")
}

SERVED_BY = dict.fromkeys((CHATS, "/v1/responses", "/v1/messages"), "compatible")
JUNK: list[Any] = [None, -1, 2**70, "x", [], {}, [5], {"type": []}]


def mutations(body: Any, kinds: list[Any] = JUNK) -> Iterator[Any]:
    """The body with each node in turn replaced by junk, or absent."""
    for place in places(body):
        for junk in kinds:
            yield replaced(body, place, junk)
        yield replaced(body, place)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for name, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*at, name))


def replaced(body: Any, place: tuple[Any, ...], *junk: Any) -> Any:
    copied = node = copy.deepcopy(body)
    for name in place[:-1]:
        node = node[name]
    if junk:
        node[place[-1]] = junk[0]
    else:
        del node[place[-1]]
    return copied


@pytest.mark.parametrize(("path", "backend"), [(path, SERVED_BY.get(path, "vllm")) for path in BODIES])
async def test_no_body_of_a_caller_is_an_error_of_the_gateway(
    path: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = reply(_CHAT, "200 OK", "content-type: application/json")
    async with (
        Upstream([answer]) as upstream,
        running({"only": pool(upstream.url, backend=backend)}) as gateway,
        calling(gateway.url) as caller,
    ):
        blamed = []
        for body in mutations(BODIES[path]):
            status, _, raw = await caller.whole(post(body, path=path))
            if status != 200 and not is_refusal(path, status, raw):
                blamed.append((status, raw[:200], body))
        assert not blamed, (len(blamed), blamed[:3])
        assert not failures(caplog)


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Exceptions that nothing has expected."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def is_refusal(path: str, status: int, raw: bytes) -> bool:
    error = json.loads(raw)
    is_anthropic = error.get("type") == "error"
    return 400 <= status < 500 and bool(error["error"]["message"]) and is_anthropic == path.startswith("/v1/messages")


# --------------------------------------------------------------------------- hostile servers

_USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
_OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"},
]
_RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "model": "m",
    "output": _OUTPUT,
    "usage": {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}},
}
_MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 1},
}
WHOLE: dict[str, Any] = {
    CHATS: {
        "id": "chatcmpl-1",
        "created": 5,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"content": "hi", "reasoning": "t", "tool_calls": [_CALL]}, "finish_reason": "stop"}
        ],
        "usage": _USAGE,
    },
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGE,
}


def _chunk(delta: Any, finish: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "created": 5, "model": "m", "choices": [choice]}


_NEW_CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STREAMED: dict[str, list[Any]] = {
    CHATS: [
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"reasoning_content": "t"}),
        _chunk({"content": "hi"}),
        _chunk({"tool_calls": [_NEW_CALL]}),
        _chunk({}, "tool_calls"),
        {"id": "chatcmpl-1", "choices": [], "usage": _USAGE},
    ],
    "/v1/responses": [
        {
            "type": "response.created",
            "sequence_number": 0,
            "response": {**_RESPONSE, "status": "in_progress", "output": []},
        },
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"type": "message", "id": "msg_1", "content": []},
        },
        {
            "type": "response.output_text.delta",
            "item_id": "msg_1",
            "output_index": 0,
            "content_index": 0,
            "delta": "hi",
        },
        {"type": "response.output_item.added", "output_index": 1, "item": _OUTPUT[2]},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{}"},
        {"type": "response.completed", "response": _RESPONSE},
    ],
    "/v1/messages": [
        {"type": "message_start", "message": {**_MESSAGE, "content": [], "stop_reason": None}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "t"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 2},
        },
        {"type": "message_stop"},
    ],
}
ASKED = {
    CHATS: CHAT,
    "/v1/responses": {"model": "chat", "input": "hello"},
    "/v1/messages": {"model": "chat", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}


ROUTED = [
    *((path, backend) for path in ASKED for backend in ("compatible", "anthropic")),
    *((path, "vllm") for path in ("/v1/responses", "/v1/messages")),
]


class Answering(Upstream):
    """Plays `answer`, and `later` in another read, to every inference request; `spoken` notes the path."""

    answer: bytes = b""
    later: bytes = b""
    spoken: str = ""

    def script(self, received: Received) -> list[bytes | Act | Pause]:
        if received.method == "GET":
            return [reply()]
        self.spoken = received.target
        return [self.answer, Pause(0.05), self.later, CLOSE] if self.later else [self.answer, CLOSE]


@asynccontextmanager
async def served_by(backend: str) -> AsyncIterator[tuple[Gateway, Answering]]:
    async with Answering() as upstream:
        pools = {"only": pool(upstream.url, backend=backend)}
        async with running(pools) as gateway:
            yield gateway, upstream


async def ask(gateway: Gateway, path: str, stream: bool) -> tuple[int, bytes]:
    """Status and body of an answer on a connection of its own."""
    async with calling(gateway.url) as caller:
        body = {**ASKED[path], "stream": stream}
        status, headers = await caller.ask(post(body, "connection: close", path=path))
        if "content-length" in headers:
            return status, await caller.body(headers)
        return status, b"".join(await caller.chunks())


def event_stream(path: str, events: list[Any]) -> bytes:
    written = b"".join(map(written_event, events))
    return chunked(written + b"data: [DONE]\n\n" * (path == CHATS))


def written_event(event: Any) -> bytes:
    kind = event.get("type") if isinstance(event, dict) else None
    return bytes(ServerSentEvent(kind.encode() if isinstance(kind, str) else b"", json.dumps(event).encode()))


def is_error(path: str, status: int, raw: bytes) -> bool:
    error = json.loads(raw)
    is_anthropic = error.get("type") == "error"
    return (
        400 <= status < 600
        and status != 500
        and bool(error["error"]["message"])
        and is_anthropic == (path == "/v1/messages")
    )


def ends(path: str, raw: bytes) -> bool:
    """The stream says why it ends, or that it has failed, in the dialect of the path."""
    if not raw.endswith(b"\n\n"):
        return False
    data = [event.data for event in SseDecoder().feed(raw)]
    if path == CHATS and data[-1] == b"[DONE]":
        return True
    events = [json.loads(each) for each in data]
    if path == CHATS:
        choices = [choice for event in events for choice in event.get("choices") or ()]
        return "error" in events[-1] or any(choice.get("finish_reason") for choice in choices)
    if path == "/v1/messages":
        return events[-1].get("type") in ("message_stop", "error") or any(map(_stops, events))
    return events[-1].get("type") in ("response.completed", "response.incomplete", "response.failed", "error")


def _stops(event: dict[str, Any]) -> bool:
    return event.get("type") == "message_delta" and bool((event.get("delta") or {}).get("stop_reason"))


@pytest.mark.parametrize(("path", "backend"), ROUTED)
async def test_no_whole_answer_of_a_server_is_an_error_of_the_gateway(
    path: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served_by(backend) as (gateway, upstream):
        upstream.answer = reply(b"{}", "200 OK", "content-type: application/json")
        await ask(gateway, path, False)
        spoken = upstream.spoken
        blamed, good = [], 0
        for answer in [WHOLE[spoken], *mutations(WHOLE[spoken], [None, -1, [5], {"type": []}])]:
            upstream.answer = reply(json.dumps(answer).encode(), "200 OK", "content-type: application/json")
            status, raw = await ask(gateway, path, False)
            good += status == 200
            if status != 200 and not is_error(path, status, raw):
                blamed.append((status, raw[:300], answer))
        assert not blamed, (len(blamed), blamed[:3])
        assert not failures(caplog)
        assert good > 20


@pytest.mark.parametrize(("path", "backend"), ROUTED)
async def test_no_stream_of_a_server_ends_falsely(path: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served_by(backend) as (gateway, upstream):
        upstream.answer = reply(b"{}", "200 OK", "content-type: application/json")
        await ask(gateway, path, False)
        spoken = upstream.spoken
        blamed, good = [], 0
        for events in [STREAMED[spoken], *mutations(STREAMED[spoken], [None, [], {"type": []}])]:
            upstream.answer = event_stream(spoken, events)
            status, raw = await ask(gateway, path, True)
            good += status == 200
            if not (ends(path, raw) if status == 200 else is_error(path, status, raw)):
                blamed.append((status, raw[-300:], events))
        assert not blamed, (len(blamed), blamed[:3])
        assert not failures(caplog)
        assert good > 20


@pytest.mark.parametrize(("path", "backend"), ROUTED)
async def test_an_answer_in_no_utf_8_is_no_error_of_the_gateway(
    path: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Latin-1 in text, members and errors."""
    async with served_by(backend) as (gateway, upstream):
        upstream.answer = reply(b"{}", "200 OK", "content-type: application/json")
        await ask(gateway, path, False)
        spoken = upstream.spoken
        for status in ("200 OK", "500 x"):
            upstream.answer = reply(b'{"error":{"message":"caf\xe9"}}', status, "content-type: application/json")
            found, raw = await ask(gateway, path, False)
            assert is_error(path, found, raw), (found, raw)
        events = b"".join(map(written_event, STREAMED[spoken]))
        for name in (b'"type"', b'"choices"', b'"usage"'):
            upstream.answer = chunked(events.replace(name, b'"caf\xe9":"\xe9",' + name))
            found, raw = await ask(gateway, path, True)
            readable = raw.decode("utf-8", "replace").encode()
            assert ends(path, readable) if found == 200 else is_error(path, found, raw), (found, raw)
        assert not failures(caplog)


# --------------------------------------------------------------------------- further tricks

_ZEROS = b"0" * 400
_FIGURES = b'"usage":{"prompt_tokens":1%b,"completion_tokens":1%b},"metrics":{"queue_time_ms":1e308}' % (_ZEROS, _ZEROS)
ENDED = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize("stream", [False, True])
async def test_figures_of_a_server_that_no_engine_has_are_none(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A count with 400 digits is no float: the end of the answer must not depend on it."""
    async with served_by("compatible") as (gateway, upstream):
        whole = b'{"choices":[{"message":{"content":"hi"}}],%b}' % _FIGURES
        upstream.answer = chunked(ENDED + b'data: {"choices":[],%b}\n\n' % _FIGURES) if stream else reply(whole)
        status, _ = await ask(gateway, CHATS, stream)
        assert (status, last(gateway).end, last(gateway).answer.prompt_tokens) == (
            200,
            RequestOutcome.COMPLETED,
            None,
        )
        assert not failures(caplog)


@pytest.mark.parametrize(("path", "backend"), [(path, "anthropic") for path in ASKED] + [("/v1/responses", "vllm")])
async def test_a_stream_in_another_dialect_is_no_empty_success(path: str, backend: str) -> None:
    """A chat server behind a pool of another kind: its [DONE] ends no answer."""
    async with served_by(backend) as (gateway, upstream):
        upstream.answer = event_stream(CHATS, STREAMED[CHATS])
        status, raw = await ask(gateway, path, True)
        assert is_error(path, status, raw)
        assert last(gateway).end is RequestOutcome.FAILED


async def test_mixed_arguments_of_calls_are_recorded_as_a_broken_answer() -> None:
    """The call that goes on after another one has begun cannot be told in Messages."""
    calls = [{**_NEW_CALL, "index": n, "id": f"c{n}"} for n in (0, 1)]
    more = {"index": 0, "function": {"arguments": "x"}}
    events = [_chunk({"tool_calls": [call]}) for call in (*calls, more)] + [_chunk({}, "tool_calls")]
    async with served_by("compatible") as (gateway, upstream):
        upstream.answer = STREAM_HEAD + chunk(written_event(events[0]))
        upstream.later = b"".join(chunk(written_event(event)) for event in events[1:]) + LAST_CHUNK
        status, raw = await ask(gateway, "/v1/messages", True)
        kinds = [json.loads(event.data)["type"] for event in SseDecoder().feed(raw)]
        assert (status, kinds[0], kinds[-1]) == (200, "message_start", "error")
        assert last(gateway).end is RequestOutcome.UPSTREAM_BROKE


@pytest.mark.parametrize(("path", "backend"), [("/v1/responses", "compatible"), (CHATS, "anthropic")])
async def test_an_endless_answer_fills_no_memory(path: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a translation keeps, to repeat it at the end of the answer, is bounded."""
    monkeypatch.setattr(translation, "KEPT_LIMIT", 5_000)
    async with served_by(backend) as (gateway, upstream):
        spoken = "/v1/messages" if backend == "anthropic" else CHATS
        first, endless = b"".join(map(written_event, STREAMED[spoken][:3])), written_event(STREAMED[spoken][2])
        upstream.answer, upstream.later = STREAM_HEAD + chunk(first), chunk(endless * 200) + LAST_CHUNK
        status, raw = await ask(gateway, path, True)
        assert (status, last(gateway).end) == (200, RequestOutcome.UPSTREAM_BROKE)
        assert ends(path, raw)


CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "x"}]},
        {"extra_content": {"x": {"signature": "x"}}},
        {"tool_calls": [{**CALL, "extra_content": {"x": "x"}}]},
        {"reasoning_content": "x"},
    ],
)
async def test_endless_state_of_a_turn_fills_no_memory(path: str, delta: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept until it is sealed, in one event: a server cannot make that event as long as it likes."""
    monkeypatch.setattr(translation, "KEPT_LIMIT", 5_000)
    begun = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "so"}, "finish_reason": None}]}
    more = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    async with served_by("compatible") as (gateway, upstream):
        events = (json.dumps({"id": "1", **each}).encode() for each in (begun, more, ended))
        first, endless, last_event = (b"data: " + event + b"\n\n" for event in events)
        rest = endless * 200 + last_event + b"data: [DONE]\n\n"
        upstream.answer, upstream.later = STREAM_HEAD + chunk(first), chunk(rest) + LAST_CHUNK
        status, raw = await ask(gateway, path, True)
        assert (status, last(gateway).end) == (200, RequestOutcome.UPSTREAM_BROKE)
        assert ends(path, raw)


async def test_counting_tokens_counts_against_the_limits_of_a_key() -> None:
    key = {"name": "web", "sha256": hashlib.sha256(b"sk-web").hexdigest(), "requests_per_minute": 1}
    count = {name: value for name, value in ASKED["/v1/messages"].items() if name != "max_tokens"}
    asked = post(count, "authorization: Bearer sk-web", path="/v1/messages/count_tokens")
    async with Upstream([reply()]) as upstream, running({"only": pool(upstream.url)}, keys=[key]) as gateway:
        async with calling(gateway.url) as caller:
            assert [(await caller.whole(asked))[0] for _ in range(2)] == [200, 429]
        assert not upstream.requests
