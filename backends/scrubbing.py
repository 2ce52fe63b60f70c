"""Removes from a server's message what no caller may read: URLs, hosts, addresses, accounts and keys.

Little else is removed: the message should help the caller. Text is cut to MESSAGE_LIMIT, and patterns run in linear
time.
"""

from __future__ import annotations

import re

from backends.error_body import MESSAGE_LIMIT
from backends.error_patterns import KEY_MARK
from backends.secrets import is_secret

_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029\ud800-\udfff]+")
_START = r"(?<![\w.-])"  # of a name: else each letter is tried, in square time
_SCRUBS = (
    (re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s'\"`<>)\]}]+"), "[url]"),
    (re.compile(r"(?i)\bbearer\s+\S+"), "[key]"),
    (re.compile(r"\b(?:sk|pk|rk|gsk|xai|fw|hf|key|api|nvapi|AIza)[-_][A-Za-z0-9_*.-]{8,}"), "[key]"),
    (re.compile(r"\bAIza[A-Za-z0-9_-]{20,}"), "[key]"),
    (re.compile(r"\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{32,}"), "[key]"),  # not a UUID, not a snake_case name
    (re.compile(r"\b(?:org|proj|team)[-_](?=[A-Za-z]*\d|[A-Za-z]{16})[A-Za-z0-9]{6,}"), "[account]"),
    (re.compile(r"(?i)\b((?:team|org|organization|api key id):? \(?)[0-9a-f]{8}-[0-9a-f-]{27}"), r"\1[account]"),
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
    text = _CONTROL.sub(" ", text[:MESSAGE_LIMIT])
    if is_secret(secret):
        text = text.replace(secret, KEY_MARK)
    for pattern, mark in _SCRUBS:
        text = pattern.sub(mark, text)
    return text
