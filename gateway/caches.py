"""Bounded caches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class FairCache(Generic[Value]):
    """Values by owner and key, at most `most` in total as `size_of` measures them. Beyond the bound, the owner with
    most gives up its oldest value, and nobody else does."""

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


class GenerationalCache(Generic[Value]):
    """Drops entries not used lately, without a list of uses. Holds values of at most `limit` in total, measured by
    `size` (default: the number of entries).

    A full young generation becomes the old one, and a hit in the old generation moves the entry to the young: a hit
    costs one dict lookup. Safe for several threads without a lock: of two changes at once one may be lost or miscounted
    until the next generation, and is then computed again.
    """

    def __init__(self, limit: int, size: Callable[[Value], int] = lambda value: 1) -> None:
        self._limit = limit // 2
        self._size_of = size
        self.clear()

    def clear(self) -> None:
        self._young: dict[int, Value] = {}
        self._old: dict[int, Value] = {}
        self._young_size = self._old_size = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def size(self) -> int:
        return self._young_size + self._old_size

    def get(self, key: int) -> Value | None:
        value = self._young.get(key)
        if value is None and (value := self._old.pop(key, None)) is not None:
            self._old_size -= self._size_of(value)
            self.put(key, value)
        return value

    def get_all(self, keys: Sequence[int]) -> list[Value | None]:
        """The values in order of `keys`; None for an unknown key."""
        found = list(map(self._young.get, keys))
        if self._old and None in found:
            return list(map(self.get, keys))
        return found

    def put(self, key: int, value: Value) -> None:
        """Add or replace an entry; a value larger than a generation is not kept."""
        size = self._size_of(value)
        if size > self._limit:
            return
        replaced = self._young.pop(key, None)
        if replaced is not None:
            self._young_size -= self._size_of(replaced)
        if self._young_size + size > self._limit:
            self._old = self._young
            self._old_size = self._young_size
            self._young = {}
            self._young_size = 0
        self._young[key] = value
        self._young_size += size
