"""Copies of answers on their way to callers, for the cache of answers."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.downstream.http_request import HttpRequest
from gateway.parts.answers.answer_stores import AnswerKey
from gateway.upstream.answer import Relay
from policies.routes.route import Route

MAX_ANSWER = 1 << 20  # bytes of a kept answer


@dataclass(frozen=True, slots=True)
class CacheUse:
    """A request's use of the cache. `fresh`: the caller wants a new answer."""

    key: AnswerKey
    route: Route
    ttl: float
    fresh: bool


class CopyBudget:
    """Bytes that the copies in progress may take together."""

    def __init__(self, most: int) -> None:
        self.left = most


class CopyingRelay(Relay):
    """`copy`: the body so far; None: it is larger than may be kept."""

    def __init__(self, http: HttpRequest, budget: CopyBudget, use: CacheUse) -> None:
        super().__init__(http)
        self.use = use
        self.copy: bytearray | None = bytearray()
        self.content_type = ""
        self._budget = budget

    def begin(self, head: bytes, first: bytes, length: int | None) -> None:
        super().begin(head, first, length)
        self.content_type = _content_type(head)
        self._add(first)

    def write(self, data: bytes, framed: bytes = b"") -> None:
        super().write(data, framed)
        self._add(data)

    def end(self, last: bytes = b"") -> None:
        super().end(last)
        self._add(last)

    def release(self) -> None:
        """Nothing more is copied. The copy is kept at once or never: its bytes are free for others."""
        super().release()
        if self.copy is not None:
            self._budget.left += len(self.copy)

    def _add(self, data: bytes) -> None:
        if self.copy is None:
            return
        if len(self.copy) + len(data) > MAX_ANSWER or len(data) > self._budget.left:
            self._budget.left += len(self.copy)
            self.copy = None
        else:
            self._budget.left -= len(data)
            self.copy += data


def _content_type(head: bytes) -> str:
    for line in head.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(": ")
        if name == "content-type":
            return value
    return ""
