"""The KV cache of a simulated engine: blocks with reference counts, found by chained hashes.

Rules, as in vLLM's block pool (vllm/v1/core/block_pool.py, kv_cache_manager.py):
- A block is *private* (being filled; counted, not named) or *cached* (full, named by hash).
- A cached block without a user is *idle*: still a hit, and free to be allocated.
- Blocks without content are allocated first, then idle blocks, least recently used first.
- A request frees blocks tail first, so the end of a prefix is evicted before the start.
- With `host` blocks in the CPU's memory, a block that is evicted stays there, least recently used first out. An engine
  loads it from there; the copy stays. (vLLM copies each block when it is computed: as many hits.)
- Two requests with the same computed block share the block afterwards. (vLLM keeps both copies until a copy is freed;
  the difference is a few blocks for the time of a request.)
Invariant: capacity = spare + idle + used + private.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class CacheChange:
    """A KV event: `blocks` are stored in a medium, or removed from it. `session`: request that computed them."""

    medium: str  # gpu or cpu
    stored: bool
    blocks: Sequence[Hashable]
    parent: Hashable | None = None
    session: str = ""


class PrefixCache:
    """`capacity` blocks, shared by the running requests of an engine. `changes`: KV events; None: nobody listens."""

    def __init__(self, capacity: int, host: int = 0) -> None:
        self.capacity = capacity
        self.changes: list[CacheChange] | None = None
        self._host_capacity = host
        self._host: OrderedDict[Hashable, None] = OrderedDict()
        self._spare = capacity
        self._idle: OrderedDict[Hashable, None] = OrderedDict()
        self._used: dict[Hashable, int] = {}  # reference counts

    @property
    def free(self) -> int:
        """Blocks which can be allocated now."""
        return self._spare + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the blocks held by running requests, 0 to 1 (vllm:kv_cache_usage_perc)."""
        return 1.0 - self.free / self.capacity

    def __contains__(self, block: Hashable) -> bool:
        return block in self._used or block in self._idle

    def in_use(self, chain: Sequence[Hashable]) -> int:
        """Number of these blocks held by running requests, which need no further room."""
        return sum(block in self._used for block in chain)

    def match(self, chain: Sequence[Hashable], limit: int) -> int:
        """Number of leading blocks of `chain`, at most `limit`, which are cached."""
        used, idle = self._used, self._idle
        hit = 0
        for block in islice(chain, limit):
            if block not in used and block not in idle:
                break
            hit += 1
        return hit

    def loadable(self, chain: Sequence[Hashable], hit: int, limit: int) -> int:
        """Number of blocks after the first `hit`, up to `limit`, which can be loaded."""
        host, found = self._host, 0
        for block in islice(chain, hit, limit) if host else ():
            if block not in host:
                break
            host.move_to_end(block)
            found += 1
        return found

    def acquire(self, chain: Sequence[Hashable], hit: int, total: int) -> bool:
        """Hold the first `hit` blocks of `chain` and allocate `total - hit` private blocks; all or nothing."""
        used, idle = self._used, self._idle
        revived = [block for block in islice(chain, hit) if block in idle]
        if total - hit > self.free - len(revived):
            return False
        for block in revived:
            del idle[block]
            used[block] = 0
        for block in islice(chain, hit):
            used[block] += 1
        self.allocate(total - hit)
        return True

    def allocate(self, count: int) -> None:
        """Allocate `count` private blocks; `free` must be at least `count`."""
        spared = min(count, self._spare)
        self._spare -= spared
        for _ in range(count - spared):
            self._evict(self._idle.popitem(last=False)[0])

    def _evict(self, block: Hashable) -> None:
        if self._host_capacity:
            self._host[block] = None
            self._host.move_to_end(block)
            self._note("cpu", True, block)
            if len(self._host) > self._host_capacity:
                self._note("cpu", False, self._host.popitem(last=False)[0])
        self._note("gpu", False, block)

    def _note(self, medium: str, stored: bool, block: Hashable) -> None:
        if self.changes is not None:
            self.changes.append(CacheChange(medium, stored, (block,)))

    def commit(self, blocks: Sequence[Hashable], parent: Hashable | None = None, request: Hashable = "") -> None:
        """Name full private blocks of a request, which follow `parent`, for hits of other requests."""
        if self.changes is not None:
            self.changes.append(CacheChange("gpu", True, blocks, parent, str(request)))
        used, idle = self._used, self._idle
        for block in blocks:
            if block in used or block in idle:  # the second copy becomes spare
                self._spare += 1
                idle.pop(block, None)
            used[block] = used.get(block, 0) + 1

    def release(self, blocks: Sequence[Hashable], private: int) -> None:
        """Free a request's cached `blocks` (in prompt order) and `private` others."""
        used, idle = self._used, self._idle
        for block in reversed(blocks):
            count = used[block] - 1
            if count:
                used[block] = count
            else:
                del used[block]
                idle[block] = None
        self._spare += private

    def drop_idle(self) -> None:
        """Forget the blocks that no request holds."""
        self._spare += len(self._idle)
        self._idle.clear()
        self._host.clear()

    def clear(self) -> None:
        """Empty the cache: the engine restarted."""
        self._host.clear()
        self._idle.clear()
        self._used.clear()
        self._spare = self.capacity
