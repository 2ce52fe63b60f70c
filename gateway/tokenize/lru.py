"""A map bounded in bytes: what was not used longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
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

    def peek(self, key: int) -> Value | None:
        """The value, not counted as a use: changes nothing, so that other threads may ask."""
        return self._entries.get(key)

    def put(self, key: int, value: Value) -> None:
        self.put_all(((key, value),))

    def put_all(self, entries: Iterable[tuple[int, Value]]) -> None:
        """One after the other."""
        held, size = self._entries, self._size
        for key, value in entries:
            if (previous := held.get(key)) is not None:
                self.bytes -= size(previous)
                held.move_to_end(key)
            held[key] = value
            self.bytes += size(value)
        while self.bytes > self.limit:
            self.bytes -= size(held.popitem(last=False)[1])
