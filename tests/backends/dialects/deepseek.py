"""DeepSeek: API docs, "Error Codes", "Context Caching" and "Rate Limit" (keep-alive comments) (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="deepseek",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7},
    stream=events(
        ": keep-alive",
        delta(role="assistant", content=None, reasoning_content=""),
        ": keep-alive",
        delta(content=None, reasoning_content="Let"),
        delta(content="Hello", reasoning_content=None),
        {
            **delta(finish="stop", content=""),
            "usage": {
                "prompt_tokens": 100,
                "completion_tokens": 2,
                "total_tokens": 102,
                "prompt_cache_hit_tokens": 64,
                "prompt_cache_miss_tokens": 36,
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(100, 2, 64),
    errors=[
        ErrorReply(
            402,
            {
                "error": {
                    "message": "Insufficient Balance",
                    "type": "unknown_error",
                    "param": None,
                    "code": "invalid_request_error",
                }
            },
            FailureKind.QUOTA,
            "insufficient_quota",
        ),
        ErrorReply(
            400,
            {
                "error": {
                    "message": "Model Not Exist",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_request_error",
                }
            },
            FailureKind.MISCONFIGURED,
            "model_not_found",
        ),
        ErrorReply(
            401,
            {
                "error": {
                    "message": "Authentication Fails",
                    "type": "authentication_error",
                    "param": None,
                    "code": "invalid_request_error",
                }
            },
            FailureKind.AUTH,
        ),
        ErrorReply(503, b"", FailureKind.OVERLOADED),
    ],
)
