"""What the other replicas have told: one Reader's view of them. Pure: bytes come in, burdens and prompts come out.

Rules:
- What comes from one's own group is not looked at: its workers know of each other through memory.
- One that is silent for SILENT seconds has nothing under way, and its opinions on endpoints end.
- A message says how old its times are, not how old it is. Of each teller the quickest message is taken for
  immediate, and by how much another one came later makes it older. So times are wrong by what the quickest one of late
  took on its way: on one network a millisecond. One that is SILENT or more late is no news, nor is one that was heard.
- What others have spent is added up from what each has told since it was first heard: whoever comes, goes, or begins
  anew, the sum never leaps.
- Memory is bounded, whatever comes: MOST_TELLERS, endpoints that the reader knows, PENDING blocks.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from gateway.cluster.gossip_message import MalformedUpdate, PeerUpdate, at, read, teller_of
from policies.fleet.peers import PeerLoad, PeerReader, combined
from policies.types import FOREVER, NEVER

SILENT = 3.0  # s
EVERY = 0.005  # s between two looks at what has come: it is one change, worked out once
DRIFT = 2e-4  # s per s that two clocks may drift apart: several times what crystals do
MOST_TELLERS = 1024
PENDING = 1 << 20  # blocks that wait to be taken in: 8 MiB


class Peers:
    """`knows`: whether an endpoint is the reader's too."""

    def __init__(self, group: bytes, knows: Callable[[str], bool]) -> None:
        self.group, self.knows = group, knows
        self.malformed = 0  # messages
        self._tellers: dict[bytes, PeerState] = {}
        self._changed: dict[str, None] = {}  # in the order in which they did: a replay is the same every time
        self._prompts: deque[tuple[str, array[int]]] = deque()
        self._pending = 0
        self._spent = defaultdict[str, float](float)
        self._due, self._expires = NEVER, FOREVER

    def hear(self, raw: bytes, now: float) -> None:
        """A message has come."""
        try:
            if teller_of(raw)[0] == self.group:
                return
            news = read(raw)
        except MalformedUpdate:
            self.malformed += 1
            return
        self._expire(now)
        teller = self._tellers.get(news.teller)
        if teller is None:
            if news.last or len(self._tellers) >= MOST_TELLERS:
                return
            teller = self._tellers[news.teller] = PeerState(news.group)
        told_at = teller.told_at(news.clock, now)
        if told_at is None:
            return
        teller.heard_at = now
        self._expires = min(self._expires, now + SILENT)
        self._take(teller, news, told_at)
        if news.last:
            self._lose(news.teller)

    def merge(self, reader: PeerReader, now: float) -> None:
        if now < self._due:
            return
        self._due = now + EVERY
        self._expire(now)
        changed, self._changed = self._changed, {}
        for name in changed:
            told = [teller.burdens[name] for teller in self._tellers.values() if name in teller.burdens]
            reader.on_peer_load(name, replace(combined(told), prefill_s=self._spent[name]), now)
        while self._prompts:
            reader.on_peer_prompt(*self._prompts.popleft())
        self._pending = 0

    def replicas(self, now: float) -> int:
        """That are heard of now, self included."""
        return 1 + len({teller.group for teller in self._tellers.values() if now < teller.heard_at + SILENT})

    def _take(self, teller: PeerState, news: PeerUpdate, told_at: float) -> None:
        burdens = {name: at(told, told_at) for name, told in news.burdens.items() if self.knows(name)}
        for name, burden in burdens.items():
            before = teller.burdens.get(name)
            if before is not None:
                self._spent[name] += max(burden.prefill_s - before.prefill_s, 0.0)
        if news.full:
            self._changed |= dict.fromkeys(teller.burdens)
            teller.burdens = burdens
        else:
            teller.burdens.update(burdens)
        self._changed |= dict.fromkeys(burdens)
        for name, hashes in news.prompts:
            if hashes and self.knows(name):
                self._prompts.append((name, hashes))
                self._pending += len(hashes)
        while self._pending > PENDING:
            self._pending -= len(self._prompts.popleft()[1])

    def _expire(self, now: float) -> None:
        if now < self._expires:
            return
        for name in [name for name, teller in self._tellers.items() if teller.heard_at + SILENT <= now]:
            self._lose(name)
        self._expires = min((teller.heard_at for teller in self._tellers.values()), default=FOREVER) + SILENT

    def _lose(self, name: bytes) -> None:
        self._changed |= dict.fromkeys(self._tellers.pop(name).burdens)


class PeerState:
    """One process of another group."""

    __slots__ = ("_clock", "_least", "_seen_at", "burdens", "group", "heard_at")

    def __init__(self, group: bytes) -> None:
        self.group = group
        self.burdens: dict[str, PeerLoad] = {}
        self.heard_at = NEVER
        self._clock = NEVER  # its own, of its last message
        self._least, self._seen_at = FOREVER, NEVER  # between its clock and ours, of late

    def told_at(self, clock: float, now: float) -> float | None:
        """When it told this, by our clock; None where that is no news."""
        if clock <= self._clock:
            return None
        self._clock, skew = clock, now - clock
        drifted = DRIFT * (now - self._seen_at) if self._seen_at > NEVER else 0.0
        self._least, self._seen_at = min(self._least + drifted, skew), now
        late = skew - self._least
        return now - late if late < SILENT else None
