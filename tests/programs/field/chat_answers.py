"""Writes a turn as a reply or a stream of chat completions, with the reasoning where the API puts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.programs.field.answers import Turn
from tests.programs.field.rules import Target
from tests.programs.field.shared_rules import Body
from tests.programs.field.state import Ledger, seal

_ENDS = {"stop": "stop", "calls": "tool_calls", "length": "length"}
_USAGE = {
    "prompt_tokens": 1200,
    "completion_tokens": 40,
    "total_tokens": 1240,
    "prompt_tokens_details": {"cached_tokens": 1000},
    "completion_tokens_details": {"reasoning_tokens": 12},
}


def message_of(target: Target, turn: Turn, ledger: Ledger) -> dict[str, Any]:
    """The message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text or (None if turn.calls else "")}
    calls = [_call(call.id, call.name, call.text, call.custom) for call in turn.calls]
    if calls:
        message["tool_calls"] = calls
    if turn.thought:
        message |= _reasoning(target, turn, message, ledger)
    if target.rule("signature") == "thought_signature" and calls:
        signature = seal(target, turn.mark)
        calls[0]["extra_content"] = {"google": {"thought_signature": signature}}
        ledger.note(target, turn.mark, signature)
    return message


def _call(identity: str, name: str, text: str, custom: bool) -> dict[str, Any]:
    inner = {"name": name, "input": text} if custom else {"name": name, "arguments": text}
    found = {"type": "custom" if custom else "function", "custom" if custom else "function": inner}
    return {"id": identity, **found} if identity else found


def _reasoning(target: Target, turn: Turn, message: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    form = target.rule("thoughts")
    if form in ("reasoning_content", "reasoning"):
        if target.rule("returned") and turn.calls:
            ledger.note(target, turn.mark, turn.thought)
        return {form: turn.thought}
    if form == "reasoning_details":
        return _details(target, turn, ledger)
    if form == "parts":
        thinking = {"type": "thinking", "thinking": [{"type": "text", "text": turn.thought}]}
        return {"content": [thinking, *([{"type": "text", "text": turn.text}] if turn.text else [])]}
    if form == "think tags":
        return {"content": f"<think>\n{turn.thought}\n</think>\n\n{turn.text}"}
    return {}


def _details(target: Target, turn: Turn, ledger: Ledger) -> dict[str, Any]:
    style = target.rule("detail_format") or "google-gemini-v1"
    identity = f"rs_{turn.mark}" if style.startswith("openai") else (turn.calls[0].id if turn.calls else "")
    signature = seal(target, turn.mark, target.model, identity, style)
    first: dict[str, Any] = {"format": style, "index": 0}
    if identity:
        first["id"] = identity
    if style.startswith("anthropic"):
        details = [{"type": "reasoning.text", "text": turn.thought, "signature": signature, **first}]
    else:
        details = [{"type": "reasoning.encrypted", "data": signature, **first}]
    ledger.note(target, turn.mark, signature)
    return {"reasoning": turn.thought, "reasoning_details": details}


def whole(target: Target, body: Body, turn: Turn, ledger: Ledger) -> bytes:
    choice = {
        "index": 0,
        "message": message_of(target, turn, ledger),
        "finish_reason": _ENDS[turn.end],
        "logprobs": None,
    }
    reply = {**_head(target, turn), "object": "chat.completion", "choices": [choice], "usage": _USAGE}
    return json.dumps(reply).encode()


def _head(target: Target, turn: Turn) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.mark}", "created": 1_800_000_000, "model": target.model}


def streamed(target: Target, body: Body, turn: Turn, ledger: Ledger) -> bytes:
    message = message_of(target, turn, ledger)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "reasoning"):
        if name in message:
            text = message[name]
            deltas += [{name: text[:7]}, {name: text[7:]}]
    if "reasoning_details" in message:
        deltas.append({"reasoning_details": message["reasoning_details"]})
    deltas += _content(message.get("content"))
    for number, call in enumerate(message.get("tool_calls") or ()):
        deltas += _call_deltas(target, call, number)
    chunks = [_chunk(target, turn, [{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    end = "stop" if target.api == "gemini" and turn.end == "calls" else _ENDS[turn.end]
    chunks.append(_chunk(target, turn, [{"index": 0, "delta": {}, "finish_reason": end}]))
    if (body.get("stream_options") or {}).get("include_usage") or target.api in ("mistral", "deepseek"):
        chunks.append({**_chunk(target, turn, []), "usage": _USAGE})
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks) + b"data: [DONE]\n\n"


def _content(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [{"content": [part]} for part in content]
    return [{"content": content[:9]}, {"content": content[9:]}] if content else []


def _call_deltas(target: Target, call: dict[str, Any], number: int) -> list[dict[str, Any]]:
    kind = call["type"]
    text = "input" if kind == "custom" else "arguments"
    whole_text = call[kind][text]
    index = {} if target.api == "gemini" else {"index": number}
    if target.rule("one_piece") or target.api == "gemini":
        return [{"tool_calls": [{**index, **call}]}]
    first = {**index, **call, kind: {**call[kind], text: ""}}
    pieces = [whole_text[:5], whole_text[5:]]
    return [{"tool_calls": [first]}, *({"tool_calls": [{**index, kind: {text: piece}}]} for piece in pieces)]


def _chunk(target: Target, turn: Turn, choices: list[Any]) -> dict[str, Any]:
    return {**_head(target, turn), "object": "chat.completion.chunk", "choices": choices}
