"""Loads and prefixes which processes in front of the same engines exchange.

Rules:
- Each process publishes the own share of the load alone. Peer loads are added when read and never passed on: nothing
  counts twice.
- The prefill queue of an engine is one, whoever sent the prompts: tokens add up, and the engine began when the first
  prompt was sent, or at the latest first token of any process.
- Learned models (predictors, scales, lengths) are not shared.
- An endpoint found down counts as a peer report to all other processes (`policies.fleet.circuit_breaker`). A process
  which finds most of a pool down publishes no report (the lost network may be the process's own), and a report never
  takes the last endpoint of a pool.
- A prefix sent by one process is believed cached by all, as if sent by each. The engine's next answers correct a prefix
  which failed there. Of an API this is a prefix that was answered.

Times are of the clock of the decisions: a link between machines translates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial, reduce
from operator import add, attrgetter
from typing import Any, Protocol

from policies.latency.token_counts import PrefillQueue
from policies.latency.tpot import NO_MISSES, MissCurve
from policies.types import FOREVER, NEVER


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Load of a single process at an endpoint."""

    in_flight: int = 0  # attempts
    prefilling: int = 0  # of these, without a first token
    queued_tokens: int = 0  # uncached, of the prefilling attempts (policies.latency.token_counts)
    queued_pairs: int = 0  # attention pairs of the queue
    queued_remainder: int = 0  # of the queued tokens, not drained by time
    decoding_context: int = 0  # prompt tokens of decoding answers
    warming: int = 0  # 1: the process is warming the engine's cache
    queued_since: float = FOREVER  # start of the queue at the engine; FOREVER: empty queue
    last_token_at: float = NEVER  # latest first token
    last_used_at: float = NEVER  # latest attempt
    blocked_until: float = NEVER  # a provider's rate limit
    down_since: float = NEVER  # NEVER: the process has not seen the endpoint down
    prefill_s: float = 0.0  # sent there since the process began
    decode_s: float = 0.0  # recent, of all answers together
    decode_tokens: float = 0.0  # written in `decode_s`
    tpot_limit: float = FOREVER  # s per token that the answers bear
    expected_tpot_misses: MissCurve = NO_MISSES

    def numbers(self) -> tuple[float, ...]:
        """Every field but the miss curve, in order: PEER_LOAD_COUNTS integers, then floats."""
        return _numbers(self)

    @classmethod
    def from_numbers(cls, numbers: Iterable[float], misses: MissCurve) -> PeerLoad:
        named: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
        return cls(**named, expected_tpot_misses=misses)

    def joined_with(self, own: PrefillQueue, last_token_at: float) -> PrefillQueue:
        """The one prefill queue of this load and our own. `last_token_at`: latest first token of any process."""
        if not self.prefilling:
            return own
        started_at = min(own.started_at, self.queued_since) if own.tokens else self.queued_since
        return PrefillQueue(
            tokens=own.tokens + self.queued_tokens,
            pairs=own.pairs + self.queued_pairs,
            remainder=own.remainder + self.queued_remainder,
            started_at=max(started_at, last_token_at),
        )


NO_LOAD = PeerLoad()
PEER_LOAD_COUNTS = 7  # leading fields, integers
_NUMBERS = [field.name for field in fields(PeerLoad)][:-1]
PEER_LOAD_FLOATS = len(_NUMBERS) - PEER_LOAD_COUNTS
_numbers = attrgetter(*_NUMBERS)


class PeerReader(Protocol):
    """Receiver of peers' publications: the fleet."""

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        """`load`: of all peers together."""

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int], now: float) -> None:
        """A peer sent a prompt of these blocks there."""


class PeerLink(Protocol):
    """A link to peers, on one machine or over a network. Updates may be lost, but not garbled."""

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        """Publishes all of our load at the endpoint."""

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        """Publishes that a prompt of these blocks was sent there."""

    def merge(self, reader: PeerReader, now: float) -> None:
        """Passes the reader everything new since the last call. Called before every decision."""


def add_misses(a: MissCurve, b: MissCurve) -> MissCurve:
    """Adds expected misses of the same stall."""
    return tuple(map(add, a, b)) if a and b else a or b


_COMBINED_BY: dict[str, Callable[..., object]] = {  # other fields are added
    **dict.fromkeys(("queued_since", "tpot_limit"), min),
    **dict.fromkeys(("warming", "last_token_at", "last_used_at", "blocked_until", "down_since"), max),
    "expected_tpot_misses": partial(reduce, add_misses),
}


def combined(loads: Iterable[PeerLoad]) -> PeerLoad:
    """Sum of the loads of several processes at an endpoint."""
    found = list(loads)
    if len(found) < 2:
        return found[0] if found else NO_LOAD
    total: dict[str, Any] = {
        name: _COMBINED_BY.get(name, sum)([getattr(load, name) for load in found])
        for name in (*_NUMBERS, "expected_tpot_misses")
    }
    return PeerLoad(**total)


@dataclass(slots=True)
class _LinkReader:
    """Implements `PeerReader` for a single link: keeps the loads, passes prompts on."""

    loads: dict[str, PeerLoad]  # latest, by endpoint
    changed: dict[str, None]
    reader: PeerReader

    def on_peer_load(self, endpoint_id: str, load: PeerLoad, now: float) -> None:
        self.loads[endpoint_id] = load
        self.changed[endpoint_id] = None

    def on_peer_prompt(self, endpoint_id: str, hashes: Sequence[int], now: float) -> None:
        self.reader.on_peer_prompt(endpoint_id, hashes, now)


class CombinedPeers:
    """Several links, to different peers, with summed loads."""

    def __init__(self, *links: PeerLink) -> None:
        self._links = links
        self._loads: list[dict[str, PeerLoad]] = [{} for _ in links]

    def publish(self, endpoint_id: str, load: PeerLoad) -> None:
        for link in self._links:
            link.publish(endpoint_id, load)

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        for link in self._links:
            link.publish_prompt(endpoint_id, hashes)

    def merge(self, reader: PeerReader, now: float) -> None:
        changed: dict[str, None] = {}
        for link, loads in zip(self._links, self._loads, strict=True):
            link.merge(_LinkReader(loads, changed, reader), now)
        for endpoint_id in changed:
            reader.on_peer_load(
                endpoint_id, combined(one[endpoint_id] for one in self._loads if endpoint_id in one), now
            )
