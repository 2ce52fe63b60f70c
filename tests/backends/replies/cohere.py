"""Cohere: API reference "Errors", by its OpenAI-compatible API (2026-11). Errors have no `error`."""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import of

reply = of("cohere")
TRIAL = "You are using a Trial key, which is limited to {}. You can continue to use the Trial key for free or upgrade."
TOO_MANY = "too many tokens: size limit exceeded by 11326 tokens. Try using shorter or fewer inputs."

REPLIES = [
    reply("context", 400, {"id": "ef1ad312", "message": TOO_MANY}, FailureKind.CONTEXT),
    reply("trial, a month", 429, {"id": "1", "message": TRIAL.format("1000 API calls / month")}, FailureKind.QUOTA),
    reply(
        "trial, a minute", 429, {"id": "1", "message": TRIAL.format("20 API calls / minute")}, FailureKind.REQUEST_RATE
    ),
    reply("key", 401, {"id": "1", "message": "invalid api token"}, FailureKind.AUTH),
    reply(
        "model",
        404,
        {"id": "1", "message": "model 'm-1' not found, make sure the correct model ID was used."},
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "output", 400, {"message": "too many tokens: max tokens must be less than or equal to 4096"}, FailureKind.CLIENT
    ),
    reply("server", 500, {"message": "internal server error"}, FailureKind.SERVER),
]
