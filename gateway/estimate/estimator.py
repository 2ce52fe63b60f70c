"""What a prompt costs and which prefix blocks it has, for every pool of a route, before any engine sees it.

Rules:
- What was read before is not read again. A prompt is recognised piece by piece from its beginning, so a
  conversation's next turn costs its new text; text that comes back behind another beginning costs its
  block hashes, not its tokenising.
- Small new text is read here and now, with no task switch; large new text in a thread (tokenising gives
  up the GIL). Threads only compute: caches are changed on the event loop alone.
- Cache groups share nothing, not even tokenised text: a tenant could time what another had sent.
- Prompts are remembered as digests, block hashes and token ids, bounded in bytes, never as text.

Pools with the same tokenizer, block size and template see a prompt the same way: that is a lane.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol
from zlib import crc32

from gateway.estimate.encoders import Encoder, encoder
from gateway.estimate.lru import Lru
from gateway.estimate.prefixes import Prefix, extend, start
from gateway.estimate.prompt import NOT_TEXT, Piece, Prompt, Span, prompt_of
from policies.facts import PoolEstimate, PrefixBlocks, PromptEstimate
from policies.tokens import PER_MESSAGE

__all__ = ["Estimator", "EstimatorStatistics", "PoolTokenizer", "Prompt", "prompt_of"]

OFFLOAD = 10_000  # bytes of new text: 0.5 ms to read
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
    """A pool's correction of counts, learned from what its engines report (`policies.tokens.TokenScale`)."""

    def correct(self, text_tokens: int, messages: int) -> int: ...


class _Lane(NamedTuple):
    tokenizer: str
    block_size: int
    template: int


class _Reading(NamedTuple):
    """A prompt in one lane: the known beginning, and what is left to read."""

    lane: _Lane
    blocks: list[bytes]
    prefix: Prefix
    digest: int  # of the pieces up to there
    rest: Sequence[Piece]


class _Task(NamedTuple):
    """One estimate under way. `texts`: packed ids by tokenizer and text, of what is left to read."""

    prompt: Prompt
    lanes: Mapping[str, _Lane]  # by pool
    cache_group: str
    output_tokens: int
    readings: list[_Reading]
    texts: dict[tuple[str, str], bytes]


_Read = list[list[tuple[int, Prefix]]]  # by reading: digest and prefix after every piece that was left


class Estimator:
    """One per worker. `pools` are those of the config; `scale` gives a pool's current correction."""

    def __init__(
        self,
        pools: Iterable[PoolTokenizer],
        scale: Callable[[str], Scale],
        *,
        encoders: Callable[[str], Encoder] = encoder,
        offload_bytes: int = OFFLOAD,
        cache_bytes: int = CACHE,
        executor: Executor | None = None,
    ) -> None:
        self._lanes = {pool.name: _Lane(pool.tokenizer, pool.block_size, pool.template) for pool in pools}
        self._scale = scale
        self._encoders = encoders
        self._offload_bytes = offload_bytes
        self._prefixes: Lru[Prefix] = Lru(cache_bytes // 2, _prefix_bytes)
        self._tokens: Lru[bytes] = Lru(cache_bytes // 2, _tokens_bytes)
        self._executor = executor or ThreadPoolExecutor(WORKERS, "estimator")

    def warm(self) -> None:
        """Load every tokenizer (0.2 s for o200k_base), so that no request has to."""
        for lane in self._lanes.values():
            self._encoders(lane.tokenizer).count("warm")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def set_block_size(self, pool: str, tokens: int) -> None:
        """The pool's engines said their block size."""
        self._lanes[pool] = self._lanes[pool]._replace(block_size=tokens)

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
        if self._is_large(task):
            loop = asyncio.get_running_loop()
            return self._conclude(task, await loop.run_in_executor(self._executor, _read, task, self._encoders))
        return self._conclude(task, _read(task, self._encoders))

    def estimate_now(
        self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int
    ) -> PromptEstimate | None:
        """The same for callers that cannot wait. None: much of it is new, use `estimate`."""
        task = self._recall(prompt, pools, cache_group, output_tokens)
        return None if self._is_large(task) else self._conclude(task, _read(task, self._encoders))

    def _recall(self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int) -> _Task:
        lanes = {pool: self._lanes[pool] for pool in pools}
        readings = [self._recognise(lane, prompt.pieces, cache_group) for lane in dict.fromkeys(lanes.values())]
        task = _Task(prompt, lanes, cache_group, output_tokens, readings, {})
        for reading in readings:
            for _, span in reading.rest:
                if isinstance(span, str):
                    self._recall_text(task, reading.lane.tokenizer, span)
        return task

    def _recall_text(self, task: _Task, tokenizer: str, text: str) -> None:
        ids = self._tokens.get(hash((tokenizer, task.cache_group, text)))
        if ids is not None:
            task.texts[tokenizer, text] = ids

    def _recognise(self, lane: _Lane, pieces: Sequence[Piece], cache_group: str) -> _Reading:
        blocks: list[bytes] = []
        digest, prefix, known = hash((lane, cache_group)), start(cache_group), self._prefixes.get
        for at, piece in enumerate(pieces):
            key = hash((digest, piece))
            found = known(key)
            if found is None:
                return _Reading(lane, blocks, prefix, digest, pieces[at:])
            digest, prefix = key, found
            blocks.append(found.blocks)
        return _Reading(lane, blocks, prefix, digest, ())

    def _is_large(self, task: _Task) -> bool:
        return sum(_bytes(span) for reading in task.readings for _, span in reading.rest) > self._offload_bytes

    def _conclude(self, task: _Task, read: _Read) -> PromptEstimate:
        for (tokenizer, text), ids in task.texts.items():
            self._tokens.put(hash((tokenizer, task.cache_group, text)), ids)
        ends = {
            reading.lane: self._remember(reading, added) for reading, added in zip(task.readings, read, strict=True)
        }
        estimates = {
            pool: self._of_pool(pool, lane, task.prompt.messages, *ends[lane]) for pool, lane in task.lanes.items()
        }
        return PromptEstimate(estimates, task.output_tokens)

    def _remember(self, reading: _Reading, added: list[tuple[int, Prefix]]) -> tuple[array[int], Prefix]:
        blocks, prefix = reading.blocks, reading.prefix
        for digest, prefix in added:
            self._prefixes.put(digest, prefix)
            blocks.append(prefix.blocks)
        hashes = array("Q")
        hashes.frombytes(b"".join(blocks))
        return hashes, prefix

    def _of_pool(self, pool: str, lane: _Lane, messages: int, hashes: array[int], prefix: Prefix) -> PoolEstimate:
        tokens = self._scale(pool).correct(prefix.text, messages)
        scale = tokens / prefix.tokens if prefix.tokens else 1.0
        return PoolEstimate(tokens, PrefixBlocks(hashes, lane.block_size, scale), prefix.text, messages)


def _read(task: _Task, encoders: Callable[[str], Encoder]) -> _Read:
    """Read what is left, in every lane. Changes nothing but the task's own `texts`."""
    return [_read_on(reading, task.texts, encoders(reading.lane.tokenizer)) for reading in task.readings]


def _read_on(reading: _Reading, texts: dict[tuple[str, str], bytes], encoder: Encoder) -> list[tuple[int, Prefix]]:
    lane, _, prefix, digest, rest = reading
    added = []
    for piece in rest:
        role, ids = piece
        if isinstance(ids, str):
            text = lane.tokenizer, ids
            ids = texts.get(text) or texts.setdefault(text, array("I", encoder.encode(ids)).tobytes())
        digest = hash((digest, piece))
        prefix = extend(prefix, b"" if role is None else _opening(role, lane.template), ids, lane.block_size)
        added.append((digest, prefix))
    return added


@lru_cache(maxsize=256)
def _opening(role: str, tokens: int) -> bytes:
    """Ids that stand for what a chat template puts around a message of this role."""
    return array("I", [NOT_TEXT | crc32(role.encode())]).tobytes() * tokens


def _bytes(span: Span) -> int:
    """Of UTF-8, at most; of ids, as they are."""
    return len(span) if isinstance(span, bytes) or span.isascii() else 3 * len(span)


def _prefix_bytes(prefix: Prefix) -> int:
    return PREFIX_OVERHEAD + len(prefix.blocks) + len(prefix.tail)


def _tokens_bytes(ids: bytes) -> int:
    return TOKENS_OVERHEAD + len(ids)
