"""What is sent to servers that speak OpenAI's dialect."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any

import pytest
from msgspec import Raw

from backends.interface import BackendConfig, BackendRequest, FailureKind, HttpCall, Operation
from backends.openai import Compatible, Mistral, OpenAI
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


def test_the_model_is_replaced_and_the_rest_goes_through() -> None:
    """Fields that the gateway does not know are the caller's and the server's business."""
    call = OpenAI(config()).call(forward({"seed": 7, "vendor_field": {"a": [1, None]}}))
    assert (call.method, call.path) == ("POST", "/v1/chat/completions")
    assert sent(call) == {"model": "served", "messages": MESSAGES, "seed": 7, "vendor_field": {"a": [1, None]}}


def test_what_lies_within_goes_through_as_it_was_written() -> None:
    """JSON that was judged need not be decoded to be sent; what we set is set beside it."""
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


def test_what_was_parsed_is_not_changed_in_place() -> None:
    """Another attempt will send it again, to another model."""
    body = {"model": "chat", "messages": MESSAGES, "stream": True, "stream_options": {"x": 1}, "max_tokens": 9}
    before = copy.deepcopy(body)
    OpenAI(config()).call(forward(body, stream=True, max_tokens=5))
    assert body == before
    OpenAI(config()).call(BackendRequest(Operation.CHAT, MappingProxyType(body), "served", True))


def test_a_stream_is_asked_for_its_usage() -> None:
    """The gateway meters by it; the caller's other options stay."""
    call = OpenAI(config()).call(forward({"stream": True, "stream_options": {"other": 1}}, stream=True))
    assert sent(call)["stream_options"] == {"other": 1, "include_usage": True}
    assert sent(OpenAI(config()).call(forward({"stream_options": None}, stream=True)))["stream"] is True
    assert "stream_options" not in sent(OpenAI(config()).call(forward()))


def test_stream_options_that_are_none_are_left_to_the_server() -> None:
    """It will say what is wrong with them."""
    assert sent(OpenAI(config()).call(forward({"stream_options": "x"}, stream=True)))["stream_options"] == "x"


def test_what_is_not_streamed_here_is_not_streamed_there() -> None:
    """Whatever the body says."""
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
        ({"max_tokens": "100000"}, {"max_tokens": 100}),
        ({"max_tokens": True}, {"max_tokens": 100}),
        ({"max_tokens": 500, "max_completion_tokens": 20}, {"max_tokens": 100, "max_completion_tokens": 20}),
    ],
)
def test_output_is_capped_in_the_callers_own_terms(body: dict[str, Any], limits: dict[str, Any]) -> None:
    """A smaller wish is kept, a larger one lowered, none is set; what is no number does not get past the cap."""
    call = sent(OpenAI(config()).call(forward(body, max_tokens=100)))
    assert {name: value for name, value in call.items() if name.startswith("max_")} == limits


def test_the_default_limit_has_the_name_that_the_server_knows() -> None:
    """`max_completion_tokens` is OpenAI's new name; older dialects and completions know the old one alone."""
    assert sent(Compatible(config()).call(forward(max_tokens=9)))["max_tokens"] == 9
    completion = forward(operation=Operation.COMPLETION, max_tokens=9)
    assert sent(OpenAI(config()).call(completion))["max_tokens"] == 9


def test_without_a_cap_the_limit_is_left_alone() -> None:
    """A route may have none."""
    assert sent(OpenAI(config()).call(forward({"max_tokens": 10**6})))["max_tokens"] == 10**6


def fields(call: HttpCall) -> list[tuple[str, str]]:
    """All that it says in its head, in order."""
    return list(call.headers.items())


def test_headers_are_the_gateways_own() -> None:
    """Its key, its name, no compression; the caller's are no part of a Forward but for the ids."""
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


def test_without_a_key_nothing_is_authorized() -> None:
    """An engine of one's own often has none."""
    headers = dict(fields(OpenAI(config(api_key="")).call(forward())))
    assert "authorization" not in headers
    assert headers["accept"] == "application/json"


def test_configured_headers_have_the_last_word() -> None:
    """A proxy in between may want another scheme; each name goes out once."""
    call = OpenAI(config(headers={"Authorization": "Basic x", "api-version": "1"})).call(forward())
    names = [name for name, _ in fields(call)]
    assert (dict(fields(call))["authorization"], dict(fields(call))["api-version"]) == ("Basic x", "1")
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["Host", "content-length", "Transfer-Encoding", "connection"])
def test_framing_is_not_configurable(name: str) -> None:
    """Else a configuration could smuggle."""
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


def test_our_own_key_never_comes_back() -> None:
    """However a server words it, in a reply or inside a stream."""
    backend = OpenAI(config(api_key="oddkey"))
    assert backend.failure(400, {}, b'{"error":{"message":"oddkey is bad"}}').message == "[key] is bad"
    tap = backend.tap(forward(stream=True))
    tap.feed(b'data: {"error":{"message":"oddkey is bad","code":400}}\n\n')
    assert tap.failure is not None
    assert tap.failure.message == "[key] is bad"


def test_an_api_is_known_by_its_traffic_alone() -> None:
    """Asking it how it fares would cost quota."""
    backend = OpenAI(config())
    assert (backend.local, backend.probe(), backend.load(), backend.read_load(b"x")) == (False, None, None, {})


def test_a_refusal_is_read_in_the_dialect() -> None:
    """Failures are `backends.failures`' to tell."""
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
def test_mistral_is_spared_the_fields_it_refuses(body: dict[str, Any], expected: dict[str, Any]) -> None:
    """It answers 422 to `stream_options` and `max_completion_tokens`, and tells the usage unasked."""
    call = sent(Mistral(config()).call(forward(body, stream=True, max_tokens=100)))
    assert call == {"model": "served", "messages": MESSAGES, "stream": True, **expected}
