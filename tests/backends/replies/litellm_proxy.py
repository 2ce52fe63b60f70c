"""LiteLLM's proxy: docs "Error Reference" and "Exception Mapping", and reports in public issues (TinyLLM 17,
agent-zero 711). The words of the provider come after LiteLLM's own.
Words of the following rows are a guess, in the documented shape: `capacity`.
"""

from __future__ import annotations

from backends.interface import FailureKind
from tests.backends.replies.reply import of, openai_error

reply = of("litellm")
NO_ACCESS = "key not allowed to access model. This key can only access models=['a']. Tried to access m-1"
SIZE = (
    "litellm.RateLimitError: RateLimitError: OpenAIException - Request too large for m-1 in organization org-1a2b3c4d "
    "on tokens per min (TPM): Limit 30000, Requested 36055. The input or output tokens must be reduced."
)
CONTEXT = (
    "litellm.ContextWindowExceededError: litellm.BadRequestError: ContextWindowExceededError: OpenAIException - This "
    "model's maximum context length is 4097 tokens. However, your messages resulted in 5001 tokens."
)
INVALID = "{'error': '/chat/completions: Invalid model name passed in model=m-1. Call `/v1/models` for your key.'}"
COOLING = "No deployments available for selected model, Try again in 60 seconds. Passed model=m-1. cooldown_list=['a']"

REPLIES = [
    reply("request too large", 429, openai_error(SIZE, "throttling_error", "429", "None"), FailureKind.REQUEST_SIZE),
    reply(
        "tokens",
        429,
        openai_error(
            "litellm.RateLimitError: AzureException - You have exceeded token rate limit.", "throttling_error", "429"
        ),
        FailureKind.TOKEN_RATE,
    ),
    reply("context", 400, openai_error(CONTEXT, "invalid_request_error", "400", "None"), FailureKind.CONTEXT),
    reply(
        "filter",
        400,
        openai_error(
            "litellm.ContentPolicyViolationError: AzureException - The response was filtered due to the prompt "
            "triggering Azure OpenAI's content management policy.",
            "None",
            "400",
            "None",
        ),
        FailureKind.CONTENT_FILTER,
    ),
    reply(
        "key",
        401,
        openai_error("Authentication Error, Invalid proxy server token passed.", "auth_error", "401", "None"),
        FailureKind.AUTH,
    ),
    reply(
        "model of the key",
        401,
        openai_error(NO_ACCESS, "key_model_access_denied", "401", "model"),
        FailureKind.MISCONFIGURED,
    ),
    reply("model", 400, openai_error(INVALID, "None", "400", "None"), FailureKind.MISCONFIGURED),
    reply(
        "capacity",
        429,
        openai_error(
            "litellm.RateLimitError: MistralException - Service tier capacity exceeded for this model.",
            "throttling_error",
            "429",
        ),
        FailureKind.OVERLOADED,
    ),
    reply(
        "budget",
        400,
        openai_error(
            "Budget has been exceeded! Current cost: 26.075, Max budget: 0.25", "budget_exceeded", "400", "None"
        ),
        FailureKind.QUOTA,
    ),
    reply("cooling down", 429, openai_error(COOLING, "None", "429", "None"), FailureKind.RATE_LIMITED, learned=60.0),
    reply(
        "server",
        500,
        openai_error("litellm.InternalServerError: OpenAIException - Oops", "None", "500"),
        FailureKind.SERVER,
    ),
]
