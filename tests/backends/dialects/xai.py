"""xAI: API reference and "Debugging Errors" (2026-11). Errors are two texts; a wrong key is a 400."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

TRANSCRIPT = Transcript(
    kind="xai",
    headers={"authorization": "Bearer sk-secret"},
    stream=events(
        delta(role="assistant", content="", reasoning_content="Hm"),
        delta(content="Hello", role="assistant"),
        delta(finish="stop", content=""),
        {
            "id": "1",
            "choices": [],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "total_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 6},
                "num_sources_used": 0,
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2, 6),
    limits={"x-ratelimit-limit-requests": "480", "x-ratelimit-remaining-requests": "479"},
    waits=[(False, 479, 480, 60.0)],
    errors=[
        ErrorReply(
            400,
            {
                "code": "Client specified an invalid argument",
                "error": "Incorrect API key provided: sk***et. You can obtain an API key from https://console.x.ai.",
            },
            FailureKind.AUTH,
        ),
        ErrorReply(
            404,
            {
                "code": "Some requested entity was not found",
                "error": "The model m-1 does not exist or your team does not have access to it.",
            },
            FailureKind.MISCONFIGURED,
        ),
        ErrorReply(
            429,
            {"code": "Some resource has been exhausted", "error": "Too many requests for team."},
            FailureKind.RATE_LIMITED,
        ),
    ],
)
