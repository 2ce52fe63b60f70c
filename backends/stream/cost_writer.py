"""The cost of an answer in the `usage` of its stream, as OpenRouter gives it: `"usage": {"cost": 0.00012, ...}`.

Rules:
- `cost` is added to events of chat completions and completions whose `usage` has counts, as the first member; all
  other bytes pass verbatim. No event is made up: without usage there is no cost.
- A cost that the server itself states stays. An event that names two members `usage` passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from backends.stream.sse import WholeEvents, data_of, events_of

_USAGE = re.compile(rb'"usage"(?:\s|data:)*:(?:\s|data:)*\{')


class _Usage(msgspec.Struct):
    cost: float | None = None
    prompt_tokens: int | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class CostWriter(WholeEvents):
    """`cost`: USD of the answer up to now; 0: not known, or not to be told."""

    def __init__(self, cost: Callable[[], float]) -> None:
        super().__init__()
        self._cost = cost

    def feed(self, data: bytes) -> bytes:
        return self._with_cost(super().feed(data))

    def close(self) -> bytes:
        return self._with_cost(super().close())

    def _with_cost(self, data: bytes) -> bytes:
        if b'"usage"' not in data or not (cost := self._cost()):
            return data
        return b"".join(_with_cost(event, b'"cost":%.8f,' % cost) for event in events_of(data))


def _with_cost(event: bytes, member: bytes) -> bytes:
    found = [*_USAGE.finditer(event)]
    if len(found) != 1:
        return event
    try:
        usage = _decode(data_of(event) or b"").usage
    except (ValueError, msgspec.DecodeError, RecursionError):
        return event
    if usage is None or usage.cost is not None or usage.prompt_tokens is None:
        return event
    at = found[0].end()
    return event[:at] + member + event[at:]
