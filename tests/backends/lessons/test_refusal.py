"""Refusals of servers, in the servers' own words, and the lesson of each.

The words are those of models' documentation, SDKs and users' reports of 2026 (tests/backends/replies has the others).
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import pytest
from msgspec import Raw

from backends.body_changes import changed
from backends.error_body import MESSAGE_LIMIT
from backends.lessons.refusal import Reading, RefusalVerdict, read_refusal
from backends.lessons.refusal_rows import table

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": "ho", "reasoning_content": "hm", "annotations": []},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"seed": {}}}}}],
    "tool_choice": "required",
    "temperature": 0.2,
    "top_p": 0.9,
    "top_k": 5,
    "max_tokens": 9,
    "reasoning_effort": "minimal",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "parallel_tool_calls": False,
    "logprobs": True,
    "user": "u",
    "service_tier": "fast",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "a", "signature": "b"}, {"type": "text", "text": "ho"}],
        },
    ],
    "max_tokens": 9,
    "temperature": 0.2,
    "top_p": 0.9,
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"effort": "xhigh"},
    "tool_choice": {"type": "any"},
    "tools": [{"name": "f", "input_schema": {}, "strict": True, "defer_loading": True}],
}


def openai(message: str, param: str | None = None, code: str | None = None) -> Any:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def anthropic(message: str) -> Any:
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


UNSUPPORTED = "unsupported_parameter"
MENDS: dict[str, tuple[Any, dict[str, Any], str]] = {  # error, body, the lesson in words
    "OpenAI: a parameter": (
        openai("Unsupported parameter: 'temperature' is not supported with this model.", "temperature", UNSUPPORTED),
        CHAT,
        "temperature is left out",
    ),
    "OpenAI: another name": (
        openai(
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            *("max_tokens", UNSUPPORTED),
        ),
        CHAT,
        "max_tokens is sent as max_completion_tokens",
    ),
    "OpenAI: the default alone": (
        openai(
            "Unsupported value: 'temperature' does not support 0.2 with this model. Only the default (1) value is "
            "supported.",
            *("temperature", "unsupported_value"),
        ),
        CHAT,
        "temperature is left out",
    ),
    "OpenAI: listed values": (
        openai(
            "Unsupported value: 'reasoning_effort' does not support 'minimal' with this model. Supported values are: "
            "'low', 'medium', and 'high'.",
            *("reasoning_effort", "unsupported_value"),
        ),
        CHAT,
        "reasoning_effort is one of low, medium, high",
    ),
    "OpenAI: a role": (
        openai(
            "Unsupported value: 'messages[1].role' does not support 'developer' with this model.",
            *("messages[1].role", "unsupported_value"),
        ),
        CHAT,
        "messages.role is one of system",
    ),
    "OpenAI: moved": (
        openai(
            "Unsupported parameter: 'reasoning_effort'. In the Responses API, this parameter has moved to "
            "'reasoning.effort'."
        ),
        CHAT,
        "reasoning_effort is sent as reasoning.effort",
    ),
    "OpenAI: no param": (openai("Unrecognized request argument supplied: top_k"), CHAT, "top_k is left out"),
    "Azure: several": (
        openai("Unrecognized request arguments supplied: top_k, user"),
        CHAT,
        "top_k is left out, user is left out",
    ),
    "OpenAI: unknown": (openai("Unknown parameter: 'top_k'.", "top_k", "unknown_parameter"), CHAT, "top_k is left out"),
    "OpenAI: another operation": (
        openai(
            "Function tools with reasoning_effort are not supported for gpt-5.6 in /v1/chat/completions. To use "
            "function tools, use /v1/responses",
            "reasoning_effort",
        ),
        CHAT,
        "asked at /v1/responses beside tools",
    ),
    "Anthropic: deprecated": (
        anthropic("`temperature` is deprecated for this model."),
        MESSAGES,
        "temperature is left out",
    ),
    "Anthropic: a pair": (
        anthropic("`temperature` and `top_p` cannot both be specified for this model. Please use only one."),
        MESSAGES,
        "top_p is left out beside temperature",
    ),
    "Anthropic: extra": (
        anthropic("tools.0.custom.defer_loading: Extra inputs are not permitted"),
        MESSAGES,
        "tools.defer_loading is left out",
    ),
    "Anthropic: a form of thinking": (
        anthropic('"thinking.type.enabled" is not supported for this model. Use "thinking.type.adaptive".'),
        MESSAGES,
        "thinking.type is one of adaptive, thinking.budget_tokens is left out",
    ),
    "Anthropic: efforts": (
        anthropic("This model does not support the effort parameter."),
        MESSAGES,
        "output_config.effort is left out",
    ),
    "Anthropic: a forced call": (
        anthropic("Thinking may not be enabled when tool_choice forces tool use."),
        MESSAGES,
        "thinking is left out beside tool_choice.type=any|tool",
    ),
    "Anthropic: a signature": (
        anthropic("messages.1.content.0: Invalid `signature` in `thinking` block"),
        MESSAGES,
        "messages.content is sent without thinking, redacted_thinking",
    ),
    "Anthropic: grammars": (anthropic("The compiled grammar is too large."), MESSAGES, "tools.strict is left out"),
    "Gemini: a list": (
        [
            {
                "error": {
                    "code": 400,
                    "message": 'Invalid JSON payload received. Unknown name "top_k": Cannot find field.',
                    "status": "INVALID_ARGUMENT",
                    "details": [
                        {
                            "fieldViolations": [
                                {
                                    "description": "Invalid JSON payload received. "
                                    'Unknown name "top_k": Cannot find field.'
                                }
                            ]
                        }
                    ],
                }
            }
        ],
        CHAT,
        "top_k is left out",
    ),
    "Gemini: at a place": (
        [
            {
                "error": {
                    "code": 400,
                    "message": "Invalid JSON payload received. Unknown name \"annotations\" at 'messages[3]': "
                    "Cannot find field.",
                    "status": "INVALID_ARGUMENT",
                }
            }
        ],
        CHAT,
        "messages.annotations is left out",
    ),
    "Gemini: penalties": (
        [{"error": {"code": 400, "message": "Penalty is not enabled for this model", "status": "INVALID_ARGUMENT"}}],
        CHAT,
        "presence_penalty is left out, frequency_penalty is left out",
    ),
    "Mistral: a place": (
        {
            "object": "error",
            "message": {
                "detail": [
                    {
                        "type": "extra_forbidden",
                        "loc": ["body", "messages", 3, "assistant", "reasoning_content"],
                        "msg": "Extra inputs are not permitted",
                        "input": "hm",
                    }
                ]
            },
        },
        CHAT,
        "messages.reasoning_content is left out",
    ),
    "FastAPI: a place": (
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "top_k"], "msg": "Extra inputs are not permitted"}]},
        CHAT,
        "top_k is left out",
    ),
    "Mistral: JSON in the message": (
        openai(
            json.dumps(
                {
                    "detail": [
                        {"type": "extra_forbidden", "loc": ["body", "user"], "msg": "Extra inputs are not permitted"}
                    ]
                }
            )
        ),
        CHAT,
        "user is left out",
    ),
    "Groq: in a message": (
        openai(
            "'messages.3' : for 'role:assistant' the following must be satisfied[('messages.3' : property "
            "'reasoning_content' is unsupported)]"
        ),
        CHAT,
        "messages.reasoning_content is left out",
    ),
    "Cerebras: flat": (
        {"message": "property 'logprobs' is unsupported", "type": "invalid_request_error", "code": "wrong_api_format"},
        CHAT,
        "logprobs is left out",
    ),
    "xAI: a string, in camel case": (
        {"code": "invalid", "error": "Model grok-4 does not support parameter presencePenalty."},
        CHAT,
        "presence_penalty is left out",
    ),
    "xAI: an argument": (
        {"code": "invalid", "error": "Argument not supported on this model: logprobs"},
        CHAT,
        "logprobs is left out",
    ),
    "xAI: a value": (
        {"error": "This model does not support 'reasoning_effort' value 'minimal'."},
        CHAT,
        "reasoning_effort is left out",
    ),
    "Moonshot: the only value": (
        openai("invalid temperature: only 1 is allowed for this model"),
        CHAT,
        "temperature is one of 1",
    ),
    "Fireworks: a place": (
        openai("Extra inputs are not permitted, field: 'messages[3].annotations', value: []"),
        CHAT,
        "messages.annotations is left out",
    ),
    "OpenRouter: the provider's own error": (
        {
            "error": {
                "message": "Provider returned error",
                "code": 400,
                "metadata": {
                    "provider_name": "OpenAI",
                    "raw": json.dumps(openai("Unsupported parameter: 'top_p'", "top_p", UNSUPPORTED)),
                },
            }
        },
        CHAT,
        "top_p is left out",
    ),
    "SGLang: a place in words": (
        {
            "object": "error",
            "message": "1 validation error:\n  {'type': 'literal_error', 'loc': ('body', 'messages', 1, "
            "'ChatCompletionMessageGenericParam', 'role'), 'msg': \"Input should be 'system', 'assistant' or 'tool'\", "
            "'input': 'developer'}",
            "type": "BadRequestError",
            "code": 400,
        },
        CHAT,
        "messages.role is one of system",
    ),
    "vLLM: a template's roles": (openai("Unexpected message role."), CHAT, "messages.role is one of system"),
    "vLLM: a template's order": (
        openai("System message must be at the beginning."),
        {**CHAT, "messages": [*CHAT["messages"], {"role": "system", "content": "stop"}]},
        "system messages are folded",
    ),
    **{
        f"fitted: {name}": (openai(words), CHAT, f"fitted to accepts.{facts}")
        for name, words, facts in (
            (
                "state of calls",
                "Function call f is missing a thought_signature in functionCall parts.",
                "call_state: "
                "extra_content.google.thought_signature, fitted to accepts.call_state_placeholder: "
                "skip_thought_signature_validator",
            ),
            (
                "details",
                "Provider returned error: missing a thought_signature",
                "reasoning: returned, fitted to "
                "accepts.reasoning_member: reasoning_details, fitted to accepts.detail_placeholder.type: "
                "reasoning.encrypted, fitted to accepts.detail_placeholder.data: skip_thought_signature_validator, "
                "fitted to accepts.detail_placeholder.format: google-gemini-v1",
            ),
            ("custom tools", "tools[1].type: unknown variant `custom`, expected `function`", "custom_tools: no"),
            (
                "Gemini's schemas",
                'Invalid JSON payload received. Unknown name "const" at \'tools[0].function_declarations'
                "[0].parameters.properties[0].value': Cannot find field.",
                "schema: gemini, fitted to accepts.strict_schema: gemini",
            ),
            (
                "Kimi's schemas",
                "At path 'properties.p2': type is not defined",
                "schema: moonshot, fitted to accepts.strict_schema: moonshot",
            ),
            (
                "llama.cpp's schemas",
                "failed to parse grammar",
                "schema: llamacpp, fitted to accepts.strict_schema: llamacpp",
            ),
            (
                "Claude's schemas",
                "output_config.format.schema: For 'integer' type, property 'minimum' is not supported",
                "strict_schema: anthropic_strict",
            ),
            (
                "names",
                "Invalid 'tools[0].function.name': string does not match pattern.",
                "tool_name: [a-zA-Z_][a-zA-Z0-9_-]{0,63}",
            ),
            (
                "ids of nine",
                "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.",
                "call_id: [a-zA-Z0-9]{9}",
            ),
            (
                "ids",
                "Invalid 'messages[1].tool_calls[0].id': string too long. Expected a string with maximum length 40",
                "call_id: [a-zA-Z0-9_-]{1,40}",
            ),
            (
                "names of users",
                "Invalid 'user': string too long. Expected a string with maximum length 64",
                "user_length: 64",
            ),
            (
                "forced calls",
                "Thinking mode does not support this tool_choice",
                "forced_tools: thinking, fitted to accepts.thinks_unasked: yes",
            ),
            (
                "JSON beside thinking",
                "'response_format' json mode is not supported when enable_thinking is true",
                "json_thinking: no",
            ),
            ("a temperature", "temperature: Input should be less than or equal to 1", "temperature: 0.01, 1"),
            (
                "items of reasoning",
                "Invalid 'input[2].content': array too long. Expected an array with maximum length 0.",
                "reasoning: refused",
            ),
            (
                "turns",
                "Conversation roles must alternate user/assistant/...",
                "system: one, fitted to accepts.alternation: yes",
            ),
            (
                "a limit of the output",
                "max_tokens is too large: 128000. This model supports at most 65536 completion tokens, whereas you "
                "provided 128000.",
                "output: 65536",
            ),
            (
                "another limit of the output",
                "max_tokens: 128000 > 64000, which is the maximum allowed number of output tokens for claude-opus-4-5",
                "output: 64000",
            ),
            (
                "sequences of stop",
                "Invalid 'stop': array too long. Expected an array with maximum length 4, but got 6",
                "stops: 4",
            ),
            (
                "the root of a schema",
                "schema must be a JSON Schema of 'type: \"object\"', got 'type: \"array\"'",
                "schema: openai",
            ),
            (
                "unions at the root of a schema",
                "tools.0.custom.input_schema: input_schema does not support oneOf, allOf, or anyOf at the top level",
                "schema: openai",
            ),
            ("empty texts", "messages.0.content.0: text content blocks must be non-empty", "empty_texts: no"),
            (
                "an answer begun",
                "This model does not support assistant message prefill. The conversation must end with a user message.",
                "prefill: no",
            ),
            ("a user after results", "Unexpected role 'user' after role 'tool'", "user_after_results: no"),
            ("the first turn", 'messages: first message must use the "user" role', "user_first: yes"),
            (
                "empty turns",
                "Assistant message must have either content or tool_calls, but not none.",
                "empty_turns: no",
            ),
            (
                "broken arguments",
                "invalid params, tool call arguments are not valid json (2013)",
                "json_arguments: yes",
            ),
            ("stops", "stop_sequences: each stop sequence must contain non-whitespace", "blank_stops: no"),
            ("no tools", "[] is too short - 'tools'", "empty_tools: no"),
            ("encrypted reasoning", "Encrypted content is not supported with this model.", "reasoning_items: no"),
            ("roles", 'Unexpected role "system". Allowed roles are "user" or "assistant".', "system: first"),
        )
    },
    "OpenRouter: no words of the provider": (
        openai("Provider returned error"),
        {"model": "m", "messages": [{"role": "assistant", "content": "ho", "reasoning_details": [{}]}]},
        "messages.reasoning_details is left out",
    ),
    "xAI: a limit": (
        {"code": "invalid", "error": "Argument not supported on this model: maxTokens"},
        CHAT,
        "max_tokens is sent as max_completion_tokens",
    ),
    "Anthropic: a member inside": (
        anthropic("`effort` is deprecated for this model."),
        MESSAGES,
        "output_config.effort is left out",
    ),
    "Groq: a member by its other name": (
        openai("`reasoning_effort` must be one of none, default"),
        {"model": "m", "input": "hi", "reasoning": {"effort": "low"}},
        "reasoning.effort is one of none, default",
    ),
    "DeepSeek: reasoning": (
        openai("The reasoning_content in the thinking mode must be passed back to the API."),
        CHAT,
        "fitted to accepts.reasoning: returned",
    ),
    "OpenRouter: one of two": (
        openai('Only one of "temperature" and "top_p" can be specified'),
        CHAT,
        "top_p is left out beside temperature",
    ),
    "Go: json": (openai('json: unknown field "top_k"'), CHAT, "top_k is left out"),
    "Python: a keyword": (
        openai("create() got an unexpected keyword argument 'top_k'"),
        CHAT,
        "top_k is left out",
    ),
    "Anthropic: temperature beside thinking": (
        anthropic("`temperature` may only be set to 1 when thinking is enabled."),
        MESSAGES,
        "temperature is left out beside thinking",
    ),
    "Anthropic: thinking cannot be switched off": (
        anthropic('"thinking.type.disabled" is not supported for this model.'),
        {**MESSAGES, "thinking": {"type": "disabled"}},
        "thinking is left out",
    ),
    "Anthropic: an effort without thinking": (
        anthropic(
            "effort 'xhigh' is not supported when thinking is disabled on this model. Use effort 'high' or below."
        ),
        {**MESSAGES, "thinking": {"type": "disabled"}},
        "output_config.effort is one of high beside thinking.type=disabled",
    ),
    "a service": (openai("user is not a recognized parameter"), CHAT, "user is left out"),
    "a proxy": (openai("This server does not support the parameter top_k"), CHAT, "top_k is left out"),
    "an old server": (
        openai("extra fields not permitted: top_k: extra fields not permitted"),
        CHAT,
        "top_k is left out",
    ),
    "JSON Schema": (
        openai("Additional properties are not allowed ('top_k' was unexpected)"),
        CHAT,
        "top_k is left out",
    ),
}
OTHERS: dict[str, tuple[Any, dict[str, Any], RefusalVerdict]] = {
    "a value out of range": (
        openai(
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 9 instead.",
            *("temperature", "decimal_above_max_value"),
        ),
        CHAT,
        RefusalVerdict.MERITS,
    ),
    "a range": (anthropic("temperature: range: 0..1"), MESSAGES, RefusalVerdict.MERITS),
    "a type": (
        {"detail": [{"type": "string_type", "loc": ["body", "user"], "msg": "Input should be a valid string"}]},
        CHAT,
        RefusalVerdict.MERITS,
    ),
    "tools": (openai("Unsupported parameter: 'tools'", "tools", UNSUPPORTED), CHAT, RefusalVerdict.LACKS),
    "a forced call": (
        anthropic('tool_choice: type "tool" and "any" are not supported for this model'),
        MESSAGES,
        RefusalVerdict.LACKS,
    ),
    "a tool parser": (
        openai('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "pictures": (openai("At most 0 image(s) may be provided in one prompt."), CHAT, RefusalVerdict.LACKS),
    "a kind of content": (
        openai(
            "Failed to deserialize the JSON body into the target type: messages[2]: unknown variant `image_url`, "
            "expected `text` at line 1 column 99"
        ),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "a schema": (
        openai("'response_format' of type 'json_schema' is not supported with this model.", "response_format"),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "a limit of the output": (
        openai("Unsupported parameter: 'max_output_tokens' is not supported with this model."),
        {"model": "m", "input": "hi", "max_output_tokens": 9},
        RefusalVerdict.LACKS,
    ),
    "a model's fault": (openai("Failed to call a function.", code="tool_use_failed"), CHAT, RefusalVerdict.UNREAD),
    "no name": ({"error": {"code": "1210", "message": "API call parameter error"}}, CHAT, RefusalVerdict.UNREAD),
    "a quoted member that was not sent": (
        openai("Invalid content: \"Unsupported parameter: 'seed'\""),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "a signature of a call": (
        openai("Thought_signature of call f is not valid."),
        CHAT,
        RefusalVerdict.UNREAD,
    ),
    "a page": ("<html>bad request</html>", CHAT, RefusalVerdict.UNREAD),
    "two of which neither can be lost": (
        openai("`max_tokens` and `tools` cannot both be specified."),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "another name of what is meant": (
        openai("'response_format' is no longer there. Use 'form' instead."),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "another value of what is meant": (
        openai("response_format.type must be one of 'text', 'json_object'"),
        CHAT,
        RefusalVerdict.LACKS,
    ),
    "several answers": (openai("Unsupported parameter: 'n'", "n"), {**CHAT, "n": 2}, RefusalVerdict.LACKS),
    "an answer to keep": (openai("Unsupported parameter: 'store'"), {**CHAT, "store": True}, RefusalVerdict.LACKS),
    "words far behind": (openai("x " * 500 + "Unsupported parameter: 'top_k'"), CHAT, RefusalVerdict.UNREAD),
}


def reading(error: Any, body: dict[str, Any], *, raw: bool = False) -> Reading:
    """`raw`: nested values as requests have them."""
    sent = {name: Raw(json.dumps(each).encode()) for name, each in body.items()} if raw else body
    return read_refusal(error.encode() if isinstance(error, str) else json.dumps(error).encode(), sent)


@pytest.mark.parametrize("raw", [False, True], ids=["decoded", "raw"])
@pytest.mark.parametrize("name", MENDS)
def test_a_refusal_that_names_a_member_is_read_as_a_lesson(name: str, raw: bool) -> None:
    error, body, words = MENDS[name]
    found = reading(error, body, raw=raw)
    assert found.verdict is RefusalVerdict.MEND
    assert str(found.lesson) == words


@pytest.mark.parametrize("name", MENDS)
def test_a_lesson_changes_the_body_that_was_refused_unless_it_names_an_operation(name: str) -> None:
    error, body, _ = MENDS[name]
    lesson = reading(error, body).lesson
    assert lesson is not None
    if not lesson.operation and "fitted" not in str(lesson):
        assert changed(body, lesson.changes) != body


@pytest.mark.parametrize("name", OTHERS)
def test_meaning_is_never_mended_away_and_faults_of_the_caller_stay_his(name: str) -> None:
    error, body, verdict = OTHERS[name]
    assert reading(error, body).verdict is verdict


def test_a_member_of_a_tools_schema_is_no_member_of_the_request() -> None:
    """`seed` is a parameter of the tool."""
    assert reading(openai("Unsupported parameter: 'seed'"), CHAT).lesson is None


@pytest.mark.parametrize(("name", "value"), [("n", 1), ("store", False), ("tools", []), ("response_format", None)])
def test_a_member_that_says_nothing_has_no_meaning(name: str, value: Any) -> None:
    assert str(reading(openai(f"Unsupported parameter: '{name}'"), {"model": "m", name: value}).lesson) == (
        f"{name} is left out"
    )


def test_a_value_that_no_server_knows_is_in_doubt() -> None:
    """Of a caller's own body it is his fault, of a translated one ours."""
    error = openai("Invalid value: 'banana'. Supported values are: 'low' and 'high'.", "reasoning_effort")
    assert reading(error, {**CHAT, "reasoning_effort": "banana"}).in_doubt
    assert not reading(error, CHAT).in_doubt


@pytest.mark.parametrize("piece", ["'", "a.", "unsupported parameter: ", "use '", "a and ", "input should be ", "{"])
def test_hostile_words_are_read_in_bounded_time(piece: str) -> None:
    """Patterns run over MESSAGE_LIMIT characters, whatever a server sends; a backtracking one would not return."""
    words = piece * MESSAGE_LIMIT
    assert reading(openai(words, words), CHAT).verdict is not RefusalVerdict.MEND


def test_every_row_of_the_table_is_tried() -> None:
    """A row that no refusal here needs would be a guess."""
    from backends.error_body import error_parts

    used = set()
    for error, _, _ in [*MENDS.values(), *OTHERS.values()]:
        body = error.encode() if isinstance(error, str) else json.dumps(error).encode()
        for part in error_parts(body):
            used.update(place for place, row in enumerate(table().rows) if row.matches(part))
    left = [place for place in range(len(table().rows)) if place not in used]
    assert [table().rows[place].words.pattern for place in left] == []


@pytest.mark.parametrize(
    "token",
    [
        "input[0].",
        "tools[0]name",
        "missing a thought_signature ",
        "a does not support 'x' ",
        "a",
        "a.",
        "'a.b[c].d",
        'unknown name "',
        "role ",
        "'loc': (",
        "{",
        "must be one of",
    ],
)
def test_no_words_of_a_server_take_long_to_read(token: str) -> None:
    """A server, or a caller whom a server quotes, writes the words: reading takes linear time."""
    words = (token * 2000)[:2000]
    said = {"detail": [{"type": "x", "loc": ["body", "zzz"], "msg": words}] * 50}
    began = perf_counter()
    read_refusal(json.dumps(said).encode(), {"model": "m", "messages": [], "temperature": 1})
    assert perf_counter() - began < 1.0  # 25 s with names of any length
