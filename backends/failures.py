"""Maps foreign exceptions and error replies to a `Failure`.

Rules:
- Every message may be shown to a caller. Only a complaint about the caller's own request (4xx) is passed on in the
  server's words, and scrubbed; other server messages are for the operator.
- Nothing of a rejected API key is passed on: providers quote keys in such messages.
- Known error shapes: OpenAI, vLLM (old and new), SGLang, Gemini (a list), Mistral, FastAPI (`detail`), Ollama and
  llama.cpp (`error` as a string).
"""

from __future__ import annotations

import json
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from backends.interface import Failure, FailureKind

_MESSAGE_LIMIT = 2000  # characters of a server's message passed on


class TransportError(Exception):
    """A request could not be sent, or got no complete reply."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


TIMED_OUT = Failure(FailureKind.TIMEOUT, "The backend did not answer in time.", status=504)
MALFORMED = Failure(FailureKind.PROTOCOL, "The backend sent something that is not HTTP/1.1.")
TOO_LARGE = Failure(FailureKind.PROTOCOL, "The backend's reply is larger than the gateway accepts.")
NOT_JSON = Failure(FailureKind.PROTOCOL, "The backend sent something that is not JSON.")
LINE_TOO_LONG = Failure(FailureKind.PROTOCOL, "The backend sent an event larger than the gateway accepts.")
UNANSWERED = Failure(FailureKind.RESET, "The backend closed the connection without an answer.")
CUT_SHORT = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")


class ForbiddenAddressError(OSError):
    """A host name led to an address that no backend can have."""


_CONNECT: tuple[tuple[type[Exception], str], ...] = (  # the first match counts; all but the last are OSErrors
    (TimeoutError, "The backend did not accept a connection in time."),
    (ForbiddenAddressError, "The backend's name leads to an address that no backend may have."),
    (socket.gaierror, "The backend's name could not be resolved."),
    (ssl.SSLCertVerificationError, "The backend's certificate could not be verified."),
    (ssl.SSLError, "The TLS handshake with the backend failed."),
    (ConnectionRefusedError, "The backend refused the connection."),
    (ConnectionError, "The backend closed the connection while it was being set up."),
    (Exception, "The backend could not be reached."),
)


def of_connect(error: Exception) -> Failure:
    """Of an exception raised before anything was sent."""
    return Failure(FailureKind.CONNECT, next(text for kind, text in _CONNECT if isinstance(error, kind)))


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """A server's error object; fields are empty if absent."""

    message: str = ""
    type: str = ""
    code: str | int | None = None
    param: str | None = None


def of_reply(status: int, headers: Mapping[str, str], body: bytes, secret: str = "") -> Failure:
    """Failure for an error status. `secret` is the API key, never shown."""
    try:
        said = complaint(msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError):
        said = ErrorBody()  # a proxy's HTML page, say: the status tells all there is to know
    return _of_complaint(status, headers, said, secret)


def of_event(error: Any, secret: str = "") -> Failure:
    """Failure for an error object inside a 200 stream: the code of the object is the only status."""
    said = complaint({"error": error})
    return _of_complaint(_status_in(said), {}, said, secret)


def complaint(reply: Any) -> ErrorBody:
    """Read a decoded error body in any of the known shapes."""
    if isinstance(reply, list):  # Gemini wraps errors in a list
        reply = reply[0] if reply else None
    if not isinstance(reply, Mapping):
        return ErrorBody()
    error = reply.get("error") or reply
    if not isinstance(error, Mapping):
        return ErrorBody(message=str(error))
    message, code = error.get("message") or error.get("detail") or "", error.get("code")
    return ErrorBody(
        message if isinstance(message, str) else _details(message),
        _text(error.get("type")),
        code if isinstance(code, (str, int)) else None,
        _text(error.get("param")) or None,
    )


def _details(message: Any) -> str:
    """Join the `{loc, msg}` entries of FastAPI and Mistral."""
    if isinstance(message, Mapping):
        message = message.get("detail")
    entries = [entry for entry in message if isinstance(entry, Mapping)] if isinstance(message, list) else []
    return "; ".join(f"{'.'.join(map(str, e.get('loc') or ()))}: {e.get('msg', '')}" for e in entries)


def _of_complaint(status: int, headers: Mapping[str, str], said: ErrorBody, secret: str) -> Failure:
    if status in (401, 402, 403, 407):  # 402: our account is empty
        return Failure(FailureKind.AUTH, "The backend refused the gateway's credentials.")
    if status == 429:
        code = said.code if said.code == "insufficient_quota" else "rate_limit_exceeded"
        message = "The backend's rate limit is reached."
        return Failure(FailureKind.RATE_LIMITED, message, 429, code, code, retry_after=retry_after(headers))
    if status in (503, 529):
        return Failure(FailureKind.OVERLOADED, "The backend is overloaded.", 503, retry_after=retry_after(headers))
    if status in (408, 504):
        return TIMED_OUT
    if status >= 500:
        return Failure(FailureKind.SERVER, "The backend failed.", retry_after=retry_after(headers))
    if status < 400:
        return Failure(FailureKind.PROTOCOL, "The backend answered with a redirect, which is never followed.")
    if status in (404, 405) and not said.type:  # a web server's own 404: the URL is wrong, not the request
        return Failure(FailureKind.PROTOCOL, "The backend does not serve this operation.")
    return _refusal(status, said, secret)


def _refusal(status: int, said: ErrorBody, secret: str) -> Failure:
    """Failure for a 4xx by the request's own fault, in the server's words."""
    code = said.code if isinstance(said.code, str) else None  # vLLM repeats the status as an int
    if status == 404:
        code = code or "model_not_found"
    elif code is None and "maximum context length" in said.message:  # vLLM says so in words only
        code = "context_length_exceeded"
    return Failure(
        FailureKind.CLIENT,
        scrub(said.message, secret) or "The backend refused the request.",
        status,
        said.type if _SNAKE.fullmatch(said.type) else "invalid_request_error",  # vLLM: `BadRequestError`
        scrub(code, secret) if code else None,
        scrub(said.param, secret) if said.param else None,
    )


def _status_in(said: ErrorBody) -> int:
    try:
        status = int(said.code or 0)
    except ValueError:
        status = 0
    if 400 <= status < 600:
        return status
    return 429 if said.code == "rate_limit_exceeded" else 400 if said.type == "invalid_request_error" else 500


def decode_leniently(data: bytes) -> Any:
    """Decode JSON with the additions of Python servers (NaN, Infinity, lone surrogates). Raises ValueError."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as the server asks (RFC 9110, 10.2.3, and OpenAI's `retry-after-ms`); None if malformed.

    A date is measured from the reply's own Date if present, so clocks need not agree.
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with suppress(ValueError):
            wait = float(headers.get(name) or "") * unit
            if math.isfinite(wait) and wait >= 0:
                return wait
    then, now = _timestamp(headers.get("retry-after")), _timestamp(headers.get("date"))
    if then is None:
        return None
    wait = then - (time.time() if now is None else now)
    return wait if wait >= 0 else None


def _timestamp(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


_SNAKE = re.compile(r"[a-z][a-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029\ud800-\udfff]+")
_START = r"(?<![\w.-])"  # of a name: else each letter is tried, in square time
_SCRUBS = (
    (re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s'\"`<>)\]}]+"), "[url]"),
    (re.compile(r"(?i)\bbearer\s+\S+"), "[key]"),
    (re.compile(r"\b(?:sk|pk|rk|gsk|xai|fw|hf|key|api|nvapi|AIza)[-_][A-Za-z0-9_*.-]{8,}"), "[key]"),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{20,}"), "[key]"),
    (re.compile(r"\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{32,}"), "[key]"),  # not a UUID, not a snake_case name
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?"), "[address]"),
    (re.compile(r"\[[0-9a-fA-F]*:[0-9a-fA-F:.]+\](?::\d+)?"), "[address]"),
    (re.compile(_START + r"[A-Za-z][A-Za-z0-9.-]*:\d{4,5}\b"), "[address]"),  # host:port
    (
        re.compile(r"(?i)" + _START + r"(?:[a-z0-9-]+\.)+(?:com|net|org|io|ai|dev|cloud|local|internal|svc|lan)\b"),
        "[address]",
    ),
)


def scrub(text: str, secret: str = "") -> str:
    """Remove URLs, hosts, addresses and keys from `text`; return a single line."""
    text = _CONTROL.sub(" ", text[:_MESSAGE_LIMIT])
    if secret:
        text = text.replace(secret, "[key]")
    for pattern, mark in _SCRUBS:
        text = pattern.sub(mark, text)
    return text
