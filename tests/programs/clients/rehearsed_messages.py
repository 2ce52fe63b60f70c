"""The rehearsed model behind Anthropic's Messages, as strict as the API is documented (docs.anthropic.com, 2026-11)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.programs.clients.rehearsed_model import Answer, Json

ID = re.compile(r"[a-zA-Z0-9_-]+")
FORCED = ("any", "tool")


class RefusedError(Exception):
    """The API would answer 400."""


def require(holds: object, reason: str) -> None:
    if not holds:
        raise RefusedError(reason)


def as_chat(body: Json) -> Json:
    """Translate a request for the rehearsed model. Raises RefusedError."""
    require(isinstance(body.get("max_tokens"), int), "max_tokens: Field required")
    require(body.get("messages"), "messages: at least one message is required")
    messages: list[Json] = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    pending: set[str] = set()
    for message in body["messages"]:
        pending = _read_message(message, pending, messages)
    require(not pending, f"tool_use ids were found without tool_result blocks: {pending}")
    chat = {"model": body["model"], "messages": messages, "max_tokens": body["max_tokens"], **_tools(body)}
    if _thinks(body):
        chat["reasoning_effort"] = "high"
    if shape := (body.get("output_config") or {}).get("format"):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": shape["schema"]}}
    return chat


def _text(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else " ".join(block["text"] for block in content)


def _thinks(body: Json) -> bool:
    thinking = body.get("thinking") or {}
    kind = thinking.get("type")
    require(kind in (None, "enabled", "disabled", "adaptive"), f"thinking.type: {kind}")
    if kind == "enabled":
        require(1024 <= thinking["budget_tokens"] < body["max_tokens"], "thinking.budget_tokens")
    if kind in ("enabled", "adaptive"):
        forced = (body.get("tool_choice") or {}).get("type") in FORCED
        require(not forced, "Thinking may not be enabled when tool_choice forces tool use.")
        require(body.get("temperature") in (None, 1), "`temperature` may only be set to 1 when thinking is enabled.")
    return kind in ("enabled", "adaptive")


def _read_message(message: Json, pending: set[str], messages: list[Json]) -> set[str]:
    """Append a message; return the ids of the tool calls for the next message to answer."""
    role, content = message["role"], message["content"]
    require(role in ("user", "assistant", "system"), f"messages: role {role}")
    blocks: list[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    require(all(block.get("text", "x").strip() for block in blocks), "messages: text content blocks must be non-empty")
    answered = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
    require(pending <= answered, f"tool_use ids were found without tool_result blocks: {pending - answered}")
    require(answered <= pending, f"unexpected tool_use_id in tool_result blocks: {answered - pending}")
    parts, calls = [], []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            source = block["source"]
            url = f"data:{source['media_type']};base64,{source['data']}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif kind == "tool_result":
            messages.append(
                {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content", ""))}
            )
        elif kind == "tool_use":
            require(ID.fullmatch(block["id"]) and isinstance(block["input"], dict), f"tool_use: {block}")
            calls.append(block["id"])
        else:
            require(kind in ("thinking", "redacted_thinking") and block.get("signature"), f"content of type {kind}")
    if parts or calls:
        messages.append({"role": role, "content": parts or None})
    return set(calls)


def _tools(body: Json) -> Json:
    functions = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}}
        for tool in body.get("tools") or ()
    ]
    choice = body.get("tool_choice") or {"type": "auto"}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice["type"]]
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tools": functions, "tool_choice": chosen, **parallel} if functions else {}


# --------------------------------------------------------------------------- replies

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_of(usage: Json) -> Json:
    """Usage of Anthropic: `input_tokens` excludes cached tokens."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }


def message(number: int, model: str, said: Answer, finish: str, usage: Json) -> Json:
    content = list(_blocks(number, said))
    return {**_envelope(number, model), "content": content, "stop_reason": _REASONS[finish], "usage": usage_of(usage)}


def _envelope(number: int, model: str) -> Json:
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}


def _blocks(number: int, said: Answer) -> Iterator[Json]:
    if said.reasoning:
        yield {"type": "thinking", "thinking": said.reasoning, "signature": "c2lnbmVk"}
    if said.words:
        yield {"type": "text", "text": " ".join(said.words)}
    for place, call in enumerate(said.calls):
        yield {"type": "tool_use", "id": f"toolu_{number}_{place}", "name": call.name, "input": call.arguments}


def events(number: int, model: str, said: Answer, finish: str, usage: Json) -> Iterator[Json]:
    counted = usage_of(usage)
    begun = {**_envelope(number, model), "content": [], "stop_reason": None, "usage": {**counted, "output_tokens": 1}}
    yield {"type": "message_start", "message": begun}
    yield {"type": "ping"}
    for index, block in enumerate(_blocks(number, said)):
        yield from _block_events(index, block, said)
    delta = {"stop_reason": _REASONS[finish], "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": counted}
    yield {"type": "message_stop"}


def _block_events(index: int, block: Json, said: Answer) -> Iterator[Json]:
    empty: dict[str, Any] = {
        "text": {"text": ""},
        "thinking": {"thinking": "", "signature": ""},
        "tool_use": {"input": {}},
    }
    yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty[block["type"]]}}
    for delta in _deltas(block, said):
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _deltas(block: Json, said: Answer) -> Iterator[Json]:
    if block["type"] == "text":
        for place, word in enumerate(said.words):
            yield {"type": "text_delta", "text": (" " if place else "") + word}
    elif block["type"] == "thinking":
        for place, word in enumerate(block["thinking"].split()):
            yield {"type": "thinking_delta", "thinking": (" " if place else "") + word}
        yield {"type": "signature_delta", "signature": block["signature"]}
    else:
        arguments = json.dumps(block["input"])
        for start in range(0, len(arguments), 5):
            yield {"type": "input_json_delta", "partial_json": arguments[start : start + 5]}
