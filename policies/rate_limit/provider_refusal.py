"""A provider's refusal of requests for a while: 429, or no capacity.

A rate limit is no failure: the provider says until when to wait.
"""

from __future__ import annotations

from math import inf

MIN_RETRY_AFTER, DEFAULT_RETRY_AFTER, MAX_RETRY_AFTER = 0.1, 1.0, 60.0  # s; default: where the provider names none


class ProviderRefusal:
    """`until`: end of the latest refusal, past ones too; `why`: its reason, for the operator."""

    def __init__(self) -> None:
        self.until = -inf
        self.why = ""

    def on_refused(self, now: float, retry_after: float | None, why: str = "") -> None:
        """`retry_after`: seconds, by the provider; None: not named."""
        self.why = why
        wait = DEFAULT_RETRY_AFTER
        if retry_after is not None:
            wait = min(max(retry_after, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
        self.until = max(self.until, now + wait)
