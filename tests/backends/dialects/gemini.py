"""Gemini: OpenAI compatibility, "Troubleshooting" and google.rpc.Status (2026-11). Errors are a list."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

RETRY = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}


def error(code: int, status: str, message: str, *details: object) -> list[object]:
    return [{"error": {"code": code, "message": message, "status": status, "details": list(details)}}]


TRANSCRIPT = Transcript(
    kind="gemini",
    path="/v1beta/openai",
    target="/v1beta/openai/chat/completions",
    headers={"authorization": "Bearer sk-secret"},
    stream=events(
        delta(content="<thought>Hm", role="assistant", extra_content={"google": {"thought": True}}),
        delta(content="Hello", role="assistant"),
        {
            **delta(finish="stop", role="assistant"),
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 30},
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2),
    errors=[
        ErrorReply(
            429,
            error(429, "RESOURCE_EXHAUSTED", "You exceeded your current quota.", RETRY),
            FailureKind.RATE_LIMITED,
            retry_after=34.5,
        ),
        ErrorReply(429, error(429, "RESOURCE_EXHAUSTED", "Resource has been exhausted."), FailureKind.RATE_LIMITED),
        ErrorReply(
            400,
            error(
                400,
                "INVALID_ARGUMENT",
                "API key not valid. Please pass a valid API key.",
                {"reason": "API_KEY_INVALID"},
            ),
            FailureKind.AUTH,
        ),
        ErrorReply(503, error(503, "UNAVAILABLE", "The model is overloaded."), FailureKind.OVERLOADED),
        ErrorReply(
            400, error(400, "INVALID_ARGUMENT", "Unable to submit request: top_k must be positive."), FailureKind.CLIENT
        ),
    ],
)
