"""What this process has to tell the other replicas, until it is told. Pure.

Rules:
- The latest burden of an endpoint is told, however often it changed; all of them again every EVERY_FULL seconds, so
  that what was lost is made up for.
- A prompt is told once. Of more than ROOM blocks between two messages, or RATE a second, the end is left out.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

from gateway.cluster.gossip_message import packed
from policies.fleet.peers import NO_LOAD, PeerLoad
from policies.types import NEVER

TELL = 0.02  # s between two messages
EVERY_FULL = 1.0  # s
ROOM = 8_192  # blocks in a message: 64 KiB
RATE = 131_072.0  # blocks a second: 1 MiB


def new_group() -> bytes:
    """A name that no other gateway has."""
    return os.urandom(8)


class PendingUpdates:
    """`group`: those who know of each other anyway, such as the workers of one machine."""

    def __init__(self, group: bytes, teller: bytes | None = None) -> None:
        self.group, self.teller = group, teller or os.urandom(8)
        self._burdens: dict[str, PeerLoad] = {}
        self._changed: dict[str, None] = {}
        self._prompts: list[tuple[str, array[int]]] = []
        self._room = ROOM
        self._allowed, self._at = RATE, NEVER
        self._full_at = NEVER  # when all is to be told again

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        self._burdens[endpoint_id] = burden
        self._changed[endpoint_id] = None

    def sent(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        if self._room:
            taken = hashes[: self._room]
            self._prompts.append((endpoint_id, taken if isinstance(taken, array) else array("Q", taken)))
            self._room -= len(taken)

    def message(self, now: float) -> bytes | None:
        """All that is new; None where nothing is."""
        full = now >= self._full_at
        if not (full or self._changed or self._prompts):
            return None
        if full:
            self._full_at = now + EVERY_FULL
        burdens = self._burdens if full else {name: self._burdens[name] for name in self._changed}
        made = packed(self.group, self.teller, now, burdens, self._affordable(now), full=full)
        self._changed.clear()
        if full:  # what has ended for good need not be said again
            self._burdens = {name: burden for name, burden in burdens.items() if burden != NO_LOAD}
        return made

    def farewell(self, now: float) -> bytes:
        """The last one."""
        return packed(self.group, self.teller, now, {}, (), full=True, last=True)

    def forget(self) -> None:
        """Nobody can be told now: prompts are old news soon, and burdens are told in full when somebody can."""
        self._full_at = NEVER
        self._prompts, self._room = [], ROOM

    def _affordable(self, now: float) -> list[tuple[str, array[int]]]:
        self._allowed = min(self._allowed + RATE * max(now - self._at, 0.0), RATE)
        self._at, found = now, []
        for name, hashes in self._prompts:
            if blocks := hashes[: int(self._allowed)]:
                found.append((name, blocks))
                self._allowed -= len(blocks)
        self._prompts, self._room = [], ROOM
        return found
