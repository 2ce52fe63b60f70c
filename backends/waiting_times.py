"""Times to wait, as servers tell them: `Retry-After`, and durations such as `6m0s`."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
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
