"""llama.cpp's server: tools/server/README.md and the page of --metrics (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

PAGE = b"""# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 5
"""
TRANSCRIPT = Transcript(
    kind="llamacpp",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7},
    absent=["cache_salt"],
    stream=events(
        delta(role="assistant", content=None),
        delta(reasoning_content="Hm"),
        delta(content="Hello"),
        delta(finish="stop"),
        {
            "id": "1",
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
            "timings": {"cache_n": 4, "prompt_n": 5, "prompt_ms": 12.5},
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2),
    load=("/metrics", PAGE, {"running": 2, "waiting": 5}),
    errors=[
        ErrorReply(
            400,
            {
                "error": {
                    "code": 400,
                    "message": "the request exceeds the available context size",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 9000,
                    "n_ctx": 4096,
                }
            },
            FailureKind.CONTEXT,
            "context_length_exceeded",
        ),
        ErrorReply(
            503,
            {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}},
            FailureKind.OVERLOADED,
        ),
        ErrorReply(
            401,
            {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}},
            FailureKind.AUTH,
        ),
    ],
    stream_error=events({"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}),
    stream_failure=FailureKind.SERVER,
)
