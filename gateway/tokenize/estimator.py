"""What a prompt costs and which prefix blocks it has, for every pool of a route, before any engine sees it.

Rules:
- What was read before is not read again. A prompt is recognised part by part from its beginning, and its first
  unknown part piece by piece, so a conversation's next turn costs its new text; text that comes back behind
  another beginning costs its block hashes, not its tokenising.
- Small new text is read here and now, with no task switch; large new text in a thread (tokenising gives
  up the GIL). Threads only compute: caches are changed on the event loop alone.
- Cache groups share nothing, not even tokenised text: a tenant could time what another had sent.
- Prompts are remembered as digests, block hashes and token ids, bounded in bytes, never as text.

Pools with the same tokenizer, block size and template see a prompt the same way: that is a lane.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from gateway.tokenize.incremental import (
    Position,
    Read,
    Tail,
    TokenizerConfig,
    effort,
    lane_of,
    open_rest,
    read_on,
    recognise,
)
from gateway.tokenize.lru import Lru
from gateway.tokenize.prefix_blocks import Prefix
from gateway.tokenize.prompt import Prompt, prompt_of
from gateway.tokenize.tokenizers import Encoder, encoder
from policies.latency.token_scale import PER_MESSAGE
from policies.types import PoolEstimate, PrefixBlocks, PromptEstimate

__all__ = ["Estimator", "EstimatorStatistics", "PoolTokenizer", "Prompt", "prompt_of"]

Entry = TypeVar("Entry")

OFFLOAD = 10_000  # bytes of text to be tokenised: 0.4 ms
OPEN, PART = 200_000, 500  # bytes of JSON to be opened: 0.6 ms; as many as a part costs otherwise
AT_ONCE = 1_000  # entries of a cache
CACHE = 64_000_000  # bytes
WORKERS = 2  # threads
PREFIX_OVERHEAD, TOKENS_OVERHEAD = 530, 260  # bytes an entry takes besides its hashes and ids (tracemalloc)


@dataclass(frozen=True, slots=True)
class PoolTokenizer:
    """How one pool reads a prompt. `template`: tokens that its chat template adds to a message."""

    name: str
    tokenizer: str = "o200k_base"
    block_size: int = 16
    template: int = int(PER_MESSAGE)


@dataclass(frozen=True, slots=True)
class EstimatorStatistics:
    """What the caches hold, and may hold."""

    entries: int
    bytes: int
    limit_bytes: int


class Scale(Protocol):
    """A pool's correction of counts, learned from what its engines report
    (`policies.latency.token_scale.TokenScale`)."""

    def correct(self, text_tokens: int, messages: int) -> int: ...


class _Task(NamedTuple):
    """One estimate under way: how far the prompt is known in each lane, and the ids of what had to be tokenised."""

    prompt: Prompt
    lanes: Mapping[str, TokenizerConfig]  # by pool
    cache_group: str
    output_tokens: int
    places: dict[TokenizerConfig, Position]
    texts: dict[int, bytes]


class Estimator:
    """One per worker. `pools` are those of the config; `scale` gives a pool's current correction."""

    def __init__(
        self,
        pools: Iterable[PoolTokenizer],
        scale: Callable[[str], Scale],
        *,
        encoders: Callable[[str], Encoder] = encoder,
        offload_bytes: int = OFFLOAD,
        open_bytes: int = OPEN,
        cache_bytes: int = CACHE,
        executor: Executor | None = None,
    ) -> None:
        self._pools: dict[str, PoolTokenizer] = {}
        self._lanes: dict[str, TokenizerConfig] = {}
        self.reload(pools)
        self._scale = scale
        self._encoders = encoders
        self._offload_bytes, self._open_bytes = offload_bytes, open_bytes
        self._prefixes: Lru[Prefix] = Lru(cache_bytes // 2, _prefix_bytes)
        self._tokens: Lru[bytes] = Lru(cache_bytes // 2, _tokens_bytes)
        self.executor = executor or ThreadPoolExecutor(WORKERS, "estimator")

    def reload(self, pools: Iterable[PoolTokenizer]) -> None:
        """Another configuration. A pool that is told the same keeps the block size that its engines said; one that is
        gone is still known to whoever has chosen its route already."""
        for pool in pools:
            if self._pools.get(pool.name) != pool:
                self._pools[pool.name] = pool
                self._lanes[pool.name] = lane_of(pool.tokenizer, pool.block_size, pool.template)

    def warm(self) -> None:
        """Load every tokenizer (0.2 s for o200k_base), so that no request has to."""
        for lane in self._lanes.values():
            self._encoders(lane.tokenizer).count("warm")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    def set_block_size(self, pool: str, tokens: int) -> None:
        """The pool's engines said their block size."""
        known = self._lanes[pool]
        self._lanes[pool] = lane_of(known.tokenizer, tokens, known.template)

    def statistics(self) -> EstimatorStatistics:
        prefixes, tokens = self._prefixes, self._tokens
        return EstimatorStatistics(
            len(prefixes) + len(tokens), prefixes.bytes + tokens.bytes, prefixes.limit + tokens.limit
        )

    async def estimate(
        self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int
    ) -> PromptEstimate:
        """The prompt as each of these pools sees it. Does not yield to the loop unless much of it is new."""
        task = self._recall(prompt, pools, cache_group, output_tokens)
        opened = self._open(task)
        if opened is not None and self._is_small(opened):
            return self._conclude(task, self._read(task, opened))
        read = await asyncio.get_running_loop().run_in_executor(self.executor, self._read, task, opened)
        return await self._conclude_in_turns(task, read)

    def estimate_now(
        self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int
    ) -> PromptEstimate | None:
        """The same for callers that cannot wait. None: much of it is new, use `estimate`."""
        task = self._recall(prompt, pools, cache_group, output_tokens)
        opened = self._open(task)
        if opened is not None and self._is_small(opened):
            return self._conclude(task, self._read(task, opened))
        return None

    # -- on the event loop -------------------------------------------------------------------

    def _recall(self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int) -> _Task:
        lanes = {pool: self._lanes[pool] for pool in pools}
        find = self._prefixes.get
        places = {each: recognise(each, prompt, cache_group, find) for each in dict.fromkeys(lanes.values())}
        return _Task(prompt, lanes, cache_group, output_tokens, places, {})

    def _open(self, task: _Task) -> list[Tail] | None:
        """What is left in the lanes in which something is. None: even to look at it is much."""
        prompt, parts = task.prompt, len(task.prompt.digests)
        left = [place for place in task.places.values() if len(place.blocks) < parts]
        if left and prompt.size + PART * parts > self._open_bytes:
            known = min(len(place.blocks) for place in left)
            if prompt.size_from(known) + PART * (parts - known) > self._open_bytes:
                return None
        find, find_ids = self._prefixes.get, self._tokens.get
        return [open_rest(place, prompt, task.cache_group, find, find_ids) for place in left]

    def _is_small(self, opened: list[Tail]) -> bool:
        return sum(map(effort, opened)) <= self._offload_bytes

    def _conclude(self, task: _Task, read: list[Read]) -> PromptEstimate:
        for _, added in read:
            self._prefixes.put_all(added)
        self._tokens.put_all(task.texts.items())
        return self._estimate(task, read)

    async def _conclude_in_turns(self, task: _Task, read: list[Read]) -> PromptEstimate:
        """The same, half a millisecond at a time."""
        for _, added in read:
            for some in _several(added):
                self._prefixes.put_all(some)
                await asyncio.sleep(0)
        for texts in _several(list(task.texts.items())):
            self._tokens.put_all(texts)
            await asyncio.sleep(0)
        return self._estimate(task, read)

    def _estimate(self, task: _Task, read: list[Read]) -> PromptEstimate:
        task.prompt.forget()
        for place, _ in read:
            task.places[place.lane] = place
        hashes = {lane: array("Q", b"".join(place.blocks)) for lane, place in task.places.items()}
        estimates = {}
        for pool, lane in task.lanes.items():
            end, messages = task.places[lane].end, task.prompt.messages
            tokens = self._scale(pool).correct(end.text, messages)
            scale = tokens / end.tokens if end.tokens else 1.0
            blocks = PrefixBlocks(hashes[lane], lane.block_size, scale)
            estimates[pool] = PoolEstimate(tokens, blocks, end.text, messages)
        return PromptEstimate(estimates, task.output_tokens)

    # -- on the event loop or in a thread ----------------------------------------------------

    def _read(self, task: _Task, opened: list[Tail] | None) -> list[Read]:
        """What is left, in every lane. Changes nothing but the task's own `texts`."""
        if opened is None:
            find, find_ids = self._prefixes.peek, self._tokens.peek
            opened = [open_rest(place, task.prompt, task.cache_group, find, find_ids) for place in task.places.values()]
        return [read_on(each, self._encoders(each.place.lane.tokenizer), task.texts) for each in opened]


def _several(entries: list[Entry]) -> Iterator[list[Entry]]:
    return (entries[at : at + AT_ONCE] for at in range(0, len(entries), AT_ONCE))


def _prefix_bytes(prefix: Prefix) -> int:
    return PREFIX_OVERHEAD + len(prefix.blocks) + len(prefix.tail)


def _tokens_bytes(ids: bytes) -> int:
    return TOKENS_OVERHEAD + len(ids)
