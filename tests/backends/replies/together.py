"""Together AI: "Error codes", "Rate limits" (2026-11).
Words of the following rows are a guess, in the documented shape: `model`, `server`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import of, openai_error

reply = of("together", "together")
TOO_LONG = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: 8000 `inputs` tokens"
TO_MODEL = "You have reached the rate limit specific to this model m-1. The maximum rate limit for this model is {}."

REPLIES = [
    reply("context", 422, openai_error(TOO_LONG, "invalid_request_error"), FailureKind.CONTEXT),
    reply(
        "context, new words",
        400,
        openai_error("The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
        FailureKind.CONTEXT,
    ),
    reply(
        "requests",
        429,
        openai_error(TO_MODEL.format("0.6 queries per minute or 6 requests per minute"), "model_rate_limit"),
        FailureKind.REQUEST_RATE,
    ),
    reply(
        "by the headers",
        429,
        openai_error("You have reached the rate limit.", "model_rate_limit"),
        FailureKind.REQUEST_RATE,
        headers={"x-ratelimit-limit": "20", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "2"},
    ),
    reply(
        "unknown limit",
        429,
        openai_error("You have reached the rate limit.", "model_rate_limit"),
        FailureKind.RATE_LIMITED,
    ),
    reply("money", 402, openai_error("Credit limit exceeded", "credit_limit"), FailureKind.QUOTA),
    reply(
        "key",
        401,
        openai_error("Invalid API key provided.", "invalid_request_error", "invalid_api_key"),
        FailureKind.AUTH,
    ),
    reply(
        "model",
        404,
        openai_error(
            "Unable to access model m-1. Please visit https://api.together.ai/models",
            "invalid_request_error",
            "model_not_available",
        ),
        FailureKind.MISCONFIGURED,
    ),
    reply("overloaded", 503, openai_error("The server is overloaded", "service_unavailable"), FailureKind.OVERLOADED),
    reply("server", 500, openai_error("Internal server error", "server_error"), FailureKind.SERVER),
]
