"""Sliding window over the last minute, in an array of integers with a writer and any number of readers.

Rules:
- A second counts as a whole until the end is over a minute old. So no span of 60 s holds more than the limit; a
  steady caller gets up to a second (1.7%) less than the limit.
- The array holds totals, and the totals at the start of each second. Usage since a second is one subtraction; an idle
  second costs nothing.
- A refund is subtracted from the second of the use, if the second still counts.
- A word is one aligned integer of 8 bytes: a reader in another process may see a request more or less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

WINDOW_S = 60
RING = 64  # seconds which are kept; WINDOW_S + 1 count
WINDOW_WORDS = 2 + 3 * RING

Used = tuple[int, int]  # requests, tokens


class CounterArray(Protocol):
    """Integers of 64 bits: a list, an array, memory which processes share."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, to: int, /) -> None: ...


class SlidingWindow:
    """In `words` from `base` on: totals of requests and tokens; then, for each second of a ring, the number + 1 and
    both totals at the start."""

    def __init__(self, words: CounterArray, base: int = 0) -> None:
        self.words, self.base = words, base
        # Cache of `used`: the oldest second which counts stays the same within a second, or until the first addition.
        self._found_at = self._slot = self._idle_total = -1

    def total(self) -> Used:
        return self.words[self.base], self.words[self.base + 1]

    def used(self, now: int) -> Used:
        """Usage of all seconds which count."""
        requests, tokens = self.total()
        if self._found_at != now or (self._slot < 0 and self._idle_total != requests + tokens):
            self._found_at, self._idle_total = now, requests + tokens
            self._slot = next((slot for _, slot in self._slots(range(max(now - WINDOW_S, 0), now + 1))), -1)
        if self._slot < 0:
            return 0, 0
        return requests - self.words[self._slot + 1], tokens - self.words[self._slot + 2]

    def per_second(self, now: int) -> Iterator[tuple[int, int, int]]:
        """Second, requests and tokens of all seconds with usage which count, latest first."""
        requests, tokens = self.total()
        for second, slot in self._slots(range(now, max(now - WINDOW_S, 0) - 1, -1)):
            before, tokens_before = self.words[slot + 1], self.words[slot + 2]
            yield second, requests - before, tokens - tokens_before
            requests, tokens = before, tokens_before

    def add(self, now: int, requests: int, tokens: int) -> None:
        words, base = self.words, self.base
        slot = self._slot_of(now)
        if words[slot] != now + 1:
            words[slot + 1], words[slot + 2] = words[base], words[base + 1]
            words[slot] = now + 1
        words[base] += requests
        words[base + 1] += tokens

    def refund(self, second: int, now: int, tokens: int, requests: int = 0) -> None:
        """Takes back what was added in `second`."""
        if second >= now - WINDOW_S:
            self.words[self.base] -= requests
            self.words[self.base + 1] -= tokens
            for _, slot in self._slots(range(second + 1, now + 1)):
                self.words[slot + 1] -= requests
                self.words[slot + 2] -= tokens

    def _slot_of(self, second: int) -> int:
        return self.base + 2 + 3 * (second % RING)

    def _slots(self, seconds: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The seconds with usage, with the slots."""
        for second in seconds:
            slot = self._slot_of(second)
            if self.words[slot] == second + 1:
                yield second, slot


def used(windows: Iterable[SlidingWindow], now: int) -> Used:
    """Usage in all windows together."""
    requests = tokens = 0
    for window in windows:
        window_requests, window_tokens = window.used(now)
        requests += window_requests
        tokens += window_tokens
    return requests, tokens


def available_at(windows: Iterable[SlidingWindow], now: int, field: int, amount: int) -> int:
    """The second at whose start so many requests (field 0) or tokens (1) no longer count."""
    found: dict[int, int] = {}
    for window in windows:
        for second, *added in window.per_second(now):
            found[second] = found.get(second, 0) + added[field]
    second = now
    for second in sorted(found):
        amount -= found[second]
        if amount <= 0:
            break
    return second + WINDOW_S + 1


def resets_at(windows: Iterable[SlidingWindow], now: int) -> tuple[int, int]:
    """The seconds at whose start no request, and no token, counts any more; 0: none counts now."""
    last = [0, 0]
    for window in windows:
        for second, *added in window.per_second(now):
            for field in (0, 1):
                if added[field] > 0:
                    last[field] = max(last[field], second + WINDOW_S + 1)
            if all(last):
                break
    return last[0], last[1]
