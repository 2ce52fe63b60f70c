"""llama.cpp: tools/server, `format_error_response` (2026-11).
Words of the following rows are a guess, in the documented shape: `context, older still`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, event, of

reply = of("llamacpp", "llamacpp")
FULL = "request (9000 tokens) exceeds the available context size (4096 tokens), try increasing it"


def error(code: int, message: str, type: str, **more: int) -> object:
    return {"error": {"code": code, "message": message, "type": type, **more}}


REPLIES = [
    reply(
        "context",
        400,
        error(400, FULL, "exceed_context_size_error", n_prompt_tokens=9000, n_ctx=4096),
        FailureKind.CONTEXT,
    ),
    reply("context, older", 400, error(400, FULL, "invalid_request_error"), FailureKind.CONTEXT),
    reply(
        "context, older still",
        500,
        error(500, FULL, "server_error"),
        FailureKind.CONTEXT,
        (400, "context_length_exceeded"),
    ),
    reply("path", 404, error(404, "File Not Found", "not_found_error"), FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("loading", 503, error(503, "Loading model", "unavailable_error"), FailureKind.OVERLOADED),
    reply("key", 401, error(401, "Invalid API Key", "authentication_error"), FailureKind.AUTH),
    reply(
        "no metrics",
        501,
        error(501, "This server does not support metrics endpoint.", "not_supported_error"),
        FailureKind.SERVER,
    ),
    reply("grammar", 400, error(400, "Failed to parse grammar", "invalid_request_error"), FailureKind.CLIENT),
    reply("server", 500, error(500, "Compute error.", "server_error"), FailureKind.SERVER),
    reply("event", 200, event(error(500, "Compute error.", "server_error")), FailureKind.SERVER),
    reply(
        "event, context",
        200,
        event(error(400, FULL, "exceed_context_size_error")),
        FailureKind.CONTEXT,
        (400, "context_length_exceeded"),
    ),
]
