"""A map from block names to small numbers, in two flat arrays: 12 bytes a slot, where a dict takes 70 to 100 an entry.

Open addressing with linear probing; names are hashes already. A removal moves what follows it back, so there are
no tombstones. At most 6 slots of 10 are taken.
"""

from __future__ import annotations

from array import array

SMALLEST = 64  # slots
FULL = 0.6


class BlockTable:
    """Names are positive and under 2**64; values under 2**32."""

    __slots__ = ("_mask", "_names", "_size", "_values")

    def __init__(self) -> None:
        self._names: array[int]
        self._values: array[int]
        self._size: int
        self._allocate(SMALLEST)

    def __len__(self) -> int:
        return self._size

    def get(self, name: int) -> int | None:
        names, mask = self._names, self._mask
        at = name & mask
        while (found := names[at]) != name:
            if not found:
                return None
            at = (at + 1) & mask
        return self._values[at]

    def put(self, name: int, value: int) -> None:
        """New, or with another value."""
        names, mask = self._names, self._mask
        at = name & mask
        while (found := names[at]) and found != name:
            at = (at + 1) & mask
        self._values[at] = value
        if not found:
            names[at] = name
            self._size += 1
            if self._size > mask * FULL:
                self._resize(2 * (mask + 1))

    def pop(self, name: int) -> int | None:
        names, values, mask = self._names, self._values, self._mask
        at = name & mask
        while (found := names[at]) != name:
            if not found:
                return None
            at = (at + 1) & mask
        value, self._size = values[at], self._size - 1
        self._close(at)
        return value

    def clear(self) -> None:
        self._allocate(SMALLEST)

    def _close(self, hole: int) -> None:
        """Move back what could not have its own slot because this one was taken."""
        names, values, mask = self._names, self._values, self._mask
        at = hole
        while name := names[at := (at + 1) & mask]:
            if (at - name) & mask >= (at - hole) & mask:
                names[hole], values[hole] = name, values[at]
                hole = at
        names[hole] = 0

    def _resize(self, slots: int) -> None:
        before = zip(self._names, self._values, strict=True)
        self._allocate(slots)
        for name, value in before:
            if name:
                self.put(name, value)

    def _allocate(self, slots: int) -> None:
        self._names, self._values = array("Q", bytes(8 * slots)), array("I", bytes(4 * slots))
        self._mask, self._size = slots - 1, 0
