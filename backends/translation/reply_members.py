"""Reads members of replies and events of any shape: a member of an unknown shape counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.translation.translation import decode_event


def as_count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def as_object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def as_objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def decoded(data: bytes) -> Mapping[str, Any]:
    """The object of an event; empty: there is none (the tap reports it)."""
    return as_object(decode_event(data))
