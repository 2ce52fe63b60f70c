"""One endpoint's statistics as GET /fleet shows them: what an operator cannot read from a monotonic clock is in seconds
from now."""

from __future__ import annotations

from typing import Any

import msgspec

from policies.fleet.endpoint_state import EndpointStatistics
from policies.types import NEVER, Health

_HALF_OPEN = "half_open"

# Public names in the JSON of members of `Load`.
PUBLIC_NAMES = {
    "queued_tokens": "ahead",
    "backlog_s": "busy",
    "expected_tpot_misses": "harm",
    "tpot_pressure": "strain",
    "reopens_in": "closed",
    "prefill_utilization": "duty",
    "last_token_at": "heard_at",
}


def shown(found: EndpointStatistics, now: float) -> dict[str, Any]:
    """Ready for JSON."""
    said: dict[str, Any] = msgspec.to_builtins(found, enc_hook=repr)
    del said["until"]
    said["load"] = {PUBLIC_NAMES.get(name, name): value for name, value in said["load"].items()}
    load = found.load
    return {
        **said,
        "why": _why(found, now),
        "tried_again_in_s": _ahead(found.until, now) if load.health is Health.DOWN else None,
        "limited_for_s": _ahead(load.blocked_until, now),
        "scraped_s_ago": _ago(load.scraped_at, now),
        "heard_s_ago": _ago(load.last_token_at, now),
    }


def _why(found: EndpointStatistics, now: float) -> str | None:
    """It gets no requests, or fewer than its share; None: it gets them."""
    reasons = [found.why] if found.why else []
    if found.breaker == _HALF_OPEN:
        reasons.append("one request at a time may try it")
    if found.load.blocked_until > now:
        reasons.append(f"its provider limits us for {found.load.blocked_until - now:.1f} s more")
    if found.load.warming:
        reasons.append("it is given its cache back")
    return "; ".join(reasons) or None


def _ahead(moment: float, now: float) -> float | None:
    return round(moment - now, 3) if moment > now else None


def _ago(moment: float, now: float) -> float | None:
    return None if moment == NEVER else round(now - moment, 3)
