"""Estimates prompt tokens and prefix blocks for every pool of a route, before any engine sees the prompt.

recognise -> encode -> hash, once for all pools with equal tokenizer settings (`gateway.tokenize.incremental`). Rules:
- Known text is not read again. A conversation's next turn costs its new text; known text behind a new beginning costs
  its block hashes, not its encoding.
- Small new text is encoded here and now, with no task switch; large new text in a thread, as encoding releases the GIL.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace

from gateway.tokenize.incremental import IncrementalTokenizer, Position, Tail, TokenizerConfig
from gateway.tokenize.prompt import Prompt
from gateway.tokenize.tokenizers import Encoder, encoder
from policies.latency.token_counts import TokenScale
from policies.types import PoolEstimate, PrefixBlocks, PromptEstimate

OFFLOAD = 10_000  # bytes of text to be encoded: 0.4 ms
OPEN = 200_000  # bytes of JSON to be decoded: 0.6 ms
PART_EFFORT = 500  # bytes of JSON decoded in the time which a part takes besides
CACHE = 64_000_000  # bytes
WORKERS = 2  # threads


class Estimator:
    """Shared by a worker's requests. `scale` gives a pool's correction of counts, learned from reported usage."""

    def __init__(
        self,
        pools: Mapping[str, TokenizerConfig],
        scale: Callable[[str], TokenScale],
        *,
        encoders: Callable[[str], Encoder] = encoder,
        offload_bytes: int = OFFLOAD,
        open_bytes: int = OPEN,
        cache_bytes: int = CACHE,
        executor: Executor | None = None,
    ) -> None:
        self._pools: dict[str, TokenizerConfig] = {}  # as configured
        self._configs: dict[str, TokenizerConfig] = {}  # with the block sizes reported by engines
        self.reload(pools)
        self._scale = scale
        self._encoders = encoders
        self._offload_bytes = offload_bytes
        self._open_bytes = open_bytes
        self._tokenizer = IncrementalTokenizer(encoders, cache_bytes)
        self.executor = executor or ThreadPoolExecutor(WORKERS, "estimator")

    def reload(self, pools: Mapping[str, TokenizerConfig]) -> None:
        """Apply another configuration. An unchanged pool keeps the block size reported by its engines; a removed pool
        stays known to requests already routed."""
        changed = {name: config for name, config in pools.items() if self._pools.get(name) != config}
        self._pools.update(changed)
        self._configs.update(changed)

    def set_block_size(self, pool: str, tokens: int) -> None:
        """Apply the block size reported by the pool's engines."""
        self._configs[pool] = replace(self._configs[pool], block_size=tokens)

    def warm(self) -> None:
        """Load every tokenizer (0.2 s for o200k_base), so no request has to."""
        for config in self._configs.values():
            self._encoders(config.tokenizer).count("warm")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    @property
    def cached_bytes(self) -> int:
        return self._tokenizer.cached_bytes

    async def estimate(
        self, prompt: Prompt, pools: Sequence[str], cache_group: str, output_tokens: int
    ) -> PromptEstimate:
        """The prompt as each of these pools sees it. Does not yield to the loop unless much of the prompt is new."""
        names: dict[TokenizerConfig, list[str]] = {}
        for pool in pools:
            names.setdefault(self._configs[pool], []).append(pool)
        ends = [self._tokenizer.recognise(config, prompt, cache_group) for config in names]
        if any(position.parts < len(prompt.digests) for position in ends):
            ends = await self._read_rest(ends, prompt, cache_group)
        prompt.drop_decoded()
        estimates = {}
        for end, alike in zip(ends, names.values(), strict=True):
            hashes = array("Q", b"".join(end.blocks))
            estimates.update({pool: self._pool_estimate(pool, end, hashes, prompt.messages) for pool in alike})
        return PromptEstimate(estimates, output_tokens)

    async def _read_rest(self, positions: list[Position], prompt: Prompt, cache_group: str) -> list[Position]:
        """Read to the end of the prompt, in a thread where that would hold the loop."""

        def open_all() -> list[Tail]:
            return [self._tokenizer.open(position, prompt, cache_group) for position in positions]

        def read_all(tails: list[Tail]) -> list[Position]:
            return [self._tokenizer.read(tail) for tail in tails]

        loop = asyncio.get_running_loop()
        if not self._is_small_to_open(prompt, min(position.parts for position in positions)):
            return await loop.run_in_executor(self.executor, lambda: read_all(open_all()))
        tails = open_all()
        if sum(tail.effort() for tail in tails) > self._offload_bytes:
            return await loop.run_in_executor(self.executor, read_all, tails)
        return read_all(tails)

    def _is_small_to_open(self, prompt: Prompt, known: int) -> bool:
        parts = len(prompt.digests)
        if prompt.size + PART_EFFORT * parts <= self._open_bytes:  # cheap to tell, and nearly always so
            return True
        return prompt.size_from(known) + PART_EFFORT * (parts - known) <= self._open_bytes

    def _pool_estimate(self, pool: str, end: Position, hashes: array[int], messages: int) -> PoolEstimate:
        counted, text = end.prefix.tokens, end.prefix.text
        tokens = self._scale(pool).correct(text, messages)
        scale = tokens / counted if counted else 1.0
        return PoolEstimate(tokens, PrefixBlocks(hashes, end.config.block_size, scale), text, messages)
