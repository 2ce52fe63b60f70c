"""Evidence against an endpoint: of one caller's requests, or of several callers'.

Rules:
- A failure that a request may have provoked counts for its own caller at once, in a breaker per caller, a copy of the
  endpoint's breaker with the same thresholds and times.
- The failure counts for all callers once a second caller meets the same kind within RECENT seconds, or the gateway
  itself does (caller ""): a probe with the gateway's own credential and model needs no second witness.
- An answer to any caller clears the list of witnesses, but no caller's breaker, as the caller's requests may be the
  cause, and no provider limit.
- At most MAX_CALLERS callers are stored per endpoint, the latest. Evidence that has expired, or was not retried for
  FORGOTTEN seconds, is dropped.
- Evidence of one caller is never published to peers.

`LearnedCap` is the most requests that an engine has in progress by its own limit (vLLM's `--max-num-queued-reqs`,
SGLang's `--max-queued-requests`), learned from its refusals: no page of an engine tells the limit.

Rules:
- The limit is the number of requests, of all gateway processes, at the engine when a further request was refused. With
  none, other clients have filled the engine, and nothing is learned.
- A caller's latest refusal counts: among many requests sent at once, the last refused saw the fewest at the engine.
- A limit shown by a caller's refusals applies to the caller's own requests. All callers get the higher of the limits
  shown by two callers: no single caller can close an engine to all.
- A limit is forgotten CAP_FORGOTTEN seconds after the latest refusal. A changed limit, or departed clients, thus cost a
  refusal a minute, hidden by another endpoint or a wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field

from policies.blame.blame import Evidence
from policies.fleet.circuit_breaker import EJECTION_RESET, MAX_EJECTION, BreakerState, CircuitBreaker
from policies.rate_limit.endpoint_limits import ProviderRefusal, SavedRefusal
from policies.types import NEVER, AttemptOutcome

CAP_FORGOTTEN = 60.0  # s


class LearnedCap:
    def __init__(self, in_flight: int, now: float) -> None:
        self.limit = in_flight
        self.until = now + CAP_FORGOTTEN

    def at(self, now: float) -> int | None:
        """None: forgotten."""
        return self.limit if now < self.until else None

    def reasons(self, now: float) -> Iterator[tuple[str, str, float]]:
        """Belief, reason and end."""
        if now < self.until:
            yield f"cap of {self.limit} requests", "the engine refused more, by its own limit", self.until


_CLOSED = BreakerState.CLOSED  # a member is slow to look up in an enumeration

RECENT = 60.0  # s between the same evidence of two callers
MAX_CALLERS = 64  # of an endpoint
FORGOTTEN = MAX_EJECTION  # s after the end of an ejection

_FAILURES = frozenset({Evidence.FAILED, Evidence.BROKE_OFF, Evidence.UNREACHABLE})  # a single kind: server failure
_LIFTED = ("failure", Evidence.DENIED, Evidence.UNPAID)  # kinds of evidence that an answer disproves


class Witnesses:
    """The latest two callers with the same kind of evidence, by kind."""

    def __init__(self) -> None:
        self.seen: dict[Hashable, dict[str, float]] = {}  # time by caller, by kind

    def add(self, kind: Hashable, caller: str, now: float) -> bool:
        """Add evidence of a caller's request. True: the evidence counts for all callers."""
        seen = self.seen.setdefault("failure" if kind in _FAILURES else kind, {})
        seen.pop(caller, None)
        seen[caller] = now
        if len(seen) > 2:
            del seen[next(one for one in seen if one)]
        return any(not one or one != caller for one, at in seen.items() if now - at <= RECENT)

    def on_answer(self) -> None:
        for kind in _LIFTED:
            self.seen.pop(kind, None)


@dataclass(slots=True)
class CallerState:
    """State of an endpoint by the evidence of one caller. `since`: time of the latest evidence."""

    breaker: CircuitBreaker
    refusal: ProviderRefusal
    since: float
    queue_cap: LearnedCap | None = None  # of the engine's own queue
    unknown_variants: dict[str, float] = field(default_factory=dict)  # refused: until when

    def is_over(self, now: float) -> bool:
        """True if no evidence counts against the endpoint any more."""
        breaker = self.breaker
        if self.cap(now) is not None or max(self.refusal.until, *self.unknown_variants.values(), NEVER) > now:
            return False
        if breaker.state is BreakerState.CLOSED:
            return now - max(self.since, breaker.closed_at) >= EJECTION_RESET
        return now - breaker.until >= FORGOTTEN

    def cap(self, now: float) -> int | None:
        """Most requests in progress, by the refusals of this caller's; None: not known."""
        return None if self.queue_cap is None else self.queue_cap.at(now)

    @property
    def refused_until(self) -> float:
        """End of the provider's refusal, by a rate limit or for lack of money."""
        return max(self.refusal.until, self.breaker.unpaid_until)


class CallerEvidence:
    """Feeds evidence to an endpoint's breaker and provider refusal, and to those of each caller with own evidence.
    `states`: by caller, latest evidence last; empty without failures."""

    def __init__(self, shared: CircuitBreaker, refusal: ProviderRefusal) -> None:
        self._shared, self._alone = shared, (shared,)
        self._refusal = refusal
        self._witnesses = Witnesses()
        self.states: OrderedDict[str, CallerState] = OrderedDict()

    def on_sent(self, key: Hashable, caller: str, now: float) -> None:
        """Of a caller with evidence, or while the breaker is not closed: else there is no trial to begin."""
        for breaker in self._breakers(caller):
            breaker.on_sent(key, now)

    def on_answer(self, key: Hashable, caller: str, now: float) -> None:
        """First token of `key`."""
        if self._witnesses.seen:
            self._witnesses.on_answer()
        for breaker in self._breakers(caller) if self.states else self._alone:
            breaker.on_answer(key, now)

    def on_replied(self, key: Hashable, caller: str, outcome: AttemptOutcome, now: float) -> None:
        """An end that is no failure of the endpoint: answered, refused for the request's own fault, or cancelled."""
        if self._witnesses.seen and outcome is not AttemptOutcome.CANCELLED:
            self._witnesses.on_answer()
        for breaker in self._breakers(caller) if self.states else self._alone:
            breaker.on_ended(key, outcome, now)

    def on_failed(
        self,
        key: Hashable,
        caller: str,
        outcome: AttemptOutcome,
        evidence: Evidence,
        now: float,
        *,
        connected: bool = True,
        why: str = "",
    ) -> None:
        """`connected` False: refused, or reset before a byte came. `why`: for the operator."""
        confirmed = self._count(evidence, caller, now)
        for breaker in self._breakers(caller):
            mine = confirmed or breaker is not self._shared
            breaker.on_ended(key, outcome, now, connected, confirmed=mine, why=why)

    def on_silent(self, key: Hashable, caller: str, sent_at: float, now: float, overdue: bool) -> None:
        """`key` was abandoned without a token. `overdue`: after longer than the forecast can explain."""
        confirmed = self._count(Evidence.FAILED, caller, now)
        for breaker in self._breakers(caller):
            breaker.on_silent(key, sent_at, now, overdue, confirmed or breaker is not self._shared)

    def on_rate_limited(self, caller: str, now: float, retry_after: float | None, spent: bool, why: str) -> None:
        """`spent`: by the provider's own figures the limit is used up, for all callers."""
        confirmed = self._witnesses.add(Evidence.BUSY, caller, now) or spent
        refusal = self._refusal if confirmed else self._begin(caller, now).refusal
        refusal.on_refused(now, retry_after, why)

    def on_queue_limit(self, caller: str, cap: LearnedCap, now: float) -> LearnedCap | None:
        """The engine's own limit has refused a request of the caller. Returns the cap that counts for all; None: only
        this caller has met with any."""
        if not caller:
            return cap
        self._begin(caller, now).queue_cap = cap
        found = sorted(limit for state in self.states.values() if (limit := state.cap(now)) is not None)
        return LearnedCap(found[1], now) if len(found) > 1 else None

    def on_unknown_variant(self, variant: str, caller: str, now: float, until: float) -> bool:
        """The server does not know the variant. Returns whether that counts for all callers."""
        if self._witnesses.add(("variant", variant), caller, now):
            return True
        self._begin(caller, now).unknown_variants[variant] = until
        return False

    def restore(self, refusals: Mapping[str, SavedRefusal], age: float, now: float) -> None:
        """Brings back what single callers had met with `age` seconds ago."""
        for caller, saved in refusals.items():
            if saved.left > age:
                self._begin(caller, now).refusal.restore(saved, age, now)

    def expire(self, now: float) -> None:
        for caller in [caller for caller, state in self.states.items() if state.is_over(now)]:
            del self.states[caller]

    def on_reload(self) -> None:
        """Retry at once after failures that a mended configuration may have fixed. Provider limits stay."""
        for state in self.states.values():
            state.breaker.on_reload()
            state.unknown_variants.clear()

    def on_other_account(self) -> None:
        """Another key: the provider has refused another account."""
        for state in self.states.values():
            state.refusal = ProviderRefusal()

    def _breakers(self, caller: str) -> tuple[CircuitBreaker, ...]:
        own = self.states.get(caller)
        return self._alone if own is None else (self._shared, own.breaker)

    def _count(self, evidence: Evidence, caller: str, now: float) -> bool:
        confirmed = self._witnesses.add(evidence, caller if evidence.needs_witness else "", now)
        if not confirmed:
            self._begin(caller, now)
        return confirmed

    def _begin(self, caller: str, now: float) -> CallerState:
        """The state of a caller with new evidence; the first begins like the shared one."""
        state = self.states.get(caller)
        if state is None:
            state = self.states[caller] = CallerState(copy(self._shared), copy(self._refusal), now)
            if len(self.states) > MAX_CALLERS:
                self.states.popitem(last=False)
        state.since = now
        self.states.move_to_end(caller)
        return state
