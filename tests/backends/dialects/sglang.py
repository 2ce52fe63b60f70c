"""SGLang 0.5.23: sglang/srt/entrypoints/openai and the page of --enable-metrics."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

PAGE = b"""# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{model_name="m-1",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m-1",tp_rank="0"} 2.0
sglang:token_usage{model_name="m-1",tp_rank="0"} 0.25
sglang:prompt_tokens_total{model_name="m-1"} 1000.0
sglang:cached_tokens_total{model_name="m-1"} 400.0
sglang:page_size{model_name="m-1"} 16.0
sglang:max_total_num_tokens{model_name="m-1"} 16000.0
"""
TRANSCRIPT = Transcript(
    kind="sglang",
    headers={"authorization": "Bearer sk-secret"},
    body={"cache_salt": "a-salt"},
    absent=["rid"],
    stream=events(
        delta(role="assistant", content="", reasoning_content=None),
        delta(content=None, reasoning_content="Hm"),
        delta(content="Hello"),
        delta(finish="stop", content=None),
        {
            "id": "1",
            "choices": [],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "total_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 4},
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2, 4),
    load=(
        "/metrics",
        PAGE,
        {
            "running": 3,
            "waiting": 2,
            "kv_usage": 0.25,
            "prefix_queries": 1000.0,
            "prefix_hits": 400.0,
            "block_size": 16,
            "kv_blocks": 1000,
        },
    ),
    errors=[
        ErrorReply(
            400,
            {
                "object": "error",
                "message": "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            },
            FailureKind.CONTEXT,
            "context_length_exceeded",
        ),
        ErrorReply(
            503,
            {
                "object": "error",
                "message": "The request queue is full.",
                "type": "SERVICE_UNAVAILABLE",
                "param": None,
                "code": 503,
            },
            FailureKind.OVERLOADED,
        ),
        ErrorReply(
            500,
            {"object": "error", "message": "Internal error", "type": "InternalServerError", "code": 500},
            FailureKind.SERVER,
        ),
    ],
    stream_error=events(
        {"error": {"object": "error", "message": "aborted", "type": "InternalServerError", "code": 500}}
    ),
    stream_failure=FailureKind.SERVER,
)
