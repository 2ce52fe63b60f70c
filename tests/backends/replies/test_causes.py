"""Causes: the operator's one line about a failure."""

from __future__ import annotations

import json
import socket
import ssl
from typing import Any

import pytest

from backends.failures import ProxyError, of_connect, of_event, of_reply, of_silence
from backends.interface import FailureKind
from tests.backends.replies.reply import openai_error

TPM = "Request too large for m-1 in organization org-78asdf87asdf9aaa8976 on tokens per min (TPM): Limit 1, Requested 2"

SHORT_TPM = (
    "429 tokens: Request too large for … in organization [account] on tokens per min (TPM): Limit 1, Requested 2"
)


def cause(status: int, body: Any, secret: str = "") -> str:
    return of_reply(status, {}, body if isinstance(body, bytes) else json.dumps(body).encode(), secret).cause


@pytest.mark.parametrize(
    ("status", "said", "line"),
    [
        (500, openai_error("The server had an error", "internal_error"), "500 internal_error: The server had an error"),
        (500, openai_error("One\nTwo", None), "500: One"),
        (
            429,
            openai_error(TPM, "tokens", "rate_limit_exceeded"),
            SHORT_TPM,
        ),
        (
            402,
            openai_error("Insufficient Balance", "unknown_error", "invalid_request_error"),
            "402 unknown_error: Insufficient Balance",
        ),
        (401, openai_error("Bad key", "invalid_request_error", "invalid_api_key"), "401 invalid_api_key: Bad key"),
        (400, openai_error("Say 'hello'", "invalid_request_error", "bad_role"), "400 bad_role"),
        (500, openai_error("narwhal broke the engine", "narwhal_error"), "500: … broke the engine"),
        (400, openai_error("Say 'hello'", "BadRequestError", 400), "400 BadRequestError"),
        (404, openai_error("No such File object: hello", "an_error"), "404 an_error"),
        (403, openai_error("You may not: 'my account is hello'", "an_error"), "403 an_error"),
        (404, openai_error("hello m", "an_error", None, "model"), "404 an_error"),
        (400, openai_error("Too long: hello. context window", "an_error"), "400 an_error"),
        (500, openai_error("It broke", "a name with blanks"), "500: It broke"),
        (503, b"<html>", "503"),
        (302, b"", "302"),
    ],
)
def test_a_cause_is_status_name_and_first_line(status: int, said: Any, line: str) -> None:
    """Without the message where the message may quote a prompt."""
    assert cause(status, said) == line


@pytest.mark.parametrize(
    "message",
    [
        "Your key my-own-secret is bad",
        "Incorrect API key provided: sk-proj-********cret",
        "Your api key: ****cret is invalid",
        "Incorrect API key provided: sk***cret.",
        "Authorization: Bearer my-own-secret",
    ],
)
def test_a_cause_holds_no_part_of_a_key(message: str) -> None:
    """Providers show the last characters of a key that they refuse."""
    assert "cret" not in cause(401, openai_error(message, "my-own-secret"), "my-own-secret")
    assert "cret" not in cause(500, openai_error(message, None, "my-own-secret"), "my-own-secret")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Broken with prompt: 'my card is 4111 1111 1111 1111 cvc 123, pin 4821'", "Broken with prompt…"),
        ("my card is 4111 1111 1111 1111 cvc 123, pin 4821", "… is …"),
        ("transfer 25000 to account 99 4433 21", "… to account …"),
        ("key 83726-19283-44 is invalid", "key … is invalid"),
        ("limit 4111 1111 tokens", "limit … tokens"),
        ("code 4821", "code …"),
        ("key ab-123s", "key …s"),
        ("limit 4111,111,111,111", "limit …"),
    ],
)
def test_a_cause_holds_no_number_of_a_prompt_or_key(message: str, line: str) -> None:
    """A server may quote any text."""
    assert cause(500, openai_error(message, None)) == f"500: {line}"


@pytest.mark.parametrize(
    "message",
    [
        "Limit 30000, Used 29937, Requested 385. Please try again in 644ms.",
        "Please try again in 9m38.016s.",
        "rate limit of 40,000 input tokens",
        "maximum length is 131072",
        "limited to 1000 API calls",
        "allocate 2.50 GiB. GPU 0",
        "[Errno 104] connection reset",
        "worker-3 died, status_code=502",
        "Rate limit for model `model` in organization `[account]` on tokens: Limit 30",
        "The model's server doesn't start",
    ],
)
def test_a_cause_keeps_a_number_beside_its_unit_or_name(message: str) -> None:
    expected = message.replace("The model's", "The …")
    assert cause(500, openai_error(message, None)) == f"500: {expected}"


@pytest.mark.parametrize(
    "quotation", ["'secret", '"secret', "“secret", "`no secret`", "b'secret", "input: secret", "request=secret"]
)
def test_a_cause_ends_before_a_quotation(quotation: str) -> None:
    """Words of errors are words of prompts too."""
    assert "account" not in cause(500, openai_error(f"It failed at {quotation} my account is limited", None))


def test_a_cause_is_bounded_after_the_keys_are_out() -> None:
    """Half a key is a key."""
    found = cause(500, openai_error("x" * 140 + " my-own-secret and more"), "my-own-secret")
    assert len(found) <= 160
    assert "my-" not in found


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            {"type": "overloaded_error", "message": "Overloaded"},
            "200 with an error inside: overloaded_error: Overloaded",
        ),
        ({"code": 502, "message": "It broke"}, "200 with an error inside: 502: It broke"),
        ({"type": "invalid_request_error", "message": "hello"}, "200 with an error inside: invalid_request_error"),
        ("It broke", "200 with an error inside: It broke"),
        ({"x": 1}, "200 with an error inside"),
    ],
)
def test_the_cause_of_an_error_inside_a_200_says_so(error: Any, line: str) -> None:
    """The status alone would say that all is well."""
    assert of_event(error).cause == line


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (TimeoutError(), "no connection within 2.5 s"),
        (socket.gaierror(-2, "secret-host"), "name not resolved"),
        (ssl.SSLCertVerificationError("secret-host"), "certificate not verified"),
        (ssl.SSLError("secret-host"), "TLS handshake failed"),
        (ConnectionRefusedError("secret-host"), "connection refused"),
        (ConnectionResetError("secret-host"), "connection closed while being set up"),
        (OSError(113, "secret-host"), "not reached: EHOSTUNREACH"),
        (OSError("secret-host"), "not reached"),
        (UnicodeError("secret-host"), "not reached"),
        (ProxyError(), "proxy: no answer"),
        (ProxyError(407), "proxy: 407"),
    ],
)
def test_the_cause_of_a_failed_connection_tells_the_step(raised: Exception, line: str) -> None:
    assert of_connect(raised, 2.5).cause == line


def test_the_cause_of_a_silence_tells_how_long_it_was() -> None:
    failure = of_silence(2)
    assert (failure.kind, failure.cause) == (FailureKind.TIMEOUT, "no answer within 2 s")
    assert of_connect(TimeoutError()).cause == "no connection in time"
