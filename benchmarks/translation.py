"""CPU time of a translated chunk and of a translated request: `python -m benchmarks.translation [ROUNDS]`.

A chunk is one event of one token in a read of its own, as engines send them: least of many rounds, in microseconds.
A request is a history of 41 turns with tools. The limit of a chunk is 60 us.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from backends.translation.registry import CHAT_TO_MESSAGES, CHAT_TO_RESPONSES, MESSAGES_TO_CHAT, RESPONSES_TO_CHAT
from backends.translation.translation import Translation

ROUNDS, CHUNKS = 40, 500
LIMIT_US = 60.0
CHAT_CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CHAT_BODY = {
    "model": "m",
    "messages": [{"role": ("user", "assistant")[turn % 2], "content": "word " * 200} for turn in range(41)],
    "tools": [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object", "properties": {}}}}
        for n in range(20)
    ],
}


@dataclass(frozen=True, slots=True)
class Case:
    """`opening`: events before the measured ones. `body`: the caller's request."""

    name: str
    translation: Translation
    opening: bytes
    chunk: bytes
    body: Mapping[str, Any]


def chat_chunk(**delta: Any) -> bytes:
    chunk = {**CHAT_CHUNK, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    return b"data: %b\n\n" % json.dumps(chunk).encode()


def response_event(kind: str, **members: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": 7, "item_id": "msg_1", "output_index": 0, **members})
    return f"event: {kind}\ndata: {data}\n\n".encode()


def message_event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


def message_cases() -> list[Case]:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": " word"}}]
    native = CHAT_TO_MESSAGES.request(CHAT_BODY, frozenset())
    started = message_event("message_start", message={"id": "msg_1", "model": "m", "usage": {"input_tokens": 1}})
    block = message_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    text = message_event("content_block_delta", index=0, delta={"type": "text_delta", "text": " word"})
    return [
        Case("messages to chat: text", MESSAGES_TO_CHAT, chat_chunk(content="a"), chat_chunk(content="b"), native),
        Case(
            "messages to chat: arguments",
            MESSAGES_TO_CHAT,
            chat_chunk(tool_calls=[call]),
            chat_chunk(tool_calls=more),
            native,
        ),
        Case("chat to messages: text", CHAT_TO_MESSAGES, started + block, text, CHAT_BODY),
    ]


def cases() -> list[Case]:
    return response_cases() + message_cases()


def response_cases() -> list[Case]:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": " word"}}]
    native = CHAT_TO_RESPONSES.request(CHAT_BODY, frozenset())
    created = response_event("response.created", response={"id": "resp_1", "created_at": 1.0, "model": "m"})
    text = response_event("response.output_text.delta", content_index=0, delta=" word", logprobs=[])
    return [
        Case("responses to chat: text", RESPONSES_TO_CHAT, chat_chunk(content="a"), chat_chunk(content="b"), native),
        Case(
            "responses to chat: arguments",
            RESPONSES_TO_CHAT,
            chat_chunk(tool_calls=[call]),
            chat_chunk(tool_calls=more),
            native,
        ),
        Case("chat to responses: text", CHAT_TO_RESPONSES, created, text, CHAT_BODY),
    ]


def chunk_us(case: Case, rounds: int) -> float:
    least = float("inf")
    for _ in range(rounds):
        stream = case.translation.stream(case.body)
        stream.feed(case.opening)
        start = perf_counter()
        for _ in range(CHUNKS):
            stream.feed(case.chunk)
        least = min(least, (perf_counter() - start) / CHUNKS)
    return least * 1e6


def request_us(case: Case, rounds: int) -> float:
    least = float("inf")
    for _ in range(rounds):
        start = perf_counter()
        case.translation.request(case.body, frozenset())
        least = min(least, perf_counter() - start)
    return least * 1e6


def main(rounds: int = ROUNDS) -> None:
    print(f"{'translation':40} {'us a chunk':>12} {'us a request':>14}")
    for case in cases():
        print(f"{case.name:40} {chunk_us(case, rounds):12.1f} {request_us(case, rounds):14.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
