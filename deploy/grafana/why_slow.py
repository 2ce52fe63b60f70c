"""Dashboard Why slow?: the stage, the kind of request and the component behind a late first token."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import (
    JOB,
    POOL,
    RANGE,
    ROUTE,
    ROUTE_AND_POOL,
    breakdown,
    maximum,
    mean,
    minimum,
    quantile,
    share,
    summed,
    total,
)

STAGES = "firsttoken_stage_seconds"
BY_PROMPT = "firsttoken_ttft_by_prompt_seconds"
ENGINE = 'stage=~"engine_queue|engine_prefill"'  # parts of upstream
ALL_STAGES = f'{ROUTE}, stage!~"stream|engine_queue|engine_prefill"'
REQUESTS = total(f"{STAGES}_count", f'{ROUTE}, stage="read"')
UPSTREAM = total(f"{STAGES}_sum", f'{ROUTE}, stage="upstream"')
ENGINE_REPORTED = total(f"{STAGES}_sum", f"{ROUTE}, {ENGINE}")
CAUSES = (  # stages and the legend of their cause
    ("read", "caller's upload"),
    ("parse|estimate|admit|decide|relay", "gateway work"),
    ("queue", "gateway queue"),
    ("failover", "lost attempts"),
    ("rate_limit", "provider's rate limit"),
    ("connect|send", "connecting to the engine"),
    ("upstream", "engine"),
)


def cause_share(stages: str, name: str) -> Query:
    return Query(share(f"{STAGES}_sum", f'stage=~"{stages}"', ALL_STAGES), name)


def stage_quantiles(stage: str) -> tuple[Query, ...]:
    where = f'{ROUTE}, stage="{stage}"'
    return tuple(Query(quantile(q, STAGES, where, "route"), f"{{{{route}}}} p{q * 100:g}") for q in (0.5, 0.95))


def by_stage(expr: str) -> Query:
    return Query(expr, "{{stage}}", instant=True, format="table")


STAGE_ROW = Row(
    "Stages",
    (
        Panel(
            "TTFT by cause",
            "The share of TTFT by cause.",
            "Engine: check prompt size, its queue and its caches below. Gateway queue: too few engines. Gateway work: "
            "the last row. Caller's upload: not under the gateway's control.",
            tuple(cause_share(stages, name) for stages, name in CAUSES),
            "percentunit",
            width=12,
            stack="percent",
        ),
        Panel(
            "Mean TTFT by stage, with engine parts",
            "The mean TTFT by stage; the times that the engine reports are separated from `upstream`.",
            "engine_queue: the engine is overloaded. engine_prefill: the prompt was long, or not cached. The rest of "
            "upstream: the network, the engine's tokenizer, or an engine that reports no times.",
            (
                Query(breakdown(f"{STAGES}_sum", f'{ALL_STAGES}, stage!="upstream"', "stage", REQUESTS), "{{stage}}"),
                Query(breakdown(f"{STAGES}_sum", f"{ROUTE}, {ENGINE}", "stage", REQUESTS), "{{stage}}"),
                Query(
                    f"({UPSTREAM} - ({ENGINE_REPORTED} or vector(0))) / ({REQUESTS} > 0)",
                    "rest of upstream",
                ),
            ),
            "s",
            width=12,
            stack="normal",
        ),
        Panel(
            "Stages of slow requests",
            "Mean, p95 and p99 of each stage, in the selected time range. Slow requests are slow in the stage with "
            "p95 and p99 far above its mean.",
            "One request: its `server-timing`, its line in the access log, or `GET /requests` on the admin port.",
            (
                by_stage(mean(STAGES, ROUTE, "stage", RANGE)),
                by_stage(quantile(0.95, STAGES, ROUTE, "stage", RANGE)),
                by_stage(quantile(0.99, STAGES, ROUTE, "stage", RANGE)),
            ),
            "s",
            kind="table",
            width=12,
            height=10,
            columns={"A": ("Mean", "s"), "B": ("p95", "s"), "C": ("p99", "s")},
        ),
        Panel(
            "p95 by stage",
            "p95 of each stage over time.",
            "Find the stage that rose with TTFT.",
            (Query(quantile(0.95, STAGES, ALL_STAGES, "stage"), "{{stage}}"),),
            "s",
            width=12,
            height=10,
        ),
        Panel(
            "Engine queueing time",
            "p50 and p95 of a prompt's time in the engine's queue, as reported by the engine.",
            "No data: start vLLM with `--enable-per-request-metrics`.",
            stage_quantiles("engine_queue"),
            "s",
        ),
        Panel(
            "Engine prefill time",
            "p50 and p95 of a prompt's prefill time, as reported by the engine.",
            "Grows with the uncached tokens: see prompt size and hit rate.",
            stage_quantiles("engine_prefill"),
            "s",
        ),
        Panel(
            "Rate-limit waits",
            "p50 and p95 of the time that requests waited for a provider's rate limit, if any.",
            "Raise the limit at the provider, add another account as an endpoint, or add a tier.",
            stage_quantiles("rate_limit"),
            "s",
        ),
    ),
)

REQUEST_ROW = Row(
    "Requests",
    (
        Panel(
            "TTFT by prompt size",
            "p95 of TTFT by the prompt's tokens.",
            "Only long prompts are slow: prefill. All are: queues, or a cause unrelated to prompts.",
            (Query(quantile(0.95, BY_PROMPT, ROUTE, "prompt"), "{{prompt}}"),),
            "s",
        ),
        Panel(
            "Mean TTFT by prompt size",
            "In the selected time range.",
            "Twice the tokens should take at most twice the time. More: attention, or long prompts queue behind short "
            "ones.",
            (Query(mean(BY_PROMPT, ROUTE, "prompt", RANGE), "{{prompt}}", instant=True),),
            "s",
            kind="bargauge",
        ),
        Panel(
            "Requests by prompt size",
            "Per second.",
            "A changed mix changes TTFT without any fault.",
            (Query(total(f"{BY_PROMPT}_count", ROUTE, "prompt"), "{{prompt}}"),),
            "reqps",
            stack="normal",
        ),
        Panel(
            "TTFT distribution",
            "The number of requests by TTFT.",
            "Two bands are two kinds of requests: cached and uncached, small and large, or two pools.",
            (Query(total("firsttoken_ttft_seconds_bucket", ROUTE_AND_POOL, "le"), "{{le}}", format="heatmap"),),
            "s",
            kind="heatmap",
        ),
        Panel(
            "Cached share of prompts",
            "The mean share of prompt tokens in the engines' caches, as reported by the engines.",
            "A drop is a restart, an eviction, or callers that changed the beginning of their prompts.",
            (Query(mean("firsttoken_prefix_hit_ratio", f'{POOL}, source="reported"', "pool"), "{{pool}}"),),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Lost attempts",
            "Attempts that failed, were silent or were rate limited, per second, by pool.",
            "Each delayed its request (stage `failover`). Pools shows the endpoint.",
            (
                Query(
                    total(
                        "firsttoken_attempts_total", f'{POOL}, outcome=~"failed|silent|rate_limited"', "pool, outcome"
                    ),
                    "{{pool}} {{outcome}}",
                ),
            ),
            "reqps",
        ),
    ),
)

GATEWAY = Row(
    "Gateway",
    (
        Panel(
            "Event-loop lag",
            "The lateness of the gateway's event loop: the delay of any event.",
            "Above some milliseconds the gateway slows requests: too many for one core (see CPU: add workers), or "
            "another process uses its core.",
            (
                Query(quantile(0.5, "firsttoken_loop_lag_seconds", JOB), "p50"),
                Query(quantile(0.99, "firsttoken_loop_lag_seconds", JOB), "p99"),
                Query(maximum("firsttoken_loop_lag_max_seconds", JOB), "longest since the last scrape"),
            ),
            "s",
        ),
        Panel(
            "Event-loop stalls",
            "Stalls of the event loop of 5 ms or more, per minute.",
            "One a minute is logged, with its length.",
            (Query(f"60 * {total('firsttoken_loop_stalls_total', JOB, 'instance')}", "{{instance}}"),),
            "short",
        ),
        Panel(
            "Gateway work per request",
            "Mean time of the stages that are the gateway's own work.",
            "Some tenths of a millisecond; more with long new prompts (estimate), or when the event loop lags.",
            (
                Query(
                    mean(STAGES, f'{ROUTE}, stage=~"parse|estimate|admit|decide|relay"', "stage"),
                    "{{stage}}",
                ),
            ),
            "s",
            stack="normal",
        ),
        Panel(
            "CPU",
            "Cores used by each gateway process.",
            "Near 1: the process is at capacity; raise `server.workers`.",
            (Query(total("process_cpu_seconds_total", JOB, "instance"), "{{instance}}"),),
            "none",
        ),
        Panel(
            "Memory",
            "Resident memory of each gateway.",
            "Levels off with the number of prompts in the index; steady growth beyond is a memory leak of the gateway.",
            (Query(summed("process_resident_memory_bytes", JOB, "instance"), "{{instance}}"),),
            "bytes",
        ),
        Panel(
            "In progress",
            "Requests in progress by gateway.",
            "Unequal between gateways: check the load balancer before them.",
            (Query(summed("firsttoken_requests_in_progress", JOB, "instance"), "{{instance}}"),),
            "short",
        ),
        Panel(
            "Replicas and versions",
            "Connected gateways, and running gateways by version.",
            "Fewer than deployed: they do not reach the same Redis. Two versions for long: a stuck rollout.",
            (
                Query(maximum("firsttoken_replicas", JOB), "replicas"),
                Query(f"count by (version) (firsttoken_build_info{{{JOB}}})", "{{version}}"),
            ),
            "none",
            kind="stat",
        ),
        Panel(
            "Redis",
            "Redis reachability from every gateway (1), and errors per second.",
            "Down: each gateway continues alone, quotas may overshoot as docs/scaling.md states. No request waits.",
            (
                Query(minimum("firsttoken_redis_up", JOB), "up"),
                Query(total("firsttoken_redis_errors_total", JOB), "errors per s"),
            ),
            "none",
        ),
        Panel(
            "Spans",
            "Spans exported, and lost, per second.",
            "Lost: the collector is unavailable or too slow. Requests are not affected.",
            (
                Query(total("firsttoken_spans_exported_total", JOB), "exported"),
                Query(total("firsttoken_spans_lost_total", JOB), "lost"),
                Query(total("firsttoken_otlp_metric_exports_failed_total", JOB), "failed exports of metrics"),
            ),
            "short",
        ),
        Panel(
            "Access log lines lost",
            "Per second.",
            "The reader of the log is too slow, or the disk is.",
            (Query(total("firsttoken_access_log_lines_lost_total", JOB), "lost"),),
            "short",
        ),
        Panel(
            "Configuration",
            "Age of the configuration in force, and reloads in the last hour by result.",
            "refused: the file on disk is invalid, and the previous configuration stays in force; `firsttoken check` "
            "shows the error.",
            (
                Query(f"time() - {minimum('firsttoken_config_loaded_timestamp_seconds', JOB)}", "age, s"),
                Query(
                    f"sum by (result) (increase(firsttoken_config_reloads_total{{{JOB}}}[1h]))",
                    "{{result}} in the last hour",
                ),
            ),
            "short",
        ),
    ),
)

DASHBOARD = Dashboard(
    "firsttoken-why-slow",
    "firsttoken: Why slow?",
    "The stage, the kind of request and the component behind a late first token.",
    (STAGE_ROW, REQUEST_ROW, GATEWAY),
)
