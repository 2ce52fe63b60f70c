"""What several processes that serve one port know of each other: who has sent how much where, and which prefixes.

Rules:
- Each tells of its own share alone. What is heard is added when it is read and never told on: nothing counts twice.
- What waits at an engine is one queue, whoever sent it: tokens add up, and the time at which the engine began with it
  is that of the first that was sent, or of the latest first token that anybody saw.
- What was learned (predictors, scales, lengths) stays with whoever learned it.
- That an endpoint is down is hearsay to all but who found it (policies.fleet.circuit_breaker): it is never told on,
  and not at all by
  one that finds most of a pool down, who may have lost its own network; nor does it take the last endpoint of a pool.
- A prefix that one sent is believed held by all, as if each had sent it itself. That it may have failed there is left
  to the engine's next answers.

Times are of the clock that decisions are made on: who brings burdens from elsewhere translates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import NamedTuple, Protocol

from policies.fleet.decode_interference import HARMLESS, Harm
from policies.fleet.inflight_tokens import Queue
from policies.types import FOREVER, NEVER


class PeerLoad(NamedTuple):
    """What one process has under way at one endpoint."""

    in_flight: int = 0  # attempts
    prefilling: int = 0  # of these, without a first token
    tokens: int = 0  # uncached ones that wait there (policies.fleet.inflight_tokens), with
    pairs: int = 0  # their attention pairs
    remainder: int = 0  # and what is kept of them whatever time has passed
    context: int = 0  # tokens that its answers attend to
    warming: int = 0  # 1: it is giving the engine its cache back
    since: float = FOREVER  # when what waits began to; FOREVER: nothing does
    last_token_at: float = NEVER  # the latest first token
    used_at: float = NEVER  # the latest attempt
    blocked_until: float = NEVER  # a provider's rate limit
    down_at: float = NEVER  # since when it finds the endpoint down; NEVER: it does not
    spent: float = 0.0  # s of prefill sent there since it began
    time: float = 0.0  # of the answers being written there, lately: s,
    written: float = 0.0  # tokens written in them,
    pace: float = FOREVER  # and the tightest promise, s per token
    expected_tpot_misses: Harm = HARMLESS

    @property
    def running(self) -> int:
        return self.in_flight - self.prefilling

    @property
    def writing(self) -> tuple[float, float, float]:
        return self.time, self.written, self.pace

    def beside(self, own: Queue, heard_at: float) -> Queue:
        """The one queue that this and our own are. `heard_at`: the latest first token, whoever saw it."""
        if not self.prefilling:
            return own
        since = min(own.since, self.since) if own.tokens else self.since
        return Queue(
            own.tokens + self.tokens, own.pairs + self.pairs, own.remainder + self.remainder, max(since, heard_at)
        )


NOTHING = PeerLoad()


class PeerReader(Protocol):
    """Who takes in what siblings tell: the fleet."""

    def burdened(self, endpoint_id: str, burden: PeerLoad, now: float) -> None:
        """All siblings together have this under way there."""

    def hinted(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        """A sibling sent a prompt of these blocks there."""


class PeerLink(Protocol):
    """The way to the others: shared memory between processes, anything else between machines. Loses news, not sense."""

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        """All that we have under way there."""

    def sent(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        """We have just sent a prompt of these blocks there."""

    def merge(self, reader: PeerReader, now: float) -> None:
        """Tell the reader what is new since it was told last. Called before every decision."""


def together(burdens: Iterable[PeerLoad]) -> PeerLoad:
    """Of several processes, as one."""
    total = NOTHING
    for burden in burdens:
        total = burden if total is NOTHING else _plus(total, burden)
    return total


def _plus(a: PeerLoad, b: PeerLoad) -> PeerLoad:
    return PeerLoad(
        a.in_flight + b.in_flight,
        a.prefilling + b.prefilling,
        a.tokens + b.tokens,
        a.pairs + b.pairs,
        a.remainder + b.remainder,
        a.context + b.context,
        a.warming | b.warming,
        min(a.since, b.since),
        max(a.last_token_at, b.last_token_at),
        max(a.used_at, b.used_at),
        max(a.blocked_until, b.blocked_until),
        max(a.down_at, b.down_at),
        a.spent + b.spent,
        a.time + b.time,
        a.written + b.written,
        min(a.pace, b.pace),
        added(a.expected_tpot_misses, b.expected_tpot_misses),
    )


def added(one: Harm, other: Harm) -> Harm:
    """Answers of both that are lost to the same stall."""
    if not (one and other):
        return one or other
    return tuple(map(add, one, other))


class CombinedPeers:
    """Several ways to others, who are not the same on any two of them: what all tell adds up."""

    def __init__(self, *ways: PeerLink) -> None:
        self._ways = [_Way(way) for way in ways]

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        for one in self._ways:
            one.way.publish(endpoint_id, burden)

    def sent(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        for one in self._ways:
            one.way.sent(endpoint_id, hashes)

    def merge(self, reader: PeerReader, now: float) -> None:
        changed: dict[str, None] = {}
        for one in self._ways:
            changed |= one.news(reader, now)
        for name in changed:
            told = [one.burdens[name] for one in self._ways if name in one.burdens]
            reader.burdened(name, together(told), now)


class _Way:
    """A Reader that keeps burdens, and passes prompts on."""

    def __init__(self, way: PeerLink) -> None:
        self.way = way
        self.burdens: dict[str, PeerLoad] = {}
        self._changed: dict[str, None] = {}
        self.hinted: Callable[[str, Sequence[int]], None] = _to_nobody

    def burdened(self, endpoint_id: str, burden: PeerLoad, now: float) -> None:
        self.burdens[endpoint_id] = burden
        self._changed[endpoint_id] = None

    def news(self, reader: PeerReader, now: float) -> dict[str, None]:
        """The endpoints whose burden has changed."""
        self.hinted = reader.hinted
        self.way.merge(self, now)
        if not self._changed:
            return self._changed
        changed, self._changed = self._changed, {}
        return changed


def _to_nobody(endpoint_id: str, hashes: Sequence[int]) -> None: ...
