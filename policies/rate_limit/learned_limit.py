"""Rate limit of an API that reports none, learned from its rejections.

Rules:
- The limit is the number of requests accepted in the minute before a rejection. Below MIN_REQUESTS the API was
  overloaded, or limits something other than requests.
- At the limit, the API is full until the oldest request of the minute is a minute old.
- A limit is forgotten RATE_LIMIT_WINDOW seconds after the latest rejection: a raised limit, or one that was none,
  costs a minute, and a limit that stands costs a rejection a minute.
- The owner (`policies.rate_limit.endpoint_limits`) passes on only rejections that say that requests are used up, that
  more than one caller has met with, and of APIs that do not report what remains.
"""

from __future__ import annotations

from collections import deque
from math import inf

RATE_LIMIT_WINDOW = 60.0  # s
MIN_REQUESTS = 20
MAX_REQUESTS = 10_000  # a minute: beyond, no limit is learned


class LearnedRateLimit:
    """Requests per minute accepted by an API. `full_until`: time of the next accepted request, past ones too."""

    def __init__(self) -> None:
        self.full_until = -inf
        self._sent: deque[float] = deque(maxlen=MAX_REQUESTS)
        self._limit = 0
        self._learned_at = -inf

    def on_sent(self, now: float) -> None:
        self._sent.append(now)
        self._expire(now)
        self._count(now)

    def on_rejected(self, now: float) -> None:
        """The API rejected the latest request."""
        self._expire(now)
        if self._sent:
            self._sent.pop()
        if MIN_REQUESTS <= len(self._sent) < MAX_REQUESTS - 1:
            self._limit = len(self._sent)
            self._learned_at = now
        self._count(now)

    def limit(self, now: float) -> int | None:
        """Requests a minute; None: not learned, or forgotten."""
        return self._limit if now - self._learned_at < RATE_LIMIT_WINDOW else None

    @property
    def forgotten_at(self) -> float:
        return self._learned_at + RATE_LIMIT_WINDOW

    def _count(self, now: float) -> None:
        """Compare the requests of the last minute with the limit."""
        limit = self.limit(now)
        if limit is not None and len(self._sent) >= limit:
            self.full_until = min(self._sent[-limit] + RATE_LIMIT_WINDOW, self.forgotten_at)
        else:
            self.full_until = min(self.full_until, now)

    def _expire(self, now: float) -> None:
        while self._sent and self._sent[0] <= now - RATE_LIMIT_WINDOW:
            self._sent.popleft()
