"""Azure OpenAI: REST API reference 2024-10-21, "Content filtering" and "Quotas and limits" (2026-11)."""

from __future__ import annotations

from backends.interface import FailureKind, Usage
from tests.backends.dialects.transcript import ErrorReply, Transcript, delta, events

SAFE = {"hate": {"filtered": False, "severity": "safe"}}
FILTERED = {
    "message": "The response was filtered due to the prompt triggering Azure OpenAI's content management policy.",
    "type": None,
    "param": "prompt",
    "code": "content_filter",
    "status": 400,
    "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": {"hate": {"filtered": True}}},
}


def error(code: str, message: str) -> dict[str, object]:
    return {"error": {"code": code, "message": message}}


TRANSCRIPT = Transcript(
    kind="azure",
    path="/",
    target="/openai/deployments/m-1/chat/completions?api-version=2024-10-21",
    headers={"api-key": "sk-secret", "authorization": None},
    body={"max_tokens": 7, "stream_options": {"include_usage": True}},
    absent=["cache_salt", "prompt_cache_key"],
    stream=events(
        {"id": "", "object": "", "choices": [], "prompt_filter_results": [{"prompt_index": 0}]},
        delta(role="assistant", content=""),
        {"id": "1", "choices": [{"index": 0, "delta": {"content": "Hel"}, "content_filter_results": SAFE}]},
        delta(content="lo"),
        {"id": "1", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "content_filter_results": {}}]},
        {
            "id": "1",
            "choices": [],
            "usage": {
                "prompt_tokens": 1200,
                "completion_tokens": 2,
                "total_tokens": 1202,
                "prompt_tokens_details": {"cached_tokens": 1024},
            },
        },
        "[DONE]",
    ),
    tokens=2,
    usage=Usage(1200, 2, 1024),
    limits={"x-ratelimit-remaining-requests": "0", "x-ratelimit-remaining-tokens": "9000"},
    waits=[(False, 0, None, 10.0), (True, 9000, None, 10.0)],
    errors=[
        ErrorReply(400, {"error": FILTERED}, FailureKind.CONTENT_FILTER, "content_filter"),
        ErrorReply(
            429,
            error("429", "Requests to the ChatCompletions_Create Operation have exceeded token rate limit."),
            FailureKind.TOKEN_RATE,
            headers={"retry-after": "20", "x-ratelimit-remaining-requests": "0"},
            retry_after=20.0,
        ),
        ErrorReply(401, error("401", "Access denied due to invalid subscription key."), FailureKind.AUTH),
        ErrorReply(404, error("DeploymentNotFound", "The API deployment does not exist."), FailureKind.MISCONFIGURED),
        ErrorReply(404, error("404", "Resource not found"), FailureKind.MISCONFIGURED),
        ErrorReply(500, error("InternalServerError", "Backend returned unexpected response."), FailureKind.SERVER),
    ],
    stream_error=events(error("server_error", "The server had an error processing your request.")),
    stream_failure=FailureKind.SERVER,
)
