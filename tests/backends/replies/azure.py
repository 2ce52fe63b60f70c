"""Azure OpenAI: REST reference (2024-10-21), "Content filtering", "Quotas and limits", and reports in public issues
(langchain 12986, sample-app-aoai-chatGPT 131, TinyLLM 17).
Words of the following rows are a guess, in the documented shape: `capacity`, `role`, `network`, `content filter by
the inner error alone`.
"""

from __future__ import annotations

from typing import Any

from backends.interface import FailureKind
from tests.backends.replies.reply import NOT_SERVED, event, of

reply = of("azure", "azure")
TIER = "of your current OpenAI S0 pricing tier. Please retry after {} seconds."
OPERATION = "Requests to the {} Operation under Azure OpenAI API version 2024-10-21 have exceeded"
POLICY = "The response was filtered due to the prompt triggering Azure OpenAI's content management policy."


def error(code: str, message: str, **more: Any) -> Any:
    return {"error": {"code": code, "message": message, **more}}


REPLIES = [
    reply(
        "tokens",
        429,
        error("429", f"{OPERATION.format('ChatCompletions_Create')} token rate limit {TIER.format(20)}"),
        FailureKind.TOKEN_RATE,
        headers={"x-ratelimit-remaining-requests": "0"},
        learned=20.0,
    ),
    reply(
        "calls",
        429,
        error("429", f"{OPERATION.format('Embeddings_Create')} call rate limit {TIER.format(7)}"),
        FailureKind.REQUEST_RATE,
        headers={"retry-after": "7"},
        learned=7.0,
    ),
    reply(
        "capacity",
        429,
        error("NoCapacity", "The system is currently experiencing high demand."),
        FailureKind.RATE_LIMITED,
    ),
    reply(
        "content filter",
        400,
        error(
            "content_filter", POLICY, param="prompt", status=400, innererror={"code": "ResponsibleAIPolicyViolation"}
        ),
        FailureKind.CONTENT_FILTER,
    ),
    reply(
        "content filter by the inner error alone",
        400,
        error("BadRequest", "No.", innererror={"code": "ResponsibleAIPolicyViolation"}),
        FailureKind.CONTENT_FILTER,
    ),
    reply(
        "key",
        401,
        error("401", "Access denied due to invalid subscription key or wrong API endpoint."),
        FailureKind.AUTH,
    ),
    reply("role", 401, error("PermissionDenied", "The principal lacks the required data action."), FailureKind.AUTH),
    reply("network", 403, error("403", "Access denied due to Virtual Network/Firewall rules."), FailureKind.AUTH),
    reply(
        "deployment",
        404,
        error("DeploymentNotFound", "The API deployment for this resource does not exist."),
        FailureKind.MISCONFIGURED,
    ),
    reply("path", 404, error("404", "Resource not found"), FailureKind.MISCONFIGURED, NOT_SERVED),
    reply(
        "old model", 410, error("ModelDeprecated", "The model 'm-1' has been deprecated."), FailureKind.MISCONFIGURED
    ),
    reply(
        "context",
        400,
        error("context_length_exceeded", "This model's maximum context length is 8192 tokens."),
        FailureKind.CONTEXT,
    ),
    reply(
        "parameter",
        400,
        error("unsupported_parameter", "Unsupported parameter: 'max_tokens'.", param="max_tokens"),
        FailureKind.CLIENT,
        (400, "unsupported_parameter"),
    ),
    reply("server", 500, error("InternalServerError", "Backend returned unexpected response."), FailureKind.SERVER),
    reply("timeout", 408, error("Timeout", "The operation was timeout."), FailureKind.TIMEOUT),
    reply("event", 200, event(error("server_error", "The server had an error.")), FailureKind.SERVER),
]
