"""A map bounded in bytes: what was not used longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Lru(Generic[Value]):
    """Keys are digests: integers that stand for what was seen, which is not kept itself."""

    __slots__ = ("_entries", "_size", "bytes", "limit")

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self._entries: OrderedDict[int, Value] = OrderedDict()
        self._size = size
        self.limit = limit
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: int) -> Value | None:
        """The value, now the most recently used."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: int, value: Value) -> None:
        previous = self._entries.pop(key, None)
        if previous is not None:
            self.bytes -= self._size(previous)
        self._entries[key] = value
        self.bytes += self._size(value)
        while self.bytes > self.limit:
            self.bytes -= self._size(self._entries.popitem(last=False)[1])
