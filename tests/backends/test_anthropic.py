"""Anthropic's API: requests to it, and the meaning of its errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backends.anthropic import MAX_TOKENS, Anthropic
from backends.interface import BackendConfig, BackendRequest, Failure, FailureKind, Operation
from backends.stream.native_taps import MessagesBodyTap, MessagesTap

MESSAGES = [{"role": "user", "content": "hi"}]


def backend(**more: Any) -> Anthropic:
    return Anthropic(BackendConfig("anthropic", "claude", **{"api_key": "sk-ant-own", **more}))


def forward(
    operation: Operation = Operation.MESSAGES, body: dict[str, Any] | None = None, **more: Any
) -> BackendRequest:
    members = {"model": "route", "messages": MESSAGES, **(body or {})}
    return BackendRequest(operation, members, "claude", **{"stream": False, **more})


def failed(status: int, kind: str, message: str = "x", **headers: str) -> Failure:
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return backend().failure(status, names, json.dumps(body).encode())


def test_a_request_has_anthropics_headers() -> None:
    call = backend().call(forward(body={"max_tokens": 5}, stream=True, request_id="r-1"))
    assert call.path == "/v1/messages"
    assert call.headers == {
        "accept": "text/event-stream",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "user-agent": "firsttoken",
        "x-api-key": "sk-ant-own",
        "anthropic-version": "2023-06-01",
        "x-request-id": "r-1",
    }
    assert json.loads(call.body) == {"model": "claude", "messages": MESSAGES, "max_tokens": 5, "stream": True}


def test_the_version_and_the_betas_are_the_callers() -> None:
    """They say what the body may hold. No other header of a caller is sent on."""
    headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "a,b", "x-api-key": "theirs", "cookie": "c"}
    sent = backend().call(forward(headers=headers)).headers
    assert (sent["anthropic-version"], sent["anthropic-beta"]) == ("2026-10-21", "a,b")
    assert sent["x-api-key"] == "sk-ant-own"
    assert "cookie" not in sent


def test_configured_headers_override_the_callers() -> None:
    """A proxy before Anthropic may want a bearer token."""
    configured = {"Anthropic-Version": "2026-01-01", "Authorization": "Bearer x"}
    sent = backend(api_key="", headers=configured).call(forward(headers={"anthropic-version": "2026-10-21"})).headers
    assert (sent["anthropic-version"], sent["authorization"]) == ("2026-01-01", "Bearer x")
    assert "x-api-key" not in sent


@pytest.mark.parametrize(
    ("asked", "cap", "sent"),
    [(None, None, MAX_TOKENS), (None, 100, 100), (50, 100, 50), (500, 100, 100), (500, None, 500)],
)
def test_a_message_always_has_a_limit(asked: int | None, cap: int | None, sent: int) -> None:
    """Anthropic asks for one; a chat need not have any."""
    call = backend().call(forward(body={} if asked is None else {"max_tokens": asked}, max_tokens=cap))
    assert json.loads(call.body)["max_tokens"] == sent


@pytest.mark.parametrize(
    ("cap", "thinking"),
    [
        (None, {"type": "enabled", "budget_tokens": 8000}),
        (9000, {"type": "enabled", "budget_tokens": 8000}),
        (8000, {"type": "enabled", "budget_tokens": 7999}),
        (1024, {"type": "disabled"}),
    ],
)
def test_a_cap_of_the_route_leaves_room_for_thinking(cap: int | None, thinking: dict[str, Any]) -> None:
    """The caller's request is valid, and the cap is not the caller's."""
    asked = {"max_tokens": 16000, "thinking": {"type": "enabled", "budget_tokens": 8000}}
    assert json.loads(backend().call(forward(body=asked, max_tokens=cap)).body)["thinking"] == thinking


def test_a_model_that_always_thinks_is_left_to_it_where_a_cap_leaves_no_room() -> None:
    """It refuses thinking that is switched off."""
    asked = {"max_tokens": 16000, "thinking": {"type": "enabled", "budget_tokens": 8000}}
    call = backend().call(replace(forward(body=asked, max_tokens=1024), model="claude-fable-5"))
    assert "thinking" not in json.loads(call.body)


def test_a_count_has_no_limit() -> None:
    """Anthropic refuses members that it does not know."""
    call = backend().call(forward(Operation.COUNT_TOKENS, max_tokens=100))
    assert call.path == "/v1/messages/count_tokens"
    assert json.loads(call.body) == {"model": "claude", "messages": MESSAGES}


def test_taps_fit_the_request() -> None:
    assert isinstance(backend().tap(forward(stream=True)), MessagesTap)
    assert isinstance(backend().tap(forward()), MessagesBodyTap)


@pytest.mark.parametrize(
    ("status", "kind", "message", "expected", "code"),
    [
        (400, "invalid_request_error", "messages: Field required", FailureKind.CLIENT, None),
        (400, "invalid_request_error", "prompt is too long: 210000 tokens > 200000 maximum", FailureKind.CONTEXT,
         "context_length_exceeded"),
        (400, "invalid_request_error", "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
         FailureKind.CONTEXT, "context_length_exceeded"),
        (400, "invalid_request_error", "Your credit balance is too low to access the Anthropic API.",
         FailureKind.QUOTA, "insufficient_quota"),
        (401, "authentication_error", "invalid x-api-key", FailureKind.AUTH, None),
        (402, "billing_error", "Payment required", FailureKind.QUOTA, "insufficient_quota"),
        (403, "permission_error", "Your API key does not have permission", FailureKind.AUTH, None),
        (404, "not_found_error", "model: claude-9", FailureKind.MISCONFIGURED, "model_not_found"),
        (413, "request_too_large", "Request exceeds the maximum size", FailureKind.CLIENT, None),
        (429, "rate_limit_error", "This request would exceed your limit", FailureKind.RATE_LIMITED,
         "rate_limit_exceeded"),
        (500, "api_error", "Internal server error", FailureKind.SERVER, None),
        (504, "timeout_error", "Timed out", FailureKind.TIMEOUT, None),
        (529, "overloaded_error", "Overloaded", FailureKind.OVERLOADED, None),
    ],
)  # fmt: skip
def test_documented_errors(status: int, kind: str, message: str, expected: FailureKind, code: str | None) -> None:
    """All errors of platform.claude.com/docs, errors (November 2026), and two that are known by their words alone."""
    failure = failed(status, kind, message)
    assert (failure.kind, failure.code) == (expected, code)


def test_a_rate_limit_says_when_to_return() -> None:
    assert failed(429, "rate_limit_error", retry_after="17").retry_after == 17
    date, soon, late = "Sun, 22 Nov 2026 10:00:00 GMT", "2026-11-22T10:00:05Z", "2026-11-22T10:00:42Z"
    limits = {
        "date": date,
        "anthropic_ratelimit_requests_remaining": "3",
        "anthropic_ratelimit_requests_reset": late,
        "anthropic_ratelimit_input_tokens_remaining": "0",
        "anthropic_ratelimit_input_tokens_reset": soon,
    }
    assert failed(429, "rate_limit_error", **limits).retry_after == 5
    limits["anthropic_ratelimit_output_tokens_remaining"] = "0"
    assert failed(429, "rate_limit_error", **limits, anthropic_ratelimit_output_tokens_reset=late).retry_after == 42


def test_a_limit_without_a_time_is_no_reason_to_return() -> None:
    assert failed(429, "rate_limit_error").retry_after is None
    assert failed(429, "rate_limit_error", anthropic_ratelimit_tokens_remaining="7").retry_after is None


def test_thinking_of_other_servers_is_left_out() -> None:
    """A route may mix tiers: Anthropic refuses what the others have signed, or not."""
    thoughts = [
        {"type": "thinking", "thinking": "ours", "signature": "EqQBCgIYAhIM" * 9},
        {"type": "thinking", "thinking": "over chat", "signature": ""},
        {"type": "thinking", "thinking": "vLLM's", "signature": "0b8e64a9c1f24a3c9d1f5b7a6c2e4f80"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    text = {"type": "text", "text": "hi"}
    turns = [*MESSAGES, {"role": "assistant", "content": [*thoughts, text]}, *MESSAGES]
    turns.append({"role": "assistant", "content": [thoughts[1]]})  # of which nothing is left
    body = json.loads(backend(prompt_caching=False).call(forward(body={"messages": turns})).body)
    assert body["messages"] == [
        *MESSAGES, {"role": "assistant", "content": [thoughts[0], thoughts[3], text]}, *MESSAGES,
    ]  # fmt: skip


def test_keys_are_removed_from_errors() -> None:
    assert failed(400, "invalid_request_error", "sk-ant-own is odd").message == "[key] is odd"
