"""An engine's KV cache: the room in it, and the time to load what its slower tiers hold.

Room is known by the engine's own report. Rules, as in vLLM and SGLang:
- A prompt is admitted once its tokens fit into free blocks. Blocks become free as answers end, not as prefills do: the
  wait for blocks says nothing of the speed of prefills.
- Answers in progress need further blocks: RESERVE is not counted as room. Beyond it, the newest requests are preempted
  and wait as well.
- Without requests that run, nothing holds blocks, whatever the usage that the engine reports.

Seconds to load cached tokens from the slower tiers are learned online. Rules:
- A hit in the CPU's memory is no hit in the GPU's, and no miss: its tokens are loaded, not computed.
- A token of a tier costs the same whatever the prompt, as the transfer is bound by bandwidth. Engines load while they
  compute other prompts: a load makes its own request wait, and nobody else's.
- A first token teaches the cost where enough was loaded and nothing was queued ahead: the rest of the TTFT is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.fleet.engine_load import EngineLoad
from policies.types import FOREVER, NEVER, SLOWER_TIERS

RESERVE = 0.05  # of the KV cache
STALE = 5.0  # s after which a report says nothing about the room


class KvRoom:
    """Free KV cache space of an engine, in tokens."""

    def __init__(self) -> None:
        self._tokens = FOREVER  # as of the report, less what was sent since; negative: the reserve is in use
        self._reported_at = NEVER
        self.overflowed_at = NEVER  # latest report with requests that waited for blocks

    def tokens(self, now: float) -> float:
        """Free space in tokens; FOREVER: unknown."""
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
        return self._tokens >= 0 or now - self._reported_at > STALE

    def on_left(self, tokens: int, sent_at: float) -> None:
        """Give back the tokens of a prompt ended before its first token, unless a report came since the sending."""
        if sent_at > self._reported_at:
            self._tokens += tokens


# s per token until learned, from the published TTFT of 64k tokens on an H20: 0.11 s from the GPU, 0.27 s from the CPU's
# memory, 0.97 s by RDMA, 15.2 s computed. A disk is taken to be as slow as the network.
PRIOR = {"cpu": 0.16 / 65_536, "disk": 0.86 / 65_536, "remote": 0.86 / 65_536}
LEAST = 2_048  # tokens to load, from which the time shows beside the noise of a first token
WEIGHT = 1 / 8  # of the latest load
FARTHEST = 4.0  # times the forecast: a longer load had other reasons
FASTEST = 1 / 256  # of the prior: a cost of 0 would bound every later load by 0


class KvLoads:
    """Cost per token of each tier. `tokens`, everywhere: to load, by tier, in the order of SLOWER_TIERS."""

    def __init__(self) -> None:
        self.token_s = [PRIOR[tier] for tier in SLOWER_TIERS]

    def seconds(self, tokens: Sequence[int]) -> float:
        return sum([count * cost for count, cost in zip(tokens, self.token_s, strict=False)])

    def learn(self, tokens: Sequence[int], seconds: float) -> None:
        """A load took so long: each tier's cost moves by its share (normalized least mean squares)."""
        expected = self.seconds(tokens)
        error = min(max(seconds, 0.0), FARTHEST * expected) - expected
        step = WEIGHT * error / sum(count * count for count in tokens)
        least = [FASTEST * PRIOR[tier] for tier in SLOWER_TIERS]
        moved = [cost + step * count for cost, count in zip(self.token_s, tokens, strict=True)]
        self.token_s = [*map(max, moved, least)]
