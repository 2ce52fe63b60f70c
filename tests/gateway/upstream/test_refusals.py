"""Errors that a caller receives after failed attempts."""

from __future__ import annotations

import pytest

from backends.interface import OF_REQUEST, Failure, FailureKind
from gateway.refusals import refusal_of
from gateway.upstream.routed_request import header_safe
from tests.support.scripted_fleet import failed


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        *((failed(kind, status=422), 422, {}) for kind in OF_REQUEST),
        (failed(FailureKind.SERVER), 502, {"x-should-retry": "false"}),
        (failed(FailureKind.TIMEOUT, status=504), 504, {"x-should-retry": "false"}),
        (failed(FailureKind.AUTH), 502, {"x-should-retry": "false"}),
        (
            failed(FailureKind.RATE_LIMITED, status=429, retry_after=2.5),
            429,
            {"retry-after": "3", "retry-after-ms": "2500"},
        ),
        (failed(FailureKind.RATE_LIMITED, status=429), 429, {"retry-after": "1", "retry-after-ms": "1000"}),
        (failed(FailureKind.REQUEST_RATE, status=429), 429, {"retry-after": "1", "retry-after-ms": "1000"}),
        (failed(FailureKind.TOKEN_RATE, status=429), 429, {"retry-after": "1", "retry-after-ms": "1000"}),
        (
            failed(FailureKind.OVERLOADED, status=503, retry_after=1e9),
            503,
            {"retry-after": "3600", "retry-after-ms": "3600000"},
        ),
        (
            failed(FailureKind.OVERLOADED, status=503, retry_after=0.0),
            503,
            {"retry-after": "1", "retry-after-ms": "1000"},
        ),
    ],
)
def test_the_last_failure_is_the_callers_error(failure: Failure, status: int, headers: dict[str, str]) -> None:
    """Overload names a wait of at most an hour. After any other failure clients should not retry, since all
    candidates have been tried."""
    refusal = refusal_of(failure, "all 2 candidates have failed")
    assert (refusal.status, refusal.message, refusal.headers) == (status, "It failed.", headers)


def test_without_any_failure_the_error_is_504() -> None:
    """All attempts were silent."""
    refusal = refusal_of(None, "no first token within 60 s")
    assert (refusal.status, refusal.type, refusal.code) == (504, "server_error", "timeout")
    assert refusal.message == "No backend answered in time: no first token within 60 s."


def test_the_error_keeps_the_members_of_the_failure() -> None:
    """The log has the cause, the caller has not."""
    failure = failed(FailureKind.CLIENT, status=400, param="n", code="odd", cause="in the server's words")
    refusal = refusal_of(failure)
    assert (refusal.param, refusal.code, refusal.type) == ("n", "odd", failure.type)
    assert refusal.logged == failure.said != refusal.message


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("gpt-4.1-mini", "gpt-4.1-mini"),
        ("org/model:tag", "org/model:tag"),
        ("x" * 128, "x" * 128),
        ("x" * 129, "-"),
        ("a\r\nset-cookie: b", "-"),
        ("modèle", "-"),
        ("a\u2028b", "-"),
        ("", ""),
    ],
)
def test_a_model_name_is_shown_only_if_safe_in_a_header(model: str, shown: str) -> None:
    """Otherwise `-`."""
    assert header_safe(model) == shown
