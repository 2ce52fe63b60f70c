"""OpenRouter: "Errors and Debugging", "Streaming", "Provider Routing", "Rate Limits" (2026-11), and reports in public
issues (Flow.Launcher.Plugin.AI-Assistant 2, nodejs-api-boilerplate 16).
Words of the following rows are a guess, in the documented shape: `weight`, `budget in flight`, `requests, passed on`.
"""

from __future__ import annotations

import json
from typing import Any

from backends.interface import FailureKind
from tests.backends.replies.reply import PROMPT, event, of

reply = of("openrouter", "openrouter")


def error(code: int, message: str, **more: Any) -> Any:
    return {"error": {"code": code, "message": message, **more}, "user_id": "user_1"}


def passed_on(code: int, message: str) -> Any:
    """The error of a provider, as text in the metadata."""
    raw = json.dumps({"error": {"message": message, "type": "invalid_request_error"}})
    return error(code, "Provider returned error", metadata={"raw": raw, "provider_name": "Some"})


REPLIES = [
    reply(
        "credits",
        402,
        error(402, "Insufficient credits. Add more using https://openrouter.ai/credits"),
        FailureKind.QUOTA,
    ),
    reply(
        "credits too short for this request",
        402,
        error(
            402,
            "This request requires more credits, or fewer max_tokens. You requested up to 64000, can only afford 12.",
        ),
        FailureKind.REQUEST_SIZE,
    ),
    reply("weight", 402, error(402, "No.", type="weight_exceeds_budget"), FailureKind.REQUEST_SIZE),
    reply("budget in flight", 402, error(402, "No.", type="in_flight_budget_exhausted"), FailureKind.RATE_LIMITED),
    reply(
        "flagged",
        403,
        error(
            403,
            'm-1 requires moderation on OpenInference. Your input was flagged for "violence".',
            metadata={"reasons": ["violence"], "flagged_input": PROMPT, "provider_name": "Some", "model_slug": "m-1"},
        ),
        FailureKind.CONTENT_FILTER,
    ),
    reply(
        "key limit",
        403,
        error(403, "Key limit exceeded (total limit). Manage it using your account."),
        FailureKind.AUTH,
    ),
    reply("key", 401, error(401, "No auth credentials found"), FailureKind.AUTH),
    reply("model", 400, error(400, "m-1 is not a valid model ID"), FailureKind.MISCONFIGURED),
    reply("no provider of the model", 404, error(404, "No endpoints found for m-1."), FailureKind.MISCONFIGURED),
    reply(
        "data policy of the account",
        404,
        error(
            404,
            "No endpoints found matching your data policy (Free model training). Configure: https://openrouter.ai/x",
        ),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "no provider with tools",
        404,
        error(404, "No endpoints found that support tool use.", type="not_found"),
        FailureKind.CLIENT,
    ),
    reply(
        "context",
        400,
        error(
            400, "This endpoint's maximum context length is 131072 tokens. However, you requested about 139162 tokens."
        ),
        FailureKind.CONTEXT,
    ),
    reply("context, passed on", 400, passed_on(400, "prompt is too long: 2 tokens > 1 maximum"), FailureKind.CONTEXT),
    reply("refused, passed on", 400, passed_on(400, f"bad role in '{PROMPT}'"), FailureKind.CLIENT),
    reply("requests, passed on", 429, passed_on(429, "Rate limit: 20 requests per minute"), FailureKind.REQUEST_RATE),
    reply(
        "requests",
        429,
        error(429, "Rate limit exceeded: free-models-per-min."),
        FailureKind.REQUEST_RATE,
        headers={"x-ratelimit-limit": "20", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "1795341610000"},
    ),
    reply("provider's limit", 429, error(429, "Provider returned error"), FailureKind.RATE_LIMITED),
    reply("timeout", 408, error(408, "Request timed out"), FailureKind.TIMEOUT),
    reply("provider failed", 502, error(502, "Provider returned error"), FailureKind.SERVER),
    reply(
        "no provider",
        503,
        error(503, "There is no available model provider that meets your routing requirements"),
        FailureKind.PROVIDER,
    ),
    reply(
        "event",
        200,
        event({"id": "1", "error": {"code": 502, "message": "Provider disconnected"}, "choices": []}),
        FailureKind.SERVER,
    ),
    reply("limited event", 200, event(error(429, "Rate limit exceeded")), FailureKind.RATE_LIMITED),
    reply("whole", 200, error(502, "Provider returned error"), FailureKind.SERVER),
    reply("whole, money", 200, error(402, "Insufficient credits"), FailureKind.QUOTA),
    reply("whole, no provider", 200, error(503, "There is no available model provider"), FailureKind.PROVIDER),
]
