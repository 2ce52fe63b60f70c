"""DeepSeek: "Error Codes", "Rate Limit" (2026-11), and reports in public issues (continue 9180).
Words of the following rows are a guess, in the documented shape: `rate`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import of, openai_error

reply = of("deepseek", "deepseek")
INVALID = "invalid_request_error"
CONTEXT = (
    "This model's maximum context length is 131072 tokens. However, you requested 139162 tokens (130970 in the "
    "messages, 8192 in the completion). Please reduce the length of the messages or completion."
)

REPLIES = [
    reply("balance", 402, openai_error("Insufficient Balance", "unknown_error", INVALID), FailureKind.QUOTA),
    reply(
        "key",
        401,
        openai_error("Authentication Fails, Your api key: ****cdef is invalid", "authentication_error", INVALID),
        FailureKind.AUTH,
    ),
    reply("model", 400, openai_error("Model Not Exist", INVALID, INVALID), FailureKind.MISCONFIGURED),
    reply("context", 400, openai_error(CONTEXT, INVALID, INVALID), FailureKind.CONTEXT),
    reply("content", 400, openai_error("Content Exists Risk", INVALID, INVALID), FailureKind.CONTENT_FILTER),
    reply("rate", 429, openai_error("Rate Limit Reached", "rate_limit_error"), FailureKind.RATE_LIMITED),
    reply("parameter", 422, openai_error("Invalid Parameters", INVALID, INVALID), FailureKind.CLIENT, (422, INVALID)),
    reply("server", 500, openai_error("Server Error"), FailureKind.SERVER),
    reply("overloaded", 503, b"", FailureKind.OVERLOADED),
]
