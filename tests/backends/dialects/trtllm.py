"""TensorRT-LLM: tensorrt_llm/serve/openai_server.py and the page of its metrics (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

PAGE = b"""# HELP trtllm_num_requests_running Number of requests in the running state
# TYPE trtllm_num_requests_running gauge
trtllm_num_requests_running{engine_type="trtllm",model_name="m-1"} 4.0
# TYPE trtllm_num_requests_waiting gauge
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m-1"} 1.0
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m-1"} 0.5
"""
TRANSCRIPT = Transcript(
    kind="trtllm",
    headers={"authorization": "Bearer sk-secret"},
    body={"max_tokens": 7, "stream_options": {"include_usage": True}},
    absent=["cache_salt"],
    stream=events(
        delta(role="assistant", content="", reasoning_content=None),
        delta(content="Hel"),
        delta(content="lo"),
        delta(finish="stop", content=""),
        {
            "id": "1",
            "choices": [],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 2,
                "total_tokens": 11,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(9, 2, 0),
    load=("/prometheus/metrics", PAGE, {"running": 4, "waiting": 1, "kv_usage": 0.5}),
    errors=[
        ErrorReply(
            400,
            {"object": "error", "message": "bad", "type": "BadRequestError", "param": None, "code": 400},
            FailureKind.CLIENT,
        ),
        ErrorReply(
            500,
            {"object": "error", "message": "Internal", "type": "InternalServerError", "param": None, "code": 500},
            FailureKind.SERVER,
        ),
        ErrorReply(503, b"", FailureKind.OVERLOADED),
    ],
    stream_error=events(
        {"error": {"object": "error", "message": "aborted", "type": "InternalServerError", "code": 500}}
    ),
    stream_failure=FailureKind.SERVER,
)
