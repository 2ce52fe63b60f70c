"""SGLang 0.5: sglang/srt/entrypoints/openai and managers/tokenizer_manager."""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, event, of

reply = of("sglang", "sglang")


def error(message: str, type: str = "BadRequestError", code: int = 400) -> object:
    return {"object": "error", "message": message, "type": type, "param": None, "code": code}


TOTAL = (
    "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 9000 "
    "tokens: 8000 tokens from the input messages and 1000 tokens for the completion."
)
REPLIES = [
    reply(
        "context",
        400,
        error("The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
        FailureKind.CONTEXT,
    ),
    reply("context with the output", 400, error(TOTAL), FailureKind.CONTEXT),
    reply("queue", 503, error("The request queue is full.", "SERVICE_UNAVAILABLE", 503), FailureKind.OVERLOADED),
    reply("server", 500, error("Internal error", "InternalServerError", 500), FailureKind.SERVER),
    reply("parameter", 400, error("top_p must be in (0, 1], got 2."), FailureKind.CLIENT),
    reply("path", 404, {"detail": "Not Found"}, FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("key", 401, {"error": "Unauthorized"}, FailureKind.AUTH),
    reply("event", 200, event({"error": error("aborted", "InternalServerError", 500)}), FailureKind.SERVER),
    reply("refused event", 200, event({"error": error(TOTAL)}), FailureKind.CONTEXT, (400, "context_length_exceeded")),
    reply("whole", 200, {"error": error("aborted", "InternalServerError", 500)}, FailureKind.SERVER),
]
