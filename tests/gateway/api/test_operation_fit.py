"""Operations that a pool's servers turn out to lack, and requests that no pool needs another body for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.facts.model_facts import Facts
from backends.interface import Operation
from backends.translation.turn_state.seals import sealed
from gateway.api.api_error import ApiError
from gateway.api.inference_request import InferenceRequest, parse
from gateway.api.operation_fit import OperationFit, Servers, fitted_signs
from gateway.config.models import Config
from gateway.core.hooks import Plans
from gateway.runtime import build_runtime
from tests.support import builders
from tests.support.gateways import document, pool

SERVERS = Servers({"small": frozenset({Operation.CHAT, Operation.EMBEDDINGS})})
ROUTE = builders.route(tiers=["small"])


def embedding(caller: str) -> InferenceRequest:
    request = builders.request(input="x")
    request.operation, request.caller = Operation.EMBEDDINGS, caller
    return request


def is_unfit(fit: OperationFit, caller: str) -> bool:
    request = embedding(caller)
    fit.fit(request, ROUTE, SERVERS)
    return bool(request.unfit)


def found_lacking(fit: OperationFit, caller: str) -> None:
    assert not fit.found_lacking("small", embedding(caller), ROUTE, SERVERS)


def test_what_one_caller_has_found_lacking_is_taken_from_that_caller_alone() -> None:
    fit = OperationFit()
    for _ in range(5):
        found_lacking(fit, "a")
    assert (is_unfit(fit, "a"), is_unfit(fit, "b")) == (True, False)


def test_what_two_callers_have_found_lacking_is_asked_by_nobody() -> None:
    fit = OperationFit()
    found_lacking(fit, "a")
    found_lacking(fit, "b")
    assert is_unfit(fit, "c")


def test_an_operation_that_was_served_before_is_not_found_lacking() -> None:
    fit = OperationFit()
    fit.served.add(("small", Operation.EMBEDDINGS))
    found_lacking(fit, "a")
    assert not is_unfit(fit, "a")


# ------------------------------------------------------------------- nothing to fit

KINDS = {
    "local": {"backend": "vllm"},
    "other": {"backend": "compatible", "model": "m", "accepts": {"temperature": False}},
    "tgi": {"backend": "tgi"},
    "openai": {"backend": "openai", "model": "gpt-5.1", "api_key": "k"},
    "mistral": {"backend": "mistral", "model": "mistral-large-latest", "api_key": "k"},
    "claude": {"backend": "anthropic", "model": "claude-opus-5", "api_key": "k"},
}
POOLS = {name: pool("http://127.0.0.1:9", **section) for name, section in KINDS.items()}
ROUTES = {**{name: [name] for name in KINDS}, "two": ["local", "other"], "all": [*KINDS]}
RUNTIME = build_runtime(
    Config.model_validate(document(POOLS, {name: {"tiers": tiers} for name, tiers in ROUTES.items()}))
)
HELLO: dict[str, Any] = {"role": "user", "content": "hi"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
MEMBERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.2},
    {"max_tokens": 9},
    {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
    {"reasoning_effort": "high"},
    {"metadata": {"user_id": "a"}},
    {"messages": [HELLO, {"role": "assistant", "content": [THOUGHT]}, HELLO]},
    {"messages": [{"role": "developer", "content": "brief"}, HELLO]},
    {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "a"}}]}]},
    {"messages": [HELLO, {"role": "tool", "tool_call_id": sealed("0" * 12, {"id": "c"}), "content": "r"}]},
)


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES, Operation.EMBEDDINGS])
@pytest.mark.parametrize("name", ROUTES)
def test_what_a_plan_calls_plain_is_left_by_every_pool(name: str, operation: Operation) -> None:
    """The one test of a plain request finds every request that the whole look would find."""
    route = next(route for route in RUNTIME.routes.all if route.name == name)
    fit = OperationFit(recall=lambda _: "")
    plan = Plans().of(RUNTIME, route, operation)
    for members in MEMBERS:
        asked = {"messages": [HELLO], "max_tokens": 9} if operation is Operation.MESSAGES else {"input": "hi"}
        if operation is Operation.CHAT:
            asked = {"messages": [HELLO]}
        raw = json.dumps({"model": name, **asked, **members}).encode()
        try:
            request = parse(operation, raw, {}, 0.0, "r")
        except ApiError:
            continue  # of another dialect
        if fit.is_plain(request, plan.fitted, raw):
            assert fit.work(request, route, RUNTIME.servers(), raw) is None, members


@pytest.mark.parametrize("name", ["local", "two"])
def test_a_small_request_to_local_servers_is_plain(name: str) -> None:
    route = next(route for route in RUNTIME.routes.all if route.name == name)
    plan, fit = Plans().of(RUNTIME, route, Operation.CHAT), OperationFit()
    raw = json.dumps({"model": name, "messages": [HELLO], "stream": True, "max_tokens": 8}).encode()
    request = parse(Operation.CHAT, raw, {}, 0.0, "r")
    assert fit.is_plain(request, plan.fitted, raw)
    assert not fit.is_plain(request, plan.fitted, raw.replace(b'"user"', b'"developer"'))
    fit.lacking[name, Operation.CHAT] = {}
    assert not fit.is_plain(request, plan.fitted, raw)


def test_a_route_with_a_pool_of_another_dialect_has_no_plain_request() -> None:
    servers = Servers({"small": frozenset({Operation.MESSAGES})}, lambda _: Facts())
    assert fitted_signs(Operation.CHAT, ROUTE, servers) is None
    assert fitted_signs(Operation.MESSAGES, ROUTE, servers) is not None
