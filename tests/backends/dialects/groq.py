"""Groq: API reference, "Rate Limits" and "API Error Codes" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="groq",
    path="/openai/v1",
    target="/openai/v1/chat/completions",
    headers={"authorization": "Bearer sk-secret"},
    absent=["cache_salt", "prompt_cache_key"],
    stream=events(
        {**delta(role="assistant", content=""), "x_groq": {"id": "req_1"}},
        delta(reasoning="Hm"),
        delta(content="Hello"),
        {**delta(finish="stop"), "x_groq": {"id": "req_1", "usage": {"prompt_tokens": 9, "completion_tokens": 2}}},
        {
            "id": "1",
            "choices": [],
            "usage": {
                "queue_time": 0.02,
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2, 4),
    limits={
        "x-ratelimit-limit-requests": "14400",
        "x-ratelimit-remaining-requests": "14370",
        "x-ratelimit-reset-requests": "2m59.56s",
        "x-ratelimit-limit-tokens": "18000",
        "x-ratelimit-remaining-tokens": "17997",
        "x-ratelimit-reset-tokens": "7.66s",
    },
    waits=[(False, 14370, 14400, 179.56), (True, 17997, 18000, 7.66)],
    errors=[
        ErrorReply(
            429,
            {
                "error": {
                    "message": "Rate limit reached for model `m-1` in organization `org_1` on tokens "
                    "per minute (TPM): Limit 6000, Used 5900, Requested 200.",
                    "type": "tokens",
                    "code": "rate_limit_exceeded",
                }
            },
            FailureKind.TOKEN_RATE,
            "rate_limit_exceeded",
            {"retry-after": "2"},
            2.0,
        ),
        ErrorReply(
            401,
            {"error": {"message": "Invalid API Key", "type": "invalid_request_error", "code": "invalid_api_key"}},
            FailureKind.AUTH,
        ),
        ErrorReply(
            503, {"error": {"message": "Service Unavailable", "type": "internal_server_error"}}, FailureKind.OVERLOADED
        ),
    ],
)
