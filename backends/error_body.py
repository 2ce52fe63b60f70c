"""Reads a server's error object, in any of the known shapes.

Rules:
- Known shapes: OpenAI, vLLM (old and new), SGLang, Gemini (a list), Mistral, FastAPI (`detail`), Cohere (no `error`),
  xAI, Ollama, TGI and llama.cpp (`error` as a string), LiteLLM (`None` as a string, names of exceptions before words).
- Texts are cut to MESSAGE_LIMIT characters, so that no pattern is ever matched against more.
- Whatever a server sends, reading raises nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.rate_limit_headers import duration

MESSAGE_LIMIT = 2000  # characters of a server's message
_MOST_ENTRIES = 50  # of a list inside an error
_SECONDS = re.compile(r"\d{1,6}(?:\.\d{1,9})?s")
_WAIT = re.compile(r"\b(?:try again|retry) (?:in|after) (?:(\d{1,6}) seconds\b|([\d.hms]{2,30}))", re.IGNORECASE)
_WRAPPERS = re.compile(r"(?:litellm\.\w{1,60}: |\w{1,60}(?:Exception|Error)(?:: | - )){1,4}")


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """A server's error object; fields are empty if absent. `labels`, `inner`, `metrics` and `page` are for recognition,
    and shown to nobody."""

    message: str = ""
    type: str = ""
    code: str | int | None = None
    param: str | None = None
    retry_after: float | None = None  # s
    labels: tuple[str, ...] = ()  # names in other places than OpenAI's
    inner: str = ""  # words of the provider behind a proxy
    metrics: str = ""  # names of the quotas that are used up
    page: str = ""  # beginning of a body that is no JSON

    @property
    def names(self) -> frozenset[str]:
        """Machine-readable names of the error, in lower case; numbers are none."""
        code = self.code if isinstance(self.code, str) else ""
        return frozenset(name.lower() for name in (self.type, code, *self.labels) if name and not name.isdigit())

    @property
    def words(self) -> str:
        """The message without the names of exceptions put before the message by a proxy."""
        wrappers = _WRAPPERS.match(self.message)
        return self.message[wrappers.end() :] if wrappers else self.message


def read_error(reply: Any) -> ErrorBody:
    """Read a decoded error body."""
    if isinstance(reply, list):  # Gemini wraps errors in a list
        reply = reply[0] if reply else None
    if not isinstance(reply, Mapping):
        return ErrorBody()
    error = reply.get("error") or reply
    if not isinstance(error, Mapping):
        labels = _labels(reply, "error_type", "type", "code")
        return ErrorBody(_text(error), labels=labels, retry_after=_wait(_text(error)))
    return _of_object(error)


def _of_object(error: Mapping[Any, Any]) -> ErrorBody:
    message, details = error.get("message") or error.get("detail") or "", error.get("details")
    code = error.get("code") or (details.get("error_code") if isinstance(details, Mapping) else None)  # Anthropic's
    text = _text(message) if isinstance(message, str) else _joined(message)
    metadata, inner = error.get("metadata"), error.get("innererror")
    return ErrorBody(
        text,
        _text(error.get("type")),
        (_text(code) or None) if isinstance(code, str) else code if isinstance(code, int) else None,
        _text(error.get("param")) or None,
        _retry_delay(details) or _wait(text),
        _labels(error, "status", "error_type") + (_labels(inner, "code") if isinstance(inner, Mapping) else ()),
        _text(metadata.get("raw")) if isinstance(metadata, Mapping) else "",
        _metrics(details),
    )


def _labels(error: Mapping[Any, Any], *names: str) -> tuple[str, ...]:
    return tuple(text for name in names if (text := _text(error.get(name))))


def _retry_delay(details: Any) -> float | None:
    """Seconds of a `RetryInfo` (google.rpc), which Gemini sends in place of a header."""
    for entry in _entries(details):
        delay = entry.get("retryDelay")
        if isinstance(delay, str) and _SECONDS.fullmatch(delay):
            return float(delay[:-1])
    return None


def _metrics(details: Any) -> str:
    """Metrics of a `QuotaFailure` (google.rpc)."""
    violations = [one for entry in _entries(details) for one in _entries(entry.get("violations"))]
    return " ".join(_text(one.get("quotaMetric")) for one in violations)[:MESSAGE_LIMIT]


def _wait(message: str) -> float | None:
    """Seconds that the words of a rate limit tell, where no header does."""
    found = _WAIT.search(message)
    if found is None:
        return None
    return float(found[1]) if found[1] else duration(found[2].rstrip("."))


def _joined(message: Any) -> str:
    """Join the `{loc, msg}` entries of FastAPI and Mistral."""
    if isinstance(message, Mapping):
        message = message.get("detail")
    if isinstance(message, str):
        return _text(message)
    lines = [f"{_place(entry.get('loc'))}: {_word(entry.get('msg', ''))}" for entry in _entries(message)]
    return "; ".join(lines)[:MESSAGE_LIMIT]


def _entries(value: Any) -> list[Mapping[Any, Any]]:
    entries = value[:_MOST_ENTRIES] if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _place(loc: Any) -> str:
    return ".".join(map(_word, loc[:_MOST_ENTRIES])) if isinstance(loc, list) else _word(loc or "")


def _word(value: Any) -> str:
    """A scalar as text; nothing of a value that may be nested without end."""
    return str(value)[:MESSAGE_LIMIT] if isinstance(value, (str, float, bool)) or _is_short(value) else ""


def _is_short(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() < 64


def _text(value: Any) -> str:
    """Text of a member; LiteLLM writes absence as `None`."""
    return value[:MESSAGE_LIMIT] if isinstance(value, str) and value != "None" else ""


# --------------------------------------------------------------------------- parts of an error


@dataclass(frozen=True, slots=True)
class ErrorPart:
    """An entry of an error reply. `member`: path of the faulty member, as spelled by the server; empty: none."""

    member: str
    words: str
    names: frozenset[str]


_MOST_INSIDE = 2  # levels of nested errors to read
_LOC = re.compile(
    r"'type': '(?P<type>\w{1,60})', 'loc': \((?P<loc>[^()]{1,300})\), "
    r"'msg': (?P<quote>['\"])(?P<msg>.{1,400}?)(?P=quote)[,}]"
)
_LOC_NAME = re.compile(r"'([^']{1,100})'|(\d{1,6})")


def error_parts(body: bytes) -> list[ErrorPart]:
    """Errors listed in an error reply: errors that name a member first, then nested errors."""
    try:
        return _parts(json.loads(body), _MOST_INSIDE)
    except (ValueError, RecursionError):
        return []


def _parts(reply: Any, inside: int) -> list[ErrorPart]:
    if isinstance(reply, list):
        reply = reply[0] if reply else None
    said = read_error(reply)
    parts = [ErrorPart(said.param, said.words, said.names)] if said.param else []
    parts += _located(reply)
    parts += [
        ErrorPart(_name_of(found["loc"]), found["msg"], frozenset({found["type"]}))
        for found in _LOC.finditer(said.message)
    ]
    for text in (said.inner, said.message) if inside else ():
        if (begin := text.find("{")) >= 0:
            parts += _inside(text[begin:], inside - 1)
    return [*parts, ErrorPart("", said.words, said.names)] if said.message else parts


def _inside(text: str, inside: int) -> list[ErrorPart]:
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return []
    return _parts(found, inside)


def _located(reply: Any) -> list[ErrorPart]:
    """The entries `{type, loc, msg}` of FastAPI and Mistral, and the violations of google.rpc."""
    if not isinstance(reply, Mapping):
        return []
    error = reply.get("error")
    holders = [each for each in (reply, error, reply.get("message")) if isinstance(each, Mapping)]
    entries = [entry for holder in holders for entry in _entries(holder.get("detail"))]
    found = [
        ErrorPart(_place(entry["loc"]), _word(entry.get("msg", "")), frozenset({_text(entry.get("type"))}))
        for entry in entries
        if entry.get("loc")
    ]
    details = [each for holder in holders for each in _entries(holder.get("details"))]
    violations = [each for detail in details for each in _entries(detail.get("fieldViolations"))]
    return found + [ErrorPart("", _text(each.get("description")), frozenset()) for each in violations]


def _name_of(loc: str) -> str:
    return ".".join(found[1] or found[2] for found in _LOC_NAME.finditer(loc))
