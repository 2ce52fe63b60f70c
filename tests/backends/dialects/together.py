"""Together AI: docs, "Error Codes" and "Rate Limits" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="together",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7},
    stream=events(
        {**delta(content="Hel", role="assistant"), "usage": None},
        delta(content="lo"),
        {
            **delta(finish="eos", content=""),
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11, "cached_tokens": 0},
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2),
    limits={"x-ratelimit-limit": "10", "x-ratelimit-remaining": "3", "x-ratelimit-reset": "1"},
    waits=[(False, 3, 10, 1.0)],
    errors=[
        ErrorReply(
            429,
            {
                "id": "1",
                "error": {
                    "message": "You have reached the rate limit specific to this model.",
                    "type": "model_rate_limit",
                    "param": None,
                    "code": None,
                },
            },
            FailureKind.RATE_LIMITED,
        ),
        ErrorReply(402, {"error": {"message": "Credit limit exceeded", "type": "credit_limit"}}, FailureKind.QUOTA),
        ErrorReply(
            503,
            {"error": {"message": "The server is overloaded", "type": "service_unavailable"}},
            FailureKind.OVERLOADED,
        ),
    ],
)
