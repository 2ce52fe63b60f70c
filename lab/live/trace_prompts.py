"""Prompts for a trace, which holds lengths and shared prefixes, and no text.

Rules:
- A block of a trace becomes as many random words as it has tokens, the same for the same hash: prompts share what the
  recorded prompts shared, and a cache can find it. What follows the last full block is unique.
- All blocks of a trace have the same length, or equal hashes would not begin at the same place.
- Text differs from run to run, so that no cache holds it from the run before.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from secrets import randbits
from typing import Any

from gateway.cli.live.probe import random_text
from lab.traffic.traces import BLOCK, Arrival

BLOCKS = 8_192  # texts of blocks that are kept, of 2.5 kB


class TracePrompts:
    """`block`: tokens per hash. `run`: number of the run; None: one that was never used."""

    def __init__(self, block: int = BLOCK, run: int | None = None) -> None:
        self._words = block
        self._run = randbits(64) if run is None else run
        self._unique = Random(f"{self._run} unique")
        self._block = lru_cache(BLOCKS)(self._block_text)

    def body(self, arrival: Arrival) -> dict[str, Any]:
        """Body of a chat with a prompt of the recorded length, of one message."""
        blocks = arrival.hashes[: arrival.prompt_tokens // self._words]
        rest = arrival.prompt_tokens - len(blocks) * self._words
        texts = [*map(self._block, blocks), random_text(max(rest, 1), self._unique)]
        return {"messages": [{"role": "user", "content": " ".join(texts)}]}

    def _block_text(self, block: int) -> str:
        return random_text(self._words, Random(f"{self._run} {block}"))
