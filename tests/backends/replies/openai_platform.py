"""OpenAI: guides "Error codes" and "Rate limits", API reference (`response.error.code`), and the words that users of
its SDKs report in public issues (vanna-flask 11, shell_gpt 653, MetaGPT 523, streamlit-openai 18, LibreChat 2632).
Words of the following rows are a guess, in the documented shape: `a rate of neither`, `by the headers: requests`, `by
the headers: tokens`, `model by its name alone`.
"""

from __future__ import annotations

from backends.interface import FailureKind, Operation
from tests.backends.replies.reply import NOT_SERVED, PROMPT, event, of, openai_error

INVALID = "invalid_request_error"
reply = of("openai", "openai")
response = {"operation": Operation.RESPONSES}
TOO_LARGE = (
    "Request too large for gpt-4o in organization org-78asdf87asdf9aaa8976 on tokens per min (TPM): Limit 30000, "
    "Requested 31538. The input or output tokens must be reduced in order to run successfully. Visit "
    "https://platform.openai.com/account/rate-limits to learn more."
)
TOKENS = (
    "Rate limit reached for gpt-4o in organization org-uOtiSEwvUnroadaOnJJquBEC on tokens per min (TPM): Limit 30000, "
    "Used 29937, Requested 385. Please try again in 644ms."
)
REQUESTS = (
    "Rate limit reached for gpt-4o in organization org-uOtiSEwvUnroadaOnJJquBEC on requests per min (RPM): Limit 3, "
    "Used 3, Requested 1. Please try again in 20s."
)
QUOTA = "You exceeded your current quota, please check your plan and billing details."
CONTEXT = (
    "This model's maximum context length is 128000 tokens. However, your messages resulted in 204308 tokens. Please "
    "reduce the length of the messages."
)
ITEM = "Item with id 'rs_0b5f3eb6f51f' not found. Items are not persisted when `store` is set to false."
FLAGGED = "Invalid prompt: your prompt was flagged as potentially violating our usage policy. Please try again."

REPLIES = [
    reply("request too large", 429, openai_error(TOO_LARGE, "tokens", "rate_limit_exceeded"), FailureKind.REQUEST_SIZE),
    reply(
        "more than the limit, in the words of a rate",
        429,
        openai_error(TOKENS.replace("Requested 385", "Requested 30385"), "tokens", "rate_limit_exceeded"),
        FailureKind.REQUEST_SIZE,
    ),
    reply("tokens", 429, openai_error(TOKENS, "tokens", "rate_limit_exceeded"), FailureKind.TOKEN_RATE, learned=0.644),
    reply(
        "requests",
        429,
        openai_error(REQUESTS, "requests", "rate_limit_exceeded"),
        FailureKind.REQUEST_RATE,
        headers={"retry-after": "2", "retry-after-ms": "1500"},
        learned=1.5,
    ),
    reply(
        "by the headers: requests",
        429,
        openai_error("Rate limit reached", None, "rate_limit_exceeded"),
        FailureKind.REQUEST_RATE,
        headers={"x-ratelimit-remaining-requests": "0", "x-ratelimit-remaining-tokens": "149984"},
    ),
    reply(
        "by the headers: tokens",
        429,
        openai_error("Rate limit reached", None, "rate_limit_exceeded"),
        FailureKind.TOKEN_RATE,
        headers={"x-ratelimit-remaining-requests": "99", "x-ratelimit-remaining-tokens": "0"},
    ),
    reply("a rate of neither", 429, openai_error("Rate limit reached", "input-images"), FailureKind.RATE_LIMITED),
    reply("quota", 429, openai_error(QUOTA, "insufficient_quota", "insufficient_quota"), FailureKind.QUOTA),
    reply(
        "billing off", 429, openai_error("Not active.", "billing_not_active", "billing_not_active"), FailureKind.QUOTA
    ),
    reply(
        "hard limit of the bill",
        400,
        openai_error("Billing hard limit has been reached", INVALID, "billing_hard_limit_reached"),
        FailureKind.QUOTA,
    ),
    reply(
        "key",
        401,
        openai_error("Incorrect API key provided: sk-proj-********cdef.", INVALID, "invalid_api_key"),
        FailureKind.AUTH,
    ),
    reply(
        "organization", 401, openai_error("You must be a member of an organization to use the API"), FailureKind.AUTH
    ),
    reply(
        "country",
        403,
        openai_error("Country, region, or territory not supported", None, "unsupported_country_region_territory"),
        FailureKind.AUTH,
    ),
    reply(
        "scope",
        403,
        openai_error("You have insufficient permissions for this operation. Missing scopes: model.request", INVALID),
        FailureKind.AUTH,
    ),
    reply(
        "model of another project",
        403,
        openai_error("Project `proj_a1b2c3d4` does not have access to model `m-1`", INVALID, "model_not_found"),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "model",
        404,
        openai_error("The model `m-1` does not exist or you do not have access to it.", INVALID, "model_not_found"),
        FailureKind.MISCONFIGURED,
    ),
    reply(
        "model by its name alone",
        404,
        openai_error("This is not a chat model and thus not supported: m-1", INVALID),
        FailureKind.MISCONFIGURED,
    ),
    reply("path", 404, openai_error("Invalid URL (POST /v1/chat)", INVALID), FailureKind.MISCONFIGURED, NOT_SERVED),
    reply("vector store", 404, openai_error("Vector store with id ['vs_68'] not found.", INVALID), FailureKind.CONTENT),
    reply("container", 404, openai_error("Container with id 'cntr_68' not found.", INVALID), FailureKind.CONTENT),
    reply(
        "file of a container",
        404,
        openai_error("File cfile_68628828cefc not found on container cntr_686287a8b3ac.", INVALID),
        FailureKind.CONTENT,
    ),
    reply("file", 404, openai_error("No such File object: file-vyA4ivhK", INVALID, None, "id"), FailureKind.CONTENT),
    reply("assistant", 404, openai_error("No assistant found with id 'asst_1'.", INVALID), FailureKind.CONTENT),
    reply("thread", 404, openai_error("No thread found with id 'thread_1'.", INVALID), FailureKind.CONTENT),
    reply("batch", 404, openai_error("No batch found with id 'batch_1'.", INVALID), FailureKind.CONTENT),
    reply("conversation", 404, openai_error("Conversation with id 'conv_1' not found.", INVALID), FailureKind.CONTENT),
    reply("item", 404, openai_error(ITEM, INVALID, None, "input"), FailureKind.CONTENT),
    reply(
        "previous response",
        400,
        openai_error("Previous response with id 'resp_1' not found.", INVALID, "previous_response_not_found"),
        FailureKind.CONTENT,
        (400, "previous_response_not_found"),
    ),
    reply(
        "image by its address",
        400,
        openai_error("Error while downloading https://x.example/a.png.", INVALID, "invalid_image_url", "url"),
        FailureKind.CONTENT,
        (400, "invalid_image_url"),
    ),
    reply("context", 400, openai_error(CONTEXT, INVALID, "context_length_exceeded", "messages"), FailureKind.CONTEXT),
    reply(
        "context of responses",
        400,
        openai_error("Your input exceeds the context window of this model.", INVALID, "context_length_exceeded"),
        FailureKind.CONTEXT,
    ),
    reply("flagged prompt", 400, openai_error(FLAGGED, INVALID, "invalid_prompt"), FailureKind.CONTENT_FILTER),
    reply(
        "flagged image",
        400,
        openai_error(
            "Your request was rejected by the safety system.", "image_generation_user_error", "moderation_blocked"
        ),
        FailureKind.CONTENT_FILTER,
        (400, "moderation_blocked"),
    ),
    reply(
        "parameter",
        400,
        openai_error(f"Invalid value: '{PROMPT}'.", INVALID, "invalid_value", "messages[0].role"),
        FailureKind.CLIENT,
        (400, "invalid_value"),
    ),
    reply("server", 500, openai_error("The server had an error while processing", "server_error"), FailureKind.SERVER),
    reply(
        "overloaded",
        503,
        openai_error("The engine is currently overloaded, please try again later", "server_error"),
        FailureKind.OVERLOADED,
        headers={"retry-after": "5"},
        learned=5.0,
    ),
    reply("slow down", 503, openai_error("Slow Down", "server_error", "slow_down"), FailureKind.OVERLOADED),
    reply("event", 200, event(openai_error("The server had an error", "server_error")), FailureKind.SERVER),
    reply(
        "failed response",
        200,
        event({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "It failed."}}}),
        FailureKind.SERVER,
        **response,
    ),
    reply(
        "limited response",
        200,
        event({"type": "error", "code": "rate_limit_exceeded", "message": TOKENS, "param": None}, "error"),
        FailureKind.TOKEN_RATE,
        learned=0.644,
        **response,
    ),
    reply(
        "overloaded response",
        200,
        event({"type": "error", "code": "server_is_overloaded", "message": "Our servers are overloaded."}, "error"),
        FailureKind.OVERLOADED,
        **response,
    ),
    reply(
        "image of a response",
        200,
        event(
            {"type": "response.failed", "response": {"error": {"code": "failed_to_download_image", "message": "No."}}}
        ),
        FailureKind.CONTENT,
        (400, "failed_to_download_image"),
        **response,
    ),
    reply(
        "flagged image of a response",
        200,
        event({"type": "response.failed", "response": {"error": {"code": "image_content_policy_violation"}}}),
        FailureKind.CONTENT_FILTER,
        (400, "content_filter"),
        **response,
    ),
]
