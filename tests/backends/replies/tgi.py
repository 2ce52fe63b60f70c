"""Text Generation Inference: router/src/infer and validation, "Messages API" (archived in 2026-03)."""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import event, of

reply = of("tgi", "tgi")
INPUTS = "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000"
TOTAL = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2000 `inputs` tokens"

REPLIES = [
    reply("context", 422, {"error": INPUTS, "error_type": "validation"}, FailureKind.CONTEXT),
    reply("context with the output", 422, {"error": TOTAL, "error_type": "validation"}, FailureKind.CONTEXT),
    reply(
        "parameter",
        422,
        {"error": "Input validation error: `top_p` must be > 0.0", "error_type": "validation"},
        FailureKind.CLIENT,
    ),
    reply("overloaded", 429, {"error": "Model is overloaded", "error_type": "overloaded"}, FailureKind.OVERLOADED),
    reply(
        "generation",
        424,
        {"error": "Request failed during generation: CUDA error", "error_type": "generation"},
        FailureKind.SERVER,
    ),
    reply("unhealthy", 503, {"error": "unhealthy", "error_type": "healthcheck"}, FailureKind.OVERLOADED),
    reply(
        "event",
        200,
        event({"error": "Request failed during generation", "error_type": "generation"}),
        FailureKind.SERVER,
    ),
]
