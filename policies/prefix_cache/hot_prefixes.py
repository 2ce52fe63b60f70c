"""Which prefixes of a pool's prompts are worth having in an engine's cache.

A sketch, not an index. Rules:
- A prompt is noted at some DEPTHS of its chained block hashes (equal hash, equal prompt up to there), and at its end.
  Each such place counts the prompts that passed it lately: its heat. All conversations pass the places of their system
  prompt; those beyond are passed by their own turns.
- What a prompt was made of (`text`, without meaning here) stays at its end. A prompt that goes on a little (TAIL) from
  another's end takes that one's place and heat: of a conversation there is the latest turn alone. Any depth's text is
  that of an end beneath it.
- A place is worth its heat per block, shared with the engines that hold it already.
- Bounded in places and in bytes of text: the least recently passed goes first, and of one prompt the deepest.

Heat halves every HALF_LIFE. What comes in is weighed up instead of all else being weighed down (forward decay,
Cormode et al., ICDE 2009), so that places compare without a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile
from typing import Generic, TypeVar

Text = TypeVar("Text")

HALF_LIFE = 300.0  # s
LEAST_HEAT = 0.25  # one prompt, two half-lives ago
DEPTHS = tuple(step << octave for octave in range(20) for step in (2, 3))  # blocks: 2, 3, 4, 6, 8, 12, ...
TAIL = 64  # blocks
MAX_NODES = 8192  # that are depths, and that are ends
MAX_TEXT_SHARE = 1 / 8  # of all bytes, that one text may take
CONSIDERED = 512  # places, the hottest, that are weighed against what other engines hold
REBASE = 64.0  # half-lives after which weights begin anew: a float has room for a thousand


@dataclass(frozen=True, slots=True)
class HotPrefix(Generic[Text]):
    """The first `blocks` blocks of a text."""

    text: Text
    blocks: int


class _PrefixNode(Generic[Text]):
    """A prefix of so many blocks. `text`: where a prompt ends."""

    __slots__ = ("above", "blocks", "heat", "size", "text")

    def __init__(self, blocks: int, above: _PrefixNode[Text] | None, text: Text | None = None, size: int = 0) -> None:
        self.blocks, self.above, self.text, self.size = blocks, above, text, size
        self.heat = 0.0

    def up(self) -> Iterator[_PrefixNode[Text]]:
        """This one and those above it."""
        place: _PrefixNode[Text] | None = self
        while place is not None:
            yield place
            place = place.above


class HotPrefixes(Generic[Text]):
    """Of one pool. `limit`: bytes of text."""

    def __init__(self, limit: int) -> None:
        self.bytes, self.limit = 0, limit
        self._depths: OrderedDict[int, _PrefixNode[Text]] = (
            OrderedDict()
        )  # the least recently passed first, deep before
        self._ends: OrderedDict[int, _PrefixNode[Text]] = OrderedDict()  # shallow; both by hash
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._depths) + len(self._ends)

    def record(self, hashes: Sequence[int], text: Text, size: int, now: float) -> None:
        """A prompt was computed. `size`: bytes that keeping `text` takes."""
        weight, above = self._weight(now), None
        keys = [hashes[depth - 1] for depth in DEPTHS[: bisect_right(DEPTHS, len(hashes))]]
        for depth, key in zip(DEPTHS, keys, strict=False):
            place = self._depths.get(key)
            if place is None:
                place = self._depths[key] = _PrefixNode(depth, above)
            place.heat += weight
            above = place
        for key in reversed(keys):
            self._depths.move_to_end(key)
        if keys and size <= self.limit * MAX_TEXT_SHARE:
            self._end(hashes, _PrefixNode(len(hashes), above, text, size), weight)
        while len(self._depths) > MAX_NODES:
            self._depths.popitem(last=False)

    def _end(self, hashes: Sequence[int], end: _PrefixNode[Text], weight: float) -> None:
        ends, end.heat = self._ends, weight
        for key in [key for key in hashes[-TAIL:] if key in ends]:
            passed = ends.pop(key)
            self.bytes -= passed.size
            end.heat += passed.heat
        ends[hashes[-1]] = end
        self.bytes += end.size
        while self.bytes > self.limit or len(ends) > MAX_NODES:
            self.bytes -= ends.popitem(last=False)[1].size

    def hottest(self, room: int, now: float, copies: Callable[[Text, int], int]) -> list[HotPrefix[Text]]:
        """What to have in an empty cache with `room` blocks for it. `copies`: on how many engines a text's blocks are.

        A depth on the way to another place is not named by itself.
        """
        least, texts = LEAST_HEAT * self._weight(now), self._texts()
        hot = nlargest(CONSIDERED, (place for place in texts if place.heat >= least), key=lambda place: place.heat)
        worth = {place: place.heat / (1 + copies(texts[place], place.blocks)) for place in hot}
        taken: dict[_PrefixNode[Text], None] = {}
        for place in sorted(hot, key=worth.__getitem__, reverse=True):
            path = list(takewhile(lambda above: above not in taken, place.up()))
            held = path[-1].above if path else place
            cost = place.blocks - (held.blocks if held is not None else 0)
            if cost <= room:
                room -= cost
                taken.update(dict.fromkeys(path))
        beginnings = {place.above for place in taken}
        return [HotPrefix(texts[place], place.blocks) for place in taken if place not in beginnings]

    def _texts(self) -> dict[_PrefixNode[Text], Text]:
        """Every place that has an end beneath it, with the latest one's text."""
        texts: dict[_PrefixNode[Text], Text] = {}
        for end in reversed(self._ends.values()):
            assert end.text is not None
            texts.update(dict.fromkeys(takewhile(lambda place: place not in texts, end.up()), end.text))
        return texts

    def _weight(self, now: float) -> float:
        age = (now - self._since) / HALF_LIFE
        if age > REBASE:
            for place in (*self._depths.values(), *self._ends.values()):
                place.heat *= 0.5**age
            self._since, age = now, 0.0
        return float(2.0**age)
