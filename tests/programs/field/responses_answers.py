"""Writes a turn as a response or the events of one, with encrypted reasoning."""

from __future__ import annotations

import json
from typing import Any

from tests.programs.field.answers import Turn
from tests.programs.field.rules import Target
from tests.programs.field.shared_rules import Body
from tests.programs.field.state import Ledger, seal

_USAGE = {
    "input_tokens": 1200,
    "input_tokens_details": {"cached_tokens": 1000},
    "output_tokens": 40,
    "output_tokens_details": {"reasoning_tokens": 12},
    "total_tokens": 1240,
}


def items_of(target: Target, body: Body, turn: Turn, ledger: Ledger) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.thought:
        wants = "reasoning.encrypted_content" in (body.get("include") or ())
        item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{turn.mark}", "summary": []}
        if (body.get("reasoning") or {}).get("summary"):
            item["summary"] = [{"type": "summary_text", "text": turn.thought}]
        if not target.rule("encrypted"):
            item["content"] = [{"type": "reasoning_text", "text": turn.thought}]
        elif wants:
            item["encrypted_content"] = seal(target, turn.mark)
            ledger.note(target, turn.mark, item["encrypted_content"])
        items.append(item)
    if any(tool.get("type") == "web_search" for tool in body.get("tools") or ()) and turn.mark[-1] in "01234":
        action = {"type": "search", "query": "weather"}
        items.append({"type": "web_search_call", "id": f"ws_{turn.mark}", "status": "completed", "action": action})
    if turn.text:
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{turn.mark}", "status": "completed", "role": "assistant", "content": [part]}
        )
    return items + [_call(turn, number) for number in range(len(turn.calls))]


def _call(turn: Turn, number: int) -> dict[str, Any]:
    call = turn.calls[number]
    kind, text, prefix = ("custom_tool_call", "input", "ctc") if call.custom else ("function_call", "arguments", "fc")
    found = {"type": kind, "id": f"{prefix}_{turn.mark}{number}", "call_id": call.id, "name": call.name}
    return {
        **found,
        text: call.text,
        "status": "completed",
        **({"namespace": call.namespace} if call.namespace else {}),
    }


def response_of(target: Target, body: Body, turn: Turn, output: list[Any], status: str) -> dict[str, Any]:
    cut = {"reason": "max_output_tokens"} if turn.end == "length" and status != "in_progress" else None
    found = {
        "id": f"resp_{turn.mark}",
        "object": "response",
        "created_at": 1_800_000_000,
        "status": "incomplete" if cut else status,
        "error": None,
        "incomplete_details": cut,
        "instructions": body.get("instructions"),
        "model": target.model,
        "output": output,
        "usage": _USAGE if status != "in_progress" else None,
    }
    repeated = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "temperature": 1.0}
    return {**found, **{name: body.get(name, value) for name, value in {**repeated, "top_p": 1.0}.items()}}


def whole(target: Target, body: Body, turn: Turn, ledger: Ledger) -> bytes:
    output = items_of(target, body, turn, ledger)
    return json.dumps(response_of(target, body, turn, output, "completed")).encode()


def streamed(target: Target, body: Body, turn: Turn, ledger: Ledger) -> bytes:
    output = items_of(target, body, turn, ledger)
    started = response_of(target, body, turn, [], "in_progress")
    events: list[dict[str, Any]] = [{"type": "response.created", "response": started}]
    for index, item in enumerate(output):
        events += _item_events(index, item)
    last = response_of(target, body, turn, output, "completed")
    events.append({"type": f"response.{last['status']}", "response": last})
    lines = [{**event, "sequence_number": number} for number, event in enumerate(events)]
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in lines)


def _item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    started = {**item, "status": "in_progress"} if item["type"] != "reasoning" else item
    inner: list[dict[str, Any]] = []
    if item["type"] == "message":
        part, place = item["content"][0], {**at, "content_index": 0}
        empty = {**part, "text": ""}
        inner = [
            {"type": "response.content_part.added", **place, "part": empty},
            {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **place, "part": part},
        ]
        started = {**started, "content": []}
    elif item["type"] == "reasoning":
        for number, part in enumerate(item["summary"]):
            place = {**at, "summary_index": number}
            inner += [
                {"type": "response.reasoning_summary_part.added", **place, "part": {**part, "text": ""}},
                {"type": "response.reasoning_summary_text.delta", **place, "delta": part["text"]},
                {"type": "response.reasoning_summary_text.done", **place, "text": part["text"]},
                {"type": "response.reasoning_summary_part.done", **place, "part": part},
            ]
        for number, part in enumerate(item.get("content") or ()):
            place = {**at, "content_index": number}
            inner += [
                {"type": "response.reasoning_text.delta", **place, "delta": part["text"]},
                {"type": "response.reasoning_text.done", **place, "text": part["text"]},
            ]
        started = {name: value for name, value in item.items() if name not in ("content", "encrypted_content")}
        started["summary"] = []
    elif item["type"] == "function_call":
        text, started = item["arguments"], {**started, "arguments": ""}
        inner = [
            {"type": "response.function_call_arguments.delta", **at, "delta": text},
            {"type": "response.function_call_arguments.done", **at, "arguments": text, "name": item["name"]},
        ]
    elif item["type"] == "web_search_call":
        inner = []
    else:
        text, started = item["input"], {**started, "input": ""}
        inner = [
            {"type": "response.custom_tool_call_input.delta", **at, "delta": text},
            {"type": "response.custom_tool_call_input.done", **at, "input": text},
        ]
    added = {"type": "response.output_item.added", "output_index": index, "item": started}
    return [added, *inner, {"type": "response.output_item.done", "output_index": index, "item": item}]
