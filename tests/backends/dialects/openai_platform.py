"""OpenAI: API reference, guides "Error codes" and "Rate limits" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

LIMITS = {
    "x-ratelimit-limit-requests": "500",
    "x-ratelimit-remaining-requests": "499",
    "x-ratelimit-reset-requests": "120ms",
    "x-ratelimit-limit-tokens": "30000",
    "x-ratelimit-remaining-tokens": "29000",
    "x-ratelimit-reset-tokens": "2s",
}
USAGE = {
    "prompt_tokens": 1200,
    "completion_tokens": 3,
    "total_tokens": 1203,
    "prompt_tokens_details": {"cached_tokens": 1024, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


def error(message: str, type: str, code: str | None, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


TRANSCRIPT = Transcript(
    kind="openai",
    headers={"authorization": "Bearer sk-secret"},
    body={"model": "m-1", "stream_options": {"include_usage": True}, "max_tokens": 7},
    absent=["cache_salt"],
    stream=events(
        delta(role="assistant", content="", refusal=None),
        {**delta(content="Hel"), "obfuscation": "abc"},
        delta(content="lo"),
        delta(finish="stop"),
        {"id": "1", "choices": [], "usage": USAGE},
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(1200, 3, 1024, reasoning=1),
    limits=LIMITS,
    waits=[(False, 499, 500, 0.12), (True, 29000, 30000, 2.0)],
    errors=[
        ErrorReply(
            401,
            error("Incorrect API key provided: sk-s***t.", "invalid_request_error", "invalid_api_key"),
            FailureKind.AUTH,
        ),
        ErrorReply(
            429,
            error(
                "Rate limit reached for m-1 in organization org-1 on requests per min.",
                "requests",
                "rate_limit_exceeded",
            ),
            FailureKind.REQUEST_RATE,
            "rate_limit_exceeded",
            {"retry-after": "2", "retry-after-ms": "1500"},
            1.5,
        ),
        ErrorReply(
            429,
            error("You exceeded your current quota.", "insufficient_quota", "insufficient_quota"),
            FailureKind.QUOTA,
            "insufficient_quota",
        ),
        ErrorReply(
            400,
            error(
                "This model's maximum context length is 128000 tokens.",
                "invalid_request_error",
                "context_length_exceeded",
                "messages",
            ),
            FailureKind.CONTEXT,
            "context_length_exceeded",
        ),
        ErrorReply(
            404,
            error("The model `m-1` does not exist.", "invalid_request_error", "model_not_found"),
            FailureKind.MISCONFIGURED,
            "model_not_found",
        ),
        ErrorReply(500, error("The server had an error.", "server_error", None), FailureKind.SERVER),
        ErrorReply(
            503,
            error("The engine is currently overloaded.", "service_unavailable_error", None),
            FailureKind.OVERLOADED,
            None,
            {"retry-after": "5"},
            5.0,
        ),
    ],
    stream_error=events(error("The server had an error processing your request.", "server_error", None)),
    stream_failure=FailureKind.SERVER,
)
