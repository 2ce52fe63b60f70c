"""History of counts in memory: how much each count grew in the last 10 s, 5 minutes and hour.

Rules:
- Totals come in every few seconds; a ring of slots for each span keeps their growth. Nothing is done per request.
- Memory is the number of counts times 120 slots and 20 looks times 8 bytes: 80 KB for a route with 70 counts.
- A total that decreased is that of another process, which began at zero: the whole total is new.
- The window `now` has no slots: it is the growth since the look at the totals 10 s ago, or the next one after.
- Slots are numbered by the wall clock. Where the clock went back, the present slot takes those ahead of it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

Key = tuple[str, ...]
Grown = Sequence[tuple[int, float]]  # columns, and the growth of their counts


@dataclass(frozen=True, slots=True)
class Span:
    """A window of time and its slots."""

    name: str
    slot_s: float
    slots: int

    @property
    def seconds(self) -> float:
        return self.slot_s * self.slots

    def first(self, wall: float) -> int:
        """Number of the slot that the window up to `wall`, Unix time, begins with."""
        return int(wall // self.slot_s) - self.slots + 1


NOW = Span("now", 10.0, 1)
SPANS = {span.name: span for span in (Span("5m", 5.0, 60), Span("1h", 60.0, 60))}
WINDOWS = {**SPANS, NOW.name: NOW}
LOOKS = 20  # at the totals that are remembered for `now`: viewers of all windows cause 1.2 a second
MAX_COUNTS = 20_000  # further ones are not kept: 23 MB


@dataclass(slots=True)
class Slot:
    """Growth of the counts in one part of a span. `curves`: what was computed of a slot that is over, by route."""

    number: int  # Unix time / slot_s
    counts: array[float] = field(default_factory=lambda: array("d"))
    curves: dict[str, Any] = field(default_factory=dict)

    def add(self, grown: Grown, width: int) -> None:
        self.widen(width)
        for column, count in grown:
            self.counts[column] += count

    def widen(self, width: int) -> None:
        if width > len(self.counts):
            self.counts.frombytes(bytes(8 * (width - len(self.counts))))


@dataclass(frozen=True, slots=True)
class Window:
    """`slots`: those with samples, oldest first; `totals`: their sum by column; `first`: number of the slot that the
    span begins with; `covered`: seconds from the first sample to now."""

    span: Span
    first: int
    slots: Sequence[Slot]
    totals: Sequence[float]
    covered: float


class CountHistory:
    """The first totals are the base: growth is known from there on. `columns`: place of each count in a slot;
    `by_route`: the same by route, member and labels."""

    def __init__(self) -> None:
        self.columns: dict[Key, int] = {}
        self.by_route: dict[str, dict[str, dict[Key, int]]] = {}
        self._before: Mapping[Key, float] | None = None
        self._looks: deque[tuple[float, Slot]] = deque(maxlen=LOOKS)  # Unix time, growth since the last
        self._since = inf  # Unix time of the first totals
        self._rings: dict[str, deque[Slot]] = {name: deque(maxlen=span.slots) for name, span in SPANS.items()}

    def note(self, totals: Mapping[Key, float], wall: float) -> None:
        """`wall`: Unix time of the totals."""
        before, self._before, self._since = self._before, totals, min(self._since, wall)
        grown = [] if before is None else [*self._growth(before, totals)]
        for name, span in SPANS.items():
            self._slot(self._rings[name], int(wall // span.slot_s)).add(grown, len(self.columns))
        if self._looks and wall < self._looks[-1][0]:
            self._looks.clear()
        self._looks.append((wall, Slot(0)))
        self._looks[-1][1].add(grown, len(self.columns))
        while len(self._looks) > 1 and self._looks[1][0] <= wall - NOW.seconds:
            self._looks.popleft()

    def _growth(self, before: Mapping[Key, float], totals: Mapping[Key, float]) -> Iterable[tuple[int, float]]:
        for key, total in totals.items():
            column, was = self._column(key), before.get(key, 0.0)
            if total != was and column is not None:
                yield column, total - was if total > was else total

    def _column(self, key: Key) -> int | None:
        if (column := self.columns.get(key)) is None and len(self.columns) < MAX_COUNTS:
            route, member, *labels = key
            column = self.columns[key] = len(self.columns)
            self.by_route.setdefault(route, {}).setdefault(member, {})[tuple(labels)] = column
        return column

    @staticmethod
    def _slot(ring: deque[Slot], number: int) -> Slot:
        ahead = list[Slot]()
        while ring and ring[-1].number > number:
            ahead.append(ring.pop())
        if not ring or number > ring[-1].number:
            ring.append(Slot(number))
        for slot in ahead:
            ring[-1].add([*enumerate(slot.counts)], len(slot.counts))
            ring[-1].curves.clear()
        return ring[-1]

    def slots(self, span: Span, wall: float) -> Sequence[Slot]:
        """Those with samples up to now, oldest first; the last is the present one, which is not over."""
        first = span.first(wall)
        return self._widened(slot for slot in self._rings[span.name] if slot.number >= first)

    def window(self, span: Span, wall: float) -> Window:
        """Up to now. `NOW`: the growth of the remembered looks, and the slots of 5 minutes."""
        if span is NOW:
            covered = self._looks[-1][0] - self._looks[0][0] if self._looks else 0.0
            span, added = SPANS["5m"], self._widened(look for _, look in islice(self._looks, 1, None))
            slots = self.slots(span, wall)
        else:
            added = slots = self.slots(span, wall)
            covered = wall - max(slots[0].number * span.slot_s, self._since) if slots else 0.0
        rows = [bytes(len(self.columns)), *(slot.counts for slot in added)]
        totals = [*map(sum, zip(*rows, strict=True))]
        return Window(span, span.first(wall), slots, totals, min(max(covered, 0.0), span.seconds))

    def _widened(self, slots: Iterable[Slot]) -> Sequence[Slot]:
        """With a place for each count."""
        found = [*slots]
        for slot in found:
            slot.widen(len(self.columns))
        return found
