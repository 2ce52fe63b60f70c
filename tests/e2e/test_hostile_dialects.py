"""Hostile callers and hostile servers in every dialect, over real sockets.

- Whatever JSON a caller sends to whatever path: an answer, or a 4xx in the dialect of the path.
- Whatever bytes a server answers with, whole or streamed: an answer, or an error in the caller's dialect; never a 500.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.builders import calling, post
from tests.support.gateways import pool, running
from tests.support.upstream import Upstream, reply

_CHAT = b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3}}'

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "chat",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "stream_options": {"include_usage": True},
        "max_tokens": 5, "n": 1, "stop": ["x"], "temperature": 0.5, "reasoning_effort": "low",
    },
    "/v1/completions": {"model": "chat", "prompt": ["a", [1, 2]], "max_tokens": 5, "n": 1, "stop": "x"},
    "/v1/responses": {
        "model": "chat",
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "r"}]},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None, "conversation": None,
        "store": False, "max_output_tokens": 5, "metadata": {}, "prompt_cache_key": "k",
    },
    "/v1/messages": {
        "model": "chat",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}, {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}], "is_error": True}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"}, "stop_sequences": ["x"], "service_tier": "auto",
    },
    "/v1/embeddings": {"model": "chat", "input": ["a", [1, 2]], "dimensions": 5},
    "/v1/rerank": {"model": "chat", "query": {"content": [{"type": "text", "text": "q"}]}, "documents": ["a", {"text": "b"}]},
    "/v1/score": {"model": "chat", "text_1": "a", "text_2": ["b"]},
    "/tokenize": {
        "model": "chat",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": [_CALL], "name": "n"}],
        "tools": [{"type": "function", "function": _FUNCTION}],
    },
}  # fmt: skip
BODIES["/v1/messages/count_tokens"] = {
    name: value for name, value in BODIES["/v1/messages"].items() if name not in ("max_tokens", "metadata")
}

JUNK: list[Any] = [None, True, -1, 1.5, 2**70, "", "x", [], {}, [5], [None], [[]], [{}], {"type": []}, {"type": "x"}, {"": {}}]


def mutations(body: Any) -> Iterator[Any]:
    """The body with each node in turn replaced by junk, or absent."""
    for place in places(body):
        for junk in JUNK:
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


@pytest.mark.parametrize("backend", ["compatible", "vllm"])
@pytest.mark.parametrize("path", BODIES)
async def test_no_body_of_a_caller_is_an_error_of_the_gateway(path: str, backend: str) -> None:
    async with Upstream([reply(_CHAT, "200 OK", "content-type: application/json")]) as upstream:
        async with running({"only": pool(upstream.url, backend=backend)}) as gateway, calling(gateway.url) as caller:
            blamed = []
            for body in mutations(BODIES[path]):
                status, _, raw = await caller.whole(post(body, path=path))
                if status != 200 and not is_refusal(path, status, raw):
                    blamed.append((status, raw[:200], body))
            assert not blamed, (len(blamed), blamed[:3])


def is_refusal(path: str, status: int, raw: bytes) -> bool:
    error = json.loads(raw)
    is_anthropic = error.get("type") == "error"
    return 400 <= status < 500 and bool(error["error"]["message"]) and is_anthropic == path.startswith("/v1/messages")
