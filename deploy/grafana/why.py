"""Dashboard Why: what made requests miss their budgets, forecasts against reality, and what limits each pool."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import (
    POOL,
    ROUTE,
    ROUTE_AND_POOL,
    maximum,
    mean,
    minimum,
    quantile,
    ratio,
    share,
    summed,
    total,
)

SLOW, SLO, TOKENS = "firsttoken_slow_total", "firsttoken_slo_total", "firsttoken_tokens_total"
TTFT, PREDICTED = "firsttoken_ttft_seconds", "firsttoken_ttft_predicted_seconds"
GAP, COVERED = "firsttoken_longest_gap_seconds", "firsttoken_ttft_prediction_covered_total"
CACHED = total("firsttoken_cached_tokens_total", ROUTE, "route")
INPUT = total(TOKENS, f'{ROUTE}, direction="input"', "route")
COMPLETED = total("firsttoken_requests_total", f'{ROUTE}, outcome="completed"', "route")
STEPS, PAUSE, KEPT = "firsttoken_session_steps", "firsttoken_session_pause_seconds", "firsttoken_session_kept_ratio"
BEGUN = total(f"{STEPS}_bucket", f'{ROUTE}, le="1.0"', "route")
BOUNDS = (
    (0, "idle", "grey"),
    (1, "nothing", "green"),
    (2, "decoding", "yellow"),
    (3, "prefill", "orange"),
    (4, "KV cache", "red"),
)


def of_objective(objective: str) -> str:
    return share(SLO, 'met="true"', f'{ROUTE}, objective="{objective}"', "route")


MISSES = Row(
    "Misses",
    (
        Panel(
            "Misses by cause",
            "Requests that missed a budget or failed, per second, by the one cause of each.",
            "`firsttoken why --route ROUTE --last 15m` has the same in milliseconds; docs/trouble.md has the mend of "
            "each cause.",
            (Query(total(SLOW, ROUTE, "cause"), "{{cause}}"),),
            "reqps",
            width=12,
            stack="normal",
        ),
        Panel(
            "Misses by route",
            "Requests that missed a budget or failed, per second, by route.",
            "Select the route that rises, and read its causes on the left.",
            (Query(total(SLOW, ROUTE, "route"), "{{route}}"),),
            "reqps",
            width=12,
            stack="normal",
        ),
        Panel(
            "Goodput",
            "The share of requests that completed within every budget of their route, and of each objective alone.",
            "Goodput below every objective: different requests miss different budgets. Equal to one: that one decides.",
            (
                Query(of_objective("goodput"), "{{route}} goodput"),
                Query(of_objective("ttft"), "{{route}} ttft"),
                Query(of_objective("tpot"), "{{route}} tpot"),
                Query(of_objective("gap"), "{{route}} gap"),
                Query(of_objective("total"), "{{route}} total"),
            ),
            "percentunit",
            width=12,
            maximum=1,
        ),
        Panel(
            "Good requests per second",
            "Requests that completed within every budget, per second.",
            "Flat while traffic grows: the fleet is at its capacity.",
            (Query(total(SLO, f'{ROUTE}, objective="goodput", met="true"', "route"), "{{route}}"),),
            "reqps",
            width=12,
            stack="normal",
        ),
    ),
)

FORECASTS = Row(
    "Forecasts against reality",
    (
        Panel(
            "Forecast and TTFT",
            "The median forecast of the first token, and the median TTFT, by pool.",
            "Apart for long: other clients of the engines, or an engine that changed. Compare with calibration.",
            (
                Query(quantile(0.5, PREDICTED, POOL, "pool"), "{{pool}} forecast"),
                Query(quantile(0.5, TTFT, ROUTE_AND_POOL, "pool"), "{{pool}} TTFT"),
            ),
            "s",
            width=12,
        ),
        Panel(
            "Within the forecast p90",
            "The share of first tokens that came within the predicted p90; 90% is ideal.",
            "Below 80%: requests go to tiers that miss. Above 98%: tiers that would meet the budget are skipped.",
            (Query(share(COVERED, 'covered="true"', f'{POOL}, percentile="p90"', "pool"), "{{pool}}"),),
            "percentunit",
            width=12,
            maximum=1,
        ),
    ),
)

PROMPTS = Row(
    "Prompts",
    (
        Panel(
            "Cached share of prompts",
            "The share of prompt tokens that the engine or provider had cached, by route.",
            "A fall: a changed prompt (`cache_broken`), a restart (`cold_cache`) or a cache that is too small "
            "(`evicted_session`).",
            (Query(ratio(CACHED, INPUT), "{{route}}"),),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Prompt length",
            "Mean prompt tokens of completed requests, by route.",
            "Every uncached token is prefill time. Growth over weeks: history, tool results or tool descriptions.",
            (Query(ratio(INPUT, COMPLETED), "{{route}}"),),
            "short",
        ),
        Panel(
            "Requests to external APIs",
            "The share of requests that pools of external APIs answered, over the last hour.",
            "Growth: the own engines cannot keep the budget. See what limits their pool, below.",
            (Query(maximum("route:firsttoken_external:ratio_rate1h", ROUTE, "route"), "{{route}}"),),
            "percentunit",
            maximum=1,
        ),
    ),
)

SESSIONS = Row(
    "Sessions",
    (
        Panel(
            "Steps of a session",
            "Mean number of prompts of a session, by route: steps over sessions that began.",
            "An agent's task takes steps times the TTFT, and the answers: profile a step before an engine.",
            (Query(ratio(total(f"{STEPS}_count", ROUTE, "route"), BEGUN), "{{route}}"),),
            "short",
        ),
        Panel(
            "Time between steps",
            "p50 and p90 of the time from the end of a step to the next, by route. Waits for a session's second step.",
            "The time of tools and people. Longer than engines keep a prefix: more KV cache.",
            (
                Query(quantile(0.5, PAUSE, ROUTE, "route"), "{{route}} p50"),
                Query(quantile(0.9, PAUSE, ROUTE, "route"), "{{route}} p90"),
            ),
            "s",
        ),
        Panel(
            "Kept of the previous prompt",
            "Mean share of the prompt before with which a step begins, by route. Waits for a session's second step.",
            "Below 100%: the prompts change early; `firsttoken advise` names the place and the cost.",
            (Query(mean(KEPT, ROUTE, "route"), "{{route}}"),),
            "percentunit",
            maximum=1,
        ),
    ),
)

ENGINES = Row(
    "Steadiness and limits",
    (
        Panel(
            "What limits a pool",
            "The verdict of most of the pool's engines.",
            "Decoding: fewer concurrent answers. Prefill: shorter prompts, more cache hits. KV cache: more memory. "
            "All: more engines.",
            (Query(maximum("firsttoken_pool_bound", POOL, "pool"), "{{pool}}"),),
            "short",
            kind="state-timeline",
            width=12,
            states=BOUNDS,
        ),
        Panel(
            "Longest gap between tokens",
            "p50 and p99 of the longest gap of an answer, by route.",
            "p99 far above TPOT: prefills between the tokens of answers, or preempted answers.",
            (
                Query(quantile(0.5, GAP, ROUTE_AND_POOL, "route"), "{{route}} p50"),
                Query(quantile(0.99, GAP, ROUTE_AND_POOL, "route"), "{{route}} p99"),
            ),
            "s",
            width=12,
        ),
        Panel(
            "Gaps above a second",
            "Standstills of answers, per second. Waits for the first gap above 1 s.",
            "Preemptions beside it: less concurrency. Else the engine's log.",
            (Query(total("firsttoken_long_gaps_total", ROUTE_AND_POOL, "route"), "{{route}}"),),
            "short",
        ),
        Panel(
            "Preempted answers",
            "Answers that engines put back into their queues for want of KV cache, per second.",
            "Above 0: fewer concurrent requests, or more memory.",
            (Query(summed("firsttoken_endpoint_preemptions_per_second", POOL, "pool"), "{{pool}}"),),
            "short",
        ),
        Panel(
            "Refused by the engine",
            "Requests that engines refused by their own queue limits (vLLM), per second.",
            "Above 0 for long: `concurrent_requests` of the pool at or below the limit, or more engines.",
            (Query(summed("firsttoken_endpoint_rejections_per_second", POOL, "pool"), "{{pool}}"),),
            "short",
        ),
        Panel(
            "Evicted blocks",
            "Blocks that engines dropped from their prefix caches, per second. Waits for an engine with `kv_events`.",
            "With a falling cached share: more memory, or fewer sessions for each engine.",
            (Query(summed("firsttoken_endpoint_evictions_per_second", POOL, "pool"), "{{pool}}"),),
            "short",
        ),
        Panel(
            "Accepted draft tokens",
            "The share of draft tokens that engines accepted. Waits for an engine with speculative decoding.",
            "Below about 40%: fewer draft tokens, or none.",
            (Query(minimum("firsttoken_endpoint_speculative_acceptance_ratio", POOL, "pool"), "{{pool}}"),),
            "percentunit",
            maximum=1,
        ),
    ),
)

DASHBOARD = Dashboard(
    "firsttoken-why",
    "firsttoken: Why",
    "What made requests miss their budgets, forecasts against reality, and what limits each pool.",
    (MISSES, FORECASTS, PROMPTS, SESSIONS, ENGINES),
)
