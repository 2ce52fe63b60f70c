"""HTTP to an InferenceRequest: what decisions read is understood, the rest passes, the hostile is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.interface import BackendRequest, Operation
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest, parse, with_model
from gateway.api.request_headers import request_id_of
from gateway.strict_json import MAX_MEMBERS, decode, encode
from tests.support.builders import CHAT, backend
from tests.support.builders import request as understood

NO_HEADERS: Mapping[str, str] = {}


def completion(**body: Any) -> InferenceRequest:
    return parse(Operation.COMPLETION, json.dumps({"model": "m", **body}).encode(), NO_HEADERS, 0.0, "req-1")


def refused(headers: Mapping[str, str] | None = None, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        understood(headers, **body)
    return caught.value


# --------------------------------------------------------------------------- valid requests


@pytest.mark.parametrize(
    ("body", "known"),
    [
        ({}, {"model": "chat", "stream": False, "wants_usage": False, "max_tokens": None, "user_turns": 1}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True, "wants_usage": True}),
        ({"stream": None, "stream_options": None}, {"stream": False, "wants_usage": False}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"tools": [{"type": "function"}]}, {"tools": True}),
        ({"tools": []}, {"tools": False}),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, {"json_schema": True}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": True}),
        ({"response_format": {"type": "text"}}, {"json_schema": False}),
        ({"response_format": None}, {"json_schema": False}),
    ],
)
def test_fields_of_the_body_used_for_decisions(body: dict[str, Any], known: dict[str, Any]) -> None:
    """OpenAI's names; the new name of max_tokens has the last word."""
    request = understood(**body)
    assert {name: getattr(request, name) for name in known} == known


@pytest.mark.parametrize(
    ("messages", "turns", "images"),
    [
        ([{"role": "user", "content": "x"}], 1, False),
        ([{"role": "system", "content": "x"}], 1, False),
        ([{"role": "user"}, {"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": None}], 2, False),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], 1, False),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 1, True),
        ([{"role": "user", "content": [{"type": "text"}, {"type": "input_image"}]}], 1, True),
        ([{"role": "user", "content": [{"type": "input_image"}]}, {"role": "user", "content": "x"}], 2, True),
        ([{"role": "tool", "content": [{"type": "input_image"}]}], 1, True),
    ],
)
def test_turns_and_images_are_read_from_the_messages(messages: list[Any], turns: int, images: bool) -> None:
    """A turn is a message of the user's; there is at least one."""
    request = understood(messages=messages)
    assert (request.user_turns, request.images) == (turns, images)


@pytest.mark.parametrize("prompt", ["text", ["one", "two"], [1, 2, 3], [[1, 2], [3]], []])
def test_a_completions_prompt_is_text_or_tokens_or_a_list_of_either(prompt: Any) -> None:
    """A text prompt is one turn without tools or images."""
    request = completion(prompt=prompt)
    assert decode(encode(request.body))["prompt"] == prompt
    assert (request.user_turns, request.tools, request.images, request.json_schema) == (1, False, False, False)


def test_everything_else_passes_untouched() -> None:
    """The body is complete; fields unknown to the gateway are left to the engine."""
    odd: dict[str, Any] = {
        "seed": 2**53 + 1,
        "vendor": {"x": [1.5, None]},
        "logit_bias": "not even a mapping",
        "metadata": 3,
    }
    assert decode(encode(understood(**odd).body)) == {**CHAT, **odd}


def test_headers_with_budgets_priority_and_session() -> None:
    """Milliseconds on the wire, seconds inside; other headers are kept only if a policy reads them."""
    headers = {
        "x-slo-ttft-ms": "250",
        "x-slo-tpot-ms": "12.5",
        "x-priority": "-3",
        "x-session-id": "s" * 300,
        "traceparent": "00-" + "a" * 200,
        "x-team": "web",
        "cookie": "secret",
    }
    request = parse(Operation.CHAT, json.dumps(CHAT).encode(), headers, 1.0, "req-1", frozenset({"x-team", "x-none"}))
    assert (request.ttft_budget, request.tpot_budget, request.priority) == (0.25, 0.0125, -3)
    assert (len(request.session), len(request.traceparent)) == (256, 128)
    assert request.headers == {"x-team": "web"}
    assert (request.arrival, request.request_id, request.size) == (1.0, "req-1", len(json.dumps(CHAT)))


def test_the_aliases_of_the_budget_headers_are_known() -> None:
    """llm-d's names; ours has the last word."""
    alias = {"x-llm-d-slo-ttft-ms": "300", "x-llm-d-slo-tpot-ms": "30"}
    assert (understood(alias).ttft_budget, understood(alias).tpot_budget) == (0.3, 0.03)
    assert understood({**alias, "x-slo-ttft-ms": "200"}).ttft_budget == 0.2


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": 1}, "model", "'model': expected 'string', got 'integer'."),
        ({"model": ""}, "model", "'model': expected 'string' of length >= 1."),
        ({"messages": []}, "messages", "'messages': expected 'array' of length >= 1."),
        ({"messages": [{"content": "x"}]}, "messages[0]", "'messages[0]': Object missing required field 'role'."),
        ({"messages": ["x"]}, "messages[0]", "'messages[0]': expected 'object', got 'string'."),
        ({"stream": "yes"}, "stream", "'stream': expected 'boolean | null', got 'string'."),
        ({"max_tokens": "9"}, "max_tokens", "'max_tokens': expected 'integer | null', got 'string'."),
        ({"max_tokens": 1.5}, "max_tokens", "'max_tokens': expected 'integer | null', got 'number'."),
        ({"n": 129}, "n", "'n': expected 'integer' <= 128."),
        ({"temperature": "hot"}, "temperature", "'temperature': expected 'number | null', got 'string'."),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
        ({"tools": {}}, "tools", "'tools': expected 'array | null', got 'object'."),
    ],
)
def test_a_field_of_the_wrong_type_is_named_in_jsons_terms(
    body: dict[str, Any], param: str, message: str | None
) -> None:
    """400, with OpenAI's `param`: the caller need not guess, nor know Python."""
    refusal = refused(**body)
    assert (refusal.status, refusal.type, refusal.param) == (400, "invalid_request_error", param)
    assert message in (None, refusal.message)


@pytest.mark.parametrize("limit", [-1, 0])
@pytest.mark.parametrize(
    ("operation", "name", "more"),
    [
        (Operation.CHAT, "max_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        (Operation.CHAT, "max_completion_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        (Operation.COMPLETION, "max_tokens", {"prompt": "x", "echo": True}),
        (Operation.MESSAGES, "max_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        (Operation.RESPONSES, "max_output_tokens", {"input": "x"}),
    ],
)
def test_a_limit_below_one_is_the_engines_to_judge(
    operation: Operation, name: str, more: dict[str, Any], limit: int
) -> None:
    """Sent as it is; for forecasts and quotas no limit is given."""
    found = parse(operation, json.dumps({"model": "chat", name: limit, **more}).encode(), NO_HEADERS, 0.0, "")
    assert (found.body[name], found.max_tokens) == (limit, None)


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES])
def test_a_body_of_too_many_elements_is_refused_undecoded(operation: Operation) -> None:
    """Also where the path names the model, which is put in by decoding."""
    raw = b'{"model":"chat","messages":[' + b"{}," * MAX_MEMBERS + b"no JSON"
    assert with_model(raw, "other") is raw
    with pytest.raises(ApiError, match="too many elements") as caught:
        parse(operation, raw, NO_HEADERS, 0.0, "")
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_a_missing_field_is_named() -> None:
    """Also at the top, where there is no path."""
    with pytest.raises(ApiError) as caught:
        completion()
    assert (caught.value.message, caught.value.param) == (
        "'prompt': Object missing required field 'prompt'.",
        "prompt",
    )


@pytest.mark.parametrize("raw", [b"[]", b'"chat"', b"1", b"null"])
def test_a_body_is_an_object(raw: bytes) -> None:
    """Anything else has no fields."""
    with pytest.raises(ApiError, match=r"^The body must be a JSON object\.$"):
        parse(Operation.CHAT, raw, NO_HEADERS, 0.0, "")


def test_bad_json_is_refused_in_words() -> None:
    """The parser's, after ours."""
    with pytest.raises(ApiError, match=r"^The body is not valid JSON: it is empty\.$"):
        parse(Operation.CHAT, b"", NO_HEADERS, 0.0, "")


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "1e9", "9" * 5000])
def test_a_budget_that_cannot_be_meant_is_refused_by_name(name: str, value: str) -> None:
    """A misspelt budget must not become no budget."""
    assert refused({name: value}).message == f"The header {name} must be a positive number of milliseconds."


@pytest.mark.parametrize("value", ["", "high", "1.5", "9" * 5000])
def test_a_priority_is_a_whole_number(value: str) -> None:
    """Refused by name."""
    assert refused({"x-priority": value}).message == "The header x-priority must be an integer."


NAMES = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "tools",
        "response_format",
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "function",
        "tool_calls",
        "include_usage",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["x", "user", "text", "image_url", "json_schema", "function", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x"])},
        optional={"content": st.text(max_size=3) | st.lists(st.dictionaries(NAMES, VALUES)), "tool_calls": VALUES},
    )
    | VALUES,
    max_size=3,
)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([Operation.CHAT, Operation.COMPLETION]),
    st.dictionaries(NAMES, VALUES, max_size=4),
    MESSAGES | VALUES,
    VALUES,
)
def test_any_object_is_understood_or_refused(operation: Operation, body: dict[str, Any], messages: Any, p: Any) -> None:
    """A valid body can be counted and sent: no body causes an internal error."""
    raw = json.dumps({"model": "m", "messages": messages, "prompt": p, **body}).encode()
    with suppress(ApiError):
        request = parse(operation, raw, NO_HEADERS, 0.0, "req-1")
        for part in range(len(request.prompt.digests)):
            assert request.prompt.pieces(part)
        speaker, sent = backend(), BackendRequest(operation, request.body, "served", request.stream, max_tokens=5)
        assert json.loads(speaker.call(sent).body)["model"] == "served"
        speaker.tap(sent)


# --------------------------------------------------------------------------- ids


@pytest.mark.parametrize("given", ["a", "7f9c-1:2_3.4", "x" * 128])
def test_a_plain_request_id_is_the_callers_own(given: str) -> None:
    """Both sides' logs then say the same."""
    assert request_id_of({"x-request-id": given}) == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\r\nx: y", "ä", "\u2028", "a/b", '"'])
def test_any_other_request_id_is_replaced(given: str) -> None:
    """Ids are logged and forwarded, and so may not contain line breaks or headers."""
    fresh = {request_id_of({"x-request-id": given}) for _ in range(3)}
    assert len(fresh) == 3
    assert all(name.startswith("req_") and len(name) == 28 for name in fresh)


# --------------------------------------------------------------------------- sessions


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, ""),
        ({"x-session-id": "s"}, {"user": "u"}, "s"),
        ({"session-id": "s"}, {}, "s"),
        ({"session_id": "s"}, {}, "s"),
        ({"x-claude-code-session-id": "s"}, {"metadata": {"user_id": "u"}}, "s"),
        ({"x-session-id": "s"}, {"prompt_cache_key": "k"}, "k"),
        ({}, {"conversation": "c", "user": "u"}, "c"),
        ({}, {"conversation": {"id": "c"}}, "c"),
        ({}, {"metadata": {"user_id": "u"}}, "u"),
        ({}, {"safety_identifier": "i", "user": "u"}, "i"),
        ({}, {"user": "u"}, "u"),
        ({}, {"prompt_cache_key": 7, "conversation": [1], "metadata": {"user_id": None}, "safety_identifier": ""}, ""),
    ],
)
def test_a_session_is_named_by_what_clients_send(headers: dict[str, str], body: dict[str, Any], session: str) -> None:
    """The name of the cache first, then of the session, then of the user."""
    assert understood(headers, **body).session == session


@pytest.mark.parametrize(("written", "choices"), [(2.0, 2), (2, 2)])
def test_an_integer_may_be_written_with_a_fraction_of_zero(written: float, choices: int) -> None:
    """JSON Schema takes 2.0 for an integer. The body is forwarded as it was written."""
    request = parse(Operation.CHAT, json.dumps({**CHAT, "n": written}).encode(), {}, 1.0, "req-1")
    assert request.choices == choices
    assert type(decode(encode(request.body))["n"]) is type(written)


@pytest.mark.parametrize("written", [2.5, 1e300, -1.0])
def test_a_number_that_is_no_integer_is_refused(written: float) -> None:
    with pytest.raises(ApiError) as refused:
        parse(Operation.CHAT, json.dumps({**CHAT, "n": written}).encode(), {}, 1.0, "req-1")
    assert (refused.value.status, refused.value.param) == (400, "n")
