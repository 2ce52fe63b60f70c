"""Maps foreign exceptions and error replies to a `Failure`.

Rules:
- Every message may be shown to a caller. Only a complaint about the caller's own request (4xx) is passed on in the
  server's words, and scrubbed; other server messages are for the operator.
- Nothing of a rejected API key is passed on: providers quote keys in such messages.
- A complaint about the model name or the path is one about the configuration, which has chosen both. A message is
  recognised by its beginning alone: further on, it may quote a caller.
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
from backends.secrets import is_secret

_MESSAGE_LIMIT = 2000  # characters of a server's message passed on


class TransportError(Exception):
    """A request could not be sent, or got no complete reply."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


TIMED_OUT = Failure(FailureKind.TIMEOUT, "The backend did not answer in time.", status=504)
MALFORMED = Failure(FailureKind.PROTOCOL, "The backend sent something that is not HTTP/1.1.")
NOT_READ = Failure(FailureKind.PROTOCOL, "The gateway could not read the backend's reply; the fault is ours.")
TOO_LARGE = Failure(FailureKind.PROTOCOL, "The backend's reply is larger than the gateway accepts.")
NOT_JSON = Failure(FailureKind.PROTOCOL, "The backend sent something that is not JSON.")
TEXT_LOST = Failure(FailureKind.PROTOCOL, "The backend sent something that is not JSON, and text may be missing.")
NOT_EVENTS = Failure(FailureKind.PROTOCOL, "The backend sent something that is not an event stream.")
LINE_TOO_LONG = Failure(FailureKind.PROTOCOL, "The backend sent an event larger than the gateway accepts.")
UNANSWERED = Failure(FailureKind.RESET, "The backend closed the connection without an answer.")
WENT_SILENT = Failure(FailureKind.TIMEOUT, "The backend stopped sending in the middle of the answer.", status=504)
NOT_SERVED = Failure(FailureKind.MISCONFIGURED, "The backend does not serve this operation.")
EMPTY = Failure(FailureKind.PROTOCOL, "The backend ended its reply before the first token.")
UNKNOWN_MODEL = Failure(FailureKind.MISCONFIGURED, "The backend does not know the configured model or path.")
UNRESCUED = Failure(FailureKind.RESET, "The backend broke in the middle of the answer, and no other could continue it.")
TRUNCATED = Failure(FailureKind.RESET, "The backend ended the stream before the answer was complete.")
SILENT = Failure(FailureKind.TIMEOUT, "The backend stopped sending in the middle of the answer.")
DIVERGED = Failure(FailureKind.GATEWAY, "The backend broke in the middle of the answer, and another wrote other words.")
LATE = Failure(FailureKind.TIMEOUT, "The answer took longer than its route allows.", 504, code="timeout")
UNTRANSLATED = Failure(FailureKind.GATEWAY, "The gateway cannot express the backend's answer in the caller's dialect.")
NOT_ASSEMBLED = Failure(FailureKind.GATEWAY, "The gateway cannot put the backend's stream together.")
STOPPED = Failure(FailureKind.OVERLOADED, "The gateway was stopped in the middle of the answer; try again.")
CUT_SHORT = Failure(FailureKind.RESET, "The backend closed the connection before its reply was complete.")


class ForbiddenAddressError(OSError):
    """A host name led to an address that no backend can have."""


class ProxyError(OSError):
    """The HTTP proxy opened no tunnel. `status`: of its reply; 0: there was none."""

    def __init__(self, status: int = 0) -> None:
        super().__init__("no tunnel")
        self.status = status


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
    if isinstance(error, ProxyError):
        refused = "refused the gateway's credentials" if error.status == 407 else "opened no connection to the backend"
        return Failure(FailureKind.CONNECT, f"The proxy {refused}.")
    return Failure(FailureKind.CONNECT, next(text for kind, text in _CONNECT if isinstance(error, kind)))


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """A server's error object; fields are empty if absent."""

    message: str = ""
    type: str = ""
    code: str | int | None = None
    param: str | None = None
    retry_after: float | None = None  # s


def of_reply(status: int, headers: Mapping[str, str], body: bytes, secret: str = "") -> Failure:
    """Failure for an error status. `secret` is the API key, never shown."""
    try:
        said = complaint(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        said = ErrorBody()  # a proxy's HTML page, say: the status tells all there is to know
    return _of_complaint(status, headers, said, secret)


def of_event(error: Any, secret: str = "") -> Failure:
    """Failure for an error object inside a 200 stream: the code of the object is the only status."""
    said = complaint({"error": error})
    if wrapped := _WRAPPED.match(said.message):
        said = ErrorBody(code=int(wrapped[1]))
    return _of_complaint(_status_in(said), {}, said, secret)


# vLLM 0.32, `/v1/messages` streamed: a refusal of its own chat, read as a chunk; the repr keeps the end of the error.
_WRAPPED = re.compile(r"\d+ validation errors? for ChatCompletionStreamResponse\b.{0,500}?'code': (\d{3})}}", re.DOTALL)


def of_body(body: bytes, secret: str = "") -> Failure | None:
    """Failure for a 200 with an error object for a body; None: the body is another."""
    try:
        said = decode_leniently(body)
    except ValueError:
        return None
    return of_event(said["error"], secret) if isinstance(said, dict) and said.get("error") else None


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
        _retry_delay(error.get("details")),
    )


def _retry_delay(details: Any) -> float | None:
    """Seconds of a `RetryInfo` (google.rpc), which Gemini sends in place of a header."""
    for entry in details if isinstance(details, list) else ():
        delay = entry.get("retryDelay") if isinstance(entry, Mapping) else None
        if isinstance(delay, str) and _SECONDS.fullmatch(delay):
            return float(delay[:-1])
    return None


def _details(message: Any) -> str:
    """Join the `{loc, msg}` entries of FastAPI and Mistral."""
    if isinstance(message, Mapping):
        message = message.get("detail")
    entries = [entry for entry in message if isinstance(entry, Mapping)] if isinstance(message, list) else []
    return "; ".join(f"{_place(entry.get('loc'))}: {entry.get('msg', '')}" for entry in entries)


def _place(loc: Any) -> str:
    return ".".join(map(str, loc)) if isinstance(loc, list) else str(loc or "")


def _of_complaint(status: int, headers: Mapping[str, str], said: ErrorBody, secret: str) -> Failure:
    if status == 402 and "fewer max_tokens" in said.message:  # OpenRouter: enough for another request
        message, code = "The gateway's account with the backend is too short for this.", "insufficient_quota"
        return Failure(FailureKind.RATE_LIMITED, message, 429, code, code)
    unpaid = said.code in _NO_MONEY or said.type in _NO_MONEY
    if status == 402 or (status == 429 and unpaid) or (status == 400 and said.message.startswith(_NO_CREDIT)):
        message = "The gateway's account with the backend is used up."
        return Failure(FailureKind.QUOTA, message, 429, "insufficient_quota", "insufficient_quota")
    if (status in (401, 403, 407) and not _is_content_filter(said)) or (
        status == 400 and _ABOUT_KEY.match(said.message)
    ):
        return Failure(FailureKind.AUTH, "The backend refused the gateway's credentials.")
    if status == 429:
        message, code = "The backend's rate limit is reached.", "rate_limit_exceeded"
        wait = retry_after(headers)
        return Failure(
            FailureKind.RATE_LIMITED, message, 429, code, code, retry_after=said.retry_after if wait is None else wait
        )
    if status in (503, 529):
        return Failure(FailureKind.OVERLOADED, "The backend is overloaded.", 503, retry_after=retry_after(headers))
    if status in (408, 504):
        return TIMED_OUT
    if status >= 500:
        return Failure(FailureKind.SERVER, "The backend failed.", retry_after=retry_after(headers))
    if status == 424:  # TGI: the engine failed
        return Failure(FailureKind.SERVER, "The backend failed.")
    if status < 400:
        return Failure(FailureKind.PROTOCOL, "The backend answered with a redirect, which is never followed.")
    if status in (404, 405) and not (said.type or _ABOUT_MODEL.match(said.message)):  # a web server's own: a wrong URL
        return NOT_SERVED
    if _is_about_model(status, said):
        return _refusal(status, said, secret, FailureKind.MISCONFIGURED, "model_not_found")
    return _refusal(status, said, secret)


def _refusal(
    status: int, said: ErrorBody, secret: str, kind: FailureKind = FailureKind.CLIENT, known_code: str | None = None
) -> Failure:
    """Failure for a 4xx by the request's own fault, or by the model's name, in the server's words."""
    code = said.code if isinstance(said.code, str) else None  # vLLM repeats the status as an int
    if _is_content_filter(said):
        known_code = CONTENT_FILTER
    elif code is None and (said.type in _CONTEXT_TYPES or _CONTEXT.search(said.message)):  # most say so in words only
        known_code = CONTEXT_LENGTH
    code = code if known_code is None or code in _KNOWN_CODES else known_code
    return Failure(
        kind,
        scrub(said.message, secret) or "The backend refused the request.",
        status,
        said.type if _SNAKE.fullmatch(said.type) else "invalid_request_error",  # vLLM: `BadRequestError`
        scrub(code, secret) if code else None,
        scrub(said.param, secret) if said.param else None,
    )


CONTEXT_LENGTH, CONTENT_FILTER = "context_length_exceeded", "content_filter"  # OpenAI's codes
CONTENT_CODES = (CONTENT_FILTER, "content_policy_violation", "moderation_blocked")
_MODEL_CODES = frozenset(
    "model_not_found invalid_model model_not_available model_not_supported DeploymentNotFound NOT_FOUND".split()
)
_KNOWN_CODES = (*CONTENT_CODES, CONTEXT_LENGTH, "model_not_found")
_NO_MONEY = ("insufficient_quota", "billing_not_active", "billing_hard_limit_reached", "insufficient_balance")
_NO_CREDIT = "Your credit balance is too low"  # Anthropic, by a 400
_CONTEXT_TYPES = ("exceed_context_size_error",)  # llama.cpp
_CONTEXT = re.compile(
    r"maximum context length|maximum model length|longer than the model's context|context window|prompt is too long|"
    r"exceed context limit|`inputs` tokens \+ `max_new_tokens` must be <=",
    re.IGNORECASE,
)
_ABOUT_KEY = re.compile(r"incorrect api key provided|api key not valid|api key expired", re.IGNORECASE)  # xAI, Gemini
_ABOUT_MODEL = re.compile(
    r"(?:invalid|unknown|unsupported) model\b|model not exist|"
    r"(?:the )?(?:requested )?(?:model:? )?[`'\"]?[\w./:@-]{1,200}[`'\"]?:? is not a valid model|"
    r"(?:the )?(?:requested )?model:? (?:[`'\"]?[\w./:@-]{1,200}[`'\"]?:? )?"
    r"(?:does not exist|not found|is not (?:found|available|supported|loaded))",
    re.IGNORECASE,
)
_CALLERS_OWN = re.compile(r"file|image|response|conversation", re.IGNORECASE)  # not found, by a code


def _is_about_model(status: int, said: ErrorBody) -> bool:
    if said.param is not None and said.param != "model":
        return False
    if status in (404, 405):
        return not (isinstance(said.code, str) and _CALLERS_OWN.search(said.code))
    return status in (400, 422) and (
        said.param == "model" or said.code in _MODEL_CODES or _ABOUT_MODEL.match(said.message) is not None
    )


def _is_content_filter(said: ErrorBody) -> bool:
    """A refusal of the content. OpenRouter answers 403, in words."""
    return said.code in CONTENT_CODES or said.type in CONTENT_CODES or "input was flagged" in said.message


# Status of an error inside a stream by its type: Anthropic's names (platform.claude.com/docs, errors, November 2026).
_EVENT_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def _status_in(said: ErrorBody) -> int:
    try:
        status = int(said.code or 0)
    except ValueError:
        status = 0
    if 400 <= status < 600:
        return status
    return 429 if said.code == "rate_limit_exceeded" else _EVENT_STATUS.get(said.type, 500)


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


_SECONDS = re.compile(r"\d{1,6}(?:\.\d{1,9})?s")
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
    if is_secret(secret):
        text = text.replace(secret, "[key]")
    for pattern, mark in _SCRUBS:
        text = pattern.sub(mark, text)
    return text
