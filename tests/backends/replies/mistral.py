"""Mistral: API reference, "Rate limits", "Guardrailing", and reports in public issues (cline 9085, continue 6185).
Words of the following rows are a guess, in the documented shape: `guardrails`, `money`, `image`.
"""

from __future__ import annotations

from typing import Any

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, PROMPT, of

reply = of("mistral", "mistral")


def error(message: Any, type: str, code: str | None = None) -> Any:
    return {"object": "error", "message": message, "type": type, "param": None, "code": code}


INPUT = {
    "detail": [
        {"type": "extra_forbidden", "loc": ["body", "x"], "msg": "Extra inputs are not permitted", "input": PROMPT}
    ]
}
REPLIES = [
    reply("requests", 429, error("Requests rate limit exceeded", "rate_limited", "1300"), FailureKind.REQUEST_RATE),
    reply("unknown limit", 429, error("Rate limit exceeded", "rate_limited", "1300"), FailureKind.RATE_LIMITED),
    reply(
        "by the headers",
        429,
        error("Rate limit exceeded", "rate_limited", "1300"),
        FailureKind.REQUEST_RATE,
        headers={"x-ratelimit-limit-req-minute": "60", "x-ratelimit-remaining-req-minute": "0"},
    ),
    reply(
        "by the headers: tokens",
        429,
        error("Rate limit exceeded", "rate_limited", "1300"),
        FailureKind.TOKEN_RATE,
        headers={"x-ratelimit-remaining-req-minute": "9", "x-ratelimit-remaining-tokens-minute": "0"},
    ),
    reply(
        "capacity",
        429,
        error("Service tier capacity exceeded for this model.", "service_tier_capacity_exceeded", "3505"),
        FailureKind.OVERLOADED,
    ),
    reply("model", 400, error("Invalid model: m-1", "invalid_model", "1500"), FailureKind.MISCONFIGURED),
    reply("key", 401, {"message": "Unauthorized", "request_id": "1"}, FailureKind.AUTH),
    reply("money", 402, {"detail": "Payment required"}, FailureKind.QUOTA),
    reply("path", 404, {"message": "no Route matched with those values"}, FailureKind.MISCONFIGURED, NOT_SERVED),
    reply(
        "context",
        400,
        error(
            "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
            "invalid_request_prompt",
            "3051",
        ),
        FailureKind.CONTEXT,
    ),
    reply("guardrails", 403, error("Blocked.", "guardrails_violation"), FailureKind.CONTENT_FILTER),
    reply("member", 422, error(INPUT, "invalid_request_error"), FailureKind.CLIENT),
    reply(
        "image",
        400,
        error("Could not load image: status 404", "invalid_request_file", "3310"),
        FailureKind.CONTENT,
        (400, "3310"),
    ),
    reply("server", 500, error("Internal server error", "internal_server_error", "1000"), FailureKind.SERVER),
    reply("overloaded", 503, error("Service unavailable.", "internal_server_error", "3000"), FailureKind.OVERLOADED),
]
