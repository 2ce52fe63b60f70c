"""Mistral: API reference and "Rate limits" (2026-11). Unknown fields are refused; usage comes unasked."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="mistral",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7},
    absent=["stream_options", "max_completion_tokens"],
    stream=events(
        delta(role="assistant", content=""),
        delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}]),
        delta(content="Hello"),
        {**delta(finish="stop", content=""), "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}},
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2),
    limits={"x-ratelimit-limit-req-minute": "60", "x-ratelimit-remaining-req-minute": "0"},
    waits=[(False, 0, 60, 60.0)],
    errors=[
        ErrorReply(
            429,
            {
                "object": "error",
                "message": "Requests rate limit exceeded",
                "type": "rate_limited",
                "param": None,
                "code": "1300",
            },
            FailureKind.REQUEST_RATE,
        ),
        ErrorReply(
            422,
            {
                "object": "error",
                "type": "invalid_request_error",
                "message": {
                    "detail": [
                        {"type": "extra_forbidden", "loc": ["body", "x"], "msg": "Extra inputs are not permitted"}
                    ]
                },
            },
            FailureKind.CLIENT,
        ),
        ErrorReply(401, {"message": "Unauthorized", "request_id": "1"}, FailureKind.AUTH),
        ErrorReply(
            400,
            {
                "object": "error",
                "message": "Invalid model: m-1",
                "type": "invalid_model",
                "param": None,
                "code": "1500",
            },
            FailureKind.MISCONFIGURED,
        ),
    ],
)
