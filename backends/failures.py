"""Maps foreign exceptions, error replies and silences to a `Failure`.

Rules:
- Every message may be shown to a caller. A complaint about the caller's own request (4xx) is passed on in the server's
  words, and scrubbed. Of a limit, of load and of a failure (429, 5xx) the server's words follow ours, shorter and
  scrubbed more: which limit is reached, and how far, is the caller's to act on. Of the gateway's own key and
  configuration no word is passed on.
- A refusal of the request keeps its status, but for a request that is larger than the account's limit: 413 and
  `request_too_large`, because SDKs repeat a 429, and such a request can never fit.
- `cause` is the operator's line: status, the server's code or type, and the first line of its message, without keys. It
  goes into logs, which hold no text of prompts: of a complaint about the request, which may quote a prompt, only status
  and name are told.
- Shapes of error bodies: `error_body`. Their meaning: `error_patterns`.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from backends.error_body import MESSAGE_LIMIT, ErrorBody, read_error
from backends.error_patterns import KEY_MARK, kind_of, opens_with_model
from backends.interface import RATE_LIMITS, Contact, Failure, FailureKind
from backends.rate_limit_headers import retry_after
from backends.scrubbing import is_known_name, is_secret, known_words, scrub, scrubbed_words

_CAUSE_LIMIT = 160  # characters of a cause


class TransportError(Exception):
    """A request could not be sent, or got no complete reply."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


_protocol = partial(Failure, FailureKind.PROTOCOL)
_reset = partial(Failure, FailureKind.RESET)
_timeout = partial(Failure, FailureKind.TIMEOUT)
_gateway = partial(Failure, FailureKind.GATEWAY)

TIMED_OUT = _timeout("The backend did not answer in time.", status=504, cause="no answer in time")
MALFORMED = _protocol("The backend sent something that is not HTTP/1.1.", cause="not HTTP/1.1")
NOT_READ = _gateway(
    "The gateway could not read the backend's reply; the fault is ours.",
    cause="a reply that the gateway could not read",
)
NOT_COMPRESSED = _protocol(
    "The backend's reply is not compressed as its header says.", cause="a reply that is not compressed as it says"
)
PAGE = _protocol("The backend sent a web page in place of an answer.", cause="200 with a web page")
TOO_LARGE = _protocol(
    "The backend's reply is larger than the gateway accepts.", cause="a reply larger than the gateway accepts"
)
NOT_JSON = _protocol("The backend sent something that is not JSON.", cause="not JSON")
TEXT_LOST = _protocol(
    "The backend sent something that is not JSON, and text may be missing.", cause="not JSON, where text may be missing"
)
NOT_EVENTS = _protocol("The backend sent something that is not an event stream.", cause="not an event stream")
LINE_TOO_LONG = _protocol(
    "The backend sent an event larger than the gateway accepts.", cause="an event larger than the gateway accepts"
)
UNANSWERED = _reset("The backend closed the connection without an answer.", cause="connection closed without an answer")
NOT_SERVED = Failure(
    FailureKind.MISCONFIGURED, "The backend does not serve this operation.", cause="the path is unknown"
)
CUT_SHORT = _reset(
    "The backend closed the connection before its reply was complete.",
    cause="connection closed in the middle of the reply",
)

EMPTY = _protocol("The backend ended its reply before the first token.", cause="200 that ended before the first token")
UNKNOWN_MODEL = Failure(FailureKind.MISCONFIGURED, "The backend does not know the configured model or path.")
TRUNCATED = _reset(
    "The backend ended the stream before the answer was complete.", cause="stream ended before the answer was complete"
)
SILENT = _timeout(
    "The backend stopped sending in the middle of the answer.", cause="silent in the middle of the answer"
)
LATE = _timeout(
    "The answer took longer than its route allows.", 504, code="timeout", cause="later than the route allows"
)
UNRESCUED = _reset(
    "The backend broke in the middle of the answer, and no other could continue it.",
    cause="the stream broke, and no peer continued it",
)
DIVERGED = _gateway(
    "The backend broke in the middle of the answer, and another wrote other words.",
    cause="the peer of a broken stream wrote other words",
)
UNTRANSLATED = _gateway(
    "The gateway cannot express the backend's answer in the caller's dialect.",
    cause="an answer that the gateway cannot translate",
)
NOT_ASSEMBLED = _gateway(
    "The gateway cannot put the backend's stream together.", cause="a stream that the gateway cannot put together"
)
STOPPED = Failure(
    FailureKind.OVERLOADED, "The gateway was stopped in the middle of the answer; try again.", cause="gateway stopped"
)
UNRESOLVED = Failure(
    FailureKind.UNRESOLVED, "The backend's name could not be resolved in time.", contact=Contact.UNTRIED
)
NO_SOCKET = _gateway("The gateway has no socket left for a connection to the backend.", cause="no socket left")
OWN_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
NOT_WOKEN = Failure(FailureKind.SERVER, "The backend is asleep, and could not be woken.", cause="not woken")
FAILED_INSIDE = Failure(FailureKind.SERVER, "The backend failed.", cause="200 with an error inside")


CUT_OFF = (TRUNCATED, EMPTY)  # the server died, or ends streams without a last event
OF_STREAMS = (NOT_JSON, TEXT_LOST, LINE_TOO_LONG, *CUT_OFF)  # a whole answer of the same server may be well


class ForbiddenAddressError(OSError):
    """A host name led to an address that no backend can have."""


class NameTimeoutError(OSError):
    """A host name was not resolved in time. `within`: s."""

    def __init__(self, within: float) -> None:
        super().__init__("name not resolved in time")
        self.within = within


class ProxyError(OSError):
    """The HTTP proxy opened no tunnel. `status`: of its reply; 0: there was none."""

    def __init__(self, status: int = 0) -> None:
        super().__init__("no tunnel")
        self.status = status


_CONNECT: tuple[
    tuple[type[Exception], str, str, Contact], ...
] = (  # the first match counts; all but the last are OSErrors
    (TimeoutError, "The backend did not accept a connection in time.", "no connection in time", Contact.FAILED),
    (
        ForbiddenAddressError,
        "The backend's name leads to an address that no backend may have.",
        "name leads to an address that no backend may have",
        Contact.UNTRIED,
    ),
    (socket.gaierror, "The backend's name could not be resolved.", "name not resolved", Contact.UNTRIED),
    (
        ssl.SSLCertVerificationError,
        "The backend's certificate could not be verified.",
        "certificate not verified",
        Contact.MADE,
    ),
    (ssl.SSLError, "The TLS handshake with the backend failed.", "TLS handshake failed", Contact.MADE),
    (ConnectionRefusedError, "The backend refused the connection.", "connection refused", Contact.FAILED),
    (
        ConnectionError,
        "The backend closed the connection while it was being set up.",
        "connection closed while being set up",
        Contact.FAILED,
    ),
    (Exception, "The backend could not be reached.", "not reached", Contact.FAILED),
)


def of_connect(error: Exception, within: float | None = None, *, accepted: bool = False) -> Failure:
    """Of an exception raised before anything was sent. `within`: seconds that were allowed; `accepted`: the server took
    the connection, and the TLS handshake failed."""
    if isinstance(error, ProxyError):
        refused = "refused the gateway's credentials" if error.status == 407 else "opened no connection to the backend"
        cause = f"proxy: {error.status}" if error.status else "proxy: no answer"
        return Failure(FailureKind.CONNECT, f"The proxy {refused}.", cause=cause, contact=Contact.UNTRIED)
    if isinstance(error, NameTimeoutError):
        return replace(UNRESOLVED, cause=f"name not resolved within {error.within:g} s")
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return replace(UNRESOLVED, cause="name not resolved: the DNS does not answer")
    if isinstance(error, OSError) and error.errno in OWN_SHORTAGES:
        return replace(NO_SOCKET, cause=f"no socket left: {errno.errorcode[error.errno]}")
    if accepted and not isinstance(error, (TimeoutError, ssl.SSLError)):
        error = ssl.SSLError()
    kind, text, cause, contact = next(row for row in _CONNECT if isinstance(error, row[0]))
    if kind is TimeoutError and within is not None:
        cause = f"no connection within {within:g} s"
    elif kind is Exception and isinstance(error, OSError) and (name := errno.errorcode.get(error.errno or 0)):
        cause = f"{cause}: {name}"
    return Failure(FailureKind.CONNECT, text, cause=cause, contact=Contact.MADE if accepted else contact)


def of_silence(within: float) -> Failure:
    """Of a server that has not answered within so many seconds."""
    return replace(TIMED_OUT, cause=f"no answer within {within:g} s")


def of_reply(
    status: int, headers: Mapping[str, str], body: bytes, secret: str = "", models: Collection[str] = ()
) -> Failure:
    """Failure for an error status. `secret` is the API key, never shown; `models`: names that the pool asks for."""
    try:
        said = read_error(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        said = ErrorBody(page=body[:MESSAGE_LIMIT].decode("utf-8", "replace"))  # of a proxy
    return _failure(status, headers, said, secret, models)


def of_event(error: Any, secret: str = "") -> Failure:
    """Failure for an error object inside a 200 stream: the names in the object are the only status."""
    said = read_error({"error": error})
    if wrapped := _WRAPPED.match(said.message):
        said = ErrorBody(code=int(wrapped[1]))
    failure = _failure(_status_in(said), {}, said, secret)
    told = failure.cause if isinstance(said.code, int) else failure.cause.partition(" ")[2]
    return replace(failure, cause=f"{FAILED_INSIDE.cause}: {told}"[:_CAUSE_LIMIT] if told else FAILED_INSIDE.cause)


# vLLM 0.32, `/v1/messages` streamed: a refusal of its own chat, read as a chunk; the repr keeps the end of the error.
_WRAPPED = re.compile(r"\d+ validation errors? for ChatCompletionStreamResponse\b.{0,500}?'code': (\d{3})}}", re.DOTALL)


def of_body(body: bytes, secret: str = "") -> Failure | None:
    """Failure for a 200 with an error object for a body; None: the body is another."""
    try:
        said = decode_leniently(body)
    except ValueError:
        return None
    return of_event(said["error"], secret) if isinstance(said, dict) and said.get("error") else None


def _failure(
    status: int, headers: Mapping[str, str], said: ErrorBody, secret: str, models: Collection[str] = ()
) -> Failure:
    if is_secret(secret):  # a placeholder such as `token` is a word of messages
        said = replace(said, message=said.message.replace(secret, KEY_MARK))
    kind = kind_of(status, headers, said, models)
    if kind is FailureKind.UNSUPPORTED:
        return NOT_SERVED
    cause = _cause(kind, status, said, secret)
    if kind not in _OWN_WORDS:
        return replace(_refusal(kind, status, said, secret), cause=cause)
    wait = retry_after(headers) if kind in _RETURNING else None
    if wait is None and kind in _RETURNING:
        wait = said.retry_after
    own, words = _OWN_WORDS[kind], scrubbed_words(said.message, secret)
    message = own.message
    if kind is FailureKind.AUTH and status == 403:
        message = "The backend refused access to the gateway."
    elif words and kind is FailureKind.QUOTA and status == 429:
        message = f"{message.rstrip('.')}: {_AMOUNT.sub('…', words)}"
    elif words and kind in _TOLD:
        message = f"{message.rstrip('.')}: {words}"
    return replace(own, kind=kind, message=message, retry_after=wait, cause=cause, words=words)


_USED_UP = "insufficient_quota"
_LIMITED = Failure(
    FailureKind.RATE_LIMITED, "The backend's rate limit is reached.", 429, "rate_limit_exceeded", "rate_limit_exceeded"
)
_AMOUNT = re.compile(r"[$€£¥]?\d[\d.,]*")  # of money: what is left of the gateway's is no caller's to read
_OWN_WORDS: Mapping[FailureKind, Failure] = {
    **dict.fromkeys(RATE_LIMITS, _LIMITED),
    FailureKind.QUOTA: Failure(
        FailureKind.QUOTA, "The gateway's account with the backend is used up.", 429, _USED_UP, _USED_UP
    ),
    FailureKind.AUTH: Failure(FailureKind.AUTH, "The backend refused the gateway's credentials."),
    FailureKind.OVERLOADED: Failure(FailureKind.OVERLOADED, "The backend is overloaded.", 503),
    FailureKind.TIMEOUT: TIMED_OUT,
    FailureKind.SERVER: Failure(FailureKind.SERVER, "The backend failed."),
    FailureKind.PROVIDER: Failure(FailureKind.PROVIDER, "The backend's provider cannot be reached."),
    FailureKind.PROTOCOL: Failure(
        FailureKind.PROTOCOL, "The backend answered with a redirect, which is never followed."
    ),
}
_TOLD = RATE_LIMITS | {FailureKind.OVERLOADED, FailureKind.SERVER, FailureKind.PROVIDER, FailureKind.TIMEOUT}
_OF_ACCOUNT: Mapping[FailureKind, tuple[int, str, str]] = {  # status, code, and words, where the key is the caller's
    **dict.fromkeys(
        RATE_LIMITS, (429, "rate_limit_exceeded", "A rate limit of your account with the provider is reached")
    ),
    FailureKind.QUOTA: (429, _USED_UP, "Your account with the provider is used up"),
    FailureKind.AUTH: (401, "invalid_api_key", "The provider refuses your API key"),
    FailureKind.MISCONFIGURED: (404, "model_not_found", "Your account with the provider has no such model"),
}


_DENIALS: Sequence[tuple[re.Pattern[str], tuple[int, str, str]]] = (  # by the words of a 401 or 403
    (
        re.compile(r"\b(?:country|countries|region|territory|location|ip address)\b", re.IGNORECASE),
        (403, "unsupported_country_region_territory", "The provider does not serve the place of this request"),
    ),
    (
        re.compile(
            r"\b(?:api[ _-]?keys?|authenticat\w*|tokens?|credentials?|bearer|x-api-key)\b|\[key\]", re.IGNORECASE
        ),
        _OF_ACCOUNT[FailureKind.AUTH],
    ),
)
_DENIED = 403, "permission_denied", "The provider denies access to your account"


def of_callers_key(failure: Failure) -> Failure:
    """The failure of an attempt with the caller's own key. What is said of the key, or of its account, is the caller's
    to mend: status, name, time and words are the provider's. No word of it is logged."""
    if failure.kind not in _OF_ACCOUNT or failure is NOT_SERVED:
        return failure
    status, code, words = _OF_ACCOUNT[failure.kind]
    if failure.kind is FailureKind.AUTH and failure.words:
        status, code, words = next((row for about, row in _DENIALS if about.search(failure.words)), _DENIED)
    named = failure.cause.removeprefix(f"{FAILED_INSIDE.cause}: ").partition(":")[0]
    told = named.partition(" ")[0]
    status = int(told) if told in ("401", "402", "403", "404", "429") else status
    message = f"{words}: {named}." if named else f"{words}."
    if failure.words:
        message = f"{message} {failure.words}"
    kind = code if status == 429 else "invalid_request_error"
    said = f"the caller's key: {named or status}"
    return Failure(
        FailureKind.CALLER_CREDENTIAL, message, status, kind, code, retry_after=failure.retry_after, cause=said
    )


_QUEUE = re.compile(
    r"queue|unfinished|pending|in[- ]?flight|too many|max_num|concurren|outstanding|admission|overloaded|busy|\bfull\b",
    re.IGNORECASE,
)


def of_engine(failure: Failure, is_plain: Callable[[], bool]) -> Failure:
    """The failure of an attempt at an engine, which has no accounts: a 429, and a 503 that speaks of its queue, is a
    limit of its own. `is_plain`: the request, and each beside it there, counts as one. A limit of tokens depends on the
    prompt, so it tells nothing of how many requests the engine takes."""
    is_limit = failure.kind in RATE_LIMITS or (failure.kind is FailureKind.OVERLOADED and _QUEUE.search(failure.words))
    if not is_limit:
        return failure
    kind = FailureKind.QUEUE_LIMIT if "token" not in failure.words and is_plain() else FailureKind.OVERLOADED
    message = "The engine is at the limit of its own queue"
    message = f"{message}: {failure.words}" if failure.words else f"{message}."
    return replace(failure, kind=kind, message=message, status=503, type="server_error", code="unavailable")


def of_unknown_model(failure: Failure, *, callers: bool) -> Failure:
    """The failure of a request for a model that the server does not know. `callers`: the caller has named it, and not
    the configuration, of which no caller is told."""
    if not callers:
        return replace(UNKNOWN_MODEL, cause=failure.cause)
    return replace(failure, kind=FailureKind.CLIENT, status=min(failure.status, 404), code="model_not_found")


_RETURNING = RATE_LIMITS | {FailureKind.OVERLOADED, FailureKind.SERVER, FailureKind.PROVIDER}


def _refusal(kind: FailureKind, status: int, said: ErrorBody, secret: str) -> Failure:
    """Failure for a 4xx by the request's own fault, or by the model's name, in the server's words."""
    code = said.code if isinstance(said.code, str) else None  # vLLM repeats the status as an int
    if kind in _CODES and code not in (*CONTENT_CODES, "model_not_found"):
        code = _CODES[kind]
    message = scrub(said.message, secret) or "The backend refused the request."
    if kind is FailureKind.REQUEST_SIZE:
        status, code = 413, "request_too_large"
        if "fewer max_tokens" in said.message:  # OpenRouter tells what the account has left
            message = "The gateway's account with the backend is too short for this request."
    return Failure(
        kind,
        message,
        400 if status >= 500 else status,
        said.type if _is_openais(said.type) and kind is not FailureKind.REQUEST_SIZE else "invalid_request_error",
        scrub(code, secret) if code else None,
        scrub(said.param, secret) if said.param else None,
    )


def _is_openais(type: str) -> bool:
    """False for vLLM's `BadRequestError`, and the like."""
    return _SNAKE.fullmatch(type) is not None


_SNAKE = re.compile(r"[a-z][a-z0-9_]*")


CONTEXT_LENGTH, CONTENT_FILTER = "context_length_exceeded", "content_filter"  # OpenAI's codes
CONTENT_CODES = (CONTENT_FILTER, "content_policy_violation", "moderation_blocked")
_CODES = {
    FailureKind.CONTEXT: CONTEXT_LENGTH,
    FailureKind.CONTENT_FILTER: CONTENT_FILTER,
    FailureKind.MISCONFIGURED: "model_not_found",
}


def _cause(kind: FailureKind, status: int, said: ErrorBody, secret: str) -> str:
    named = " ".join((str(status), *[name for name in _names(said) if is_known_name(name)][:1]))
    line = "" if _may_quote(kind, status, said) else said.message.lstrip().partition("\n")[0]
    line = known_words(_MASKED_KEY.sub("", scrub(line, secret)))
    return f"{named}: {line}"[:_CAUSE_LIMIT] if line else named


def _names(said: ErrorBody) -> list[str]:
    """Names of the error, the most telling first."""
    code = said.code if isinstance(said.code, str) and not said.code.isdigit() else ""
    names = [name for name in (said.type, code, *said.labels) if _NAME.fullmatch(name)]
    return sorted(names, key=lambda name: name.lower() in _GENERAL)


def _may_quote(kind: FailureKind, status: int, said: ErrorBody) -> bool:
    """True for a message in which a server may quote a prompt."""
    if kind is FailureKind.MISCONFIGURED:
        return not opens_with_model(said)
    return kind in _ABOUT_REQUEST or (kind is FailureKind.AUTH and status == 403)


_ABOUT_REQUEST = frozenset(
    {FailureKind.CLIENT, FailureKind.CONTEXT, FailureKind.CONTENT_FILTER, FailureKind.CONTENT, FailureKind.UNSUPPORTED}
)
_GENERAL = frozenset({"invalid_request_error", "unknown_error", "error", "badrequesterror", "bad request"})
_NAME = re.compile(r"[\w.-]{1,60}")
_MASKED_KEY = re.compile(r"[^\s*]{0,40}\*{2,}[^\s*]{0,40}")

# Status of an error inside a stream by its names: Anthropic's (platform.claude.com/docs, errors, November 2026),
# OpenAI's (API reference, `response.error.code`), vLLM's and TGI's.
_EVENT_STATUS = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "invalid_prompt": 400,
    "content_filter": 400,
    "content_policy_violation": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "insufficient_quota": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "validation": 422,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
    "overloaded": 529,
    "server_is_overloaded": 529,
    "slow_down": 529,
}


def _status_in(said: ErrorBody) -> int:
    try:
        status = int(said.code or 0)
    except ValueError:
        status = 0
    if 400 <= status < 600:
        return status
    if isinstance(said.code, str) and "image" in said.code:  # OpenAI: twelve codes of images that cannot be read
        return 400
    known = [_EVENT_STATUS[name.lower()] for name in _names(said) if name.lower() in _EVENT_STATUS]
    return known[0] if known else 500


def decode_leniently(data: bytes) -> Any:
    """Decode JSON with the additions of Python servers (NaN, Infinity, lone surrogates). Raises ValueError."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
