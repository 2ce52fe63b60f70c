"""Pools: the engines and APIs, what is believed of them, and what they did."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import BOTH, POOL, ROUTE, every, least, mean, most, quantile, share, total

ERROR = "firsttoken_ttft_prediction_error_seconds"
COVERED = "firsttoken_ttft_prediction_covered_total"
ATTEMPTS = "firsttoken_attempts_total"
FAILED = 'outcome=~"failed|broken|silent|rate_limited"'
STATES = ((0, "down", "red"), (0.5, "being tried", "orange"), (1, "up", "green"))

PREDICTIONS = Row(
    "Predictions",
    (
        Panel(
            "TTFT predicted and actual",
            "The median of what was predicted at the moment of sending (dashed), and of what came.",
            "The lines should lie on each other. Actual above predicted: requests are sent where they come late.",
            (
                Query(quantile(0.5, "firsttoken_ttft_predicted_seconds", POOL, "pool"), "{{pool}} predicted"),
                Query(quantile(0.5, "firsttoken_ttft_seconds", BOTH, "pool"), "{{pool}} actual"),
            ),
            "s",
            dashed="predicted$",
        ),
        Panel(
            "Calibration",
            "The share of requests that came within the predicted p50 and p90. Right are 0.5 and 0.9.",
            "Below: too hopeful, routes miss. Above: too careful, wanted tiers are skipped. It learns by itself "
            "within some hundred requests; if it does not, the engine changes faster than that: see its queue.",
            (Query(share(COVERED, 'covered="true"', POOL, "pool, quantile"), "{{pool}} {{quantile}}"),),
            "percentunit",
            most=1,
            steps=((0, "red"), (0.5, "yellow"), (0.9, "green")),
            lines=True,
        ),
        Panel(
            "Prediction error",
            "Actual - predicted p50: its median and the middle 80%.",
            "A median off zero is bias; a wide middle is an engine that is hard to predict, of which the deadline "
            "pays.",
            tuple(Query(quantile(q, ERROR, POOL, "pool"), f"{{{{pool}}}} p{q * 100:g}") for q in (0.1, 0.5, 0.9)),
            "s",
            least=None,
        ),
        Panel(
            "Prefix hit rate",
            "The mean share of prompt tokens that were cached, as we predicted it (dashed) and as the engine "
            "reported it.",
            "Reported below predicted: the engine evicts what we believe it holds; give it more KV cache, or "
            "cache events (docs/operations.md). Both low: prompts share no beginnings.",
            (
                Query(mean("firsttoken_prefix_hit_ratio", f'{POOL}, source="predicted"', "pool"), "{{pool}} predicted"),
                Query(mean("firsttoken_prefix_hit_ratio", f'{POOL}, source="reported"', "pool"), "{{pool}} reported"),
            ),
            "percentunit",
            width=12,
            most=1,
            dashed="predicted$",
        ),
        Panel(
            "TTFT by pool",
            "p95 of what each pool answered.",
            "One pool above the others: its queues, below.",
            (Query(quantile(0.95, "firsttoken_ttft_seconds", BOTH, "pool"), "{{pool}}", exemplars=True),),
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
            "Requests that we hold back, because every engine that could take them has enough to do.",
            "It is shorter than the engines' queues would be, and in order of deadline. Always there: too few engines.",
            (Query(every("firsttoken_queue_depth", ROUTE, "route"), "{{route}}"),),
            "short",
        ),
        Panel(
            "Time held back",
            "p50 and p95 of the stage `queue`.",
            "It is charged to the deadline. Compare with the budget.",
            (
                Query(quantile(0.5, "firsttoken_stage_seconds", f'{ROUTE}, stage="queue"', "route"), "{{route}} p50"),
                Query(quantile(0.95, "firsttoken_stage_seconds", f'{ROUTE}, stage="queue"', "route"), "{{route}} p95"),
            ),
            "s",
        ),
        Panel(
            "Engine queue",
            "Requests that wait inside the engine, by its own count.",
            "Waiting while we hold nothing back: somebody else sends to this engine as well.",
            (Query(most("firsttoken_endpoint_waiting", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "Engine running",
            "Requests that the engine computes at once, by its own count.",
            "TPOT grows with it.",
            (Query(most("firsttoken_endpoint_running", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "KV cache in use",
            "The share of the engine's KV cache that is taken by running requests.",
            "Near 1: the engine preempts, and TTFT and TPOT jump. Fewer or shorter answers, or more memory.",
            (Query(most("firsttoken_endpoint_kv_usage_ratio", POOL, "endpoint"), "{{endpoint}}"),),
            "percentunit",
            most=1,
            steps=((0, "green"), (0.9, "orange"), (0.98, "red")),
            lines=True,
        ),
        Panel(
            "In flight",
            "Attempts that are open at each endpoint, as the gateway sees it that sees most.",
            "Unequal within a pool is as it should be: what counts is the work, and who holds the prefix.",
            (Query(most("firsttoken_endpoint_in_flight", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "Uncached tokens ahead",
            "Prompt tokens that were sent, are in no cache and have no first token yet: the prefill that a new "
            "request would wait for.",
            "Divided by the engine's prefill speed it is its queue in seconds.",
            (Query(most("firsttoken_endpoint_uncached_tokens_ahead", POOL, "endpoint"), "{{endpoint}}"),),
            "short",
        ),
        Panel(
            "Tokens",
            "Tokens per second, by pool.",
            "Input at its plateau while requests wait: this is what the pool can prefill.",
            (Query(total("firsttoken_tokens_total", BOTH, "pool, direction"), "{{pool}} {{direction}}"),),
            "short",
        ),
        Panel(
            "Time per output token",
            "p95 by pool.",
            "An engine that is asked to write too many answers at once.",
            (Query(quantile(0.95, "firsttoken_tpot_seconds", BOTH, "pool"), "{{pool}}"),),
            "s",
        ),
    ),
)

HEALTH = Row(
    "Health",
    (
        Panel(
            "Endpoints",
            "Whether each endpoint is used, as the gateway sees it that sees worst.",
            "Down: `/fleet` says since when and after what; the first failure is a line on stderr. It is tried "
            "again by itself.",
            (Query(least("firsttoken_endpoint_state", POOL, "endpoint"), "{{endpoint}}"),),
            "none",
            kind="state-timeline",
            width=24,
            most=1,
            steps=((0, "red"), (0.5, "orange"), (1, "green")),
            states=STATES,
        ),
        Panel(
            "Attempts by outcome",
            "How attempts ended, per second.",
            "rate_limited: a provider's limit. silent: no token came in time. broken: died after the first token. "
            "cancelled: lost hedges, and callers that left.",
            (Query(total(ATTEMPTS, POOL, "outcome"), "{{outcome}}"),),
            "reqps",
            stack="normal",
        ),
        Panel(
            "Attempts that failed",
            "The share of each pool's attempts that came to nothing by its own fault.",
            "Callers see few of these: others take over. They pay in TTFT (stage `failover`).",
            (Query(share(ATTEMPTS, FAILED, POOL, "pool"), "{{pool}}"),),
            "percentunit",
        ),
        Panel(
            "Attempts by kind",
            "First attempts, those after a failure, and second copies.",
            "Fallbacks without failures elsewhere on this page: attempts that were left because they were silent.",
            (Query(total(ATTEMPTS, POOL, "pool, kind"), "{{pool}} {{kind}}"),),
            "reqps",
        ),
    ),
)

DASHBOARD = Dashboard(
    "firsttoken-pools",
    "firsttoken: Pools",
    "The engines and APIs: what is believed of them, and what they did.",
    (PREDICTIONS, QUEUES, HEALTH),
)
