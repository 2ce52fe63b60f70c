"""Turns of WebSockets that can be continued by `previous_response_id` although no backend stores them.

Open Responses: a socket keeps its most recent response, so that a caller with `store: false` sends new items alone. The
gateway keeps the items that led to the response, and sends them all to the backend. Rules:
- A response that a backend stores is continued by the backend.
- A response is known on its own socket alone, until the next one, or until a continuation of it fails.
- All turns kept have a bound. Beyond it, the caller with the most bytes loses its oldest turn: nobody else does.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.caches import FairCache

MAX_BYTES = 64_000_000  # of all turns kept in a process


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """A response, and the items that led to it, itself included, as elements of a JSON array."""

    response_id: str
    items: bytes
    call_ids: frozenset[str]


class KeptTurns(FairCache[KeptTurn]):
    """The latest turn of each socket, by caller and socket."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes, lambda turn: len(turn.items))
