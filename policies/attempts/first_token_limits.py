"""First-token timeouts, and candidates skipped because their forecast exceeds the timeout.

Rules:
- A configured limit is strict: a candidate whose forecast exceeds the limit is skipped.
- A default limit detects hung servers. A server slow for a reason (a long prompt, a slow machine) gets the route's
  budget and EXPLAINED times the p90 of its forecast: an earlier timeout would waste the prefill.
- Guesses skip no candidate: only a trained forecast counts, and only by the engine's time for the prompt itself, as
  queued work may end sooner. A timeout, perhaps another caller's, skips nobody: the engine is tried until enough first
  tokens have arrived since.
"""

from __future__ import annotations

from policies.attempts.wire import AttemptLimits
from policies.types import NINETIETH, AttemptKind, Candidate

EXPLAINED = 3.0  # times the p90 of a forecast: a longer silence is not explained by it


def first_token_limit(limits: AttemptLimits, candidate: Candidate, kind: AttemptKind = AttemptKind.PRIMARY) -> float:
    """First-token timeout of a candidate in seconds: the configured limit, or else the largest of the default, the
    route's budget and the time explained by the forecast. An unstreamed answer is awaited whole. A continued answer has
    the default limit."""
    endpoint, forecast, limit = candidate.endpoint, candidate.forecast, limits.first_token_limit
    if limits.unseen and endpoint.id in limits.unseen:
        return max(endpoint.first_token_limit or 0.0, limits.whole)
    if kind.continues:
        return limit
    is_meant = limits.limit_is_meant
    if (own := endpoint.first_token_limit) is not None:
        limit, is_meant = own if limits.stream else max(own, limit), endpoint.limit_is_meant
    if is_meant:
        return limit
    explained = EXPLAINED * forecast.point_estimate * forecast.ratios[NINETIETH]
    if explained > limit:
        limit = explained
    return limit if limit >= limits.budget else limits.budget


def exceeds_limit(limits: AttemptLimits, candidate: Candidate, now: float) -> str:
    """The reason for which the candidate's first token is not to be expected within its limit; empty: it is, or the
    forecast is a guess."""
    forecast, left = candidate.forecast, limits.limit_at - now
    if not forecast.trained or forecast.silent_s:
        return ""
    expected = f"the first token of {candidate.endpoint.pool} is expected in {forecast.p50:.3g} s"
    if forecast.prefill > (limit := first_token_limit(limits, candidate)):
        return f"{expected}, and first_token is {limit:g} s"
    return f"{expected}, and {left:.3g} s are left of total.limit" if forecast.prefill > left else ""
