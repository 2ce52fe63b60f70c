"""TensorRT-LLM: serve/openai_server.py, executor/worker.py, as `trtllm-serve` shows them (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, event, of

reply = of("trtllm", "trtllm")


def error(message: str, type: str = "BadRequestError", code: int = 400) -> object:
    return {"object": "error", "message": message, "type": type, "param": None, "code": code}


SUM = "The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)"
REPLIES = [
    reply("context", 400, error(SUM), FailureKind.CONTEXT),
    reply("member", 400, error("1 validation error: Extra inputs are not permitted"), FailureKind.CLIENT),
    reply("server", 500, error("Internal", "InternalServerError", 500), FailureKind.SERVER),
    reply("unavailable", 503, b"", FailureKind.OVERLOADED),
    reply("path", 404, {"detail": "Not Found"}, FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("event", 200, event({"error": error("aborted", "InternalServerError", 500)}), FailureKind.SERVER),
]
