"""Estimates prompt tokens and prefix blocks for every pool of a route, before any engine sees the prompt.

The prefix blocks are exact, and so are the counts of text that was counted before. The rest is estimated, with a
margin, and counted once the request has been sent: `count`. Pools with equal tokenizer settings share the work.

`DeferredCounts` does so between other callbacks of the event loop. Its rules:
- A slice lasts SLICE seconds, or one segment of a text if that takes longer. The next one follows when the slices have
  taken SHARE of the time at most: under load the counts wait, and requests do not.
- What waits is bounded in bytes. Beyond, a prompt is dropped: it stays estimated, and those before it are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from math import ceil
from time import perf_counter

from gateway.tokenize.prompt_reader import Position, PromptReader, PromptText, TokenizerConfig
from gateway.tokenize.tokenizers import Encoder, encoder
from policies.latency.token_counts import TokenScale
from policies.types import PoolEstimate, PromptEstimate

CACHE = 64_000_000  # bytes
WORKERS = 2  # threads

Places = Sequence[tuple[Position, Sequence[str]]]  # in a prompt, of pools with equal settings


class Estimator:
    """Shared by a worker's requests. `scale` gives a pool's correction of counts, learned from reported usage."""

    def __init__(
        self,
        pools: Mapping[str, TokenizerConfig],
        scale: Callable[[str], TokenScale],
        *,
        encoders: Callable[[str], Encoder] = encoder,
        cache_bytes: int = CACHE,
        executor: Executor | None = None,
    ) -> None:
        self._configs: dict[str, TokenizerConfig] = {}
        self._text_configs: dict[str, TokenizerConfig] = {}  # the same for prompts without media
        self.reload(pools)
        self._scale = scale
        self._encoders = encoders
        self._reader = PromptReader(encoders, cache_bytes)
        self.executor = executor or ThreadPoolExecutor(WORKERS, "estimator")

    def reload(self, pools: Mapping[str, TokenizerConfig]) -> None:
        """Apply another configuration. A removed pool stays known to requests already routed."""
        self._configs.update(pools)
        self._text_configs.update({name: config._replace(media=None) for name, config in pools.items()})

    def warm(self) -> None:
        """Load every tokenizer (0.2 s for o200k_base), so no request has to."""
        for config in self._configs.values():
            self._encoders(config.tokenizer).count("warm")

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)

    @property
    def cached_bytes(self) -> int:
        return self._reader.cached_bytes

    def estimate(self, text: PromptText, output_tokens: int = 1) -> PromptEstimate:
        """The prompt as each pool sees it. `output_tokens`: expected of the answer."""
        return self.read(self.recognise(text), text, output_tokens)

    def recognise(self, text: PromptText) -> Places:
        """The ends of what is known of the prompt."""
        return [(self._reader.recognise(config, text), pools) for config, pools in self._settings(text).items()]

    def unread(self, places: Places, text: PromptText) -> int:
        """Work of `read`, in bytes of long text."""
        return max(self._reader.unread(position, text) for position, _ in places)

    def read(self, places: Places, text: PromptText, output_tokens: int) -> PromptEstimate:
        """The estimate, from these places on."""
        estimates: dict[str, PoolEstimate] = {}
        for position, pools in places:
            self._reader.read(position, text)
            for pool in pools:
                estimates[pool] = self._for_pool(pool, position, text)
        text.prompt.decoded = {}  # a request outlives the estimate, and holds the text in the body
        return PromptEstimate(estimates, output_tokens)

    def count(self, text: PromptText) -> Iterator[None]:
        """Count the prompt exactly: an estimate after it has no margin. Yields after each segment and part."""
        for config in self._settings(text):
            yield from self._reader.count(self._reader.recognise(config, text, counted=True), text)

    def _settings(self, text: PromptText) -> Mapping[TokenizerConfig, list[str]]:
        """Pools, grouped by equal tokenizer settings for this prompt."""
        configs = self._configs if text.prompt.media else self._text_configs
        names: dict[TokenizerConfig, list[str]] = {}
        for pool in text.pools:
            variant = text.variants.get(pool)
            config = configs[pool] if variant is None else configs[pool]._replace(variant=variant)
            names.setdefault(config, []).append(pool)
        return names

    def _for_pool(self, pool: str, position: Position, text: PromptText) -> PoolEstimate:
        end = position.end
        tokens = self._scale(pool).correct(end.text, text.prompt.messages)
        blocks = position.blocks(tokens)
        return PoolEstimate(
            tokens,
            blocks,
            round(end.text),
            text.prompt.messages,
            position.config.variant,
            job_class=text.job_class,
            margin=ceil(end.margin * tokens / end.tokens) if end.margin else 0,
            counted_text=partial(self._reader.counted_text, position.digest),
            outline=partial(self._reader.outline, position, text, tokens, blocks),
        )


SLICE = 0.0005  # s
SHARE = 0.05  # of the time
BACKLOG = 8_000_000  # bytes of prompts: more than a caller can send before the next slice

log = logging.getLogger("firsttoken")


class DeferredCounts:
    """The counts of an event loop. `dropped`: prompts so far."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self.dropped = 0
        self._limit = backlog
        self._waiting: deque[tuple[int, Iterator[None]]] = deque()
        self._bytes = 0
        self._scheduled = False

    @property
    def bytes(self) -> int:
        """Of the prompts that wait."""
        return self._bytes

    def add(self, size: int, count: Iterator[None]) -> None:
        """`count`: counts a segment at each step. `size`: bytes that it keeps in memory."""
        if self._bytes + size > self._limit:
            self.dropped += 1
            return
        self._waiting.append((size, count))
        self._bytes += size
        if not self._scheduled:
            self._schedule(0.0)

    def _remove(self) -> None:
        size, _ = self._waiting.popleft()
        self._bytes -= size

    def _schedule(self, delay: float) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(delay, self._slice)

    def _slice(self) -> None:
        self._scheduled = False
        started = perf_counter()
        while self._waiting and perf_counter() - started < SLICE:
            self._step()
        if self._waiting:
            self._schedule((perf_counter() - started) * (1 / SHARE - 1))

    def _step(self) -> None:
        """A prompt that cannot be counted stays estimated: its request was sent."""
        try:
            next(self._waiting[0][1])
        except StopIteration:
            self._remove()
        except Exception:
            log.exception("a prompt cannot be counted")
            self._remove()
