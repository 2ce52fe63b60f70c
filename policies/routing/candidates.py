"""The endpoints able to take a request now, with forecasts.

Rules:
- A tier that can never take the request (`when`, context window, capabilities) is unfit, whatever the load.
- An endpoint is rejected while down, half-open with a trial request, limited by the provider, or at its cap; a drained
  one as the last resort too.
- A feature of the route or of the request refuses endpoints and pools by its hooks (`policies.route_hooks`), before
  anything else is asked of them.
- A wait for a provider's rate limit is part of the forecast: within the TTFT budget, the endpoint is a candidate.
- Where no endpoint of any tier is left, those that only have to be waited for are candidates after all.
- A request without a limit of its output needs room for the expected length where a tier has it: a guess makes no
  request unfit.
- A request with such a limit needs room for all of it where a tier has that; else for LEAST_OUTPUT tokens, and the
  limit is lowered to what fits beside the prompt, less the error of its count.
- Servers that want a limit get a default of their kind where there is none, lowered to what fits; the error
  of the count leaves LEAST_OUTPUT of it.
- Where no endpoint of any tier is left, the last resort is asked, whatever is believed of it: endpoints that are down,
  unless nobody answers there. A provider's own time (`retry-after`) is waited for, or named to the caller.
- An endpoint in cache warm-up is a candidate only where the pool has no other.
- Every endpoint of every tier is a candidate or rejected with a reason (an unfit pool with a single reason).
- A tier that comes `after` a failure is in reserve, whatever its forecasts: at first only where no other tier has an
  endpoint that takes requests now (all are down, limited or at their caps), or none has room for the prompt.
- Of tiers beside each other the order is drawn for each request; numbers are those of the drawn order.
- Unknown facts filter nothing: no declared capabilities, no declared context window.
- The expected price counts what the provider's prompt cache is believed to hold: a move to another API loses it.
- The fleet view is asked once per tier, for all remaining endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from policies.rate_limit.send_limits import UNLIMITED
from policies.route_hooks import Fits, Refused
from policies.routes.levels import FailureCause
from policies.routes.route import Tier
from policies.routing.fleet_view import FleetView, to_be_tried, with_answer, with_time_for_trials, with_total
from policies.routing.placement_request import PlacementRequest
from policies.types import (
    FOREVER,
    UNUSABLE,
    Candidate,
    Completion,
    Endpoint,
    FleetSnapshot,
    Health,
    Load,
    Pool,
    PoolEstimate,
    Rejection,
    RejectionKind,
    RequestView,
)

TierCandidates = list[Candidate]  # usable endpoints of a tier, or of a part of it; never empty

_UNKNOWN = Load()
_UP, _PROBING = Health.UP, Health.PROBING  # a member is slow to look up in an enumeration
_DOWN, _ASLEEP, _DRAINING = Health.DOWN, Health.ASLEEP, Health.DRAINING
_IS_DOWN, _ON_TRIAL = (RejectionKind.DOWN, "down"), (RejectionKind.ON_TRIAL, "down: on trial by another request")
_IS_ASLEEP = RejectionKind.ASLEEP, "asleep: it takes no request until it is woken"
_IS_DRAINED = RejectionKind.DRAINED, "drained by an operator: it takes no request until it is ready again"
LEAST_OUTPUT = 1024  # tokens: with less room the prompt is too long, and an agent does better to compact it
LONGEST_HOLD = 60.0  # s for which a request without a deadline is held because of a rate limit
UNCHANGED: Mapping[str, int] = {}  # no limit is lowered
MISFITS = {  # for which a tier can never take the request
    *(RejectionKind.UNTRANSLATABLE, RejectionKind.WHEN, RejectionKind.CONTEXT_WINDOW, RejectionKind.CAPABILITY)
}
_FEATURES = ("tools", "images", "json_schema")  # of a RequestView; the capabilities have the same names


@dataclass(slots=True, eq=False)
class CandidateSet:
    """A request and all inputs of the decision."""

    queued: PlacementRequest
    fleet: FleetSnapshot
    view: FleetView
    now: float
    target: float  # probability of making the TTFT deadline required of a tier
    left: float  # of the TTFT budget, s
    max_output: int  # tokens that need room: the caller's or the route's limit, or the expected output; or the least
    expected_output: int  # tokens
    tiers: list[TierCandidates] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    reserve: list[TierCandidates] = field(default_factory=list)  # of tiers that come after a failure, in their order
    taken: dict[str, int] = field(default_factory=dict)  # number of the tier by pool
    used_up: Refused | None = None  # a limit of the route, which keeps it from a pool
    unfit: int = 0  # tiers never able to take the request
    waiting: bool = False  # endpoints at their cap, and waits without a deadline, are taken too
    waited_for: bool = False  # such an endpoint was rejected
    has_half_open: bool = False  # an endpoint whose next request is the trial
    has_trials: bool = False  # of APIs whose forecast is a guess

    def add_tiers(self, last_resort: bool = False) -> None:
        self.rejected.clear()
        self.unfit = 0
        self.taken.clear()
        route, self.reserve = self.queued.route, []
        for number, tier in enumerate(route.drawn_tiers(self.queued.sequence) if route.has_equals else route.tiers):
            self.add_tier(number, tier, last_resort)
        if self.reserve and not self.tiers:
            self._use_reserve()
        if self.has_trials:
            self.tiers = with_time_for_trials(self.tiers, self.target, self.left, self.queued.request.stream)

    def add_tier(self, number: int, tier: Tier, last_resort: bool = False) -> None:
        """`last_resort`: endpoints that are believed closed, and may be open, are candidates too."""
        queued = self.queued
        pool, prompt = self.fleet.pools.get(tier.pool), queued.estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            self._reject(tier.pool, number, RejectionKind.NOT_ESTIMATED, "the prompt was not estimated for it")
            return
        if unfit := misfit(queued.request, tier, pool, prompt.tokens, queued.output_cap, self.max_output):
            self._reject(tier.pool, number, *unfit)
            self.unfit += 1
            return
        if pool.name in self.taken:  # of two tiers with the same pool, the first with a true `when` counts
            reason = f"its pool is looked at in tier {self.taken[pool.name] + 1}"
            self._reject(tier.pool, number, RejectionKind.POOL_TAKEN, reason)
            return
        cached = 0.0 if pool.prompt_cache is None else self._cached(pool, prompt)
        price = pool.price.of(prompt.tokens, self.expected_output, cached)
        for fits in queued.route.pool_fits:
            if refused := fits(pool, price, self.view, self.now):
                self._reject(tier.pool, number, *refused)
                self.used_up = refused
                return
        if usable := self._usable(number, pool, prompt, last_resort):
            self.taken[pool.name] = number
            able = self._forecast(self.view.candidates(usable, prompt, number, price, self.now, self.left), pool)
            divide, tiers = queued.route.divide, self.reserve if tier.after else self.tiers
            tiers += [able] if divide is None else divide(able)

    def _cached(self, pool: Pool, prompt: PoolEstimate) -> float:
        """Tokens of the prompt that the provider is expected to read from its cache. A session returns to a key that it
        has used; without one the key is drawn."""
        if len(self.queued.route.tiers) == 1:
            return 0.0  # the price decides nothing
        loads, view, now = self.fleet.loads, self.view, self.now
        up = [one for one in pool.endpoints if loads.get(one.id, _UNKNOWN).health not in UNUSABLE]
        held = [view.provider_hit(one, prompt, now) for one in up]
        return float(max(held, default=0)) if self.queued.request.session else sum(held) / max(len(held), 1)

    def _forecast(self, able: TierCandidates, pool: Pool) -> TierCandidates:
        """The candidates of a pool, with their chances of what is waited for beyond the first token, and as trials."""
        queued, left = self.queued, self.left
        if queued.unseen:
            able = with_answer(queued, able, left)
        if queued.answer_tokens:
            able = with_total(queued, self.view, able, self.now)
        if not (pool.local or left <= 0 or queued.extra_unseen(pool.name)):
            able = to_be_tried(able, self.target, left)
            self.has_trials |= able[0].trial_s > 0
        return able

    def _use_reserve(self) -> None:
        """Without a candidate in any other tier, take the reserve for what they all lack: room for the prompt, or an
        endpoint that takes requests now."""
        route, kinds = self.queued.route, {each.kind for each in self.rejected if not self._after(each.tier)}
        too_long = kinds == {RejectionKind.CONTEXT_WINDOW}
        if too_long and self.max_output > least_output(self.queued.output_cap):
            return  # the prompt may fit with a shorter answer
        cause = "context" if too_long and any("context" in tier.after for tier in route.tiers) else "failure"
        if not kinds <= MISFITS or (too_long and (cause == "context" or route.fallback.context)):
            self.tiers = [tier for tier in self.reserve if cause in self._after(tier[0].tier)]
        if kinds <= MISFITS and not self.tiers:
            self.unfit = len(route.tiers)  # a mistake of the caller, and no failure
        self.reserve = []

    def _after(self, number: int) -> frozenset[FailureCause]:
        return self.queued.route.tiers[number].after  # equal in a level, in whose order alone numbers differ

    def completion(self, candidate: Candidate) -> Completion | None:
        """Seconds until the answer is whole; None: nothing is known."""
        tokens = self.queued.answer_tokens
        return self.view.completion(candidate, tokens, self.now) if tokens else None

    def total_kept(self, candidate: Candidate) -> float:
        """Chance that the answer is whole within `total` of the route, as a share of what the route promises, as far as
        anything is known."""
        found, queued = self.completion(candidate), self.queued
        return 1.0 if found is None else found.share_of(queued.route.total_target, queued.total_deadline - self.now)

    def output_limits(self) -> Mapping[str, int]:
        """Lowered limits of the output by pool. Empty: the request has room for all of it."""
        cap = self.queued.output_cap
        if cap is not None and cap <= self.max_output:
            return UNCHANGED
        limits: dict[str, int] = {}
        for pool in self.taken:
            most, room = cap or self.fleet.pools[pool].default_output, self._room(pool)
            if most and room is not None and room < most:
                limits[pool] = room
        return limits

    def _room(self, name: str) -> int | None:
        """Tokens of output that fit into the context window of a pool beside the prompt; None: any number."""
        window, prompt = self.fleet.pools[name].context_window, self.queued.estimate.pools[name]
        if window is None:
            return None
        left, error = window - prompt.tokens, self.view.prompt_error(name, prompt)
        least = self.max_output if self.queued.output_cap else max(min(left, LEAST_OUTPUT), 1)
        return max(left - error, least)

    def _reject(self, pool: str, tier: int, kind: RejectionKind, reason: str, endpoint: str = "") -> None:
        self.rejected.append(Rejection(pool, endpoint, tier, reason, kind))

    def _usable(self, number: int, pool: Pool, prompt: PoolEstimate, last_resort: bool) -> Mapping[str, Load]:
        """Loads by endpoint. An endpoint in cache warm-up is usable where no other endpoint is, and one that is to be
        woken, with the time that this takes, where neither is."""
        ready, warming, asleep, loads = {}, {}, {}, self.fleet.loads
        fits, request, now = self.queued.fits, self.queued.request, self.now
        for endpoint in pool.endpoints:
            load = loads.get(endpoint.id, _UNKNOWN)
            if fits and (refused := first_refusal(fits, request, prompt, endpoint, load, now)):
                self._reject(pool.name, number, *refused, endpoint.id)
            elif load.wake_s:
                asleep[endpoint.id] = replace(load, wait=load.wake_s)
            elif (load.health is not _UP or load.full) and (closed := self._closed(load, pool, last_resort)):
                self._reject(pool.name, number, *closed, endpoint.id)
            elif load.limits is not UNLIMITED and load.limits.may_hold(now):
                if (limited := self._with_wait(load, prompt.tokens)) is not None:
                    ready[endpoint.id] = limited
                else:
                    reason = f"rate limited for {load.limits.wait(prompt.tokens, now):.1f} s more"
                    self._reject(pool.name, number, RejectionKind.RATE_LIMITED, reason, endpoint.id)
            elif load.warming:
                warming[endpoint.id] = load
            else:
                ready[endpoint.id] = load
        if not ready:
            return warming or asleep
        for name in warming:
            self._reject(pool.name, number, RejectionKind.WARMING, "being warmed up: it is given its cache back", name)
        return ready

    def _closed(self, load: Load, pool: Pool, last_resort: bool) -> Refused | None:
        """The reason to send an endpoint no request now, rate limits apart; None: it takes this one."""
        if load.health is _ASLEEP or load.health is _DRAINING:
            return _IS_ASLEEP if load.health is _ASLEEP else _IS_DRAINED
        if load.health is _DOWN and not (last_resort and load.failing):
            return _ON_TRIAL if load.on_trial else _IS_DOWN
        self.has_half_open |= load.health is _PROBING
        if load.full and not self.waiting:
            self.waited_for = True
            cap = pool.concurrent_requests
            return RejectionKind.AT_CAP, f"at its cap of {cap} requests" if cap else "at its own limit of requests"
        return None

    def _with_wait(self, load: Load, tokens: int) -> Load | None:
        """The load with the wait for the provider's rate limits; None: too long."""
        wait = load.limits.wait(tokens, self.now)
        if not wait:
            return load
        if self.left == FOREVER or self.queued.route.scorer != "predicted":
            self.waited_for |= wait <= LONGEST_HOLD
            bearable = self.waiting and wait <= LONGEST_HOLD
        else:
            bearable = wait < self.left
        return replace(load, wait=max(load.wait, wait)) if bearable else None


def first_refusal(
    hooks: Sequence[Fits], request: RequestView, prompt: PoolEstimate, endpoint: Endpoint, load: Load, now: float
) -> Refused | None:
    """Reason of the first hook that refuses the endpoint; None: all let it pass."""
    for fits in hooks:
        if refused := fits(request, prompt, endpoint, load, now):
            return refused
    return None


def misfit(
    request: RequestView, tier: Tier, pool: Pool, tokens: int, output_cap: int | None, max_output: int
) -> Refused | None:
    """Why the tier can never take the request. `tokens`: of the prompt there; `output_cap`: None without one."""
    window = pool.context_window
    if request.unfit and (reason := request.unfit.get(pool.name)):
        return RejectionKind.UNTRANSLATABLE, reason
    if tier.when is not None and (reason := tier.when.refuses(request, tokens, output_cap)):
        return RejectionKind.WHEN, reason
    if window is not None and tokens + max_output > window:
        reason = f"{tokens} tokens + {max_output} output exceed its context window of {window}"
        return RejectionKind.CONTEXT_WINDOW, reason
    if pool.capabilities is not None:
        for feature in _FEATURES:
            if getattr(request, feature) and feature not in pool.capabilities:
                return RejectionKind.CAPABILITY, f"it lacks {feature}"
    return None


def least_output(output_cap: int | None) -> int:
    """Tokens of output for which a tier must have room, whatever the caller's limit."""
    return 1 if output_cap is None else min(output_cap, LEAST_OUTPUT)


def find_candidates(queued: PlacementRequest, fleet: FleetSnapshot, view: FleetView, now: float) -> CandidateSet:
    """Candidates of all tiers of the route, in their order."""
    expected = queued.estimate.output_tokens
    max_output = queued.output_cap or expected
    found = CandidateSet(
        queued,
        fleet,
        view,
        now,
        target=queued.route.target,
        left=queued.deadline - now,
        max_output=max_output,
        expected_output=min(expected, max_output),
    )
    found.add_tiers()
    if not found.tiers and found.waited_for:
        found.waiting = True
        found.add_tiers()
    if not found.tiers and found.unfit:
        found.max_output = least_output(queued.output_cap)
        found.add_tiers()
    if not found.tiers and any(load.failing for load in fleet.loads.values()):
        found.add_tiers(last_resort=True)
    return found
