"""Which endpoint is believed to hold which prefix blocks.

A radix tree per endpoint, of runs of blocks. Rules:
- A block is named by a chained hash (unsigned 64 bits): equal hash, equal prefix up to and including it.
  So a node is found by its first hash alone, and the divergence from a run by binary search.
- All blocks of a run were last used by the same prompt; a prompt that uses only a part splits the run.
- The least recently used block goes first and, of one prompt, the last block goes first, as vLLM frees
  them (`KVCacheManager.free` returns blocks in reverse). So a block never outlives its prefix.
- The bound is the engine's own capacity, as far as what it reports bears that out: outputs, pinned blocks
  and other traffic share it.

- A run may hold an anchor, which says of a prompt through its end what the engine does
  (`policies.prefix_cache.chain_binding`).

A block costs 8 bytes and its share of a node.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from policies.prefix_cache.chain_binding import ChainBinding

SHRINK = 0.2  # of the capacity, when nothing of what was believed cached was
GROW = 0.005  # of the capacity, when all of it was
SMALLEST_SHARE = 1 / 256  # of the engine's capacity: enough to be proved wrong

Found = tuple[int, ChainBinding | None, int]  # leading blocks; the anchor and the stamp of the last of them
NOTHING: Found = (0, None, 0)


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Of one endpoint, in blocks: held, bound in use, and what the engine has in all."""

    blocks: int
    runs: int
    capacity: int
    nominal: int


class _IndexRun:
    """Consecutive blocks. `children` are runs that continue it: only its end can be continued."""

    __slots__ = ("anchor", "blocks", "children", "parent", "stamp")

    def __init__(self, blocks: array[int], parent: _IndexRun | None, stamp: int, children: int = 0) -> None:
        self.blocks = blocks
        self.parent = parent
        self.stamp = stamp  # the record that used it last
        self.children = children
        self.anchor: ChainBinding | None = None  # of the prompt through its end that was tied to its chain last


def _shared(blocks: array[int], hashes: Sequence[int], at: int) -> int:
    """How many leading `blocks` equal `hashes[at:]`, given that the first does."""
    high = min(len(blocks), len(hashes) - at)
    if blocks[high - 1] == hashes[at + high - 1]:
        return high
    low, high = 1, high - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if blocks[middle - 1] == hashes[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class _Cache:
    """The blocks of one endpoint."""

    __slots__ = ("capacity", "nominal", "order", "runs", "share", "size")

    def __init__(self, capacity: int) -> None:
        self.runs: dict[int, _IndexRun] = {}  # by first hash
        self.order: OrderedDict[_IndexRun, None] = OrderedDict()  # least recently used first; children before parents
        self.size = 0
        self.share = 1.0  # of the engine's capacity, that is borne out
        self.nominal = self.capacity = capacity

    def path(self, hashes: Sequence[int]) -> tuple[list[_IndexRun], int, int]:
        """The runs that begin the prompt, how many blocks they share with it, and how many the last one has beyond."""
        path, at, size, runs = [], 0, len(hashes), self.runs
        while at < size and (run := runs.get(hashes[at])) is not None:
            path.append(run)
            blocks = run.blocks
            end = at + len(blocks)
            if end > size or blocks[-1] != hashes[end - 1]:
                at += _shared(blocks, hashes, at)
                return path, at, end - at
            at = end
        return path, at, 0

    def record(self, hashes: Sequence[int], stamp: int) -> tuple[int, ChainBinding | None]:
        """How many of the blocks were held before, and their anchor."""
        path, depth, surplus = self.path(hashes)
        anchor = path[-1].anchor if path else None
        if surplus:
            path[-1] = self._split(path[-1], len(path[-1].blocks) - surplus)
        if depth < len(hashes):
            self._append(path, hashes, depth, stamp)
        for run in reversed(path):
            run.stamp = stamp
            self.order.move_to_end(run)
        if self.size > self.capacity:
            self.evict()
        return depth, anchor

    def _split(self, run: _IndexRun, at: int) -> _IndexRun:
        """Cut a run in two; the lower part stays where it is in the order."""
        upper = _IndexRun(run.blocks[:at], run.parent, run.stamp, children=1)
        upper.anchor = run.anchor
        self.runs[run.blocks[0]] = upper
        run.blocks, run.parent = run.blocks[at:], upper
        self.runs[run.blocks[0]] = run
        self.order[upper] = None
        return upper

    def _append(self, path: list[_IndexRun], hashes: Sequence[int], depth: int, stamp: int) -> None:
        parent = path[-1] if path else None
        fresh = hashes[depth:]
        if not isinstance(fresh, array):
            fresh = array("Q", fresh)
        self.size += len(fresh)
        if parent is not None and not parent.children:
            parent.blocks.extend(fresh)
            return
        if parent is not None:
            parent.children += 1
        run = _IndexRun(fresh, parent, stamp)
        self.runs[fresh[0]] = run
        self.order[run] = None
        path.append(run)

    def fit(self, nominal: int, share: float) -> None:
        """Keep to this share of the engine's capacity."""
        self.nominal, self.share = nominal, min(max(share, SMALLEST_SHARE), 1.0)
        self.capacity = max(1, round(nominal * self.share))
        self.evict()

    def evict(self) -> None:
        while (excess := self.size - self.capacity) > 0:
            oldest = next(iter(self.order))
            self.shorten(oldest, max(0, len(oldest.blocks) - excess))

    def shorten(self, run: _IndexRun, keep: int) -> None:
        """Drop the tail of a run that nothing continues."""
        self.size -= len(run.blocks) - keep
        if keep:
            del run.blocks[keep:]
            return
        del self.runs[run.blocks[0]], self.order[run]
        if run.parent is not None:
            run.parent.children -= 1


class PrefixIndex:
    """Beliefs about the prefix caches of many endpoints."""

    __slots__ = ("_caches", "_default", "_stamp")

    def __init__(self, blocks: int = 25_000) -> None:
        self._caches: dict[str, _Cache] = {}
        self._default = blocks
        self._stamp = 0

    def record(self, endpoint_id: str, hashes: Sequence[int]) -> int:
        """The endpoint is given this prompt. The stamp names this record to `trim`."""
        return self.enter(endpoint_id, hashes)[2]

    def enter(self, endpoint_id: str, hashes: Sequence[int]) -> Found:
        """The same; how many blocks it held before, their anchor, and the stamp of the record."""
        self._stamp = stamp = self._stamp + 1
        cache = self._caches.get(endpoint_id) or self._cache(endpoint_id)
        depth, anchor = cache.record(hashes, stamp)
        return depth, anchor, stamp

    def depth(self, endpoint_id: str, hashes: Sequence[int]) -> int:
        """How many leading blocks of the prompt the endpoint holds."""
        return self.find(endpoint_id, hashes)[0]

    def find(self, endpoint_id: str, hashes: Sequence[int]) -> Found:
        """That, and the anchor and the stamp of the last of these blocks.

        One call for each endpoint of each decision: `_Cache.path` without the path.
        """
        cache = self._caches.get(endpoint_id)
        if cache is None or not hashes or (run := cache.runs.get(hashes[0])) is None:
            return NOTHING
        at, size, runs = 0, len(hashes), cache.runs
        while True:
            blocks = run.blocks
            end = at + len(blocks)
            if end > size or blocks[-1] != hashes[end - 1]:
                return at + _shared(blocks, hashes, at), run.anchor, run.stamp
            if end == size or (following := runs.get(hashes[end])) is None:
                return end, run.anchor, run.stamp
            run, at = following, end

    def bind(self, endpoint_id: str, hashes: Sequence[int], anchor: ChainBinding | None) -> None:
        """The endpoint was given these blocks, and this is what it made of them."""
        self.record(endpoint_id, hashes)
        path, _, _ = self._cache(endpoint_id).path(hashes)
        for run in path:
            run.anchor = anchor

    def unbind(self, endpoint_id: str) -> None:
        """What the engine said is void: what was sent there stands."""
        for run in self._cache(endpoint_id).order:
            run.anchor = None

    def trim(self, endpoint_id: str, hashes: Sequence[int], depth: int, stamp: int) -> None:
        """The prompt was not computed there after all: forget its blocks past `depth`, unless used since."""
        cache = self._caches.get(endpoint_id)
        if cache is None:
            return
        path, shared, surplus = cache.path(hashes)
        end = shared + surplus
        for run in reversed(path):
            if run.stamp != stamp or run.children or end <= depth:
                return
            end -= len(run.blocks)
            cache.shorten(run, max(0, depth - end))

    def confirm(self, endpoint_id: str, believed: int, reported: int) -> None:
        """The engine says how many of the tokens believed cached were: the bound follows what is borne out."""
        cache = self._cache(endpoint_id)
        if reported >= believed and cache.share == 1.0:
            return
        if reported < believed:
            factor = 1 - SHRINK * (believed - reported) / believed
        else:
            factor = 1 + GROW
        cache.fit(cache.nominal, cache.share * factor)

    def clear(self, endpoint_id: str) -> None:
        """The endpoint lost its cache."""
        if (cache := self._caches.get(endpoint_id)) is not None:
            self._caches[endpoint_id] = _Cache(cache.nominal)

    def resize(self, endpoint_id: str, blocks: int) -> None:
        """The endpoint holds so many blocks in all."""
        cache = self._cache(endpoint_id)
        cache.fit(blocks, cache.share)

    def remove(self, endpoint_id: str) -> None:
        """The endpoint is gone for good."""
        self._caches.pop(endpoint_id, None)

    def statistics(self, endpoint_id: str) -> PrefixStatistics:
        cache = self._cache(endpoint_id)
        return PrefixStatistics(cache.size, len(cache.order), cache.capacity, cache.nominal)

    def _cache(self, endpoint_id: str) -> _Cache:
        cache = self._caches.get(endpoint_id)
        if cache is None:
            cache = self._caches[endpoint_id] = _Cache(self._default)
        return cache
