"""Ollama: openai/openai.go, server/routes.go, server/sched.go, and Ollama's cloud models (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, of, openai_error

reply = of("ollama", "ollama")
BUSY = "server busy, please try again.  maximum pending requests exceeded"

REPLIES = [
    reply("model", 404, openai_error("model 'm-1' not found", "not_found_error"), FailureKind.MISCONFIGURED),
    reply("model, older", 404, {"error": "model 'm-1' not found, try pulling it first"}, FailureKind.MISCONFIGURED),
    reply("path", 404, b"404 page not found", FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("busy", 503, openai_error(BUSY, "api_error"), FailureKind.OVERLOADED),
    reply("runner", 500, openai_error("llama runner process has terminated", "api_error"), FailureKind.SERVER),
    reply(
        "context",
        400,
        openai_error("prompt too long; exceeded max context length by 1200 tokens", "api_error"),
        FailureKind.CONTEXT,
    ),
    reply("context of embeddings", 400, {"error": "the input length exceeds the context length"}, FailureKind.CONTEXT),
    reply(
        "context of a cloud model",
        400,
        {"error": "The prompt is too long: 450028, model maximum context length: 262144"},
        FailureKind.CONTEXT,
    ),
    reply("tools", 400, openai_error("m-1 does not support tools", "invalid_request_error"), FailureKind.CLIENT),
]
