"""Fireworks AI: "Inference error codes", and the words of public reports about suspended accounts (2026-11).
Words of the following rows are a guess, in the documented shape: `permission`, `overloaded`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import of

reply = of("fireworks", "fireworks")
INVALID = "invalid_request_error"
SUSPENDED = (
    "Account acme is suspended, possibly due to reaching the monthly spending limit or failure to pay past invoices."
)


def error(message: str, type: str = INVALID, code: str | None = None) -> object:
    return {"error": {"object": "error", "type": type, "code": code, "message": message}}


REPLIES = [
    reply("suspended", 412, error(SUSPENDED, code="PRECONDITION_FAILED"), FailureKind.QUOTA),
    reply(
        "model",
        404,
        error("Model not found, inaccessible, and/or not deployed", code="NOT_FOUND"),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "context",
        400,
        error("The prompt is too long: 265392, model maximum context length: 262144"),
        FailureKind.CONTEXT,
    ),
    reply("key", 401, error("The API key you provided is invalid.", code="UNAUTHORIZED"), FailureKind.AUTH),
    reply("permission", 403, error("Forbidden", code="FORBIDDEN"), FailureKind.AUTH),
    reply("rate", 429, error("rate limit exceeded", "rate_limit_exceeded"), FailureKind.RATE_LIMITED),
    reply("overloaded", 503, error("service overloaded", "internal_server_error"), FailureKind.OVERLOADED),
    reply("server", 500, error("server error", "internal_server_error"), FailureKind.SERVER),
]
