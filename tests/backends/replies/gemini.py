"""Gemini: "Troubleshooting", "Rate limits", "OpenAI compatibility", google.rpc.Status, and reports in public issues
(gemini-cli 8437, continue 9570 and 9645). Errors are a list, or an object.
Words of the following rows are a guess, in the documented shape: `prohibited`, `permission`.
"""

from __future__ import annotations

from typing import Any

from backends.interface import FailureKind
from tests.backends.replies.reply import PROMPT, event, of

reply = of("gemini", "gemini")
GOOGLE = "generativelanguage.googleapis.com"
RETRY = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}
CURRENT = "You exceeded your current quota, please check your plan and billing details."
INVALID, EXHAUSTED = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"


def error(code: int, status: str, message: str, *details: Any) -> Any:
    return [{"error": {"code": code, "message": message, "status": status, "details": list(details)}}]


def quota(*metrics: str) -> Any:
    violations = [{"quotaMetric": f"{GOOGLE}/{metric}", "quotaId": "Id"} for metric in metrics]
    return {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": violations}


REQUESTS, TOKENS = "generate_content_free_tier_requests", "generate_content_free_tier_input_token_count"
REPLIES = [
    reply(
        "requests", 429, error(429, EXHAUSTED, CURRENT, quota(REQUESTS), RETRY), FailureKind.REQUEST_RATE, learned=34.5
    ),
    reply("tokens", 429, error(429, EXHAUSTED, CURRENT, quota(TOKENS), RETRY), FailureKind.TOKEN_RATE, learned=34.5),
    reply("both", 429, error(429, EXHAUSTED, CURRENT, quota(TOKENS, REQUESTS)), FailureKind.RATE_LIMITED),
    reply(
        "in words",
        429,
        error(
            429,
            EXHAUSTED,
            f"{CURRENT}\n* Quota exceeded for metric: {GOOGLE}/{REQUESTS}, limit: 20\nPlease retry in 7.9s.",
        ),
        FailureKind.REQUEST_RATE,
        learned=7.9,
    ),
    reply(
        "nothing without paying",
        429,
        error(
            429,
            EXHAUSTED,
            f"{CURRENT}\n* Quota exceeded for metric: {GOOGLE}/{REQUESTS}, limit: 0, model: m-1\nPlease retry in 7.9s.",
            quota(REQUESTS),
            RETRY,
        ),
        FailureKind.QUOTA,
    ),
    reply(
        "exhausted",
        429,
        error(429, EXHAUSTED, "Resource has been exhausted (e.g. check quota)."),
        FailureKind.RATE_LIMITED,
    ),
    reply(
        "key",
        400,
        error(400, INVALID, "API key not valid. Please pass a valid API key.", {"reason": "API_KEY_INVALID"}),
        FailureKind.AUTH,
    ),
    reply("expired key", 400, error(400, INVALID, "API key expired. Please renew the API key."), FailureKind.AUTH),
    reply(
        "location",
        400,
        error(400, "FAILED_PRECONDITION", "User location is not supported for the API use."),
        FailureKind.AUTH,
    ),
    reply(
        "permission",
        403,
        error(
            403,
            "PERMISSION_DENIED",
            "Permission denied: Consumer 'api_key:AIzaSyA12345678901234567890' has been suspended.",
        ),
        FailureKind.AUTH,
    ),
    reply(
        "billing",
        403,
        error(403, "PERMISSION_DENIED", "This API method requires billing to be enabled."),
        FailureKind.QUOTA,
    ),
    reply(
        "file",
        403,
        error(403, "PERMISSION_DENIED", "You do not have permission to access the File abc or it may not exist."),
        FailureKind.CONTENT,
    ),
    reply(
        "cache",
        403,
        error(403, "PERMISSION_DENIED", "CachedContent not found (or permission denied)"),
        FailureKind.CONTENT,
    ),
    reply(
        "model",
        404,
        error(
            404, "NOT_FOUND", "models/m-1 is not found for API version v1main, or is not supported for generateContent."
        ),
        FailureKind.MISCONFIGURED,
    ),
    reply("entity", 404, error(404, "NOT_FOUND", "Requested entity was not found."), FailureKind.CONTENT),
    reply(
        "context",
        400,
        error(400, INVALID, "The input token count (1125602) exceeds the maximum number of tokens allowed (1048576)."),
        FailureKind.CONTEXT,
    ),
    reply(
        "media by its address",
        400,
        error(400, INVALID, "Cannot fetch content from the provided URL. Please ensure the URL is valid."),
        FailureKind.CONTENT,
    ),
    reply(
        "prohibited", 400, error(400, INVALID, "The prompt was blocked: PROHIBITED_CONTENT"), FailureKind.CONTENT_FILTER
    ),
    reply("parameter", 400, error(400, INVALID, f"Invalid value at 'contents[0]': \"{PROMPT}\""), FailureKind.CLIENT),
    reply("server", 500, error(500, "INTERNAL", "An internal error has occurred."), FailureKind.SERVER),
    reply(
        "overloaded",
        503,
        error(503, "UNAVAILABLE", "The model is overloaded. Please try again later."),
        FailureKind.OVERLOADED,
    ),
    reply("deadline", 504, error(504, "DEADLINE_EXCEEDED", "The request timed out."), FailureKind.TIMEOUT),
    reply("event", 200, event({"error": error(503, "UNAVAILABLE", "Overloaded.")[0]["error"]}), FailureKind.OVERLOADED),
]
