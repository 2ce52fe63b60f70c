"""Sessions of requests, by which traffic is thinned: what a caller names, and what prompts tell where none is named.

Rules:
- A request continues the session whose latest prompt it begins with, as far as blocks of both are known.
- Its prompt is longer. Prompts that share a beginning and do not grow, as with one system prompt, or with one name for
  all requests of a caller, are sessions of their own: as one they would be in a sample all or not at all.
- At most `most` sessions are open; the oldest are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

UNNAMED = 1 << 48  # numbers of sessions that are found here, from here on


class SessionChains:
    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._open: dict[tuple[str, int], tuple[int, int]] = {}  # (session, tokens of its latest prompt)
        self._count = 0

    def session(self, tenant: str, named: int, blocks: Sequence[int], prompt_tokens: int) -> int:
        """Of the next request. `named`: by the caller, 0: not; `blocks`: chained hashes of its prompt."""
        key = self._continued(tenant, named, blocks, prompt_tokens)
        if key is not None:
            found, _ = self._open.pop(key)  # another request that begins so is none of this session
        else:
            self._count += 1
            found = named if named and (tenant, named) not in self._open else UNNAMED + self._count
        if named or blocks:
            self._open[tenant, named or blocks[-1]] = (found, prompt_tokens)
        while len(self._open) > self._most:
            del self._open[next(iter(self._open))]
        return found

    def find(self, tenant: str, named: int, blocks: Sequence[int], prompt_tokens: int) -> int | None:
        """The session that a request would continue."""
        key = self._continued(tenant, named, blocks, prompt_tokens)
        return None if key is None else self._open[key][0]

    def _continued(self, tenant: str, named: int, blocks: Sequence[int], prompt_tokens: int) -> tuple[str, int] | None:
        for block in (named,) if named else reversed(blocks):  # the longest beginning first
            if (known := self._open.get((tenant, block))) is not None:
                return (tenant, block) if prompt_tokens > known[1] else None
        return None
