"""Room in an engine's KV cache, by the engine's own report.

Rules, as in vLLM and SGLang:
- A prompt is admitted once its tokens fit into free blocks. Blocks become free as answers end, not as prefills do: the
  wait for blocks says nothing of the speed of prefills.
- Answers in progress need further blocks: RESERVE is not counted as room. Beyond it, the newest requests are preempted
  and wait as well.
- Without requests that run, nothing holds blocks, whatever the usage that the engine reports.
"""

from __future__ import annotations

from policies.fleet.engine_load import EngineLoad
from policies.types import FOREVER, NEVER

RESERVE = 0.05  # of the KV cache
STALE = 5.0  # s after which a report says nothing about the room


class KvRoom:
    """Tokens that still fit into the KV cache of one engine."""

    def __init__(self) -> None:
        self._tokens = FOREVER  # as of the report, less what was sent since; negative: the reserve is in use
        self._reported_at = NEVER
        self.overflowed_at = NEVER  # latest report with requests that waited for blocks

    def tokens(self, now: float) -> float:
        """FOREVER: unknown."""
        return self._tokens if now - self._reported_at <= STALE else FOREVER

    def on_scrape(self, engine: EngineLoad, queued_tokens: float, now: float) -> None:
        """`queued_tokens`: uncached, sent and without a first token."""
        self._reported_at = now
        self._tokens = FOREVER
        if engine.kv_usage is None or not (engine.kv_blocks and engine.block_size and engine.running):
            return
        self._tokens = (1 - RESERVE - engine.kv_usage) * engine.kv_blocks * engine.block_size
        if engine.waiting:
            self._tokens -= queued_tokens
            if self._tokens < 0:
                self.overflowed_at = now

    def on_sent(self, tokens: int, now: float) -> bool:
        """A prompt with so many uncached tokens is sent. Returns whether it finds room."""
        self._tokens -= tokens
        return self.tokens(now) >= 0

    def on_left(self, tokens: int, sent_at: float) -> None:
        """Give back the tokens of a prompt ended before its first token, unless a report came since the sending."""
        if sent_at > self._reported_at:
            self._tokens += tokens
