"""What a decision may ask of the learned state: the seam between deciding and learning."""

from __future__ import annotations

from typing import Protocol

from policies.facts import Endpoint, Forecast, Load, PoolEstimate


class Beliefs(Protocol):
    """Read-only to decisions; `policies.fleet.Fleet` is the implementation that learns."""

    def hit(self, endpoint: Endpoint, prompt: PoolEstimate) -> int:
        """Prompt tokens (the engine's) believed cached there: whole blocks, always less than the prompt."""
        ...

    def forecast(self, endpoint: Endpoint, load: Load, prompt_tokens: int, hit: int, now: float) -> Forecast:
        """TTFT from a send at `now` to the first token, and TPOT."""
        ...

    def prefill(self, endpoint: Endpoint, prompt_tokens: int, hit: int) -> float:
        """Engine time that a prompt takes there, s; 0 for an API."""
        ...
