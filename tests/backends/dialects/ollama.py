"""Ollama: docs, "OpenAI compatibility" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="ollama",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7},
    stream=events(
        delta(role="assistant", content="", reasoning="Hm"),
        delta(role="assistant", content="Hello"),
        delta(role="assistant", content="", finish="stop"),
        {"id": "1", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}},
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2),
    errors=[
        ErrorReply(
            404,
            {"error": {"message": "model 'm-1' not found", "type": "not_found_error", "param": None, "code": None}},
            FailureKind.MISCONFIGURED,
        ),
        ErrorReply(
            503,
            {
                "error": {
                    "message": "server busy, please try again. maximum pending requests exceeded",
                    "type": "api_error",
                }
            },
            FailureKind.OVERLOADED,
        ),
        ErrorReply(
            500, {"error": {"message": "llama runner process has terminated", "type": "api_error"}}, FailureKind.SERVER
        ),
    ],
)
