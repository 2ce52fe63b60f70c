"""vLLM 0.32: recorded replies (tests/backends/transcripts), vllm/entrypoints/openai, and older versions' shapes."""

from __future__ import annotations

from pathlib import Path

from backends.interface import FailureKind, Operation
from tests.backends.replies.reply import NOT_SERVED, PROMPT, event, of, openai_error

reply = of("vllm", "vllm")
RECORDED = Path(__file__).parents[1] / "transcripts"
WRAPPED = (  # a refusal of its own chat, read as a chunk
    "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, input_value="
    "{'error': {'message': 'th...am': None, 'code': 400}}, input_type=dict]"
)
VALIDATION = "1 validation error:\n  {{'type': 'list_type', 'loc': 'body.messages', 'input': '{}'}}"
OLD_RESPONSE = {
    "object": "error",
    "message": "Response with id 'resp_1' not found.",
    "type": "NotFoundError",
    "code": 404,
}


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


REPLIES = [
    reply("context, recorded", 400, recorded("vllm_400_context.json"), FailureKind.CONTEXT),
    reply("output, recorded", 400, recorded("vllm_400_max_tokens.json"), FailureKind.CLIENT),
    reply("type, recorded", 400, recorded("vllm_400_type.json"), FailureKind.CLIENT),
    reply("model, recorded", 404, recorded("vllm_404_model.json"), FailureKind.MISCONFIGURED),
    reply("engine, recorded", 500, recorded("vllm_500_engine_died.json"), FailureKind.SERVER),
    reply("engine inside a stream", 200, recorded("vllm_engine_died_before_token.sse"), FailureKind.SERVER),
    reply(
        "quoted input",
        400,
        openai_error(VALIDATION.format(PROMPT), "Bad Request", 400, "body.messages"),
        FailureKind.CLIENT,
    ),
    reply(
        "adapter",
        404,
        openai_error("The model `sql` does not exist.", "NotFoundError", 404, "model"),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "response",
        404,
        openai_error("Response with id 'resp_1' not found.", "invalid_request_error", 404, "response_id"),
        FailureKind.CONTENT,
    ),
    reply("response, older", 404, OLD_RESPONSE, FailureKind.CONTENT),
    reply("path", 404, {"detail": "Not Found"}, FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("path, newer", 404, openai_error("Not Found", "Not Found", 404), FailureKind.MISCONFIGURED, NOT_SERVED),
    reply(
        "method",
        405,
        openai_error("Method Not Allowed", "Method Not Allowed", 405),
        FailureKind.MISCONFIGURED,
        NOT_SERVED,
    ),
    reply("key", 401, {"error": "Unauthorized"}, FailureKind.AUTH),
    reply("image", 400, openai_error("Failed to load image: 404", "BadRequestError", 400), FailureKind.CONTENT),
    reply(
        "unavailable",
        503,
        openai_error("The server is shutting down.", "ServiceUnavailableError", 503),
        FailureKind.OVERLOADED,
    ),
    reply("refused event", 200, event(openai_error(PROMPT, "BadRequestError", 400)), FailureKind.CLIENT, (400, None)),
    reply("failed event", 200, event(openai_error("EngineCore died", "InternalServerError", 500)), FailureKind.SERVER),
    reply(
        "wrapped event",
        200,
        event({"type": "error", "error": {"type": "internal_error", "message": WRAPPED}}, "error"),
        FailureKind.CLIENT,
        (400, None),
        operation=Operation.MESSAGES,
    ),
    reply("whole", 200, openai_error("EngineCore died", "InternalServerError", 500), FailureKind.SERVER),
]
