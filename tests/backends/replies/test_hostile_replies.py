"""Whatever a server sends, a reply becomes a failure, in time that grows no faster than the reply."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import error_body, error_patterns, failures, scrubbing
from backends.error_body import MESSAGE_LIMIT, read_error
from backends.failures import of_body, of_event, of_reply
from backends.interface import Failure, FailureKind

LENGTH = 64 << 10
WORDS = (  # beginnings and middles of patterns, to be repeated
    "a",
    "a.",
    "a-1:",
    "`",
    "model ",
    "the model: `",
    "model 'x' ",
    "file ",
    "no such file not ",
    "limit: 1 ",
    "limit 1 requested ",
    "tokens per ",
    "your team ",
    "account ",
    "project not have ",
    "litellm.a: ",
    "aError: ",
    "try again in 1h",
    "retry after 1",
    "permission to access the ",
    "input length ",
    "capacity ",
    "country ",
    "sk-",
    "**",
    "http://",
    "[::",
    "1.",
    "\n ",
    "org-",
    "team: (0",
)
STATUSES = st.integers(100, 999)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(WORDS)
NAMES = st.sampled_from(
    "error message detail details type code param status metadata raw innererror violations loc msg".split()
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES | st.text(), inner), max_leaves=20)
HEADERS = st.dictionaries(
    st.sampled_from(("retry-after", "retry-after-ms", "date", "server", "x-ratelimit-remaining-tokens")), st.text()
)


def patterns() -> Iterator[re.Pattern[str]]:
    for module in (error_patterns, error_body, failures, scrubbing):
        yield from (value for value in vars(module).values() if isinstance(value, re.Pattern))
    yield from (pattern.words for pattern in error_patterns._TABLE)
    yield from (pattern for pattern, _ in scrubbing._SCRUBS)


def is_harmless(failure: Failure) -> bool:
    return (
        failure.kind in FailureKind
        and 400 <= failure.status < 1000
        and len(failure.message) <= 2 * MESSAGE_LIMIT
        and len(failure.cause) <= 160
        and "\n" not in failure.message + failure.cause
    )


@given(
    STATUSES.filter(lambda status: not 200 <= status < 300),
    HEADERS,
    st.binary() | VALUES.map(json.dumps).map(str.encode),
)
def test_any_reply_is_a_failure(status: int, headers: dict[str, str], body: bytes) -> None:
    assert is_harmless(of_reply(status, headers, body, "sk-own", ("m-1",)))


@given(VALUES)
def test_any_error_inside_a_200_is_a_failure(error: Any) -> None:
    assert is_harmless(of_event(error, "sk-own"))
    whole = of_body(json.dumps({"error": error}).encode(), "sk-own")
    assert whole is None or is_harmless(whole)


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_endless_nesting_is_a_failure(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    for shape in (b'{"error":%s}', b'{"message":%s}', b'{"detail":[{"loc":%s,"msg":%s}]}', b'{"error":{"details":%s}}'):
        body = shape.replace(b"%s", nested)
        assert is_harmless(of_reply(400, {}, body))
        of_body(body)


@pytest.mark.parametrize("word", WORDS)
def test_no_pattern_takes_square_time(word: str) -> None:
    """Square time over 64 KiB is minutes, beyond the time limit of a test. Replies are cut long before."""
    text = word * (LENGTH // len(word))
    for pattern in patterns():
        pattern.search(text)


def test_no_pattern_sees_more_of_a_reply_than_the_limit() -> None:
    """Of the message, of every name, and of a page that is no JSON."""
    long = "x" * LENGTH
    entries = [{"violations": [{"quotaMetric": long}] * 9, "retryDelay": long}]
    said = read_error({"error": {"message": long, "type": long, "code": long, "status": long, "details": entries}})
    joined = read_error({"detail": [{"loc": [long], "msg": long}] * 99})
    assert {len(said.message), len(said.type), len(str(said.code)), len(said.metrics), len(joined.message)} == {
        MESSAGE_LIMIT
    }
    assert all(len(label) <= MESSAGE_LIMIT for label in said.labels)
