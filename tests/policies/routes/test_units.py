"""Durations, shares and sizes as people write them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from policies.routes.route import Duration, Share, Size


class Written(BaseModel):
    duration: Duration = 1.0
    share: Share = 0.1
    size: Size = 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250us", 250e-6), ("250ms", 0.25), ("2s", 2.0), ("1.5s", 1.5), ("5m", 300.0), ("1 h", 3600.0)],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    """Every unit is understood, with or without a space."""
    assert Written(duration=text).duration == pytest.approx(seconds)  # type: ignore[arg-type]


def test_a_duration_is_the_shortest_decimal_in_seconds() -> None:
    """A budget names a histogram bucket: `le="0.7"`, not 0.7000000000000001."""
    for millis in range(1, 10_000):
        assert Written(duration=f"{millis}ms").duration == float(f"{millis}e-3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "correction"),
    [
        (800, "800 has no unit; write '800ms' or '800s'"),
        ("800", "'800' has no unit of time; write it like 250ms, 2s or 5m"),
        ("fast", "'fast' is not understood; write it like 250ms, 2s or 5m"),
        ("-1s", "'-1s' is not understood"),
        (True, "write a duration like 250ms, 2s or 5m"),
        (None, "write a duration like 250ms, 2s or 5m"),
    ],
)
def test_a_duration_without_a_unit_is_refused_with_a_correction(value: Any, correction: str) -> None:
    """A bare number could be seconds or milliseconds, so neither is assumed."""
    with pytest.raises(ValidationError, match=re.escape(correction)):
        Written(duration=value)


@pytest.mark.parametrize(("value", "share"), [("3%", 0.03), ("2.5 %", 0.025), (0.03, 0.03), ("0.03", 0.03), (0, 0.0)])
def test_a_share_is_a_fraction(value: Any, share: float) -> None:
    """In percent, or as a number."""
    assert Written(share=value).share == pytest.approx(share)


@pytest.mark.parametrize("value", ["3ms", "some", True])
def test_an_invalid_share_is_refused(value: Any) -> None:
    """`true` must not become 100%."""
    with pytest.raises(ValidationError, match=r"3% or 0\.03"):
        Written(share=value)


@pytest.mark.parametrize(
    ("value", "bytes_"),
    [("32MB", 32_000_000), ("32 mb", 32_000_000), ("1KiB", 1024), ("1.5GB", 1_500_000_000), (64, 64)],
)
def test_a_size_is_bytes(value: Any, bytes_: int) -> None:
    """Decimal and binary units; a bare number is bytes."""
    assert Written(size=value).size == bytes_


@pytest.mark.parametrize("value", ["32 apples", "big", True])
def test_an_invalid_size_is_refused(value: Any) -> None:
    """`true` must not become one byte."""
    with pytest.raises(ValidationError, match=r"write .* like 32MB"):
        Written(size=value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((Duration, text) for text in ("250ms", "2s", "1.5 h", "250us", "800", "fast", "-1s", "3%")),
        *((Share, text) for text in ("3%", "2.5 %", "0.03", "3ms", "some")),
        *((Size, text) for text in ("32MB", "32 mb", "1KiB", "64", "64B", "32 apples", "3%")),
    ],
)
def test_editors_accept_the_texts_that_validation_accepts(kind: Any, value: str) -> None:
    """The JSON Schema's pattern and the validator agree on every text."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = adapter.json_schema()
    patterns = [option["pattern"] for option in schema.get("anyOf", [schema]) if "pattern" in option]
    try:
        adapter.validate_python(value)
        accepted = True
    except ValidationError:
        accepted = False
    assert accepted == any(re.search(pattern, value) for pattern in patterns)
