"""Where a request stands in a trace: W3C Trace Context in, ids for its own spans, a header for each attempt.

Rules:
- A `traceparent` that is not valid is as if it were not there, and its `tracestate` with it (W3C Trace Context 3.2.2).
- One random number per request: the id of its own span. Those of its attempts and stages count up from it, so that
  nothing else has to be carried.
- Whether it is sampled is the caller's word, or decided by the trace id alone, as the OpenTelemetry SDKs do
  (TraceIdRatioBased): all that see a trace id come to the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import NamedTuple

ATTEMPT, STAGE = 1, 64  # what is added to a request's own span id: for its first attempt, for its first stage
SPANS = 128  # ids that a request may use
MAX_STATE = 512  # characters of tracestate that are passed on (W3C Trace Context 3.3.1.5)
SAMPLED, RANDOM = 1, 2  # bits of the flags

_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LOW_64 = 2**64 - 1


class Trace(NamedTuple):
    """Of one request. `span`: its own span's id; `parent`: that of the caller's, as hexadecimal digits."""

    id: str
    span: int
    sampled: bool
    flags: int = 0  # those of the caller that are passed on as they are
    parent: str = ""
    state: str = ""

    def sent_by(self, attempt: int) -> str:
        """The `traceparent` of an attempt, whose span is the parent of whatever the engine makes. Counted from 1."""
        return f"00-{self.id}-{self.span + ATTEMPT - 1 + attempt:016x}-{self.flags | self.sampled:02x}"


class Parent(NamedTuple):
    """A caller's `traceparent`."""

    id: str
    span: str
    flags: int


def parent(header: str) -> Parent | None:
    """None where it is not valid. Later versions may have more to say behind a dash; version 00 may not."""
    match = _PARENT.fullmatch(header)
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return Parent(match[2], match[3], int(match[4], 16))


def passable(state: str) -> str:
    """A `tracestate` that may go into a header again; otherwise none."""
    return state if len(state) <= MAX_STATE and state.isascii() and state.isprintable() else ""


class Tracer:
    """Gives requests their place. `ratio`: share of the traces begun here that are sampled."""

    def __init__(self, ratio: float) -> None:
        self._below = round(ratio * 2**64)
        self._bits = Random().getrandbits  # seeded by the system, in each process anew

    def trace(self, headers: Mapping[str, str]) -> Trace:
        """The caller's trace continued, or one that begins here."""
        span = self._bits(63) + 1  # so that what is added to it never makes it too long
        header = headers.get("traceparent")
        if header is not None and (above := parent(header.strip())) is not None:
            state = passable(headers.get("tracestate", ""))
            return Trace(above.id, span, bool(above.flags & SAMPLED), above.flags & RANDOM, above.span, state)
        number = self._bits(128) or 1
        return Trace(f"{number:032x}", span, number & _LOW_64 < self._below)
