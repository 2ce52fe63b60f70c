"""Operations that a pool's servers turn out to lack."""

from __future__ import annotations

from backends.interface import Operation
from gateway.api.inference_request import InferenceRequest
from gateway.api.operation_fit import OperationFit, Servers
from tests.support import builders

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
