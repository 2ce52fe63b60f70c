"""Dashboard Routes: objectives of routes and their attainment."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import (
    RANGE,
    ROUTE,
    ROUTE_AND_POOL,
    breakdown,
    maximum,
    mean,
    quantile,
    ratio,
    share,
    summed,
    total,
)

SLO = "firsttoken_slo_total"
REQUESTS = "firsttoken_requests_total"
TTFT = "firsttoken_ttft_seconds"
REASONING, ANSWER = "firsttoken_first_reasoning_seconds", "firsttoken_first_answer_seconds"
STAGES = "firsttoken_stage_seconds"
TO_FIRST_TOKEN = 'stage!~"stream|engine_queue|engine_prefill"'  # the last two are parts of upstream
OF_TTFT = f'{ROUTE}, objective="ttft"'
BUDGET = maximum("firsttoken_route_ttft_budget_seconds", ROUTE, "route")
TARGET = maximum("firsttoken_route_ttft_target_ratio", ROUTE, "route")
ATTAINED = share(SLO, 'met="true"', OF_TTFT, "route")
ATTAINED_IN_RANGE = share(SLO, 'met="true"', OF_TTFT, "route", RANGE)
LIMITS = ((0, "green"), (1, "yellow"), (3, "orange"), (6, "red"))  # burn rates that alert
MARGIN = ((-1, "red"), (0, "green"))


def burn(window: str) -> str:
    return maximum(f"route:firsttoken_ttft_burn:rate{window}", ROUTE, "route")


def quantiles(histogram: str, where: str, by: str) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(q, histogram, where, by), f"p{q * 100:g}", exemplars=q > 0.9) for q in (0.5, 0.95, 0.99)
    )


OBJECTIVES = Row(
    "Objectives",
    (
        Panel(
            "Objectives by route",
            "Each route's TTFT budget and target, and its attainment in the selected time range: counted per request, "
            "not read from buckets. Shed and failed requests count as missed.",
            "Margin is attainment - target. Where it is negative, check below which pool answered and which stage "
            "took the time.",
            (
                Query(BUDGET, "budget", instant=True, format="table"),
                Query(TARGET, "target", instant=True, format="table"),
                Query(ATTAINED_IN_RANGE, "attainment", instant=True, format="table"),
                Query(f"{ATTAINED_IN_RANGE} - {TARGET}", "margin", instant=True, format="table"),
                Query(quantile(0.95, TTFT, ROUTE_AND_POOL, "route", RANGE), "p95", instant=True, format="table"),
                Query(total(REQUESTS, ROUTE, "route", RANGE), "requests", instant=True, format="table"),
            ),
            "none",
            kind="table",
            width=16,
            minimum=None,
            thresholds=MARGIN,
            coloured_column="Margin",
            columns={
                "A": ("Budget", "s"),
                "B": ("Target", "percentunit"),
                "C": ("Attainment", "percentunit"),
                "D": ("Margin", "percentunit"),
                "E": ("TTFT p95", "s"),
                "F": ("Requests", "reqps"),
            },
        ),
        Panel(
            "Error budget left",
            "The unused share of the misses that the target allows, in the selected time range. Select 30 days for "
            "the usual figure.",
            "Below 0 the objective is missed in this time range: add capacity, add a tier, or relax the objective.",
            (Query(f"1 - (1 - {ATTAINED_IN_RANGE}) / (1 - {TARGET})", "{{route}}", instant=True),),
            "percentunit",
            kind="stat",
            minimum=None,
            thresholds=((-1, "red"), (0, "orange"), (0.25, "green")),
        ),
        Panel(
            "TTFT attainment",
            "The share of requests with their first token within the budget, and the target (dashed).",
            "A dip on one route: its pools, below. On all routes: Why slow?",
            (Query(ATTAINED, "{{route}}"), Query(TARGET, "{{route}} target")),
            "percentunit",
            maximum=1,
            dashed="target$",
        ),
        Panel(
            "Error-budget burn rate",
            "The rate of misses relative to the allowed rate: 1 uses the error budget up exactly. Alerts compare a "
            "short and a long window, so that past misses do not alert.",
            "Above 1 for long: a ticket. Above 6 or 14.4: a page; the runbook is in docs/trouble.md.",
            (
                Query(burn("5m"), "{{route}} 5 min"),
                Query(burn("1h"), "{{route}} 1 h"),
                Query(burn("6h"), "{{route}} 6 h"),
                Query(burn("3d"), "{{route}} 3 d"),
            ),
            "none",
            thresholds=LIMITS,
            threshold_lines=True,
        ),
        Panel(
            "Other objectives",
            "Attainment of the budgets per token (tpot) and for the complete answer (total).",
            "tpot: an engine decodes too many answers at once, check its running requests. total: answers are too "
            "long for the budget, or too slow; compare with TPOT.",
            (
                Query(
                    share(SLO, 'met="true"', f'{ROUTE}, objective!="ttft"', "route, objective"),
                    "{{route}} {{objective}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
    ),
)

FIRST_TOKEN = Row(
    "Time to first token",
    (
        Panel(
            "TTFT of $route",
            "Arrival to first token of one route, with its budget (dashed).",
            "p50 near the budget: the preferred tier is too slow for it. Only p99: queues, cold caches or lost "
            "attempts; Why slow? separates them.",
            (*quantiles(TTFT, ROUTE_AND_POOL, ""), Query(BUDGET, "budget")),
            "s",
            width=24,
            dashed="^budget$",
            repeat="route",
        ),
        Panel(
            "Reasoning and answer",
            "Arrival to the first token of reasoning and to the first token of the answer, by route. Without reasoning "
            "the second is the TTFT.",
            "Both rise: queues and prefills, as for TTFT. The answer alone: longer reasoning; less effort, or "
            "a tier that does not reason. `ttft: {of: answer}` promises the answer.",
            (
                Query(quantile(0.5, REASONING, ROUTE_AND_POOL, "route"), "{{route}} reasoning p50"),
                Query(quantile(0.95, REASONING, ROUTE_AND_POOL, "route"), "{{route}} reasoning p95"),
                Query(quantile(0.5, ANSWER, ROUTE_AND_POOL, "route"), "{{route}} answer p50"),
                Query(quantile(0.95, ANSWER, ROUTE_AND_POOL, "route"), "{{route}} answer p95"),
            ),
            "s",
            width=24,
        ),
        Panel(
            "TTFT by stage",
            "The mean TTFT by stage; the stages sum to it.",
            "upstream: the engine. queue: requests queued in the gateway, because the engines have no capacity. "
            "failover: lost attempts. All other stages should be small.",
            (
                Query(
                    breakdown(
                        f"{STAGES}_sum",
                        f"{ROUTE}, {TO_FIRST_TOKEN}",
                        "stage",
                        total(f"{STAGES}_count", f'{ROUTE}, stage="read"'),
                    ),
                    "{{stage}}",
                ),
            ),
            "s",
            width=12,
            stack="normal",
        ),
        Panel(
            "Tier share",
            "The share of answers by pool.",
            "Requests leave the preferred tier when it cannot meet the budget: the share of the other tiers is the "
            "cost of its missing capacity. `firsttoken explain` shows the reasons for one request.",
            (
                Query(
                    breakdown(REQUESTS, f'{ROUTE_AND_POOL}, pool!="-"', "pool", total(REQUESTS, f'{ROUTE}, pool!="-"')),
                    "{{pool}}",
                ),
            ),
            "percentunit",
            width=12,
            stack="percent",
        ),
    ),
)

ANSWERS = Row(
    "Answers",
    (
        Panel(
            "Requests by outcome",
            "Outcomes of requests, per second.",
            "failed and upstream_broke: an endpoint, see Pools. unavailable: no endpoint is usable. refused: invalid "
            "requests or quotas. internal: a bug of the gateway; the log has its traceback.",
            (Query(total(REQUESTS, ROUTE, "outcome"), "{{outcome}}"),),
            "reqps",
            stack="normal",
        ),
        Panel(
            "Refused for lack of capacity",
            "The share of requests that were shed, and of requests without a usable endpoint.",
            "A route with `on_miss: shed` sheds requests whose deadline cannot be met: add capacity, add a tier, or "
            "raise the budget. Unavailable: see the endpoints' state on Pools.",
            (
                Query(share(REQUESTS, 'outcome="shed"', ROUTE, "route"), "{{route}} shed"),
                Query(share(REQUESTS, 'outcome="unavailable"', ROUTE, "route"), "{{route}} unavailable"),
            ),
            "percentunit",
        ),
        Panel(
            "Refused by quota",
            "Requests refused by the limits of a key, per second.",
            "One key, all the time: raise its quota, or contact its owner.",
            (Query(total("firsttoken_quota_refused_total", 'job=~"$job"', "key, limit"), "{{key}} {{limit}}"),),
            "reqps",
        ),
        Panel(
            "Time per output token",
            "TPOT of streams, after the first token.",
            "Rising with the engines' running requests: the engines are full. Rising alone: prefills of other prompts "
            "interrupt decoding; a tpot budget bounds that.",
            (
                Query(quantile(0.5, "firsttoken_tpot_seconds", ROUTE_AND_POOL, "route"), "{{route}} p50"),
                Query(quantile(0.95, "firsttoken_tpot_seconds", ROUTE_AND_POOL, "route"), "{{route}} p95"),
            ),
            "s",
        ),
        Panel(
            "Hedges",
            "Second attempts for overdue requests, as a share of all requests, by result.",
            "Mostly lost: predictions are too optimistic or the budget is too tight. Mostly won: an endpoint is "
            "occasionally slow; see attempts on Pools.",
            (
                Query(
                    breakdown("firsttoken_hedges_total", ROUTE, "result", total(REQUESTS, ROUTE)),
                    "{{result}}",
                ),
            ),
            "percentunit",
            stack="normal",
        ),
        Panel(
            "In progress and queued",
            "Requests in progress, and those of them that are queued in the gateway until an engine has capacity.",
            "A persistent queue: the engines are full. Pools shows which ones.",
            (
                Query(summed("firsttoken_requests_in_progress", 'job=~"$job"'), "in progress, all routes"),
                Query(summed("firsttoken_queue_depth", ROUTE, "route"), "{{route}} queued"),
            ),
            "short",
        ),
        Panel(
            "Cost",
            "USD per hour at the current rate, by the prices of the pools.",
            "A jump of a more expensive pool: the cheaper tier could not meet the budget; compare with tier share.",
            (Query(f"3600 * {total('firsttoken_cost_usd_total', ROUTE_AND_POOL, 'pool')}", "{{pool}}"),),
            "currencyUSD",
            stack="normal",
        ),
        Panel(
            "Cost of 1000 requests",
            "USD per thousand completed requests.",
            "Rising at constant tier share: prompts or answers grow; see tokens.",
            (
                Query(
                    "1000 *"
                    + ratio(
                        total("firsttoken_cost_usd_total", ROUTE_AND_POOL, "route"),
                        total(REQUESTS, f'{ROUTE_AND_POOL}, outcome="completed"', "route"),
                    ),
                    "{{route}}",
                ),
            ),
            "currencyUSD",
        ),
        Panel(
            "Tokens",
            "Input and output tokens per second.",
            "Input determines prefill, and with it TTFT; output determines TPOT and cost.",
            (Query(total("firsttoken_tokens_total", ROUTE_AND_POOL, "direction"), "{{direction}}"),),
            "short",
        ),
        Panel(
            "Attempts per request",
            "Mean number of attempts per request; ideally 1.",
            "Above 1: fallbacks or hedges. Attempts by kind on Pools separates them.",
            (
                Query(
                    ratio(
                        total("firsttoken_attempts_total", 'job=~"$job", pool=~"$pool"'),
                        total("firsttoken_attempts_total", 'job=~"$job", pool=~"$pool", kind="primary"'),
                    ),
                    "attempts",
                ),
                Query(mean(STAGES, f'{ROUTE}, stage="failover"'), "mean failover seconds"),
            ),
            "none",
        ),
    ),
)

DASHBOARD = Dashboard(
    "firsttoken-routes",
    "firsttoken: Routes",
    "Objectives of routes and their attainment. For engines: Pools. For causes: Why slow?",
    (OBJECTIVES, FIRST_TOKEN, ANSWERS),
)
