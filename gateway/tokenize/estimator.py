"""Estimates prompt tokens and prefix blocks for every pool of a route, before any engine sees the prompt.

recognise -> encode -> hash, once for all pools with the same tokenizer, block size and template
(`gateway.tokenize.incremental`). Rules:
- Known text is not read again. A conversation's next turn costs its new text; known text behind a new beginning costs
  its block hashes, not its encoding.
- Small new text is encoded here and now, with no task switch; large new text in a thread, as encoding releases the GIL.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from gateway.tokenize.incremental import IncrementalTokenizer, Position, Tail, TokenizerConfig, tokenizer_config
from gateway.tokenize.prompt import Prompt
from gateway.tokenize.tokenizers import Encoder, encoder
from policies.latency.token_scale import PER_MESSAGE, TokenScale
from policies.types import PoolEstimate, PrefixBlocks, PromptEstimate

OFFLOAD = 10_000  # bytes of text to be encoded: 0.4 ms
OPEN = 200_000  # bytes of JSON to be decoded: 0.6 ms
PART_EFFORT = 500  # bytes of JSON decoded in the time which a part takes besides
CACHE = 64_000_000  # bytes
WORKERS = 2  # threads


@dataclass(frozen=True, slots=True)
class PoolTokenizer:
    """Tokenizer settings of one pool. `template`: tokens which its chat template adds to a message."""

    name: str
    tokenizer: str = "o200k_base"
    block_size: int = 16
    template: int = int(PER_MESSAGE)


class Estimator:
    """One per worker. `scale` gives a pool's correction of counts, learned from the usage which its engines report."""

    def __init__(
        self,
        pools: Iterable[PoolTokenizer],
        scale: Callable[[str], TokenScale],
        *,
        encoders: Callable[[str], Encoder] = encoder,
        offload_bytes: int = OFFLOAD,
        open_bytes: int = OPEN,
        cache_bytes: int = CACHE,
        executor: Executor | None = None,
    ) -> None:
        self._pools: dict[str, PoolTokenizer] = {}
        self._configs: dict[str, TokenizerConfig] = {}
        self.reload(pools)
        self._scale = scale
        self._encoders = encoders
        self._offload_bytes = offload_bytes
        self._open_bytes = open_bytes
        self._tokenizer = IncrementalTokenizer(encoders, cache_bytes)
        self.executor = executor or ThreadPoolExecutor(WORKERS, "estimator")

    def reload(self, pools: Iterable[PoolTokenizer]) -> None:
        """Apply another configuration. An unchanged pool keeps the block size reported by its engines; a removed pool
        stays known to requests already routed."""
        for pool in pools:
            if self._pools.get(pool.name) != pool:
                self._pools[pool.name] = pool
                self._configs[pool.name] = tokenizer_config(pool.tokenizer, pool.block_size, pool.template)

    def warm(self) -> None:
        """Load every tokenizer (0.2 s for o200k_base), so that no request has to."""
        for config in self._configs.values():
            self._encoders(config.tokenizer).count("warm")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    def set_block_size(self, pool: str, tokens: int) -> None:
        """Apply the block size reported by the pool's engines."""
        known = self._configs[pool]
        self._configs[pool] = tokenizer_config(known.tokenizer, tokens, known.template)

    @property
    def cached_bytes(self) -> int:
        return self._tokenizer.cached_bytes

    async def estimate(
        self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int
    ) -> PromptEstimate:
        """The prompt as each of these pools sees it. Does not yield to the loop unless much of the prompt is new."""
        configs = {pool: self._configs[pool] for pool in pools}
        known = [self._tokenizer.recognise(config, prompt, cache_group) for config in dict.fromkeys(configs.values())]
        unread = [position for position in known if position.parts < len(prompt.digests)]
        read = await self._read_rest(unread, prompt, cache_group) if unread else []
        prompt.drop_decoded()
        ends = {position.config: position for position in [*known, *read]}
        hashes = {config: array("Q", b"".join(end.blocks)) for config, end in ends.items()}
        estimates = {
            pool: self._pool_estimate(pool, ends[config], hashes[config], prompt.messages)
            for pool, config in configs.items()
        }
        return PromptEstimate(estimates, output_tokens)

    async def _read_rest(self, positions: list[Position], prompt: Prompt, cache_group: str) -> list[Position]:
        """Read to the end of the prompt, in a thread where that would hold the loop."""

        def open_all() -> list[Tail]:
            return [self._tokenizer.open(position, prompt, cache_group) for position in positions]

        loop = asyncio.get_running_loop()
        if not self._is_small_to_open(prompt, min(position.parts for position in positions)):
            return await loop.run_in_executor(self.executor, lambda: self._read(open_all()))
        tails = open_all()
        if sum(tail.effort() for tail in tails) > self._offload_bytes:
            return await loop.run_in_executor(self.executor, self._read, tails)
        return self._read(tails)

    def _is_small_to_open(self, prompt: Prompt, known: int) -> bool:
        unknown = len(prompt.digests) - known
        return (
            prompt.size + PART_EFFORT * len(prompt.digests) <= self._open_bytes  # cheap to tell, and nearly always so
            or prompt.size_from(known) + PART_EFFORT * unknown <= self._open_bytes
        )

    def _read(self, tails: list[Tail]) -> list[Position]:
        return [self._tokenizer.read(tail) for tail in tails]

    def _pool_estimate(self, pool: str, end: Position, hashes: array[int], messages: int) -> PoolEstimate:
        counted, text = end.prefix.tokens, end.prefix.text
        tokens = self._scale(pool).correct(text, messages)
        scale = tokens / counted if counted else 1.0
        return PoolEstimate(tokens, PrefixBlocks(hashes, end.config.block_size, scale), text, messages)
