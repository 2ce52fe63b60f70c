"""Dashboard Pools: predictions, queues, caches and health of engines and APIs."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import POOL, ROUTE, ROUTE_AND_POOL, maximum, mean, minimum, quantile, share, summed, total

ERROR = "firsttoken_ttft_prediction_error_seconds"
COVERED = "firsttoken_ttft_prediction_covered_total"
ATTEMPTS = "firsttoken_attempts_total"
FAILED = 'outcome=~"failed|broken|silent|rate_limited"'
STATES = (
    (0, "down", "red"),
    (0.5, "being probed", "orange"),
    (1, "up", "green"),
    (2, "asleep", "blue"),
    (3, "drained", "blue"),
)

PREDICTIONS = Row(
    "Predictions",
    (
        Panel(
            "TTFT predicted and actual",
            "The median of the TTFT predicted at sending (dashed), and of the actual TTFT.",
            "The lines should coincide. Actual above predicted: requests are sent to pools that miss their budgets.",
            (
                Query(quantile(0.5, "firsttoken_ttft_predicted_seconds", POOL, "pool"), "{{pool}} predicted"),
                Query(quantile(0.5, "firsttoken_ttft_seconds", ROUTE_AND_POOL, "pool"), "{{pool}} actual"),
            ),
            "s",
            dashed="predicted$",
        ),
        Panel(
            "Calibration",
            "The share of requests within the predicted p50 and p90. Ideal: 0.5 and 0.9.",
            "Below: too optimistic, routes miss. Above: too pessimistic, preferred tiers are skipped. Predictions "
            "adapt within some hundred requests; if they do not, the engine changes faster: check its queue.",
            (Query(share(COVERED, 'covered="true"', POOL, "pool, percentile"), "{{pool}} {{percentile}}"),),
            "percentunit",
            maximum=1,
            thresholds=((0, "red"), (0.5, "yellow"), (0.9, "green")),
            threshold_lines=True,
        ),
        Panel(
            "Prediction error",
            "Actual - predicted p50 TTFT: the median and the middle 80%.",
            "A median other than zero is bias; a wide middle is an engine that is hard to predict, at the expense of "
            "deadlines.",
            tuple(Query(quantile(q, ERROR, POOL, "pool"), f"{{{{pool}}}} p{q * 100:g}") for q in (0.1, 0.5, 0.9)),
            "s",
            minimum=None,
        ),
        Panel(
            "Prefix hit rate",
            "The mean share of cached prompt tokens, as predicted by the gateway (dashed) and as reported by the "
            "engine.",
            "Reported below predicted: the engine evicts blocks that the gateway's index still has; add KV-cache "
            "memory, or enable cache events (docs/running.md). Both low: prompts share no prefixes.",
            (
                Query(mean("firsttoken_prefix_hit_ratio", f'{POOL}, source="predicted"', "pool"), "{{pool}} predicted"),
                Query(mean("firsttoken_prefix_hit_ratio", f'{POOL}, source="reported"', "pool"), "{{pool}} reported"),
            ),
            "percentunit",
            width=12,
            maximum=1,
            dashed="predicted$",
        ),
        Panel(
            "TTFT by pool",
            "p95 of TTFT by answering pool.",
            "One pool above the others: its queues, below.",
            (Query(quantile(0.95, "firsttoken_ttft_seconds", ROUTE_AND_POOL, "pool"), "{{pool}}", exemplars=True),),
            "s",
            width=12,
        ),
    ),
)

QUEUES = Row(
    "Queues and caches",
    (
        Panel(
            "Gateway queue",
            "Requests queued in the gateway, because every suitable engine is at capacity.",
            "The gateway's queue replaces the engines' queues and follows deadlines. Never empty: too few engines.",
            (Query(summed("firsttoken_queue_depth", ROUTE, "route"), "{{route}}"),),
            "short",
        ),
        Panel(
            "Queueing time",
            "p50 and p95 of the stage `queue`.",
            "Queueing counts against the deadline. Compare with the budget.",
            (
                Query(quantile(0.5, "firsttoken_stage_seconds", f'{ROUTE}, stage="queue"', "route"), "{{route}} p50"),
                Query(quantile(0.95, "firsttoken_stage_seconds", f'{ROUTE}, stage="queue"', "route"), "{{route}} p95"),
            ),
            "s",
        ),
        Panel(
            "Engine queue",
            "Requests waiting in the engine's queue, as reported by the engine.",
            "Above 0 while the gateway's queue is empty: the engine has other clients.",
            (Query(maximum("firsttoken_endpoint_waiting", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "Engine running",
            "Concurrent requests on the engine, as reported by the engine.",
            "TPOT grows with the number.",
            (Query(maximum("firsttoken_endpoint_running", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "KV cache in use",
            "The share of the engine's KV cache that running requests occupy.",
            "Near 1: the engine preempts, and TTFT and TPOT jump. Fewer or shorter answers, or more memory.",
            (Query(maximum("firsttoken_endpoint_kv_usage_ratio", POOL, "endpoint"), "{{endpoint}}"),),
            "percentunit",
            maximum=1,
            thresholds=((0, "green"), (0.9, "orange"), (0.98, "red")),
            threshold_lines=True,
        ),
        Panel(
            "In flight",
            "Open attempts at each endpoint; the largest value of any gateway.",
            "Unequal values within a pool are normal: work and cached prefixes decide, not the count.",
            (Query(maximum("firsttoken_endpoint_in_flight", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "Uncached tokens ahead",
            "Prompt tokens in flight that are in no cache and have no first token yet: the prefill ahead of a new "
            "request.",
            "Divided by the engine's prefill rate: its queue in seconds.",
            (Query(maximum("firsttoken_endpoint_uncached_tokens_ahead", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "Tokens",
            "Tokens per second, by pool.",
            "Input on a plateau while requests wait: the prefill capacity of the pool.",
            (Query(total("firsttoken_tokens_total", ROUTE_AND_POOL, "pool, direction"), "{{pool}} {{direction}}"),),
            "short",
        ),
        Panel(
            "Time per output token",
            "p95 of TPOT by pool.",
            "High: an engine decodes too many answers at once.",
            (Query(quantile(0.95, "firsttoken_tpot_seconds", ROUTE_AND_POOL, "pool"), "{{pool}}"),),
            "s",
        ),
    ),
)

HEALTH = Row(
    "Health",
    (
        Panel(
            "Endpoints",
            "The state of each endpoint; the worst value of any gateway.",
            "Down: `/fleet` shows the time and the failure; the first failure is logged on stderr. The gateway probes "
            "the endpoint automatically. Drained: by an operator.",
            (Query(minimum("firsttoken_endpoint_state", POOL, "endpoint"), "{{endpoint}}"),),
            "none",
            kind="state-timeline",
            width=24,
            maximum=3,
            thresholds=((0, "red"), (0.5, "orange"), (1, "green"), (2, "blue")),
            states=STATES,
        ),
        Panel(
            "Attempts by outcome",
            "Outcomes of attempts, per second.",
            "rate_limited: a provider's limit. silent: no token came in time. broken: failed after the first token. "
            "cancelled: lost hedges, and disconnected callers.",
            (Query(total(ATTEMPTS, POOL, "outcome"), "{{outcome}}"),),
            "reqps",
            stack="normal",
        ),
        Panel(
            "Failed attempts",
            "The share of each pool's attempts that failed by the pool's own fault.",
            "Callers see few of these, because other endpoints take over. The cost is TTFT (stage `failover`).",
            (Query(share(ATTEMPTS, FAILED, POOL, "pool"), "{{pool}}"),),
            "percentunit",
        ),
        Panel(
            "Attempts by kind",
            "First attempts, fallbacks after a failure, and hedges.",
            "Fallbacks without failures elsewhere on this page: attempts that were abandoned because they were silent.",
            (Query(total(ATTEMPTS, POOL, "pool, kind"), "{{pool}} {{kind}}"),),
            "reqps",
        ),
    ),
)

DASHBOARD = Dashboard(
    "firsttoken-pools",
    "firsttoken: Pools",
    "Engines and APIs: predictions, queues, caches and health.",
    (PREDICTIONS, QUEUES, HEALTH),
)
