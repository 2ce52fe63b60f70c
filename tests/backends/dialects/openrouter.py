"""OpenRouter: docs, "Errors and Debugging", "Streaming", "Prompt Caching" and "Rate Limits" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="openrouter",
    path="/api/v1",
    target="/api/v1/chat/completions",
    headers={"authorization": "Bearer sk-secret"},
    stream=events(
        ": OPENROUTER PROCESSING",
        {**delta(role="assistant", content=""), "provider": "Some"},
        delta(content="", reasoning="Hm", reasoning_details=[{"type": "reasoning.text", "text": "Hm"}]),
        delta(content="Hello"),
        delta(finish="stop", content=""),
        {
            "id": "1",
            "choices": [],
            "usage": {
                "prompt_tokens": 50,
                "completion_tokens": 2,
                "cost": 0.001,
                "prompt_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 30},
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(50, 2, 10, 30),
    errors=[
        ErrorReply(402, {"error": {"code": 402, "message": "Insufficient credits"}}, FailureKind.QUOTA),
        ErrorReply(
            402,
            {
                "error": {
                    "code": 402,
                    "message": "You requested up to 64000 tokens, but can only afford 12."
                    " To increase, add more credits, or request fewer max_tokens",
                }
            },
            FailureKind.REQUEST_SIZE,
        ),
        ErrorReply(
            429,
            {"error": {"code": 429, "message": "Rate limit exceeded", "metadata": {"headers": {}}}},
            FailureKind.RATE_LIMITED,
        ),
        ErrorReply(
            403,
            {"error": {"code": 403, "message": "Your input was flagged", "metadata": {"reasons": ["x"]}}},
            FailureKind.CONTENT_FILTER,
            "content_filter",
        ),
        ErrorReply(502, {"error": {"code": 502, "message": "Provider returned error"}}, FailureKind.SERVER),
        ErrorReply(400, {"error": {"code": 400, "message": "m-1 is not a valid model ID"}}, FailureKind.MISCONFIGURED),
    ],
    stream_error=events(
        ": OPENROUTER PROCESSING",
        {
            "id": "1",
            "error": {"code": 502, "message": "Provider disconnected unexpectedly"},
            "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}],
        },
    ),
    stream_failure=FailureKind.SERVER,
)
