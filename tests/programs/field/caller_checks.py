"""Reads an answer as the caller's client does, and compares it with what the model said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.programs.field.answers import Turn

Answer = dict[str, Any]
_ENDS = {
    "chat": {"stop": ("stop",), "calls": ("tool_calls", "stop"), "length": ("length",)},
    "messages": {"stop": ("end_turn",), "calls": ("tool_use",), "length": ("max_tokens",)},
    "responses": {"stop": ("completed",), "calls": ("completed",), "length": ("incomplete",)},
}
_IDS = {"messages": r"[a-zA-Z0-9_-]+", "chat": r".+", "responses": r".+"}


def read(dialect: str, data: bytes, *, stream: bool) -> Answer:
    """The message, the content or the response. Raises ValueError, KeyError for no answer."""
    if not stream:
        whole = json.loads(data)
        return (
            {**whole["choices"][0]["message"], "end": whole["choices"][0]["finish_reason"]}
            if dialect == "chat"
            else whole
        )
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(line) for line in lines]
    if any("error" in event and event["error"] for event in events):
        raise ValueError(f"an error event: {events[-1]}")
    return {"chat": _chat, "messages": _messages, "responses": _response}[dialect](events)


def _chat(events: list[Answer]) -> Answer:
    message: Answer = {"role": "assistant", "content": None}
    calls: dict[int, Answer] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for place, call in enumerate(value):
                    _merge(calls.setdefault(call.get("index", len(calls) if call.get("id") else place), {}), call)
            elif name in ("content", "reasoning_content", "reasoning") and value:
                known = message.get(name)
                joined = value if known is None else known + value if isinstance(known, type(value)) else known
                message[name] = joined
            elif name == "reasoning_details":
                message[name] = [*message.get(name, ()), *value]
        if choice.get("finish_reason"):
            message["end"] = choice["finish_reason"]
    if calls:
        message["tool_calls"] = [calls[place] for place in sorted(calls)]
    return message


def _merge(call: Answer, delta: Mapping[str, Any]) -> None:
    for name, value in delta.items():
        if name in ("function", "custom"):
            inner = call.setdefault(name, {})
            for key, text in value.items():
                inner[key] = (
                    inner.get(key, "") + (text or "") if key in ("arguments", "input") else text or inner.get(key)
                )
        elif name != "index" and value is not None:
            call[name] = value


def _messages(events: list[Answer]) -> Answer:
    message = dict(events[0]["message"])
    blocks: list[Answer] = []
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for key, name in (("text", "text"), ("thinking", "thinking"), ("signature", "signature")):
                if key in delta:
                    block[name] = block.get(name, "") + delta[key]
            if "partial_json" in delta:
                texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            message["stop_reason"] = event["delta"]["stop_reason"]
    for index, text in texts.items():
        blocks[index]["input"] = json.loads(text or "{}")
    if events[-1]["type"] != "message_stop":
        raise ValueError("no message_stop")
    return {**message, "content": blocks, "started_with": events[0]["message"]["usage"].get("input_tokens")}


def _response(events: list[Answer]) -> Answer:
    last: Answer = events[-1]["response"]
    return last


def check(
    dialect: str, answer: Answer, turn: Turn, names: set[str], seen: set[str], *, translated: bool
) -> Iterator[str]:
    """Differences between what the model said and what the caller got. `seen`: ids of calls so far. Ids that a server
    wrote in the caller's own dialect are the server's: not `translated`."""
    text, calls, end = _said(dialect, answer)
    if turn.text and turn.text not in text:
        yield "text is not the model's"
    wanted = [(call.name, call.text) for call in turn.calls]
    if len(calls) != len(wanted):
        yield f"{len(calls)} calls of {len(wanted)}"
    for (identity, name, given), (_, said) in zip(calls, wanted, strict=False):
        if name not in names:
            yield "name of a tool that the caller does not have"
        if _loaded(given) not in (_loaded(said), _of_one_string(said)):
            yield "arguments are not the model's"
        if translated and (not identity or re.fullmatch(_IDS[dialect], identity) is None):
            yield "id of a call in no alphabet of the dialect"
        if translated and identity in seen:
            yield "id of a call repeats"
        seen.add(identity)
    if end not in _ENDS[dialect][turn.end]:
        yield f"end {end} for {turn.end}"
    if answer.get("started_with") == 0:
        yield "message_start has no input_tokens"


def _of_one_string(said: str) -> Any:
    """A custom tool that an API knows as a function of one string, `input`."""
    loaded = _loaded(said)
    return loaded.get("input", loaded) if isinstance(loaded, dict) else loaded


def _loaded(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _said(dialect: str, answer: Answer) -> tuple[str, list[tuple[str, str, Any]], Any]:
    if dialect == "messages":
        blocks = answer["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        return text, calls, answer["stop_reason"]
    if dialect == "responses":
        items = answer["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        calls = [
            (item["call_id"], item["name"], item.get("arguments", item.get("input")))
            for item in items
            if item["type"] in ("function_call", "custom_tool_call")
        ]
        return "".join(part.get("text", "") for part in parts), calls, answer["status"]
    content = answer.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    found = []
    for call in answer.get("tool_calls") or ():
        inner = call[call.get("type", "function")]
        found.append((call.get("id", ""), inner["name"], inner.get("arguments", inner.get("input"))))
    return content, found, answer.get("end")
