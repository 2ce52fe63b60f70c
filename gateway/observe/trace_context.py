"""W3C Trace Context: reads the caller's headers, assigns span ids, writes a header for each attempt.

Rules:
- An invalid `traceparent` is ignored, and its `tracestate` with it (W3C Trace Context 3.2.2).
- One random number per request is the id of its span; the ids of its attempts and stages count up from it, so
  nothing else has to be carried.
- Sampling follows the caller's flag, or the trace id alone as in OpenTelemetry's TraceIdRatioBased: every process that
  sees a trace id decides alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import TraceState

ATTEMPT, STAGE = 1, 64  # offsets from a request's span id: of its first attempt, of its first stage
SPANS = 128  # ids that a request may use
MAX_STATE = 512  # characters of tracestate forwarded (W3C Trace Context 3.3.1.5)
SAMPLED, RANDOM = 1, 2  # bits of the flags

_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace context of one request. `span`: id of its span; `parent`: id of the caller's span, hexadecimal."""

    id: str
    span: int
    sampled: bool
    flags: int = 0  # flags of the caller forwarded unchanged
    parent: str = ""
    state: str = ""

    def sent_by(self, attempt: int) -> str:
        """The `traceparent` of an attempt, counted from 1: its span becomes the parent of the engine's span."""
        return f"00-{self.id}-{self.span + ATTEMPT - 1 + attempt:016x}-{self.flags | self.sampled:02x}"


@dataclass(frozen=True, slots=True)
class Parent:
    """A caller's `traceparent`."""

    id: str
    span: str
    flags: int


def parent(header: str) -> Parent | None:
    """None for an invalid header. Versions above 00 may have further fields behind a dash."""
    match = _PARENT.fullmatch(header)
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return Parent(match[2], match[3], int(match[4], 16))


def passable(state: str) -> str:
    """The `tracestate` if it can be forwarded in a header, else an empty string."""
    return state if len(state) <= MAX_STATE and state.isascii() and state.isprintable() else ""


def trace_state(state: str) -> TraceState | None:
    """A `tracestate` as the SDK's value, which is imported only where spans are made."""
    from opentelemetry.trace import TraceState

    return TraceState.from_header([state]) if state else None


class Tracer:
    """Assigns trace contexts. `ratio`: sampled share of the traces begun here."""

    def __init__(self, ratio: float) -> None:
        self._below = round(ratio * 2**64)
        self._bits = Random().getrandbits  # seeded by the system, in each process anew

    def trace(self, headers: Mapping[str, str]) -> Trace:
        """The caller's trace continued, or a new one."""
        span = self._bits(63) + 1  # leaves room for the offsets
        header = headers.get("traceparent")
        if header is not None and (above := parent(header.strip())) is not None:
            state = passable(headers.get("tracestate", ""))
            return Trace(above.id, span, bool(above.flags & SAMPLED), above.flags & RANDOM, above.span, state)
        number = self._bits(128) or 1
        return Trace(f"{number:032x}", span, number & _LOW_64 < self._below)
