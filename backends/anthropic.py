"""Anthropic's Messages API (platform.claude.com/docs, API reference, November 2026).

The version of the API is that of the caller where the caller speaks Messages, for it says what a body may hold; else
2023-06-01, which still knows `temperature` and `top_p`. `headers: {anthropic-version: ...}` of the pool overrides both.

Anthropic's prompt cache holds only what a request marks with `cache_control`, as a breakpoint. Source:
platform.claude.com/docs, "Prompt caching" (November 2026). A prompt is tools, then system, then messages; a breakpoint
covers everything before it; too short a prefix is not cached, and costs nothing. Rules:
- The end of the system prompt, or of the tools where there is none, is stable from conversation to conversation.
- The end of a conversation that has gone on for a turn is stable for the next one.
- At most these two of Anthropic's four, and none where the caller has set its own.
- Thinking, empty text, and tools with `defer_loading` cannot be marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from backends import rate_limit_headers
from backends.interface import RATE_LIMITS, BackendConfig, BackendRequest, Failure, HttpCall, Operation, plain
from backends.openai import BEARER, OpenAI

BREAKPOINT = {"type": "ephemeral"}
_MARKABLE = frozenset({"text", "image", "document", "tool_use", "tool_result"})
_GONE_ON = 3  # messages: a question, its answer, and another question


def has_own(encoded: bytes) -> bool:
    """The caller has set breakpoints."""
    return b'"cache_control"' in encoded


def with_breakpoints(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a Messages request, with breakpoints at the ends of its stable prefixes."""
    marked = dict(body)
    if (system := _with_last_marked(_blocks(body.get("system")))) is not None:
        marked["system"] = system
    elif isinstance(tools := body.get("tools"), list):
        marked["tools"] = _with_last_loaded_marked(tools)
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) >= _GONE_ON:
        last = plain(messages[-1])
        content = _with_last_marked(_blocks(last.get("content"))) if isinstance(last, dict) else None
        if content is not None:
            marked["messages"] = [*messages[:-1], {**last, "content": content}]
    return marked


def _blocks(content: Any) -> Sequence[Any]:
    content = plain(content) if isinstance(content, msgspec.Raw) else content
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else ()


def _with_last_marked(blocks: Sequence[Any]) -> list[Any] | None:
    """None: the last block cannot be marked."""
    last = plain(blocks[-1]) if blocks else None
    kind = last.get("type") if isinstance(last, dict) else None
    if not isinstance(last, dict) or not isinstance(kind, str) or kind not in _MARKABLE:
        return None
    if kind == "text" and not last.get("text"):
        return None
    return [*blocks[:-1], _marked(last)]


def _with_last_loaded_marked(tools: Sequence[Any]) -> list[Any]:
    found = list(tools)
    for i in reversed(range(len(found))):
        tool = plain(found[i])
        if not (isinstance(tool, dict) and tool.get("defer_loading")):
            found[i] = _marked(tool)
            break
    return found


def _marked(block: Any) -> Any:
    return {**block, "cache_control": BREAKPOINT} if isinstance(block, dict) else block


_encode = msgspec.json.Encoder().encode
VERSION = "2023-06-01"
API_KEY = "sk-ant-api"  # prefix of an API key, as opposed to a subscription's token
MAX_TOKENS = 32_000  # default output limit, which Anthropic requires
_CALLERS = ("anthropic-version", "anthropic-beta")  # caller's headers to forward
# Request members without effect on the shape of the answer, whole or streamed.
_ASSEMBLED_MEMBERS = (
    *("model", "messages", "max_tokens", "metadata", "service_tier", "stop_sequences", "stream", "system"),
    *("temperature", "thinking", "tool_choice", "tools", "top_k", "top_p", "cache_salt"),
)
_FOREIGN_SIGNATURE = re.compile(r"[0-9a-f]{0,32}")  # none in translated answers, a UUID in vLLM's


class Anthropic(OpenAI):
    """Anthropic's API, by an API key."""

    native = frozenset({Operation.MESSAGES, Operation.COUNT_TOKENS})
    key_header = "x-api-key"
    default_output = MAX_TOKENS
    reads_attribution = True
    listing_path = "/v1/models?limit=1000"
    assembled_members = {Operation.MESSAGES: frozenset(_ASSEMBLED_MEMBERS)}

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._configured = {name.lower() for name in config.headers}
        self._headers.setdefault("anthropic-version", VERSION)

    def call(self, forward: BackendRequest) -> HttpCall:
        call = super().call(forward)
        may_mark = self.config.prompt_caching and "thread" not in forward.body  # a thread has its own breakpoints
        if may_mark and forward.operation is Operation.MESSAGES and not has_own(call.body):
            call = replace(call, body=self._encoded(with_breakpoints(self._body(forward)), forward))
        callers = {name: forward.headers[name] for name in _CALLERS if name in forward.headers}
        own = {name: value for name, value in callers.items() if name not in self._configured}
        return replace(call, headers={**call.headers, **own}) if own else call

    def with_key(self, header: str, key: str) -> Anthropic:
        """A subscription's token is a bearer token; an API key is not, whatever client has sent it."""
        bearer = header == BEARER and not key.startswith(API_KEY)
        return type(self)(replace(self.config, api_key=key, key_header=BEARER if bearer else ""))

    def _body(self, forward: BackendRequest) -> dict[str, Any]:
        body = super()._body(forward)
        if forward.operation is Operation.MESSAGES:
            body.setdefault("max_tokens", MAX_TOKENS)
        turns = map(_without_foreign_thinking, body["messages"])
        body["messages"] = [turn for turn in turns if turn is not None]
        return body

    def assembly_obstacle(self, forward: BackendRequest) -> str:
        """Features of a beta, tools of the provider and citations may have forms of their own."""
        if "anthropic-beta" in forward.headers or "anthropic-beta" in self._configured:
            return "anthropic-beta"
        tools = plain(forward.body.get("tools") or [])
        if not isinstance(tools, list) or any(
            not isinstance(tool, dict) or tool.get("type", "custom") != "custom" for tool in tools
        ):
            return "tools"
        if b'"citations"' in _encode(forward.body.get("messages")):
            return "citations"
        return super().assembly_obstacle(forward)

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> Failure:
        failure = super().failure(status, headers, body)
        if failure.kind in RATE_LIMITS and failure.retry_after is None:
            return replace(failure, retry_after=_until_reset(headers))
        return failure


def _without_foreign_thinking(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A turn without the thinking of another tier's server, which Anthropic refuses; None: nothing is left of it."""
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, list) or not any(map(_is_foreign, content)):
        return message
    kept = [block for block in content if not _is_foreign(block)]
    return {**message, "content": kept} if kept else None


def _is_foreign(block: Any) -> bool:
    if not isinstance(block, dict) or block.get("type") != "thinking":
        return False
    return _FOREIGN_SIGNATURE.fullmatch(str(block.get("signature") or "")) is not None


def _until_reset(headers: Mapping[str, str]) -> float | None:
    """Seconds until the last of the used-up limits is full again; None: not told."""
    return max((report.reset for report in rate_limit_headers.read(headers) if not report.remaining), default=None)
