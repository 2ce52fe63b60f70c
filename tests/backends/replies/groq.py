"""Groq: "API Error Codes and Responses", "Rate Limits", "Flex processing", and reports in public issues
(ha-groq-cloud-api 27, continue 10218 and 10920, podscript 20).
Words of the following rows are a guess, in the documented shape: `spending limit`, `image`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, of, openai_error

reply = of("groq", "groq")
INVALID = "invalid_request_error"
WHERE = "for model `m-1` in organization `org_01kgg5588eftc8k70aes4864eb` service tier `on_demand` on"
TOO_LARGE = (
    f"Request too large {WHERE} tokens per minute (TPM): Limit 12000, Requested 14137, please reduce your message size."
)
TOKENS = (
    f"Rate limit reached {WHERE} tokens per day (TPD): Limit 100000, Used 97050, Requested 3619. "
    "Please try again in 9m38.016s."
)
REQUESTS = (
    f"Rate limit reached {WHERE} requests per minute (RPM): Limit 30, Used 30, Requested 1. Please try again in 2s."
)

REPLIES = [
    reply("request too large", 413, openai_error(TOO_LARGE, "tokens", "rate_limit_exceeded"), FailureKind.REQUEST_SIZE),
    reply(
        "tokens", 429, openai_error(TOKENS, "tokens", "rate_limit_exceeded"), FailureKind.TOKEN_RATE, learned=578.016
    ),
    reply(
        "requests",
        429,
        openai_error(REQUESTS, "requests", "rate_limit_exceeded"),
        FailureKind.REQUEST_RATE,
        learned=2.0,
    ),
    reply(
        "body",
        413,
        openai_error("Request Entity Too Large", INVALID, "request_too_large"),
        FailureKind.CLIENT,
        (413, "request_too_large"),
    ),
    reply(
        "context",
        400,
        openai_error("Please reduce the length of the messages or completion.", INVALID, "context_length_exceeded"),
        FailureKind.CONTEXT,
    ),
    reply("key", 401, openai_error("Invalid API Key", INVALID, "invalid_api_key"), FailureKind.AUTH),
    reply(
        "organization",
        400,
        openai_error(
            "Organization has been restricted. Please reach out to support.", INVALID, "organization_restricted"
        ),
        FailureKind.AUTH,
    ),
    reply(
        "blocked model",
        403,
        openai_error(
            "The model `m-1` is blocked at the project level.", "permissions_error", "model_permission_blocked_project"
        ),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "old model",
        400,
        openai_error(
            "The model `m-1` has been decommissioned and is no longer supported.", INVALID, "model_decommissioned"
        ),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "terms",
        400,
        openai_error("The model `m-1` requires terms acceptance.", INVALID, "model_terms_required"),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "model",
        404,
        openai_error("The model `m-1` does not exist or you do not have access to it.", INVALID, "model_not_found"),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "path",
        404,
        openai_error("Unknown request URL: POST /openai/v1/chat.", INVALID, "unknown_url"),
        FailureKind.MISCONFIGURED,
        NOT_SERVED,
    ),
    reply("image", 400, openai_error("failed to fetch image: 404", INVALID), FailureKind.CONTENT),
    reply(
        "tool call",
        400,
        openai_error("Failed to call a function.", INVALID, "tool_use_failed"),
        FailureKind.CLIENT,
        (400, "tool_use_failed"),
    ),
    reply("flex capacity", 498, openai_error("Flex tier capacity exceeded.", "capacity"), FailureKind.OVERLOADED),
    reply("server", 500, openai_error("Internal Server Error", "internal_server_error"), FailureKind.SERVER),
    reply("overloaded", 503, openai_error("Service Unavailable", "internal_server_error"), FailureKind.OVERLOADED),
    reply(
        "spending limit",
        400,
        openai_error("Your organization has reached its spend limit.", INVALID, "blocked_api_access"),
        FailureKind.QUOTA,
    ),
]
