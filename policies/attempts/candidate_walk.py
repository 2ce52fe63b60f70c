"""Iterates over the candidates of a decision, in order, each once.

Rules:
- `max_attempts` limits all attempts. The last of three or more goes to an untried pool, if there is one.
- If two endpoints died after accepting the request, the request may be the cause: no third endpoint is tried.
- Candidates of avoided pools are skipped.
- A tier with `after` is skipped until the named failure has happened to the request. If the prompt is too long or the
  content refused, and a tier is reserved for this failure, no other tier is tried.
- With a route's `retries`, each level (a tier and tiers beside it) gets that many attempts after the first, alternating
  between endpoints, before the next level; the rule of the last attempt does not apply.
- A candidate at its cap or rate limit is skipped, and tried only if no other is left; a drained one is skipped.
- After a broken answer, only candidates that can continue the answer remain.

First-token timeouts of these, and candidates skipped because their forecast exceeds the timeout.

Rules:
- A configured limit is strict: a candidate whose forecast exceeds the limit is skipped.
- A default limit detects hung servers. A server slow for a reason (a long prompt, a slow machine) gets the route's
  budget and EXPLAINED times the p90 of its forecast: an earlier timeout would waste the prefill.
- Guesses skip no candidate: only a trained forecast counts, and only by the engine's time for the prompt itself, as
  queued work may end sooner. A timeout, perhaps another caller's, skips nobody: the engine is tried until enough first
  tokens have arrived since.

Retry rules after a failed attempt: pools that would fail alike, the budget charged, the delay.

The failure's blame (`policies.blame`) decides what follows; these rules add the route's limits and the request's other
candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, islice

from policies.attempts.wire import AttemptLimits, Failed, Wire
from policies.blame.blame import Blame, Elsewhere, Fault
from policies.routes.levels import FailureCause
from policies.types import NINETIETH, Attempt, AttemptKind, Candidate

OWN_TIERS: Mapping[str, FailureCause] = {"context": "context", "content_filter": "content_filter"}  # by kind of failure
MAX_DEATHS = 2  # of endpoints after acceptance of the request


class CandidateWalk:
    """The candidates not yet tried, the pools avoided, the candidates passed over as closed, and the attempts so far.
    `deaths`: of endpoints that had accepted the request; `lost`: endpoints with a failure."""

    def __init__(self, ranked: Sequence[Candidate], wire: Wire, limits: AttemptLimits) -> None:
        rules = limits.tiers
        self.opened = self.deaths = 0
        self.lost: set[str] = set()
        self.closed: list[Candidate] = []
        self.avoided: set[str] = set()  # pools
        self.retries = None if rules is None else rules.retries
        self._after = None if rules is None or not ranked or rules.after[ranked[0].tier] else rules.after
        self._cause: FailureCause = "failure"  # for which the next candidate is asked
        self._levels = () if rules is None else rules.levels
        self._spent: dict[int, int] = {}  # attempts by level, on a route with `retries`
        self._ranked = self._candidates = ranked
        if self.retries is not None:
            self._candidates = in_turns(ranked, self._levels, self.retries)
        self._passed = 0  # candidates, tried or passed over
        self._tried_pools: set[str] = set()
        self.too_slow = ""  # reason for which the latest such candidate is not asked
        self._asked: set[str] = set()  # endpoints, on a route with `retries`
        self._wire, self._max_attempts = wire, limits.max_attempts
        self._limits = limits if limits.checks_forecasts else None
        self._has_rules = bool(self._levels or limits.checks_forecasts)

    # -- the next candidate -------------------------------------------------------------------

    def advance(self, now: float) -> bool:
        """Pass over avoided and closed candidates. True: one is left, and another attempt is allowed."""
        count = len(self._candidates)
        passes = self.avoided or self._wire.closes or self._wire.drained or self._has_rules
        while self._passed < count and passes and self._passes_over(now):
            self._passed += 1
        return self._passed < count and self.may_open

    def _passes_over(self, now: float) -> bool:
        candidate = self._candidates[self._passed]
        if candidate.endpoint.pool in self.avoided or (self._after is not None and self._is_for_other(candidate)):
            return True
        if (
            self.retries is not None
            and self._levels
            and self._spent.get(self._levels[candidate.tier], 0) > self.retries
        ):
            return True
        if self._limits is not None and (reason := exceeds_limit(self._limits, candidate, now)):
            self.too_slow = reason
            return True
        if candidate.endpoint.id in self._wire.drained:
            return True
        if closed := self._wire.closes and self._wire.is_closed(candidate, now):
            self.closed.append(candidate)
        return closed

    def skip_slow(self, now: float) -> bool:
        """Skip leading candidates whose forecast exceeds the limit, in decided order. True: a candidate is left."""
        while self._limits is not None and self._passed < len(self._candidates):
            if not (reason := exceeds_limit(self._limits, self._candidates[self._passed], now)):
                break
            self._passed, self.too_slow = self._passed + 1, reason
        return self._passed < len(self._candidates)

    def _is_for_other(self, candidate: Candidate) -> bool:
        """True if the candidate's tier is reserved for a failure kind other than the request's."""
        after = () if self._after is None else self._after[candidate.tier]
        return self._cause not in after if after else self._cause != "failure"

    def turn_to(self, kind: str) -> bool:
        """After a failure: True if a later tier is reserved for this kind; the walk is then limited to such tiers."""
        after, left = self._after, range(self._passed, len(self._candidates))
        if after is None or kind not in OWN_TIERS or not any(kind in after[self._candidates[i].tier] for i in left):
            return False
        self._cause = OWN_TIERS[kind]
        return True

    @property
    def may_race(self) -> bool:
        """True if the next candidate may be hedged: its tier is not reserved for failures, and its endpoint was not
        asked before. Call after `advance`."""
        if not self._levels:
            return True
        upcoming = self.upcoming
        is_reserve = self._after is not None and self._after[upcoming.tier]
        return not is_reserve and (self.retries is None or upcoming.endpoint.id not in self._asked)

    @property
    def asks_again(self) -> bool:
        """True if the next candidate has failed before. Call after `advance`."""
        return self.retries is not None and self.upcoming.endpoint.id in self.lost

    @property
    def may_open(self) -> bool:
        return self.opened < self._max_attempts and self.deaths < MAX_DEATHS

    def allow_another(self) -> None:
        """Permit an extra attempt, to replace an attempt that failed for no fault of the request."""
        self._max_attempts += 1

    @property
    def upcoming(self) -> Candidate:
        """The next candidate, after `advance`."""
        return self._candidates[self._passed]

    def next_at(self, now: float) -> Candidate | None:
        """The next candidate, if another attempt is allowed."""
        return self.upcoming if self.advance(now) else None

    def take(self) -> Candidate:
        """The next candidate is tried now."""
        self._passed += 1
        return self._candidates[self._passed - 1]

    def take_opened(self, now: float) -> Candidate | None:
        """The first candidate that was passed over as closed, and is closed no longer, is tried now."""
        self.closed = [each for each in self.closed if each.endpoint.id not in self._wire.drained]
        opened = next((each for each in self.closed if not self._wire.is_closed(each, now)), None)
        if opened is not None:
            self.closed.remove(opened)
        return opened

    def attempt(self, candidate: Candidate, kind: AttemptKind) -> Attempt:
        """Count an attempt. The last allowed is kept for another pool."""
        self.opened += 1
        self._tried_pools.add(candidate.endpoint.pool)
        if self._levels and self.retries is not None:
            self._asked.add(candidate.endpoint.id)
            level = self._levels[candidate.tier]
            self._spent[level] = self._spent.get(level, 0) + 1
        elif 1 < self.opened == self._max_attempts - 1:
            seen, left = self._tried_pools | self.avoided, range(self._passed, len(self._candidates))
            if any(self._candidates[rank].endpoint.pool not in seen for rank in left):
                self.avoid(seen)
        return Attempt(self.opened, kind, candidate)

    def exhausted(self, denied: bool) -> str:
        """Reason for which no further attempt is opened. `denied`: by the retry budget."""
        if denied:
            return "the retry budget is spent"
        if self.deaths >= MAX_DEATHS:
            return f"{self.deaths} endpoints died while they worked on it"
        if self.opened >= self._max_attempts or self.retries is not None:
            return f"all {self.opened} attempts allowed have failed"
        return f"all {len(self._candidates)} candidates have failed"

    # -- pools to avoid -------------------------------------------------------------------

    def avoid(self, pools: Collection[str]) -> None:
        self.avoided.update(pools)
        self.closed = [each for each in self.closed if each.endpoint.pool not in self.avoided]

    # -- other candidates ---------------------------------------------------------------------

    def has_other_pool(self, candidate: Candidate) -> bool:
        """A pool other than the candidate's was ranked."""
        return any(each.endpoint.pool != candidate.endpoint.pool for each in self._ranked)

    def has_sibling(self, candidate: Candidate) -> bool:
        """Another endpoint of the candidate's pool is among the candidates, tried or not."""
        own = candidate.endpoint
        return any(each.endpoint.pool == own.pool and each.endpoint != own for each in self._candidates)

    def has_other_credential(self, candidate: Candidate) -> bool:
        """The server also takes requests by another API key, with separate limits."""
        own = candidate.endpoint
        others = self._candidates if own.server else ()
        return any(each.endpoint.server == own.server and each.endpoint.id != own.id for each in others)

    # -- the rest of an answer ----------------------------------------------------------------

    def others(self, begun: Candidate) -> Sequence[Candidate]:
        """Candidates without a failure that might write the rest of the answer of `begun`, as ranked. None where no
        further attempt is allowed."""
        left_out = {begun.endpoint.id, *self.lost}
        return [each for each in self._ranked if each.endpoint.id not in left_out] if self.may_open else ()

    def go_through(self, candidates: Sequence[Candidate]) -> None:
        """From here on these are the candidates."""
        self._candidates, self._passed = candidates, 0
        self._after, self._levels = None, ()
        self.closed, self.avoided = [], set()


def in_turns(ranked: Sequence[Candidate], levels: Sequence[int], retries: int) -> list[Candidate]:
    """Of each level all candidates, and `retries` more in turns; levels as they are ranked."""
    found: dict[int, list[Candidate]] = {}
    for each in ranked:
        found.setdefault(levels[each.tier], []).append(each)
    return [each for level in found.values() for each in islice(cycle(level), len(level) + retries)]


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
