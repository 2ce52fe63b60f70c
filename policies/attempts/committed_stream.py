"""Decides when a committed stream is left, and who may continue a broken one.

Rules:
- A stream without a byte for `idle` is left, and so is a stream past the limit of time for the whole answer.
- Where a peer can continue, the pace decides before: after 20 of the stream's mean gaps, twice the peer's predicted
  TTFT or 2 s, whichever is longest.
- A caller that does not read stops the reading from the server: that is no silence.
- A peer is an endpoint without a failure in this request. Those of the same pool come first, the soonest as of now: an
  engine that dies leaves many answers at once, and the ranking of each is as old as the answer.
- An answer that has ended on an open connection is complete. A caller that leaves after the last event of its answer
  has a complete answer, whoever closes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from policies.attempts.attempt_events import AttemptLimits, Broken, Cancel, Leave, Leaving, PeerForecast, Progress
from policies.attempts.retry_rules import OWN_FAULTS
from policies.types import FOREVER, AttemptOutcome, Candidate

LEAST_SILENCE, GAPS, TTFTS = 2.0, 20, 2  # s; mean gaps between two tokens; predicted TTFTs of the peer
SOON = 0.05  # s, the least time between two looks


def idle_of(limits: AttemptLimits, own: Candidate) -> float:
    """Seconds without a byte after which a stream of this endpoint is left in any case."""
    return limits.idle if own.endpoint.stream_idle is None else own.endpoint.stream_idle


def patience(limits: AttemptLimits, own: Candidate, tpot: float | None, peer: Candidate | None) -> float:
    """Seconds without a byte after which the stream may be left. `peer`: the first that could continue."""
    idle = idle_of(limits, own)
    if peer is None or not (limits.rescue and limits.by_pace):
        return idle
    return min(idle, max(LEAST_SILENCE, GAPS * (tpot or 0.0), TTFTS * peer.forecast.p50))


def look(
    limits: AttemptLimits, own: Candidate, progress: Progress, peer: Candidate | None, now: float
) -> Leaving | float:
    """Reason to leave the stream now, or the time of the next look."""
    quiet, idle = now - progress.heard_at, idle_of(limits, own)
    allowed = patience(limits, own, progress.tpot, peer)
    if now >= limits.limit_at and not progress.complete:
        return Leaving.LATE
    if progress.paused or quiet < allowed:
        return min(now + max(allowed - quiet, SOON), limits.limit_at if now < limits.limit_at else now + SOON)
    if quiet < idle and (progress.obstacle or peer is None):
        return min(progress.heard_at + idle, limits.limit_at)
    return Leaving.COMPLETE if progress.complete else Leaving.SILENT


def without_caller(number: int, progress: Progress) -> Leave | Cancel:
    """The end of the stream of an attempt whose caller has left."""
    if progress.relayed and not progress.paused:
        return Leave(number, Leaving.READ)
    return Cancel(number, AttemptOutcome.CANCELLED)


def peers_of(
    broken: Candidate, ranked: Sequence[Candidate], avoided: Collection[str], known: Mapping[str, PeerForecast]
) -> Sequence[Candidate]:
    """Candidates to continue the answer of `broken`, without the endpoints avoided, the soonest by what is `known`."""
    own = broken.endpoint
    able = [each for each in ranked if each.endpoint.id != own.id and each.endpoint.id not in avoided]
    soon = {name: peer.p50 for name, peer in known.items()}
    return sorted(able, key=lambda each: (each.endpoint.pool != own.pool, soon.get(each.endpoint.id, FOREVER)))


def obstacle_of(broken: Broken, limits: AttemptLimits, peers: Sequence[Candidate]) -> str:
    """Reason for which no peer may continue the answer; empty: one may. `peers`: able or not."""
    if broken.blame.fault in OWN_FAULTS:
        return "an error of the request"
    if not limits.rescue:
        return "the route asks for no rescue"
    if broken.obstacle or any(peer.endpoint.id not in broken.unable for peer in peers):
        return broken.obstacle
    return broken.unable[peers[0].endpoint.id] if peers else "no peer is left"
