"""TGI 3: docs "Messages API", router/src/server.rs for errors, "Metrics"."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

PAGE = b"""# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 6
# TYPE tgi_queue_size gauge
tgi_queue_size 2
"""
TOO_LONG = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4090 `inputs` tokens"
TRANSCRIPT = Transcript(
    kind="tgi",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7, "stream_options": {"include_usage": True}},
    absent=["cache_salt"],
    stream=events(
        delta(role="assistant", content="Hel"),
        delta(role="assistant", content="lo"),
        delta(role="assistant", content="", finish="stop"),
        {"id": "", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}},
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2),
    load=("/metrics", PAGE, {"running": 6, "waiting": 2}),
    errors=[
        ErrorReply(
            422, {"error": TOO_LONG, "error_type": "validation"}, FailureKind.CONTEXT, "context_length_exceeded"
        ),
        ErrorReply(429, {"error": "Model is overloaded", "error_type": "overloaded"}, FailureKind.OVERLOADED),
        ErrorReply(424, {"error": "Request failed during generation", "error_type": "generation"}, FailureKind.SERVER),
        ErrorReply(503, {"error": "unhealthy", "error_type": "healthcheck"}, FailureKind.OVERLOADED),
    ],
    stream_error=events({"error": "Request failed during generation: CUDA error", "error_type": "generation"}),
    stream_failure=FailureKind.SERVER,
)
