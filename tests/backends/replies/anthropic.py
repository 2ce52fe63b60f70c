"""Anthropic: API reference "Errors", "Rate limits", "Files", "Streaming messages" (November 2026), and reports in
public issues (claude-code 55132, OpenHands 9259, BoltAI 338, bolt.new 2520 and 7422).
Words of the following rows are a guess, in the documented shape: `organization`, `skill`, `container`, `filter`.
"""

from __future__ import annotations

from typing import Any

from backends.interface import FailureKind, Operation
from tests.backends.replies.reply import NOT_SERVED, PROMPT, event, of

reply = of("anthropic", "anthropic")
messages = {"operation": Operation.MESSAGES}
LIMIT = (
    "This request would exceed your organization's rate limit of {} per minute (org: "
    "9d50ef40-6cc8-4ca6-9d35-1dc9cf26235c, model: m-1). For details, refer to: https://docs.claude.com/en/api/rate-limits."
)
GROWTH = "This request would exceed your organization's maximum usage increase rate for input tokens per minute."
INPUT = "anthropic-ratelimit-input-tokens"
INVALID = "invalid_request_error"


def error(type: str, message: str) -> Any:
    return {"type": "error", "error": {"type": type, "message": message}, "request_id": "req_011C"}


REPLIES = [
    reply(
        "input tokens",
        429,
        error("rate_limit_error", LIMIT.format("40,000 input tokens")),
        FailureKind.TOKEN_RATE,
        headers={f"{INPUT}-limit": "40000", f"{INPUT}-remaining": "3000", "retry-after": "12"},
        learned=12.0,
    ),
    reply(
        "a request larger than the limit",
        429,
        error("rate_limit_error", LIMIT.format("40,000 input tokens")),
        FailureKind.REQUEST_SIZE,
        headers={f"{INPUT}-limit": "40000", f"{INPUT}-remaining": "40000"},
    ),
    reply(
        "growth",
        429,
        error("rate_limit_error", GROWTH),
        FailureKind.TOKEN_RATE,
        headers={f"{INPUT}-limit": "40000", f"{INPUT}-remaining": "40000"},
    ),
    reply("requests", 429, error("rate_limit_error", LIMIT.format("50 requests")), FailureKind.REQUEST_RATE),
    reply(
        "old words",
        429,
        error("rate_limit_error", "Number of request tokens has exceeded your per-minute rate limit"),
        FailureKind.TOKEN_RATE,
    ),
    reply(
        "connections",
        429,
        error("rate_limit_error", "Number of concurrent connections has exceeded your rate limit."),
        FailureKind.REQUEST_RATE,
    ),
    reply(
        "by the headers",
        429,
        error("rate_limit_error", "Rate limited."),
        FailureKind.TOKEN_RATE,
        headers={
            "date": "Sun, 22 Nov 2026 10:00:00 GMT",
            "anthropic-ratelimit-requests-remaining": "7",
            "anthropic-ratelimit-output-tokens-remaining": "0",
            "anthropic-ratelimit-output-tokens-reset": "2026-11-22T10:00:30Z",
        },
        learned=30.0,
    ),
    reply(
        "long context",
        429,
        error("rate_limit_error", "Extra usage is required for long context requests."),
        FailureKind.REQUEST_SIZE,
    ),
    reply("unknown limit", 429, error("rate_limit_error", "Error"), FailureKind.RATE_LIMITED),
    reply(
        "credit",
        400,
        error(INVALID, "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing."),
        FailureKind.QUOTA,
    ),
    reply(
        "spending limit",
        400,
        error(INVALID, "You have reached your specified API usage limits. You will regain access on 2026-12-01."),
        FailureKind.QUOTA,
    ),
    reply("billing", 402, error("billing_error", "There is an issue with your billing."), FailureKind.QUOTA),
    reply("key", 401, error("authentication_error", "invalid x-api-key"), FailureKind.AUTH),
    reply("organization", 400, error(INVALID, "This organization has been disabled."), FailureKind.AUTH),
    reply(
        "permission",
        403,
        error("permission_error", "Your API key does not have permission to use the specified resource."),
        FailureKind.AUTH,
    ),
    reply("model", 404, error("not_found_error", "model: m-1"), FailureKind.MISCONFIGURED),
    reply("path", 404, error("not_found_error", "Not Found"), FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("file", 404, error("not_found_error", "File not found: file_011CNha8iCJcU1wXNR6q4V8w"), FailureKind.CONTENT),
    reply("skill", 404, error("not_found_error", "Skill not found: skill_01"), FailureKind.CONTENT),
    reply("container", 404, error("not_found_error", "Container container_011C not found."), FailureKind.CONTENT),
    reply(
        "file by its address",
        400,
        error(INVALID, "Unable to download the file. Please verify the URL and try again."),
        FailureKind.CONTENT,
    ),
    reply("context", 400, error(INVALID, "prompt is too long: 208544 tokens > 200000 maximum"), FailureKind.CONTEXT),
    reply(
        "context with the output",
        400,
        error(INVALID, "input length and `max_tokens` exceed context limit: 86888 + 119866 > 204648"),
        FailureKind.CONTEXT,
    ),
    reply("body", 413, error("request_too_large", "Request exceeds the maximum size"), FailureKind.CLIENT),
    reply("parameter", 400, error(INVALID, f"messages.0.role: Input '{PROMPT}' is not allowed"), FailureKind.CLIENT),
    reply(
        "filter",
        400,
        error(INVALID, "Output blocked by content filtering policy"),
        FailureKind.CONTENT_FILTER,
    ),
    reply("server", 500, error("api_error", "Internal server error"), FailureKind.SERVER),
    reply("timeout", 504, error("timeout_error", "Timed out"), FailureKind.TIMEOUT),
    reply("overloaded", 529, error("overloaded_error", "Overloaded"), FailureKind.OVERLOADED),
    reply("event", 200, event(error("overloaded_error", "Overloaded"), "error"), FailureKind.OVERLOADED, **messages),
    reply("server event", 200, event(error("api_error", "Internal"), "error"), FailureKind.SERVER, **messages),
    reply(
        "refused event",
        200,
        event(error(INVALID, f"messages: '{PROMPT}'"), "error"),
        FailureKind.CLIENT,
        (400, None),
        **messages,
    ),
    reply("whole", 200, error("overloaded_error", "Overloaded"), FailureKind.OVERLOADED, **messages),
]
