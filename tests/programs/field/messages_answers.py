"""Writes a turn as a message or a stream of Anthropic's Messages, with signed thinking."""

from __future__ import annotations

import json
from typing import Any

from tests.programs.field.answers import Turn
from tests.programs.field.rules import Target
from tests.programs.field.shared_rules import Body
from tests.programs.field.state import Ledger, prefix, seal

_ENDS = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"}
_USAGE = {"input_tokens": 200, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 0, "output_tokens": 40}
_OMITTED = "omitted"


def blocks_of(target: Target, body: Body, turn: Turn, ledger: Ledger) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.thought and target.api == "anthropic":
        shown = (body.get("thinking") or {}).get("display", _OMITTED) != _OMITTED
        thought = turn.thought if shown or target.rule("sampling") == "one" else ""
        signature = seal(target, turn.mark, target.model, thought, prefix(target, body, len(body["messages"])))
        blocks.append({"type": "thinking", "thinking": thought, "signature": signature})
        ledger.note(target, turn.mark, signature)
        if int(turn.mark[-1], 16) < 2:
            data = seal(target, turn.mark, target.model)
            blocks.append({"type": "redacted_thinking", "data": data})
    elif turn.thought:
        blocks.append({"type": "thinking", "thinking": turn.thought, "signature": turn.mark[2:].rjust(32, "0")})
    if any(str(tool.get("type")).startswith("web_search") for tool in body.get("tools") or ()):
        blocks += _search(turn)
    if turn.text:
        blocks.append({"type": "text", "text": turn.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.text)} for call in turn.calls
    ]
    return blocks


def _search(turn: Turn) -> list[dict[str, Any]]:
    """A search that the API has run."""
    identity = f"srvtoolu_{turn.mark}"
    found = {"type": "web_search_result", "url": "https://field.test", "title": "Field", "encrypted_content": "Eq"}
    return [
        {"type": "server_tool_use", "id": identity, "name": "web_search", "input": {"query": "weather"}},
        {"type": "web_search_tool_result", "tool_use_id": identity, "content": [found]},
    ]


def _head(target: Target, turn: Turn) -> dict[str, Any]:
    return {"id": f"msg_{turn.mark}", "type": "message", "role": "assistant", "model": target.model}


def whole(target: Target, body: Body, turn: Turn, ledger: Ledger) -> bytes:
    content = blocks_of(target, body, turn, ledger)
    reply = {**_head(target, turn), "content": content, "stop_reason": _ENDS[turn.end], "stop_sequence": None}
    return json.dumps({**reply, "usage": _USAGE}).encode()


def streamed(target: Target, body: Body, turn: Turn, ledger: Ledger) -> bytes:
    started = {**_head(target, turn), "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**started, "usage": {**_USAGE, "output_tokens": 1}}}
    ]
    for index, block in enumerate(blocks_of(target, body, turn, ledger)):
        events += _block_events(index, block)
    delta = {"stop_reason": _ENDS[turn.end], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": delta, "usage": _USAGE}, {"type": "message_stop"}]
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events)


def _block_events(index: int, block: dict[str, Any]) -> list[dict[str, Any]]:
    kind = block["type"]
    empty = {
        "text": {"type": kind, "text": ""},
        "thinking": {"type": kind, "thinking": "", "signature": ""},
        "tool_use": {**block, "input": {}},
    }.get(kind, block)
    deltas: list[dict[str, Any]] = []
    if kind == "text":
        deltas = [{"type": "text_delta", "text": piece} for piece in (block["text"][:6], block["text"][6:])]
    elif kind == "thinking":
        thought = [{"type": "thinking_delta", "thinking": block["thinking"]}] * bool(block["thinking"])
        deltas = [*thought, {"type": "signature_delta", "signature": block["signature"]}]
    elif kind == "tool_use":
        text = json.dumps(block["input"])
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in (text[:4], text[4:])]
    events: list[dict[str, Any]] = [{"type": "content_block_start", "index": index, "content_block": empty}]
    events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    return [*events, {"type": "content_block_stop", "index": index}]
