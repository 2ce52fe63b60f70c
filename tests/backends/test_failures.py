"""Failures from exceptions and error replies, in common terms for all dialects."""

from __future__ import annotations

import errno
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from backends import failures
from backends.failures import of_connect, of_event, of_reply
from backends.interface import Failure, FailureKind
from backends.rate_limit_headers import retry_after
from backends.scrubbing import scrub, scrubbed_words
from policies.attempts.candidate_walk import CandidateWalk, wait_before_retry
from policies.attempts.wire import AttemptLimits, Failed, Wire
from policies.blame.blame import BLAME
from tests.support.decision_fleet import candidate

TRANSCRIPTS = Path(__file__).parent / "transcripts"


def transcript(name: str) -> bytes:
    return (TRANSCRIPTS / name).read_bytes()


def error(**fields: Any) -> bytes:
    return json.dumps({"error": fields}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "shown"),
    [
        (302, FailureKind.PROTOCOL, 502),
        (400, FailureKind.CLIENT, 400),
        (401, FailureKind.AUTH, 502),
        (402, FailureKind.QUOTA, 429),
        (403, FailureKind.CLIENT, 403),
        (408, FailureKind.TIMEOUT, 504),
        (413, FailureKind.CLIENT, 413),
        (422, FailureKind.CLIENT, 422),
        (429, FailureKind.RATE_LIMITED, 429),
        (500, FailureKind.SERVER, 502),
        (502, FailureKind.SERVER, 502),
        (503, FailureKind.OVERLOADED, 503),
        (504, FailureKind.TIMEOUT, 504),
        (529, FailureKind.OVERLOADED, 503),
    ],
)
def test_a_status_has_one_meaning(status: int, kind: FailureKind, shown: int) -> None:
    """Only a fault of the request keeps its status; the backend's faults become the gateway's."""
    failure = of_reply(status, {}, error(message="m", type="t"))
    assert (failure.kind, failure.status) == (kind, shown)


def test_vllm_errors_get_openai_types_and_codes() -> None:
    """CamelCase types, types with spaces and integer codes are unknown to OpenAI's SDKs."""
    failure = of_reply(400, {}, transcript("vllm_400_max_tokens.json"))
    assert failure == Failure(
        FailureKind.CLIENT,
        "max_tokens=99999 cannot be greater than max_model_len=16384. Please request fewer output tokens. "
        "(parameter=max_tokens, value=99999)",
        400,
        "invalid_request_error",
        None,
        "max_tokens",
    )
    assert of_reply(400, {}, transcript("vllm_400_type.json")).type == "invalid_request_error"


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
def test_a_shortage_of_the_gateways_own_is_no_fault_of_the_backend(code: int) -> None:
    """A crowd that takes all sockets ejects no endpoint."""
    failure = of_connect(OSError(code, "x"))
    assert (failure.kind, failure.cause) == (FailureKind.GATEWAY, f"no socket left: {errno.errorcode[code]}")


def test_a_prompt_too_long_has_openais_code() -> None:
    """SDKs and agents look for `context_length_exceeded`; vLLM has only a message."""
    assert of_reply(400, {}, transcript("vllm_400_context.json")).code == "context_length_exceeded"


MISCONFIGURED = {  # error replies to an unknown model name
    "vLLM": (404, transcript("vllm_404_model.json")),
    "OpenAI": (
        404,
        error(message="The model `x` does not exist", type="invalid_request_error", code="model_not_found"),
    ),
    "OpenRouter": (400, error(message="meta/x is not a valid model ID", code=400)),
    "DeepSeek": (400, error(message="Model Not Exist", type="invalid_request_error", code="invalid_request_error")),
    "Mistral": (400, b'{"object":"error","message":"Invalid model: x","type":"invalid_model","code":"1500"}'),
    "Ollama": (404, b'{"error":"model \'x\' not found, try pulling it first"}'),
    "by the parameter": (400, error(message="No.", type="invalid_request_error", param="model")),
    "a web server": (404, b"<html>nginx</html>"),
    "FastAPI": (404, b'{"detail":"Not Found"}'),
    "an unknown path, in words": (404, error(message="The requested path was not found.", type="not_found_error")),
}


@pytest.mark.parametrize("server", MISCONFIGURED)
def test_an_unknown_model_or_path_is_a_fault_of_the_configuration(server: str) -> None:
    """The configuration has chosen both: another endpoint may succeed, the same will not."""
    failure = of_reply(MISCONFIGURED[server][0], {}, MISCONFIGURED[server][1])
    assert (failure.kind, failure.retryable, is_asked_again(failure)) == (FailureKind.MISCONFIGURED, True, False)


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (404, {"message": "No such File", "type": "t", "code": "file_not_found"}, FailureKind.CONTENT),
        (404, {"message": "m", "type": "t", "param": "previous_response_id"}, FailureKind.CONTENT),
        (404, {"message": "File not found: m-1", "type": "not_found_error"}, FailureKind.CONTENT),
        (404, {"message": "Nothing of that kind", "type": "not_found_error"}, FailureKind.CONTENT),
        (404, {"message": "Resource not found: file_1", "type": "not_found_error"}, FailureKind.CONTENT),
        (400, {"message": "body.x: the input was 'y is not a valid model ID'", "type": "t"}, FailureKind.CLIENT),
        (400, {"message": "m", "param": "messages", "code": "invalid_model"}, FailureKind.CLIENT),
        (400, {"message": "not supported with this model", "param": "temperature"}, FailureKind.CLIENT),
        (400, {"message": "body.x: 'Your credit balance is too low'", "type": "t"}, FailureKind.CLIENT),
        (400, {"message": "body.x: 'API key not valid'", "type": "t"}, FailureKind.CLIENT),
        (403, {"message": "You may not say 'hello' here.", "type": "t"}, FailureKind.CLIENT),
        (403, {"message": f"You may not say '{'hello' * 30} api key' here.", "type": "t"}, FailureKind.CLIENT),
    ],
)
def test_a_caller_cannot_make_a_refusal_look_like_a_fault_of_the_configuration(
    status: int, said: Any, kind: FailureKind
) -> None:
    """Otherwise any request could take an endpoint out of use."""
    failure = of_reply(status, {}, error(**said), models=("m-1",))
    assert (failure.kind, failure.status) == (kind, status)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Nothing serves m-1 here", FailureKind.MISCONFIGURED),
        ("Nothing serves 'm-1'", FailureKind.MISCONFIGURED),
        ("Nothing serves m-10 here", FailureKind.CONTENT),
        ("Nothing serves x-m-1 here", FailureKind.CONTENT),
    ],
)
def test_a_404_that_holds_the_configured_model_is_about_the_model(message: str, kind: FailureKind) -> None:
    """In whatever words; a longer name is another."""
    assert of_reply(404, {}, error(message=message, type="t"), models=("", "m-1")).kind is kind


def test_openais_own_type_and_code_are_kept() -> None:
    """Valid values are unchanged."""
    failure = of_reply(400, {}, error(message="No.", type="image_error", code="bad_image", param="messages"))
    assert (failure.type, failure.code, failure.param) == ("image_error", "bad_image", "messages")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (error(message="a"), "a"),
        (b'{"error":"b"}', "b"),
        (b'{"object":"error","message":"c","type":"BadRequestError","param":null,"code":400}', "c"),
        (b'[{"error":{"code":400,"message":"d","status":"INVALID_ARGUMENT"}}]', "d"),
        (b'{"detail":"e"}', "e"),
        (b'{"detail":[{"loc":5,"msg":"bad"},{"loc":true}]}', "5: bad; True: "),
        (b'{"detail":[{"loc":["body","n"],"msg":"too large"},{"loc":["m"],"msg":"bad"}]}', "body.n: too large; m: bad"),
        (
            b'{"object":"error","message":{"detail":[{"type":"extra_forbidden","loc":["body","seed"],"msg":"no"}]}}',
            "body.seed: no",
        ),
        (b"<html>", "The backend refused the request."),
        (b"", "The backend refused the request."),
        (b"[]", "The backend refused the request."),
        (b'{"error":null}', "The backend refused the request."),
        (b'{"error":{"message":7}}', "The backend refused the request."),
        (b"[" * 100_000, "The backend refused the request."),
        (b'{"error":{"message":"caf\xe9"}}', "The backend refused the request."),
    ],
)
def test_every_shape_of_error_is_read(body: bytes, message: str) -> None:
    """OpenAI, a bare string, old vLLM, Gemini, FastAPI, Mistral; and unknown bodies."""
    assert of_reply(400, {}, body).message == message


def test_a_refused_key_says_nothing_of_the_key() -> None:
    """Providers quote keys and hosts in 401s; the caller can do nothing about either."""
    failure = of_reply(401, {}, error(message="Incorrect API key provided: sk-proj-abcdefgh.", type="x", code="k"))
    assert failure == Failure(FailureKind.AUTH, "The backend refused the gateway's credentials.")


def test_a_403_that_quotes_our_key_is_about_the_key() -> None:
    """No caller knows the key."""
    refused = error(message="No: 0123-4567-89ab-cdef.")
    assert of_reply(403, {}, refused, "0123-4567-89ab-cdef").kind is FailureKind.AUTH
    assert of_reply(403, {}, refused).kind is FailureKind.CLIENT


def test_a_placeholder_for_a_key_changes_no_meaning() -> None:
    """Local servers get `token`, `none` or `x` for a key."""
    said = error(message="Rate limit reached on tokens per min (TPM)")
    assert of_reply(429, {}, said, "token").kind is FailureKind.TOKEN_RATE


def test_no_message_about_the_server_tells_its_host() -> None:
    """What is said of limits and failures is passed on without."""
    for status in (302, 429, 500, 503, 529):
        assert "secret-host" not in of_reply(status, {}, error(message="secret-host down", type="t")).message


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("see https://internal.example/path?k=v for more", "see [url] for more"),
        ("connect to 10.0.0.11:8000 failed", "connect to [address] failed"),
        ("connect to [fd00::1]:8000 failed", "connect to [address] failed"),
        ("at engine-0.engines.svc: no", "at [address]: no"),
        ("at engine-0:8000", "at [address]"),
        ("key sk-proj-abcdefghijkl is bad", "key [key] is bad"),
        ("in organization org-78asdf87asdf9aaa8976 on", "in organization [account] on"),
        (
            "Team: 550e8400-e29b-41d4-a716-446655440000, API key ID: 550e8400-e29b-41d4-a716-446655440000",
            "Team: [account], API key ID: [account]",
        ),
        ("Authorization: Bearer abc.def", "Authorization: [key]"),
        ("token 0123456789abcdef0123456789abcdef0", "token [key]"),
        ("AIzaSyA1234567890123456789012345678901", "[key]"),
        ("a-key-of-our-own leaks", "[key] leaks"),
        ("two\r\nlines\x1b[31m", "two lines "),
        ("two\x85lines\x9b\u202e\u2066 \u200b", "two lines   "),
        ("ghp_16C7e42F292c6912E7710c838347Ae178B4a, AKIAIOSFODNN7EXAMPLE", "[key], [key]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVm_N-0w5N", "[key]"),
        ("xoxb-123456789012-abcdefghij tgp_v1_abcdEFGH1234567890", "[key] [key]"),
        (
            "password=hunter2secret; api_key='abc123def'; X-Api-Key: 0a1b2c3d",
            "password=[key]; api_key='[key]'; X-Api-Key: [key]",
        ),
        ("tokens: 128000, token: required", "tokens: 128000, token: required"),
        ("messages.0.content of gpt-4.1-mini is 8192 tokens", "messages.0.content of gpt-4.1-mini is 8192 tokens"),
        ("550e8400-e29b-41d4-a716-446655440000", "550e8400-e29b-41d4-a716-446655440000"),
        ("max_tokens: 99999", "max_tokens: 99999"),
    ],
)
def test_messages_are_scrubbed_of_addresses_and_keys(text: str, scrubbed: str) -> None:
    """And of little else: the message should help the caller."""
    assert scrub(text, "a-key-of-our-own") == scrubbed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peer fd00::1234:5678 at 12:30:45 is gone", "peer [address] at 12:30:45 is gone."),
        ("2001:db8:1:2:3:4:5:6 is at its limit", "[address] is at its limit."),
        ("您的请求频率已达到限制。", "您的请求频率已达到限制。"),
    ],
)
def test_words_of_a_failure_name_no_machine(text: str, words: str) -> None:
    assert scrubbed_words(text) == words


@pytest.mark.parametrize("word", ["none", "EMPTY", "test", "token", "x", "ollama", ""])
def test_a_placeholder_key_is_not_scrubbed(word: str) -> None:
    """The word is no secret, and nonetheless part of other words."""
    message = "nonetheless the latest tokens of an index in ollama are EMPTY"
    assert scrub(message, word) == message


def test_a_message_is_bounded() -> None:
    """A server cannot make the gateway repeat a megabyte."""
    assert len(of_reply(400, {}, error(message="x" * 10_000_000)).message) == 2000


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "1000000000"}, 1e9),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "Sat, 21 Nov 2026 00:00:30 GMT", "date": "Sat, 21 Nov 2026 00:00:00 GMT"}, 30.0),
        ({"retry-after": "Sat, 21 Nov 2026 00:00:00 GMT", "date": "Sat, 21 Nov 2026 00:00:30 GMT"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "tomorrow"}, None),
        ({"retry-after": "Sat, 99 Nov 2026 00:00:30 GMT"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_all_forms(headers: dict[str, str], seconds: float | None) -> None:
    """Seconds, milliseconds, a date by the server's own clock; invalid and past values count as absent."""
    assert retry_after(headers) == seconds


def test_a_retry_after_date_without_a_date_header_uses_the_local_clock() -> None:
    """A reply need not have a Date."""
    assert (retry_after({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}) or 0) > 1e9


def test_retry_after_is_kept_for_overload_only() -> None:
    """For 429, 503 and 529; not for 400."""
    headers = {"retry-after": "3"}
    assert [of_reply(status, headers, b"").retry_after for status in (429, 503, 529, 400)] == [3.0, 3.0, 3.0, None]


def test_an_empty_account_keeps_its_code() -> None:
    """`insufficient_quota` is a 429 without use of waiting: SDKs recognise the code."""
    failure = of_reply(429, {}, error(message="m", type="insufficient_quota", code="insufficient_quota"))
    assert (failure.kind, failure.code, is_asked_again(failure)) == (FailureKind.QUOTA, "insufficient_quota", False)
    assert of_reply(429, {}, b"").code == "rate_limit_exceeded"


def test_credit_too_short_for_one_request_is_not_an_empty_account() -> None:
    """A caller who asks for a million tokens must not take the key from other callers."""
    said = "This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens."
    failure = of_reply(402, {}, error(message=said, code=402))
    assert (failure.kind, failure.status, failure.code) == (FailureKind.REQUEST_SIZE, 413, "request_too_large")
    assert "65536" not in failure.message


@pytest.mark.parametrize(("key", "kind"), [("sk-a1b2c3", FailureKind.AUTH), ("here", FailureKind.CLIENT)])
def test_a_refusal_that_repeats_our_key_is_about_the_key(key: str, kind: FailureKind) -> None:
    """A short key with a provider's prefix is a key; a placeholder is a word of messages."""
    assert of_reply(403, {}, error(message=f"{key} is unwelcome"), key).kind is kind


def is_asked_again(failure: Failure) -> bool:
    """The attempt machine's rule, for an endpoint without a sibling."""
    failed, alone = Failed(1, BLAME[failure.kind.value], failure.retry_after), candidate("a")
    return wait_before_retry(failed, alone, CandidateWalk([alone], Wire(), AttemptLimits(max_attempts=3))) is not None


OF_REQUEST = ("client", "context", "content_filter", "content", "request_size", "caller_credential")


@pytest.mark.parametrize("kind", FailureKind)
def test_a_refused_request_goes_nowhere_and_a_refused_gateway_elsewhere(kind: FailureKind) -> None:
    """The same endpoint is asked again only after what may pass, and after a rate limit that says when."""
    failure = Failure(kind, "m")
    assert failure.retryable is (kind.value not in OF_REQUEST)
    lasting = (*OF_REQUEST, "auth", "misconfigured", "quota", "unsupported", "unfit", "gateway")
    rates = ("rate_limited", "request_rate", "token_rate")
    assert is_asked_again(failure) is (kind.value not in (*lasting, *rates))
    assert is_asked_again(Failure(kind, "m", retry_after=1.0)) or kind.value not in rates


@pytest.mark.parametrize(("retry_after", "again"), [("7", True), ("", False)])
def test_a_rate_limit_without_retry_after_is_not_retried_at_the_endpoint(retry_after: str, again: bool) -> None:
    """Another attempt at once would fail again."""
    assert is_asked_again(of_reply(429, {"retry-after": retry_after}, b"")) is again


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, {"message": "Your chosen model requires moderation and your input was flagged", "code": 403}),
        (400, {"message": "m", "code": "content_policy_violation"}),
        (400, {"message": "m", "code": "content_filter"}),
    ],
)
def test_a_content_filter_is_no_fault_of_the_key(status: int, said: Any) -> None:
    """A 403 for the content must not take the key out of use."""
    failure = of_reply(status, {}, error(**said))
    assert failure.kind is FailureKind.CONTENT_FILTER
    assert failure.code in failures.CONTENT_CODES


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"message": "m", "type": "InternalServerError", "code": 500}, FailureKind.SERVER),
        ({"message": "m", "code": "503"}, FailureKind.OVERLOADED),
        ({"message": "m", "code": 400}, FailureKind.CLIENT),
        ({"message": "m", "type": "invalid_request_error"}, FailureKind.CLIENT),
        ({"message": "m", "code": "rate_limit_exceeded"}, FailureKind.RATE_LIMITED),
        ({"message": "m"}, FailureKind.SERVER),
        ("m", FailureKind.SERVER),
        ({"message": "m", "code": "odd"}, FailureKind.SERVER),
    ],
)
def test_an_error_inside_a_stream_is_classified_by_its_code(said: Any, kind: FailureKind) -> None:
    """The status was 200; without a code the error is the server's."""
    assert of_event(said).kind is kind


WRAPPED = (  # vLLM 0.32, `/v1/messages` streamed: a refusal of its own chat, taken for a chunk
    "2 validation errors for ChatCompletionStreamResponse\nmodel\n  Field required [type=missing, "
    "input_value={'error': {'message': 'th...am': None, 'code': %d}}, input_type=dict]\n    For further information "
    "visit https://errors.pydantic.dev/2.14/v/missing\nchoices\n  Field required [type=missing]"
)


@pytest.mark.parametrize(("code", "kind"), [(400, FailureKind.CLIENT), (500, FailureKind.SERVER)])
def test_a_refusal_that_vllm_wraps_keeps_its_status(code: int, kind: FailureKind) -> None:
    """The words are those of a library, for nobody: not shown."""
    failure = of_event({"type": "internal_error", "message": WRAPPED % code})
    assert failure.kind is kind
    assert "validation" not in failure.message


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (TimeoutError(), "The backend did not accept a connection in time."),
        (socket.gaierror(-2, "Name or service not known: secret-host"), "The backend's name could not be resolved."),
        (ssl.SSLCertVerificationError("secret-host"), "The backend's certificate could not be verified."),
        (ssl.SSLError("secret-host"), "The TLS handshake with the backend failed."),
        (ConnectionRefusedError("secret-host"), "The backend refused the connection."),
        (ConnectionResetError("secret-host"), "The backend closed the connection while it was being set up."),
        (OSError("secret-host"), "The backend could not be reached."),
        (UnicodeError("secret-host"), "The backend could not be reached."),
    ],
)
def test_connect_errors_name_no_address(raised: Exception, message: str) -> None:
    """Exceptions contain addresses; failures do not."""
    assert of_connect(raised) == Failure(FailureKind.CONNECT, message)


def test_json_of_python_servers_is_read_leniently() -> None:
    """NaN is not JSON, but vLLM's clients read NaN. Endless nesting is an error."""
    assert failures.decode_leniently(b'{"a": NaN}')["a"] != 0
    with pytest.raises(ValueError):
        failures.decode_leniently(b"[" * 100_000)
