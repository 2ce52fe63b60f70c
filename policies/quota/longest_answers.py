"""The longest usual answers of each key by route, from the latest ones: what a request may use is claimed by these.

Rules:
- A key vouches for itself alone: no other key's answers shorten its claims.
- Fewer than KNOWN answers tell nothing: the request may take all that it is allowed to.
- Memory is bounded: SAMPLES of MOST keys and routes; the one longest without an answer is dropped.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import ceil

KNOWN = 8  # answers
SAMPLES = 64  # latest answers of a key and a route
MOST = 4096  # keys and routes
SHARE = 0.95  # of the answers are not longer


class LongestAnswers:
    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()

    def observe(self, account: str, route: str, tokens: int) -> None:
        """An answer of this key has ended with so many tokens."""
        samples = self._samples.setdefault((account, route), deque(maxlen=SAMPLES))
        samples.append(tokens)
        self._samples.move_to_end((account, route))
        if len(self._samples) > MOST:
            self._samples.popitem(last=False)

    def tokens(self, account: str, route: str) -> int | None:
        """Tokens that SHARE of the key's answers do not exceed; None: too few answers are known."""
        samples = self._samples.get((account, route), ())
        if len(samples) < KNOWN:
            return None
        return sorted(samples)[min(ceil(SHARE * (len(samples) + 1)), len(samples)) - 1]
