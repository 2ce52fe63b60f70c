"""Routes: what callers were promised, and what they got."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import BOTH, RANGE, ROUTE, breakdown, every, mean, most, quantile, ratio, share, total

SLO = "firsttoken_slo_total"
REQUESTS = "firsttoken_requests_total"
TTFT = "firsttoken_ttft_seconds"
STAGES = "firsttoken_stage_seconds"
TO_FIRST_TOKEN = 'stage!~"stream|engine_queue|engine_prefill"'  # the last two are parts of upstream
OF_TTFT = f'{ROUTE}, objective="ttft"'
BUDGET = most("firsttoken_route_ttft_budget_seconds", ROUTE, "route")
TARGET = most("firsttoken_route_ttft_target_ratio", ROUTE, "route")
ATTAINED = share(SLO, 'met="true"', OF_TTFT, "route")
ATTAINED_IN_RANGE = share(SLO, 'met="true"', OF_TTFT, "route", RANGE)
LIMITS = ((0, "green"), (1, "yellow"), (3, "orange"), (6, "red"))  # burn rates: those that alert
MARGIN = ((-1, "red"), (0, "green"))


def burn(window: str) -> str:
    return most(f"route:firsttoken_ttft_burn:rate{window}", ROUTE, "route")


def quantiles(histogram: str, where: str, by: str) -> tuple[Query, ...]:
    return tuple(
        Query(quantile(q, histogram, where, by), f"p{q * 100:g}", exemplars=q > 0.9) for q in (0.5, 0.95, 0.99)
    )


PROMISES = Row(
    "Promises",
    (
        Panel(
            "Promises by route",
            "What each route promises for the first token, and how it has kept it in the time shown: counted "
            "request by request, not read from buckets. Whatever was shed or failed counts as missed.",
            "Margin is attainment - target. Where it is negative, look below which pool answered and in which "
            "stage the time went.",
            (
                Query(BUDGET, "budget", once=True, form="table"),
                Query(TARGET, "target", once=True, form="table"),
                Query(ATTAINED_IN_RANGE, "attainment", once=True, form="table"),
                Query(f"{ATTAINED_IN_RANGE} - {TARGET}", "margin", once=True, form="table"),
                Query(quantile(0.95, TTFT, BOTH, "route", RANGE), "p95", once=True, form="table"),
                Query(total(REQUESTS, ROUTE, "route", RANGE), "requests", once=True, form="table"),
            ),
            "none",
            kind="table",
            width=16,
            least=None,
            steps=MARGIN,
            judged="Margin",
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
            "Of the misses that the target allows, the share that is left in the time shown. Set the time to 30 "
            "days for the usual figure.",
            "Below 0 the promise is broken for this time: add capacity, add a tier, or promise less.",
            (Query(f"1 - (1 - {ATTAINED_IN_RANGE}) / (1 - {TARGET})", "{{route}}", once=True),),
            "percentunit",
            kind="stat",
            least=None,
            steps=((-1, "red"), (0, "orange"), (0.25, "green")),
        ),
        Panel(
            "TTFT attainment",
            "The share of requests whose first token came within the budget, and the target (dashed).",
            "A dip on one route: its pools, below. On all: Why slow?",
            (Query(ATTAINED, "{{route}}"), Query(TARGET, "{{route}} target")),
            "percentunit",
            most=1,
            dashed="target$",
        ),
        Panel(
            "Error-budget burn",
            "How many times faster than allowed the route misses its promise: 1 uses the budget up exactly. "
            "Alerts compare a short and a long time, so that what is over does not alert.",
            "Above 1 for long: a ticket. Above 6 or 14.4: a page; the runbook is in docs/operations.md.",
            (
                Query(burn("5m"), "{{route}} 5 min"),
                Query(burn("1h"), "{{route}} 1 h"),
                Query(burn("6h"), "{{route}} 6 h"),
                Query(burn("3d"), "{{route}} 3 d"),
            ),
            "none",
            steps=LIMITS,
            lines=True,
        ),
        Panel(
            "Other promises",
            "Attainment of the budgets per token (tpot) and for the whole answer (total).",
            "tpot: an engine writes too many answers at once, see its running requests. total: answers are too "
            "long for the budget, or too slow; compare with TPOT.",
            (
                Query(
                    share(SLO, 'met="true"', f'{ROUTE}, objective!="ttft"', "route, objective"),
                    "{{route}} {{objective}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
    ),
)

FIRST_TOKEN = Row(
    "Time to first token",
    (
        Panel(
            "TTFT of $route",
            "Arrival to first token, for one route, against its budget (dashed).",
            "p50 near the budget: the wanted tier is too slow for it. Only p99: queues, cold caches or lost "
            "attempts; Why slow? tells them apart.",
            (*quantiles(TTFT, BOTH, ""), Query(BUDGET, "budget")),
            "s",
            width=24,
            dashed="^budget$",
            repeat="route",
        ),
        Panel(
            "TTFT by stage",
            "Where the mean time to the first token goes; the stages add up to it.",
            "upstream: the engine. queue: we hold requests back, because the engines have enough to do. failover: "
            "attempts were lost before. Anything else should be thin.",
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
            "Which pools answered.",
            "Requests leave the wanted tier when it cannot make the budget: the share of the others is what its "
            "lack of capacity costs. `firsttoken explain` says why for one request.",
            (
                Query(
                    breakdown(REQUESTS, f'{BOTH}, pool!="-"', "pool", total(REQUESTS, f'{ROUTE}, pool!="-"')),
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
            "How requests ended, per second.",
            "failed and upstream_broke: an endpoint, see Pools. unavailable: no endpoint is usable. refused: "
            "callers' own mistakes. internal: our bug, its traceback is in the log.",
            (Query(total(REQUESTS, ROUTE, "outcome"), "{{outcome}}"),),
            "reqps",
            stack="normal",
        ),
        Panel(
            "Refused for lack of capacity",
            "The share of requests that were shed, and of those that found no usable endpoint.",
            "Shedding is what a route with `on_miss: shed` does when nothing can make the deadline: more "
            "capacity, another tier, or a longer budget. Unavailable: see the endpoints' state on Pools.",
            (
                Query(share(REQUESTS, 'outcome="shed"', ROUTE, "route"), "{{route}} shed"),
                Query(share(REQUESTS, 'outcome="unavailable"', ROUTE, "route"), "{{route}} unavailable"),
            ),
            "percentunit",
        ),
        Panel(
            "Refused by quota",
            "Requests that a key's limits refused, per second.",
            "One key, all the time: it needs a larger quota, or its owner a word.",
            (Query(total("firsttoken_quota_refused_total", 'job=~"$job"', "key, limit"), "{{key}} {{limit}}"),),
            "reqps",
        ),
        Panel(
            "Time per output token",
            "Of streams, after the first token.",
            "Rising with the engines' running requests: they are full. Rising alone: prompts of others are "
            "computed between the tokens; a tpot budget bounds that.",
            (
                Query(quantile(0.5, "firsttoken_tpot_seconds", BOTH, "route"), "{{route}} p50"),
                Query(quantile(0.95, "firsttoken_tpot_seconds", BOTH, "route"), "{{route}} p95"),
            ),
            "s",
        ),
        Panel(
            "Hedges",
            "Second copies of overdue requests, as a share of all requests, by what came of them.",
            "Many that lose: predictions are too hopeful or the budget is too tight. Many that win: some endpoint "
            "is slow now and then; see attempts on Pools.",
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
            "In progress and held back",
            "Requests that are being served, and those of them that we hold back until an engine has room.",
            "Held back for long: the engines are full. Which ones: Pools.",
            (
                Query(every("firsttoken_requests_in_progress", 'job=~"$job"'), "in progress, all routes"),
                Query(every("firsttoken_queue_depth", ROUTE, "route"), "{{route}} held back"),
            ),
            "short",
        ),
        Panel(
            "Cost",
            "USD per hour at the present rate, by the prices in the configuration.",
            "A jump to a dearer pool: the cheaper tier could not make the budget; compare with tier share.",
            (Query(f"3600 * {total('firsttoken_cost_usd_total', BOTH, 'pool')}", "{{pool}}"),),
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
                        total("firsttoken_cost_usd_total", BOTH, "route"),
                        total(REQUESTS, f'{BOTH}, outcome="completed"', "route"),
                    ),
                    "{{route}}",
                ),
            ),
            "currencyUSD",
        ),
        Panel(
            "Tokens",
            "Tokens in and out, per second.",
            "Input is what prefill, and with it TTFT, is made of; output is what TPOT and cost are made of.",
            (Query(total("firsttoken_tokens_total", BOTH, "direction"), "{{direction}}"),),
            "short",
        ),
        Panel(
            "Attempts per request",
            "How often a request was sent, on average; 1 is what it should be.",
            "Above 1: fallbacks or hedges. Attempts by kind on Pools tells which.",
            (
                Query(
                    ratio(
                        total("firsttoken_attempts_total", 'job=~"$job", pool=~"$pool"'),
                        total("firsttoken_attempts_total", 'job=~"$job", pool=~"$pool", kind="primary"'),
                    ),
                    "attempts",
                ),
                Query(mean(STAGES, f'{ROUTE}, stage="failover"'), "seconds lost, where any were"),
            ),
            "none",
        ),
    ),
)

DASHBOARD = Dashboard(
    "firsttoken-routes",
    "firsttoken: Routes",
    "What callers were promised, and what they got. For engines: Pools. For causes: Why slow?",
    (PROMISES, FIRST_TOKEN, ANSWERS),
)
