"""Requests to servers of OpenAI's dialect."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import Raw

from backends.interface import BackendConfig, BackendRequest, FailureKind, HttpCall, Operation
from backends.openai import Compatible, Mistral, OpenAI, OpenAIPlatform
from backends.stream.taps import BodyTap, StreamTap

MESSAGES = [{"role": "user", "content": "hé"}]


def config(**fields: Any) -> BackendConfig:
    return BackendConfig(**{"kind": "openai", "model": "m", "api_key": "sk-own", **fields})


def forward(body: dict[str, Any] | None = None, **fields: Any) -> BackendRequest:
    given = {"model": "chat", "messages": MESSAGES, **(body or {})}
    return BackendRequest(**{"operation": Operation.CHAT, "body": given, "model": "served", "stream": False, **fields})


def sent(call: HttpCall) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(call.body)
    return decoded


def test_the_model_is_replaced_and_other_fields_are_unchanged() -> None:
    """Fields unknown to the gateway are between caller and server."""
    call = OpenAI(config()).call(forward({"seed": 7, "vendor_field": {"a": [1, None]}}))
    assert (call.method, call.path) == ("POST", "/v1/chat/completions")
    assert sent(call) == {"model": "served", "messages": MESSAGES, "seed": 7, "vendor_field": {"a": [1, None]}}


def test_raw_values_are_sent_byte_for_byte() -> None:
    """Validated JSON is not decoded again; the gateway's fields are added beside."""
    message = b'{"role" : "user", "content":"h\\u00e9"}'
    body = {"messages": [Raw(message)], "stream_options": {"other": Raw(b"1e2")}, "tools": [], "n": 2}
    call = OpenAI(config()).call(forward(body, stream=True, max_tokens=5))
    assert message in call.body
    assert sent(call) == {
        "model": "served",
        "messages": MESSAGES,
        "stream": True,
        "n": 2,
        "tools": [],
        "max_completion_tokens": 5,
        "stream_options": {"other": 100.0, "include_usage": True},
    }


def test_completions_go_to_their_own_path() -> None:
    """The operation's value is the path."""
    assert OpenAI(config()).call(forward(operation=Operation.COMPLETION)).path == "/v1/completions"


def test_a_parsed_body_is_never_modified() -> None:
    """Another attempt sends the body again, to another model."""
    body = {"model": "chat", "messages": MESSAGES, "stream": True, "stream_options": {"x": 1}, "max_tokens": 9}
    before = copy.deepcopy(body)
    OpenAI(config()).call(forward(body, stream=True, max_tokens=5))
    assert body == before
    OpenAI(config()).call(BackendRequest(Operation.CHAT, MappingProxyType(body), "served", True))


def test_a_stream_requests_usage() -> None:
    """For metering; the caller's other options are kept."""
    call = OpenAI(config()).call(forward({"stream": True, "stream_options": {"other": 1}}, stream=True))
    assert sent(call)["stream_options"] == {"other": 1, "include_usage": True}
    assert sent(OpenAI(config()).call(forward({"stream_options": None}, stream=True)))["stream"] is True
    assert "stream_options" not in sent(OpenAI(config()).call(forward()))


def test_invalid_stream_options_are_left_to_the_server() -> None:
    """The server's error explains the fault."""
    assert sent(OpenAI(config()).call(forward({"stream_options": "x"}, stream=True)))["stream_options"] == "x"


def test_a_whole_answer_is_requested_whole() -> None:
    """At any `stream` in the body."""
    assert sent(OpenAI(config()).call(forward({"stream": True})))["stream"] is False


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        ({}, {"max_completion_tokens": 100}),
        ({"max_tokens": None}, {"max_tokens": None, "max_completion_tokens": 100}),
        ({"max_tokens": 50}, {"max_tokens": 50}),
        ({"max_tokens": 500}, {"max_tokens": 100}),
        ({"max_completion_tokens": 500}, {"max_completion_tokens": 100}),
        ({"max_tokens": 1e9}, {"max_tokens": 100}),
        ({"max_tokens": -1}, {"max_tokens": 100}),
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"max_tokens": "100000"}, {"max_tokens": 100}),
        ({"max_tokens": True}, {"max_tokens": 100}),
        ({"max_tokens": 500, "max_completion_tokens": 20}, {"max_tokens": 100, "max_completion_tokens": 20}),
    ],
)
def test_the_output_limit_uses_the_callers_field(body: dict[str, Any], limits: dict[str, Any]) -> None:
    """A smaller value is kept, a larger or invalid value replaced, a missing value added."""
    call = sent(OpenAI(config()).call(forward(body, max_tokens=100)))
    assert {name: value for name, value in call.items() if name.startswith("max_")} == limits


def test_the_default_output_limit_has_the_servers_field_name() -> None:
    """`max_completion_tokens` is OpenAI's new name; older dialects and completions know the old name alone."""
    assert sent(Compatible(config()).call(forward(max_tokens=9)))["max_tokens"] == 9
    completion = forward(operation=Operation.COMPLETION, max_tokens=9)
    assert sent(OpenAI(config()).call(completion))["max_tokens"] == 9


def test_without_an_output_limit_the_callers_value_is_kept() -> None:
    """A route need not have a limit."""
    assert sent(OpenAI(config()).call(forward({"max_tokens": 10**6})))["max_tokens"] == 10**6


def fields(call: HttpCall) -> list[tuple[str, str]]:
    """Headers of a call, in order."""
    return list(call.headers.items())


def test_headers_are_the_gateways_own() -> None:
    """The gateway's key and name, no compression; of the caller's headers only the ids."""
    call = OpenAI(config()).call(forward(request_id="r-1", traceparent="00-a-b-01", stream=True))
    assert dict(fields(call)) == {
        "accept": "text/event-stream",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "user-agent": "firsttoken",
        "authorization": "Bearer sk-own",
        "x-request-id": "r-1",
        "traceparent": "00-a-b-01",
    }


def test_without_a_key_there_is_no_authorization_header() -> None:
    """Self-hosted engines often need no key."""
    headers = dict(fields(OpenAI(config(api_key="")).call(forward())))
    assert "authorization" not in headers
    assert headers["accept"] == "application/json"


def test_configured_headers_override_the_gateways() -> None:
    """A proxy in between may need another scheme; each name is sent once."""
    call = OpenAI(config(headers={"Authorization": "Basic x", "api-version": "1"})).call(forward())
    names = [name for name, _ in fields(call)]
    assert (dict(fields(call))["authorization"], dict(fields(call))["api-version"]) == ("Basic x", "1")
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "connection"])
def test_framing_headers_are_not_configurable(name: str) -> None:
    """Otherwise a configuration could smuggle requests."""
    with pytest.raises(ValueError, match="take it out of headers"):
        OpenAI(config(headers={name: "x"}))


def test_taps_fit_the_request() -> None:
    """A stream's tap waits for as many ends as the caller asked for choices."""
    backend = OpenAI(config())
    assert isinstance(backend.tap(forward()), BodyTap)
    tap = backend.tap(forward({"n": 2}, stream=True))
    assert isinstance(tap, StreamTap)
    tap.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')
    assert tap.ended is False


def test_the_backend_key_is_removed_from_errors() -> None:
    """In a reply and inside a stream."""
    backend = OpenAI(config(api_key="an-odd-key-of-ours"))
    assert backend.failure(400, {}, b'{"error":{"message":"an-odd-key-of-ours is bad"}}').message == "[key] is bad"
    tap = backend.tap(forward(stream=True))
    tap.feed(b'data: {"error":{"message":"an-odd-key-of-ours is bad","code":400}}\n\n')
    assert tap.failure is not None
    assert tap.failure.message == "[key] is bad"


def test_an_api_has_no_probe_and_no_load_page() -> None:
    """Probes would cost quota."""
    backend = OpenAI(config())
    assert (backend.local, backend.probe(), backend.load(), backend.read_load(b"x")) == (False, None, None, {})


def test_an_error_reply_is_classified() -> None:
    """By `backends.failures`."""
    assert OpenAI(config()).failure(401, {}, b"").kind is FailureKind.AUTH


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_completion_tokens": 50}, {"max_tokens": 50}),
        ({"max_completion_tokens": 500}, {"max_tokens": 100}),
        ({"max_completion_tokens": 50, "max_tokens": 20}, {"max_tokens": 20}),
        ({"stream_options": {"include_usage": True}}, {"max_tokens": 100}),
    ],
)
def test_mistral_gets_no_unsupported_fields(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """Mistral answers 422 to `stream_options` and `max_completion_tokens`, and reports usage unasked."""
    call = sent(Mistral(config()).call(forward(body, stream=True, max_tokens=100)))
    assert call == {"model": "served", "messages": MESSAGES, "stream": True, **expected}


REASONED = {"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning_details": []}


def test_messages_of_a_chat_caller_are_the_callers() -> None:
    """They are `Raw`, and pass as they are."""
    raw = Raw(json.dumps(REASONED).encode())
    assert sent(OpenAI(config()).call(forward({"messages": [raw]})))["messages"] == [REASONED]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 6}, {"max_completion_tokens": 5, "max_tokens": 6}),
    ],
)
def test_older_dialects_get_the_older_name_of_the_limit(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """A limit that a server does not know is none."""
    call = sent(Compatible(config()).call(forward(body)))
    assert {name: value for name, value in call.items() if name.startswith("max_")} == expected


def test_a_cache_group_has_one_prompt_cache_key_at_openai() -> None:
    """Not the salt itself; not where the caller sets its own, without groups, or where the field is unknown."""
    groups = [
        sent(OpenAIPlatform(config()).call(forward(cache_salt=salt)))["prompt_cache_key"] for salt in ("a", "a", "b")
    ]
    assert groups[0] == groups[1] != groups[2]
    assert len(groups[0]) <= 64
    own = forward({"prompt_cache_key": "mine"}, cache_salt="a")
    assert sent(OpenAIPlatform(config()).call(own))["prompt_cache_key"] == "mine"
    assert "prompt_cache_key" not in sent(OpenAIPlatform(config()).call(forward()))
    assert "prompt_cache_key" not in sent(OpenAI(config()).call(forward(cache_salt="a")))
    completion = forward({"prompt": "x"}, cache_salt="a", operation=Operation.COMPLETION)
    assert "prompt_cache_key" not in sent(OpenAIPlatform(config()).call(completion))
