"""What was used in the last minute, in a few words of memory: whoever writes them is one, anybody may read them.

Rules:
- A second is counted whole until it is entirely over a minute old. So no span of 60 s, wherever it begins, holds more
  than was let in by it; a steady caller is given up to a second (1.7%) less than its limit.
- Kept are totals, and what they were when each second began. What was used since any second is one
  subtraction, whoever else counts; an idle second costs nothing.
- What is given back is taken from the second that it was counted in, if that still counts.
- A word is one aligned integer of 8 bytes: who reads while another process writes sees a request more or less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

WINDOW_S = 60  # s
RING = 64  # seconds that are kept; SPAN + 1 count
WINDOW_WORDS = 2 + 3 * RING

Used = tuple[int, int]  # requests, tokens


class CounterArray(Protocol):
    """Integers of 64 bits: a list, an array, memory that processes share."""

    def __getitem__(self, at: int, /) -> int: ...

    def __setitem__(self, at: int, to: int, /) -> None: ...


class SlidingWindow:
    """At `base` in `words`: totals of requests and tokens; then per second its number + 1, and both as it began."""

    __slots__ = ("_found", "_idle", "_when", "base", "words")

    def __init__(self, words: CounterArray, base: int = 0) -> None:
        self.words, self.base = words, base
        # Within a second the oldest that counts stays the same; where none does, until something is added.
        self._when = self._found = self._idle = -1

    def total(self) -> Used:
        return self.words[self.base], self.words[self.base + 1]

    def used(self, now: int) -> Used:
        """In all seconds that count."""
        words, base, place = self.words, self.base, self._found
        requests, tokens = words[base], words[base + 1]
        if self._when != now or (place < 0 and self._idle != requests + tokens):
            self._when, self._idle = now, requests + tokens
            place = self._found = self._oldest(now)
        if place < 0:
            return 0, 0
        return requests - words[place + 1], tokens - words[place + 2]

    def _oldest(self, now: int) -> int:
        words, ring = self.words, self.base + 2
        for at in range(max(now - WINDOW_S, 0), now + 1):
            place = ring + 3 * (at % RING)
            if words[place] == at + 1:
                return place
        return -1

    def per_second(self, now: int) -> Iterator[tuple[int, int, int]]:
        """All that count in which there was something, the latest first, and what."""
        words, ring = self.words, self.base + 2
        requests, tokens = self.total()
        for at in range(now, max(now - WINDOW_S, 0) - 1, -1):
            place = ring + 3 * (at % RING)
            if words[place] == at + 1:
                yield at, requests - words[place + 1], tokens - words[place + 2]
                requests, tokens = words[place + 1], words[place + 2]

    def add(self, now: int, requests: int, tokens: int) -> None:
        words, base = self.words, self.base
        place = base + 2 + 3 * (now % RING)
        if words[place] != now + 1:
            words[place + 1], words[place + 2] = words[base], words[base + 1]
            words[place] = now + 1
        words[base] += requests
        words[base + 1] += tokens

    def refund(self, second: int, now: int, tokens: int) -> None:
        """Of what was added in `second`."""
        if second < now - WINDOW_S:
            return
        words, base = self.words, self.base
        words[base + 1] -= tokens
        for at in range(second + 1, now + 1):
            place = base + 2 + 3 * (at % RING)
            if words[place] == at + 1:
                words[place + 2] -= tokens


def used(windows: Iterable[SlidingWindow], now: int) -> Used:
    """By all of them."""
    requests = tokens = 0
    for window in windows:
        one = window.used(now)
        requests, tokens = requests + one[0], tokens + one[1]
    return requests, tokens


def available_at(windows: Iterable[SlidingWindow], now: int, field: int, amount: int) -> int:
    """The second at whose beginning so many requests (field 0) or tokens (1) of those that count no longer do."""
    found: dict[int, int] = {}
    for window in windows:
        for at, *added in window.per_second(now):
            found[at] = found.get(at, 0) + added[field]
    at = now
    for at in sorted(found):
        amount -= found[at]
        if amount <= 0:
            break
    return at + WINDOW_S + 1


def resets_at(windows: Iterable[SlidingWindow], now: int) -> tuple[int, int]:
    """The seconds at whose beginning no request, and no token, of those that count still does; 0: none counts."""
    last = [0, 0]
    for window in windows:
        for at, *added in window.per_second(now):
            for field in (0, 1):
                if added[field] > 0:
                    last[field] = max(last[field], at + WINDOW_S + 1)
            if all(last):
                break
    return last[0], last[1]
