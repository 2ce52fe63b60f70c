"""Seconds to load cached tokens from the slower tiers of an engine's KV cache, learned online.

Rules:
- A hit in the CPU's memory is no hit in the GPU's, and no miss: its tokens are loaded, not computed.
- A token of a tier costs the same whatever the prompt, as the transfer is bound by bandwidth. Engines load while they
  compute other prompts: a load makes its own request wait, and nobody else's.
- A first token teaches the cost where enough was loaded and nothing was queued ahead: the rest of the TTFT is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.types import SLOWER_TIERS

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
