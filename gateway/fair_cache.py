"""A cache with owners and one bound: beyond it, the owner with most gives up its oldest value, and nobody else does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class FairCache(Generic[Value]):
    """Values by owner and key, at most `most` in total as `size_of` measures them."""

    def __init__(self, most: int, size_of: Callable[[Value], int]) -> None:
        self.size = 0
        self._most, self._size_of = most, size_of
        self._values: defaultdict[str, dict[Hashable, Value]] = defaultdict(dict)  # oldest first
        self._sizes: defaultdict[str, int] = defaultdict(int)

    def get(self, owner: str, key: Hashable) -> Value | None:
        return self._values[owner].get(key) if owner in self._values else None

    def put(self, owner: str, key: Hashable, value: Value) -> None:
        self.drop(owner, key)
        self._values[owner][key] = value
        self._count(owner, self._size_of(value))
        while self.size > self._most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.drop(largest, next(iter(self._values[largest])))

    def drop(self, owner: str, key: Hashable) -> None:
        value = self._values[owner].pop(key, None)
        if value is not None:
            self._count(owner, -self._size_of(value))
        if not self._values[owner]:
            del self._values[owner]
            self._sizes.pop(owner, None)

    def _count(self, owner: str, size: int) -> None:
        self._sizes[owner] += size
        self.size += size
