"""Errors as callers see them: OpenAI's envelope, and when to try again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.api_error import REASONS, ApiError, bad_request, envelope, internal, retry_later


def test_the_body_is_openais_envelope() -> None:
    """All four fields are always there: SDKs read them without asking."""
    refusal = ApiError(429, "Too \u2028 much.", type="rate_limit_error", code="slow_down", param="n")
    assert json.loads(refusal.body()) == {
        "error": {"message": "Too \u2028 much.", "type": "rate_limit_error", "param": "n", "code": "slow_down"}
    }
    assert json.loads(bad_request("No.").body()) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}
    }
    assert envelope("No.", "invalid_request_error", None, None) == json.loads(bad_request("No.").body())


def test_an_api_error_is_the_callers_fault_by_default() -> None:
    """`str` gives the message, for logs."""
    refusal = bad_request("'n': expected 'integer'.", "n", "odd")
    assert (refusal.status, refusal.type, refusal.param, refusal.code) == (400, "invalid_request_error", "n", "odd")
    assert (str(refusal), refusal.headers, refusal.close) == ("'n': expected 'integer'.", {}, False)


def test_an_internal_error_is_a_server_error() -> None:
    """500 `server_error`, with the id to ask about; the connection is not trusted any more."""
    refusal = internal("req-7")
    assert (refusal.status, refusal.type, refusal.close) == (500, "server_error", True)
    assert refusal.message == "The gateway failed on this request (id req-7); the fault is ours."


@pytest.mark.parametrize(
    ("seconds", "whole", "millis"),
    [(0.0, "1", "1"), (0.25, "1", "250"), (1.0, "1", "1000"), (1.001, "2", "1001"), (30.0, "30", "30000")],
)
def test_retry_after_has_seconds_and_milliseconds(seconds: float, whole: str, millis: str) -> None:
    """RFC 9110 has whole seconds; both SDKs read milliseconds where they are given."""
    assert retry_later(seconds) == {"retry-after": whole, "retry-after-ms": millis}


@given(st.floats(0, 1e6))
def test_no_client_is_sent_back_early_by_rounding(seconds: float) -> None:
    """Whole seconds are rounded up, and never zero."""
    headers = retry_later(seconds)
    assert int(headers["retry-after"]) >= max(1, seconds - 0.001)
    assert int(headers["retry-after-ms"]) == pytest.approx(max(seconds * 1e3, 1), abs=0.5)
    assert int(headers["retry-after"]) * 1000 - int(headers["retry-after-ms"]) < 1000


@pytest.mark.parametrize("status", [200, 400, 401, 404, 405, 408, 413, 415, 429, 500, 502, 503, 504])
def test_every_status_that_is_written_has_its_reason(status: int) -> None:
    """A relayed head is written by hand."""
    assert REASONS[status].isascii()


def test_a_refusals_headers_are_its_own() -> None:
    """A shared ApiError, such as 404, keeps no headers of single requests."""
    given_headers = {"allow": "POST"}
    refusal = ApiError(405, "No.", headers=given_headers)
    given_headers["allow"] = "GET"
    assert refusal.headers == {"allow": "POST"}
