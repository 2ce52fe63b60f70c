"""xAI: API reference, "Debugging Errors", and reports in public issues (continue 10373 and 10740). Errors are two
texts.
Words of the following rows are a guess, in the documented shape: `permission`, `permission by the code`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import of

reply = of("xai", "xai")
DENIED = "The caller does not have permission to execute the specified operation"
UNSAFE = (
    "Content violates usage guidelines. Team: 16f2151a-40f4-4a80-8ad0-cae00c27e8dd, API key ID: "
    "c03b3526-bed4-49ed-8bd7-f20ef8830383, Model: m-1, Failed check: SAFETY_CHECK_TYPE_BIO"
)
SPENT = (
    "Your team 16f2151a-40f4-4a80-8ad0-cae00c27e8dd has either used all available credits or reached its monthly "
    "spending limit."
)
RATE = "Too many requests for team 16f2151a-40f4-4a80-8ad0-cae00c27e8dd and model m-1. Your team's rate limit is: {}."
EXHAUSTED = "Some resource has been exhausted"
INVALID = "Client specified an invalid argument"

REPLIES = [
    reply("unsafe content", 403, {"code": DENIED, "error": UNSAFE}, FailureKind.CONTENT_FILTER),
    reply("unsafe content, new code", 403, {"code": "permission-denied", "error": UNSAFE}, FailureKind.CONTENT_FILTER),
    reply("permission", 403, {"code": DENIED, "error": "API key is blocked."}, FailureKind.AUTH),
    reply("permission by the code", 403, {"code": "permission-denied", "error": "No."}, FailureKind.AUTH),
    reply(
        "no credits",
        403,
        {"code": DENIED, "error": "Your newly created team doesn't have any credits or licenses yet."},
        FailureKind.QUOTA,
    ),
    reply("credits used", 429, {"code": EXHAUSTED, "error": SPENT}, FailureKind.QUOTA),
    reply(
        "requests",
        429,
        {"code": EXHAUSTED, "error": RATE.format("Requests per Minute (actual/limit): 61/60")},
        FailureKind.REQUEST_RATE,
    ),
    reply(
        "tokens",
        429,
        {"code": EXHAUSTED, "error": RATE.format("Tokens per Minute (actual/limit): 16001/16000")},
        FailureKind.TOKEN_RATE,
    ),
    reply("unknown limit", 429, {"code": EXHAUSTED, "error": "Too many requests."}, FailureKind.RATE_LIMITED),
    reply(
        "key",
        400,
        {
            "code": INVALID,
            "error": "Incorrect API key provided: sk***ef. You can obtain an API key from https://console.x.ai.",
        },
        FailureKind.AUTH,
    ),
    reply(
        "model",
        404,
        {
            "code": "Some requested entity was not found",
            "error": "The model m-1 does not exist or your team 16f2151a-40f4-4a80-8ad0-cae00c27e8dd has no access.",
        },
        FailureKind.MISCONFIGURED,
    ),
    reply("response", 404, {"code": "not-found", "error": "Response with id resp_1 not found"}, FailureKind.CONTENT),
    reply(
        "context",
        400,
        {
            "code": INVALID,
            "error": "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
        },
        FailureKind.CONTEXT,
    ),
    reply("image", 400, {"code": INVALID, "error": "Fetching image failed with HTTP status 404."}, FailureKind.CONTENT),
    reply("argument", 422, {"code": INVALID, "error": "Failed to deserialize the JSON body."}, FailureKind.CLIENT),
    reply(
        "overloaded", 503, {"code": "The service is currently unavailable", "error": "Busy."}, FailureKind.OVERLOADED
    ),
]
