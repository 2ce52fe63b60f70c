"""Retry rules after a failed attempt: pools that would fail alike, the budget charged, the delay.

The failure's blame (`policies.blame`) decides what follows; these rules add the route's limits and the request's other
candidates.
"""

from __future__ import annotations

from collections.abc import Collection

from policies.attempts.candidate_walk import CandidateWalk
from policies.attempts.wire import AttemptLimits, Failed, Wire
from policies.blame.blame import Blame, Elsewhere, Fault
from policies.types import Candidate

BACKOFF = 0.1  # s before an overloaded endpoint is tried again, by default
OWN_FAULTS = (Fault.REQUEST, Fault.OWN_CONTENT, Fault.REQUEST_SIZE)
RATES = (Fault.RATE, Fault.REQUEST_RATE, Fault.TOKEN_RATE)


def is_lost(blame: Blame) -> bool:
    """The connection died, or the server said nothing: no engine did work that shows load."""
    return blame.kind in ("connect", "reset", "timeout")


def pools_alike(
    failure: Failed, candidate: Candidate, walk: CandidateWalk, limits: AttemptLimits, wire: Wire
) -> Collection[str] | None:
    """Pools that would fail in the same way; None: all pools."""
    pool = candidate.endpoint.pool
    match failure.blame.elsewhere:
        case Elsewhere.NEXT:
            return ()
        case Elsewhere.OTHER_CREDENTIAL:
            return () if walk.has_other_credential(candidate) else {pool}
        case Elsewhere.TRANSLATED:
            return () if failure.translated else {pool}
        case Elsewhere.OTHER_POOL:
            return {pool}
        case Elsewhere.OTHER_FILTER:
            return {pool} if limits.other_filter else None
        case Elsewhere.LARGER_WINDOW:
            return wire.without_larger_window(pool) if limits.longer_context else None
        case Elsewhere.NOWHERE:
            return None


def is_charged(failure: Failed, candidate: Candidate, walk: CandidateWalk) -> bool:
    """A retry in the pool adds load. Another key of the server has limits of its own."""
    of_key = failure.blame.fault in RATES and walk.has_other_credential(candidate)
    return failure.blame.charged and not of_key


def wait_before_retry(failure: Failed, candidate: Candidate, walk: CandidateWalk) -> float | None:
    """Seconds until the failed endpoint may be retried; None: the same failure would follow, or another endpoint of the
    pool is as good."""
    if candidate.endpoint.pool in walk.avoided:
        return None
    if is_lost(failure.blame) or failure.translated:
        return 0.0
    if not (failure.blame.again or failure.retry_after is not None) or walk.has_sibling(candidate):
        return None
    return max(failure.retry_after or BACKOFF, BACKOFF)
