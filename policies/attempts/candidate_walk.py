"""Iterates over the candidates of a decision, in order, each once.

Rules:
- `max_attempts` limits all attempts. The last of three or more goes to an untried pool, if there is one.
- If two endpoints died after accepting the request, the request may be the cause: no third endpoint is tried.
- Candidates of avoided pools are skipped.
- A tier with `after` is skipped until the named failure has happened to the request. If the prompt is too long or the
  content refused, and a tier is reserved for this failure, no other tier is tried.
- With a route's `retries`, each level (a tier and tiers beside it) gets that many attempts after the first, alternating
  between endpoints, before the next level; the rule of the last attempt does not apply.
- A candidate at its cap or rate limit is skipped, and tried only if no other is left.
- After a broken answer, only candidates that can continue the answer remain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, islice

from policies.attempts.first_token_limits import exceeds_limit
from policies.attempts.wire import AttemptLimits, Wire
from policies.routes.levels import FailureCause
from policies.types import Attempt, AttemptKind, Candidate

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
        passes = self.avoided or self._wire.closes or self._has_rules
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
