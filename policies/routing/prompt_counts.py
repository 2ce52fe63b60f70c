"""Facts of a prompt that a decision needs beforehand: whether to count it exactly, and its uncached tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from policies.route_hooks import MeterView
from policies.routes.route import Route
from policies.routing.candidates import first_refusal, least_output, misfit
from policies.types import UNUSABLE, Endpoint, FleetSnapshot, Load, Pool, PoolEstimate, PromptEstimate, RequestView

ROUGH = 0.3  # share of the tokens: forecasts and growing budgets bear a smaller margin
_UNKNOWN = Load()


def is_count_needed(
    route: Route,
    estimate: PromptEstimate,
    output_cap: int | None,
    pools: Mapping[str, Pool],
    meters: MeterView,
    now: float,
) -> bool:
    """The decision needs an exact count: the estimate is rough, or within its margin a tier may take the prompt or
    not."""
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
        output = min(estimate.output_tokens, output_cap or estimate.output_tokens)
        bounds = (max(prompt.tokens - prompt.margin, 0), prompt.tokens + prompt.margin)
        for fits in route.pool_fits:
            if len({fits(pool, pool.price.of(tokens, output), meters, now) for tokens in bounds}) > 1:
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
    cap, fits = route.output_cap(request.max_tokens), route.fits(request)
    for tier in route.tiers:
        pool, prompt = fleet.pools.get(tier.pool), estimate.pools.get(tier.pool)
        if pool is None or prompt is None:
            continue
        if misfit(request, tier, pool, prompt.tokens, cap, output):
            continue
        for endpoint in pool.endpoints:
            load = fleet.loads.get(endpoint.id, _UNKNOWN)
            if load.health not in UNUSABLE and not first_refusal(fits, request, prompt, endpoint, load, fleet.at):
                yield prompt.tokens - hit(endpoint, prompt)
