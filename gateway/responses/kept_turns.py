"""Turns of WebSockets that can be continued by `previous_response_id` although no backend stores them.

Open Responses: a socket keeps its most recent response, so that a caller with `store: false` sends new items alone. The
gateway keeps the items that led to the response, and sends them all to the backend. Rules:
- A response that a backend stores is continued by the backend.
- A response is known on its own socket alone, until the next one, or until a continuation of it fails.
- All turns kept have a bound. Beyond it, the caller with the most bytes loses its oldest turn: nobody else does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

MAX_BYTES = 64_000_000  # of all turns kept in a process


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A response, and the items that led to it, itself included, as elements of a JSON array."""

    response_id: str
    items: bytes
    call_ids: frozenset[str]


class KeptTurns:
    """The latest turn of each socket, by caller and socket."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._turns: defaultdict[str, dict[Hashable, KeptTurn]] = defaultdict(dict)  # oldest first
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self.size = 0  # bytes

    def get(self, caller: str, socket: Hashable) -> KeptTurn | None:
        return self._turns[caller].get(socket) if caller in self._turns else None

    def keep(self, caller: str, socket: Hashable, turn: KeptTurn) -> None:
        self.drop(caller, socket)
        self._turns[caller][socket] = turn
        self._count(caller, len(turn.items))
        while self.size > self._max_bytes:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self.drop(largest, next(iter(self._turns[largest])))

    def drop(self, caller: str, socket: Hashable) -> None:
        turn = self._turns[caller].pop(socket, None)
        if turn is not None:
            self._count(caller, -len(turn.items))
        if not self._turns[caller]:
            del self._turns[caller]
            self._bytes.pop(caller, None)

    def _count(self, caller: str, size: int) -> None:
        self._bytes[caller] += size
        self.size += size
