"""Rate limits in the headers of a provider's reply.

Spellings, each read in the provider's reference in 2026-11:
- OpenAI, Azure OpenAI, Groq, xAI, Fireworks, Cerebras: `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, some
  with a window behind (`-minute`, `-day`); the reset is a duration such as `6m0s`, `7.66s` or `12ms`.
- Mistral: `x-ratelimit-{limit,remaining}-{req,tokens}-minute`, without a reset: the window.
- Anthropic: `anthropic-ratelimit-{requests,tokens,input-tokens,output-tokens}-{limit,remaining,reset}`; the reset is a
  time (RFC 3339).
- OpenRouter, Together: `x-ratelimit-{limit,remaining,reset}`; the reset is seconds, or a Unix time in s or ms.

Rules:
- A limit without `remaining` says nothing. Without a reset, the window of its name counts, or a minute; without a limit
  either, UNKNOWN.
- A time is measured from the reply's own Date where there is one, so clocks need not agree.
- Output is not known in advance: of a limit of output tokens, one must be left.

Read too: times to wait, as servers tell them in `Retry-After`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+")
_LONGEST_TEXT = 64  # characters of a duration
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


def duration(text: str) -> float | None:
    """Seconds of a duration such as `6m0s`, `7.66s` or `12ms`; None: malformed."""
    if len(text) > _LONGEST_TEXT or not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait as the server asks (RFC 9110, 10.2.3, and OpenAI's `retry-after-ms`); None if malformed."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with suppress(ValueError):
            wait = float(headers.get(name) or "") * unit
            if math.isfinite(wait) and wait >= 0:
                return wait
    try:
        wait = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - sent_at(headers)
    except (ValueError, TypeError, OverflowError):
        return None
    return wait if wait >= 0 else None


def sent_at(headers: Mapping[str, str]) -> float:
    """Unix time at which the reply was sent, by the provider's own clock."""
    try:
        return parsedate_to_datetime(headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return time.time()


_WINDOWS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "month": 30 * 86400.0}  # s
MINUTE = 60.0  # s: the window where a limit is reported
UNKNOWN = 10.0  # s, where neither limit nor reset is: Azure OpenAI judges its limits over 1 or 10 s
_LONGEST = 30 * 86400.0  # s
_MOST = 1e15  # of a limit, or of a time: anything larger is malformed
_FIELDS = "limit|remaining|reset"
_OPENAI = re.compile(rf"x-ratelimit-({_FIELDS})(?:-(requests|req|tokens))?(?:-({'|'.join(_WINDOWS)}))?")
_ANTHROPIC = re.compile(rf"anthropic-ratelimit-(requests|tokens|input-tokens|output-tokens)-({_FIELDS})")


@dataclass(frozen=True, slots=True)
class RateLimitReport:
    """A provider's rate limit as of a reply: of requests, or of tokens."""

    counts_tokens: bool
    remaining: float
    limit: float | None  # None: not reported
    reset: float  # s until the limit is full


def read(headers: Mapping[str, str]) -> Sequence[RateLimitReport]:
    """Header names are lower case. Malformed values are left out."""
    reports = [_report(quantity, window, fields, headers) for (quantity, window), fields in _fields(headers).items()]
    return [report for report in reports if report is not None]


def spent(headers: Mapping[str, str]) -> Collection[str]:
    """Quantities of which nothing is left: `requests`, `tokens`."""
    found = {quantity for (quantity, _), fields in _fields(headers).items() if _number(fields.get("remaining")) == 0}
    return {"tokens" if "tokens" in quantity else "requests" for quantity in found}


def has_all_tokens(headers: Mapping[str, str]) -> bool:
    """True if the whole limit of tokens is left: a request refused for its tokens can never fit."""
    left = [
        (_number(fields.get("remaining")), _number(fields.get("limit")))
        for (quantity, _), fields in _fields(headers).items()
        if quantity in ("tokens", "input-tokens")
    ]
    return bool(left) and all(remaining is not None and remaining == limit for remaining, limit in left)


def _fields(headers: Mapping[str, str]) -> Mapping[tuple[str, str], Mapping[str, str]]:
    """Fields by quantity and window."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, value in headers.items():
        if "ratelimit" not in name:
            continue
        if match := _OPENAI.fullmatch(name):
            found.setdefault((match[2] or "requests", match[3] or ""), {})[match[1]] = value
        elif match := _ANTHROPIC.fullmatch(name):
            found.setdefault((match[1], ""), {})[match[2]] = value
    return found


def _report(
    quantity: str, window: str, fields: Mapping[str, str], headers: Mapping[str, str]
) -> RateLimitReport | None:
    remaining, limit = _number(fields.get("remaining")), _number(fields.get("limit"))
    if remaining is None:
        return None
    reset = _reset(fields.get("reset", ""), headers)
    if reset is None:
        reset = _WINDOWS[window] if window else MINUTE if limit is not None else UNKNOWN
    return RateLimitReport(quantity in ("tokens", "input-tokens"), remaining, limit, min(max(reset, 0.0), _LONGEST))


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number <= _MOST else None


def _reset(text: str, headers: Mapping[str, str]) -> float | None:
    """Seconds of a duration, or until a time; None: malformed, or absent."""
    if (wait := duration(text)) is not None:
        return wait
    number = _number(text)
    if number is not None:
        if number < 1e9:
            return number
        return (number / 1e3 if number > 1e11 else number) - sent_at(headers)
    try:
        return datetime.fromisoformat(text).timestamp() - sent_at(headers)
    except ValueError:
        return None
