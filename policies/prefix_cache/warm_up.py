"""Warm-up of engines by the gateway's own requests: with which prefixes, when, and how much.

Rules of the hottest prefixes, the contents worth having in an empty cache (a bounded sketch, not an index):
- A prompt is counted at some DEPTHS of the chained block hashes (equal hash, equal prefix), and at the end. The heat
  of such a node is the number of recent prompts through the node.
- The end of a prompt keeps the `text` (opaque here). A prompt at most TAIL blocks longer than another takes over the
  heat of the other's end: only the latest turn of a conversation is kept. Other nodes use the text of an end beneath.
- The worth of a node is the heat, divided among the engines with a copy.
- Nodes and bytes of text are bounded: the least recently passed node goes first, and of a prompt the deepest.
- Heat halves every HALF_LIFE by forward decay (Cormode et al., ICDE 2009): new prompts get larger weights, so nodes
  compare without a clock.

Rules of the schedule:
- An engine which lost its cache, while a sibling can take the traffic, is warmed up with the hottest prefixes of the
  pool: at most CACHE_SHARE of the cache, and MAX_PREFILL_S seconds at the learned prefill rate.
- Warming ends early when the pool needs the engine (MAX_OTHER_REQUESTS more requests than at its start: a warming
  endpoint is the last choice), after MAX_FAILURES in a row, and after MAX_WARM_UP in any case.
- An engine is not warmed up twice within MIN_INTERVAL: it may restart all the time, or be several behind one address.
- An endpoint of a pool with `keep_warm` gets a request after an idle time. A jitter per endpoint spreads
  endpoints which went idle together. Endpoints which are down or rate limited are left alone; a half-open one is tried
  by this request rather than by a caller's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import takewhile
from typing import Generic, TypeVar

from policies.scorers.scorers import tie_break
from policies.types import UNUSABLE, Load

Text = TypeVar("Text")

HALF_LIFE = 300.0  # s
MIN_HEAT = 0.25  # a prompt, two half-lives ago
DEPTHS = tuple(step << octave for octave in range(20) for step in (2, 3))  # blocks: 2, 3, 4, 6, 8, 12, ...
TAIL = 64  # blocks
MAX_NODES = 8192  # at depths, and at ends
MAX_TEXT_SHARE = 1 / 8  # of all bytes, for a text
CONSIDERED = 512  # hottest nodes which are weighed against the contents of other engines
REBASE = 64.0  # half-lives after which weights begin anew: a float has room for a thousand

CACHE_SHARE = 0.25
MAX_PREFILL_S = 10.0
MAX_WARM_UP = 20.0  # s
MIN_INTERVAL = 600.0  # s
CONCURRENCY = 2  # requests: the engine need not wait for the next
MAX_OTHER_REQUESTS = 2
MAX_FAILURES = 2
JITTER = 0.1  # of `idle`


@dataclass(frozen=True, slots=True)
class HotPrefix(Generic[Text]):
    """The first `blocks` blocks of a text."""

    text: Text
    blocks: int


@dataclass(slots=True, eq=False)
class _PrefixNode(Generic[Text]):
    """A prefix of `blocks` blocks. `text` and its `size` in bytes: where a prompt ends."""

    blocks: int
    above: _PrefixNode[Text] | None
    text: Text | None = None
    size: int = 0
    heat: float = 0.0

    def path(self) -> Iterator[_PrefixNode[Text]]:
        """This node and its ancestors."""
        node: _PrefixNode[Text] | None = self
        while node is not None:
            yield node
            node = node.above


class HotPrefixes(Generic[Text]):
    """`limit`: bytes of text."""

    def __init__(self, limit: int) -> None:
        self.bytes, self.limit = 0, limit
        # Nodes by hash, least recently passed first, deep before shallow.
        self._depths: OrderedDict[int, _PrefixNode[Text]] = OrderedDict()
        self._ends: OrderedDict[int, _PrefixNode[Text]] = OrderedDict()
        self._weights_since = 0.0

    def __len__(self) -> int:
        return len(self._depths) + len(self._ends)

    def record(self, hashes: Sequence[int], text: Text, size: int, now: float) -> None:
        """Counts a prompt which an engine has computed. `size`: bytes of `text`."""
        weight, above = self._weight(now), None
        keys = [hashes[depth - 1] for depth in DEPTHS[: bisect_right(DEPTHS, len(hashes))]]
        for depth, key in zip(DEPTHS, keys, strict=False):
            node = self._depths.get(key)
            if node is None:
                node = self._depths[key] = _PrefixNode(depth, above)
            node.heat += weight
            above = node
        for key in reversed(keys):
            self._depths.move_to_end(key)
        if keys and size <= self.limit * MAX_TEXT_SHARE:
            self._add_end(hashes, _PrefixNode(len(hashes), above, text, size, weight))
        while len(self._depths) > MAX_NODES:
            self._depths.popitem(last=False)

    def _add_end(self, hashes: Sequence[int], end: _PrefixNode[Text]) -> None:
        for key in hashes[-TAIL:]:
            if (passed := self._ends.pop(key, None)) is not None:
                self.bytes -= passed.size
                end.heat += passed.heat
        self._ends[hashes[-1]] = end
        self.bytes += end.size
        while self.bytes > self.limit or len(self._ends) > MAX_NODES:
            self.bytes -= self._ends.popitem(last=False)[1].size

    def hottest(self, room: int, now: float, copies: Callable[[Text, int], int]) -> list[HotPrefix[Text]]:
        """Prefixes for an empty cache with `room` blocks. `copies`: number of engines which hold a text's blocks.

        A node on the path to another chosen node is not listed.
        """
        texts, min_heat = self._texts(), MIN_HEAT * self._weight(now)
        hot = nlargest(CONSIDERED, (node for node in texts if node.heat >= min_heat), key=lambda node: node.heat)
        worth = {node: node.heat / (1 + copies(texts[node], node.blocks)) for node in hot}
        taken: dict[_PrefixNode[Text], None] = {}
        for node in sorted(hot, key=worth.__getitem__, reverse=True):
            path = list(takewhile(lambda ancestor: ancestor not in taken, node.path()))
            held = path[-1].above if path else node
            cost = node.blocks - (held.blocks if held is not None else 0)
            if cost <= room:
                room -= cost
                taken.update(dict.fromkeys(path))
        inner = {node.above for node in taken}
        return [HotPrefix(texts[node], node.blocks) for node in taken if node not in inner]

    def _texts(self) -> dict[_PrefixNode[Text], Text]:
        """Every node above an end, with the latest end's text."""
        texts: dict[_PrefixNode[Text], Text] = {}
        for end in reversed(self._ends.values()):
            assert end.text is not None
            texts.update(dict.fromkeys(takewhile(lambda node: node not in texts, end.path()), end.text))
        return texts

    def _weight(self, now: float) -> float:
        age = (now - self._weights_since) / HALF_LIFE
        if age > REBASE:
            for node in (*self._depths.values(), *self._ends.values()):
                node.heat *= 0.5**age
            self._weights_since, age = now, 0.0
        return float(2.0**age)


def warm_up_tokens(cache: int, rate: float) -> int:
    """Tokens to warm up an engine with a cache of `cache` tokens, at `rate` tokens/s."""
    return int(min(CACHE_SHARE * cache, MAX_PREFILL_S * rate))


class WarmUp(Generic[Text]):
    """The warm-up of an engine. `in_flight`: of its load, these requests included."""

    def __init__(self, prefixes: Sequence[Text], in_flight: int, now: float) -> None:
        self.prefixes = self.tokens = 0  # computed so far
        self._remaining = deque(prefixes)
        self._others = in_flight
        self._pending = self._failures = 0
        self._until = now + MAX_WARM_UP

    def next(self, in_flight: int, now: float) -> Text | None:
        """The prefix to send now; None: the warm-up is over."""
        needed = in_flight - self._pending >= self._others + MAX_OTHER_REQUESTS
        if needed or now >= self._until or self._failures >= MAX_FAILURES or not self._remaining:
            return None
        self._pending += 1
        return self._remaining.popleft()

    def on_ended(self, ok: bool, tokens: int) -> None:
        """`tokens`: of the prefix."""
        self._pending -= 1
        self._failures = 0 if ok else self._failures + 1
        if ok:
            self.prefixes += 1
            self.tokens += tokens


def is_idle(endpoint_id: str, load: Load, used_at: float, idle: float, now: float) -> bool:
    """Returns whether a keep-warm request is due. `idle`: s without a request."""
    if load.health in UNUSABLE or load.in_flight or load.limits.wait(0, now):
        return False
    jitter = tie_break(int(used_at * 1e3), endpoint_id) % 1024 / 1024
    return now - used_at >= idle * (1 - JITTER * jitter)
