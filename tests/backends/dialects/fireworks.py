"""Fireworks AI: docs, "Inference error codes" and "Rate limits" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="fireworks",
    path="/inference/v1",
    target="/inference/v1/chat/completions",
    headers={"authorization": "Bearer sk-secret"},
    stream=events(
        delta(role="assistant"),
        delta(content="Hel"),
        delta(content="lo"),
        {
            **delta(finish="stop"),
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "total_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2, 8),
    limits={"x-ratelimit-limit-requests": "600", "x-ratelimit-remaining-requests": "599"},
    waits=[(False, 599, 600, 60.0)],
    errors=[
        ErrorReply(
            404,
            {
                "error": {
                    "object": "error",
                    "type": "invalid_request_error",
                    "code": "NOT_FOUND",
                    "message": "Model not found, inaccessible, and/or not deployed",
                }
            },
            FailureKind.MISCONFIGURED,
        ),
        ErrorReply(
            429,
            {"error": {"object": "error", "type": "rate_limit_exceeded", "message": "rate limit exceeded"}},
            FailureKind.RATE_LIMITED,
        ),
        ErrorReply(
            503,
            {"error": {"object": "error", "type": "internal_server_error", "message": "overloaded"}},
            FailureKind.OVERLOADED,
        ),
    ],
)
