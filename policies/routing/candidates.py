"""The endpoints able to take a request now, with forecasts.

Rules:
- A tier that can never take the request (`when`, context window, capabilities) is unfit, whatever the load.
- An endpoint is rejected while down, half-open with a trial request, limited by the provider, or at its cap, and for a
  while after it has refused the name of the LoRA adapter.
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
- An endpoint outside of `region.only` of the route is rejected, before anything else is asked of it.
- A request with state at an endpoint (an earlier response) has no other candidate.
- A tier that comes `after` a failure is in reserve, whatever its forecasts: at first only where no other tier has an
  endpoint that takes requests now (all are down, limited or at their caps), or none has room for the prompt.
- Of tiers beside each other the order is drawn for each request; numbers are those of the drawn order.
- Unknown facts filter nothing: no declared capabilities, no declared context window.
- The fleet view is asked once per tier, for all remaining endpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from policies.rate_limit.send_limits import UNLIMITED
from policies.routes.levels import FailureCause
from policies.routes.route import Route, Tier
from policies.routing.fleet_view import FleetView, to_be_tried, with_answer, with_time_for_trials, with_total
from policies.routing.placement_request import PlacementRequest
from policies.types import (
    FOREVER,
    NEVER,
    UNUSABLE,
    Candidate,
    Completion,
    Endpoint,
    FleetSnapshot,
    Health,
    Load,
    Pool,
    PoolEstimate,
    PromptEstimate,
    Rejection,
    RejectionKind,
    RequestView,
)

TierCandidates = list[Candidate]  # usable endpoints of a tier, or of its part by region; never empty

_UNKNOWN = Load()
_DOWN, _ASLEEP = Health.DOWN, Health.ASLEEP  # a member is slow to look up in an enumeration
_IS_DOWN, _ON_TRIAL = (RejectionKind.DOWN, "down"), (RejectionKind.ON_TRIAL, "down: on trial by another request")
_IS_ASLEEP = RejectionKind.ASLEEP, "asleep: it takes no request until it is woken"
ROUGH = 0.3  # share of the tokens: forecasts and growing budgets bear a smaller margin
LEAST_OUTPUT = 1024  # tokens: with less room the prompt is too long, and an agent does better to compact it
LONGEST_HOLD = 60.0  # s for which a request without a deadline is held because of a rate limit
EXTERNAL_LIMIT = "the route has used what limits.external allows"
OTHER_REGION = "outside of the regions of the route"
UNCHANGED: Mapping[str, int] = {}  # no limit is lowered
MANY = 2**31  # tokens, more than any window
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
    unfit: int = 0  # tiers never able to take the request
    waiting: bool = False  # endpoints at their cap, and waits without a deadline, are taken too
    waited_for: bool = False  # such an endpoint was rejected
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
        pool, prompt = self.fleet.pools.get(tier.pool), self.queued.estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            self._reject(tier.pool, number, RejectionKind.NOT_ESTIMATED, "the prompt was not estimated for it")
        elif unfit := misfit(self.queued.request, tier, pool, prompt.tokens, self.queued.output_cap, self.max_output):
            self._reject(tier.pool, number, *unfit)
            self.unfit += 1
        elif pool.name in self.taken:  # of two tiers with the same pool, the first with a true `when` counts
            reason = f"its pool is looked at in tier {self.taken[pool.name] + 1}"
            self._reject(tier.pool, number, RejectionKind.POOL_TAKEN, reason)
        elif not (pool.local or self._may_use_api(pool.price.of(prompt.tokens, self.expected_output))):
            self._reject(tier.pool, number, RejectionKind.EXTERNAL_LIMIT, EXTERNAL_LIMIT)
        elif usable := self._usable(number, pool, prompt, last_resort):
            price = pool.price.of(prompt.tokens, self.expected_output)
            self.taken[pool.name] = number
            able = self.view.candidates(usable, prompt, number, price, self.now, self.left)
            if self.queued.unseen:
                able = with_answer(self.queued, able, self.left)
            able = with_total(self.queued, self.view, able, self.now) if self.queued.answer_tokens else able
            if not (pool.local or self.left <= 0 or self.queued.extra_unseen(pool.name)):
                able = to_be_tried(able, self.target, self.left)
                self.has_trials |= able[0].trial_s > 0
            regions, tiers = self.queued.route.region, self.reserve if tier.after else self.tiers
            tiers += [able] if regions is None else regions.parts(able)

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

    def total_chance(self, candidate: Candidate) -> float:
        """Chance that the answer is whole within `total` of the route, as far as anything is known."""
        found = self.completion(candidate)
        return 1.0 if found is None else found.probability(self.queued.total_deadline - self.now)

    def output_limits(self) -> Mapping[str, int]:
        """Lowered limits of the output by pool. Empty: the request has room for all of it."""
        cap = self.queued.output_cap
        if cap is not None and cap <= self.max_output:
            return UNCHANGED
        limits: dict[str, int] = {}
        for pool in self.taken:
            most = cap or self.fleet.pools[pool].default_output
            if most and (limit := self._room(pool)) < most:
                limits[pool] = limit
        return limits

    def _room(self, name: str) -> int:
        """Tokens of output that fit into the context window of a pool beside the prompt."""
        window, prompt = self.fleet.pools[name].context_window, self.queued.estimate.pools[name]
        if window is None:
            return MANY
        left, error = window - prompt.tokens, self.view.prompt_error(name, prompt)
        least = self.max_output if self.queued.output_cap else max(min(left, LEAST_OUTPUT), 1)
        return max(left - error, least)

    def _may_use_api(self, usd: float) -> bool:
        route = self.queued.route
        return route.limits.external is None or self.view.may_use_api(route, usd, self.now)

    def _reject(self, pool: str, tier: int, kind: RejectionKind, reason: str, endpoint: str = "") -> None:
        self.rejected.append(Rejection(pool, endpoint, tier, reason, kind))

    def _usable(self, number: int, pool: Pool, prompt: PoolEstimate, last_resort: bool) -> Mapping[str, Load]:
        """Loads by endpoint. An endpoint in cache warm-up is usable where no other endpoint is, and one that is to be
        woken, with the time that this takes, where neither is."""
        ready, warming, asleep, tokens = {}, {}, {}, prompt.tokens
        pinned, regions = self.queued.request.pinned, self.queued.route.region
        for endpoint in pool.endpoints:
            if regions is not None and not regions.allows(endpoint):
                self._reject(pool.name, number, RejectionKind.REGION, OTHER_REGION, endpoint.id)
                continue
            load = self.fleet.loads.get(endpoint.id, _UNKNOWN)
            if load.wake_s and pinned in ("", endpoint.id):
                asleep[endpoint.id] = replace(load, wait=load.wake_s)
            elif (load.health in UNUSABLE or load.full or load.unknown_adapters or pinned) and (
                closed := self._closed(endpoint.id, load, pool, prompt, last_resort)
            ):
                self._reject(pool.name, number, *closed, endpoint.id)
            elif load.limits is not UNLIMITED and load.limits.may_hold(self.now):
                if (limited := self._with_wait(load, tokens)) is not None:
                    ready[endpoint.id] = limited
                else:
                    reason = f"rate limited for {load.limits.wait(tokens, self.now):.1f} s more"
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

    def _closed(
        self, endpoint: str, load: Load, pool: Pool, prompt: PoolEstimate, last_resort: bool
    ) -> tuple[RejectionKind, str] | None:
        """The reason to send the endpoint no request now, rate limits apart; None: it takes this one."""
        pinned = self.queued.request.pinned
        if pinned and endpoint != pinned:
            return RejectionKind.PINNED_ELSEWHERE, "the state of the request is at another endpoint"
        if load.health is _ASLEEP:
            return _IS_ASLEEP
        if load.health is _DOWN and not (last_resort and load.failing):
            return _ON_TRIAL if load.on_trial else _IS_DOWN
        if load.unknown_adapters and load.unknown_adapters.get(prompt.adapter, NEVER) > self.now:
            return RejectionKind.UNKNOWN_ADAPTER, f"it does not know the adapter {prompt.adapter}"
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


def misfit(
    request: RequestView, tier: Tier, pool: Pool, tokens: int, output_cap: int | None, max_output: int
) -> tuple[RejectionKind, str] | None:
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


def is_count_needed(
    route: Route,
    estimate: PromptEstimate,
    output_cap: int | None,
    pools: Mapping[str, Pool],
    may_use_api: Callable[[float], bool] = lambda usd: True,
) -> bool:
    """The decision needs an exact count: the estimate is rough, or within its margin a tier may take the prompt or
    not. `may_use_api`: a cost in USD keeps within `limits.external` of the route."""
    if any(prompt.margin > ROUGH * prompt.tokens for prompt in estimate.pools.values()):
        return True
    least = least_output(output_cap)
    for tier in route.tiers:
        prompt, pool = estimate.pools.get(tier.pool), pools.get(tier.pool)
        if prompt is None or pool is None or not prompt.margin:
            continue
        limits = [] if tier.when is None or tier.when.prompt_tokens is None else tier.when.prompt_tokens.limits
        if (window := pool.context_window) is not None:
            limits = [*limits, window - (output_cap or estimate.output_tokens), window - least]
        if any(abs(prompt.tokens - limit) <= prompt.margin for limit in limits):
            return True
        if not pool.local and route.limits.external is not None:
            output = min(estimate.output_tokens, output_cap or estimate.output_tokens)
            bounds = (max(prompt.tokens - prompt.margin, 0), prompt.tokens + prompt.margin)
            if len({may_use_api(pool.price.of(tokens, output)) for tokens in bounds}) > 1:
                return True
    return False


def uncached_tokens(
    request: RequestView,
    route: Route,
    estimate: PromptEstimate,
    fleet: FleetSnapshot,
    hit: Callable[[Endpoint, PoolEstimate], int],
) -> int:
    """Prompt tokens that the best available endpoint would have to compute: its TTFT budget grows with these.

    The least number at any endpoint that is up, of a tier that may take the request; without one, the whole prompt.
    `hit`: cached tokens of the prompt at an endpoint.
    """
    cap = route.output_cap(request.max_tokens)
    for output in (cap or estimate.output_tokens, least_output(cap)):
        if found := list(_uncached_where_fits(request, route, estimate, fleet, hit, output)):
            return min(found)
    return min((prompt.tokens for prompt in estimate.pools.values()), default=0)


def _uncached_where_fits(
    request: RequestView,
    route: Route,
    estimate: PromptEstimate,
    fleet: FleetSnapshot,
    hit: Callable[[Endpoint, PoolEstimate], int],
    output: int,
) -> Iterator[int]:
    """Uncached tokens at the endpoints that are up, of tiers that take a request with room for `output` tokens."""
    cap = route.output_cap(request.max_tokens)
    for tier in route.tiers:
        pool, prompt = fleet.pools.get(tier.pool), estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            continue
        if misfit(request, tier, pool, prompt.tokens, cap, output):
            continue
        for endpoint in pool.endpoints:
            down = fleet.loads.get(endpoint.id, _UNKNOWN).health in UNUSABLE
            if not down and request.pinned in ("", endpoint.id) and route.allows(endpoint):
                yield prompt.tokens - hit(endpoint, prompt)


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
