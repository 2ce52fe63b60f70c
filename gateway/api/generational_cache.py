"""A bounded map that forgets what was not asked for lately: cheaper to ask than one that keeps the order of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class GenerationalCache(Generic[Value]):
    """Two generations; the young one becomes the old one at `limit` entries. What is asked for is young again.

    Several threads may use it: what is lost when two of them change it at once is only found out again.
    """

    __slots__ = ("_limit", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        self._young: dict[int, Value] = {}
        self._old: dict[int, Value] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: int) -> Value | None:
        value = self._young.get(key)
        return self.get_all((key,))[0] if value is None else value

    def get_all(self, keys: Sequence[int]) -> list[Value | None]:
        """In order; None for what is not known."""
        found, old = list(map(self._young.get, keys)), self._old
        if old and None in found and (again := {key: old[key] for key in keys if key in old}):
            self.update(again)
            return [value if value is not None else again.get(key) for key, value in zip(keys, found, strict=True)]
        return found

    def update(self, entries: Mapping[int, Value]) -> None:
        """Puts them among the young."""
        if len(self._young) >= self._limit:
            self._old, self._young = self._young, {}
        self._young.update(entries)
