"""Why slow?: from a late first token to the stage, the kind of request and the part that made it late."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import (
    BOTH,
    JOB,
    POOL,
    RANGE,
    ROUTE,
    breakdown,
    every,
    least,
    mean,
    most,
    quantile,
    share,
    total,
)

STAGES = "firsttoken_stage_seconds"
BY_PROMPT = "firsttoken_ttft_by_prompt_seconds"
ENGINE = 'stage=~"engine_queue|engine_prefill"'  # parts of upstream
COUNTED_ONCE = f'{ROUTE}, stage!~"stream|engine_queue|engine_prefill"'
ONE_EACH = total(f"{STAGES}_count", f'{ROUTE}, stage="read"')
UPSTREAM = total(f"{STAGES}_sum", f'{ROUTE}, stage="upstream"')
TOLD = total(f"{STAGES}_sum", f"{ROUTE}, {ENGINE}")
CULPRITS = (  # who had it: the stages, and what to call them
    ("read", "the caller's upload"),
    ("parse|estimate|admit|decide|relay", "our own work"),
    ("queue", "held back by us"),
    ("failover", "lost attempts"),
    ("rate_limit", "a provider's rate limit"),
    ("connect|send", "the way to the engine"),
    ("upstream", "the engine"),
)


def had_it(stages: str, name: str) -> Query:
    return Query(share(f"{STAGES}_sum", f'stage=~"{stages}"', COUNTED_ONCE), name)


def stage_quantiles(stage: str) -> tuple[Query, ...]:
    where = f'{ROUTE}, stage="{stage}"'
    return tuple(Query(quantile(q, STAGES, where, "route"), f"{{{{route}}}} p{q * 100:g}") for q in (0.5, 0.95))


def by_stage(expr: str) -> Query:
    return Query(expr, "{{stage}}", once=True, form="table")


WHERE = Row(
    "In which stage",
    (
        Panel(
            "Who had the time",
            "The time to the first token, shared out between those who had it.",
            "The engine: look at prompt size, its queue and its caches below. Held back: too few engines. Ours: "
            "the last row. The caller's upload: nothing here can help.",
            tuple(had_it(stages, name) for stages, name in CULPRITS),
            "percentunit",
            width=12,
            stack="percent",
        ),
        Panel(
            "Mean by stage, the engine split",
            "The mean time to the first token, stage by stage; what the engine says of itself is split out of "
            "`upstream`.",
            "engine_queue: the engine had too much to do. engine_prefill: the prompt was long, or not cached. The "
            "rest of upstream: the network, the engine's tokenizer, or an engine that says nothing of itself.",
            (
                Query(breakdown(f"{STAGES}_sum", f'{COUNTED_ONCE}, stage!="upstream"', "stage", ONE_EACH), "{{stage}}"),
                Query(breakdown(f"{STAGES}_sum", f"{ROUTE}, {ENGINE}", "stage", ONE_EACH), "{{stage}}"),
                Query(
                    f"({UPSTREAM} - ({TOLD} or vector(0))) / ({ONE_EACH} > 0)",
                    "rest of upstream",
                ),
            ),
            "s",
            width=12,
            stack="normal",
        ),
        Panel(
            "Stages of slow requests",
            "Each stage's mean and its slow ends, in the time shown. Slow requests are slow in the stage whose "
            "p95 and p99 stand far above its mean.",
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
            "The slow end of each stage, over time.",
            "What rose when TTFT rose.",
            (Query(quantile(0.95, STAGES, COUNTED_ONCE, "stage"), "{{stage}}"),),
            "s",
            width=12,
            height=10,
        ),
        Panel(
            "Queue inside the engine",
            "p50 and p95 of the time that engines say a prompt waited before they began with it.",
            "Nothing here: start vLLM with `--enable-per-request-metrics`.",
            stage_quantiles("engine_queue"),
            "s",
        ),
        Panel(
            "Prefill inside the engine",
            "p50 and p95 of the time that engines say they computed a prompt.",
            "It grows with the tokens that were not cached: see prompt size and hit rate.",
            stage_quantiles("engine_prefill"),
            "s",
        ),
        Panel(
            "Rate-limit waits",
            "p50 and p95 of the time that requests waited for a provider's rate limit, where they did.",
            "Ask the provider for more, add another account as an endpoint, or a tier behind it.",
            stage_quantiles("rate_limit"),
            "s",
        ),
    ),
)

WHICH = Row(
    "Which requests",
    (
        Panel(
            "TTFT by prompt size",
            "p95 of TTFT by the prompt's tokens.",
            "Only long prompts are slow: prefill. All are: queues, or something that has nothing to do with the "
            "prompt.",
            (Query(quantile(0.95, BY_PROMPT, ROUTE, "prompt"), "{{prompt}}"),),
            "s",
        ),
        Panel(
            "Mean TTFT by prompt size",
            "In the time shown.",
            "Twice the tokens should take at most twice the time. More: attention, or long prompts are held back "
            "for short ones.",
            (Query(mean(BY_PROMPT, ROUTE, "prompt", RANGE), "{{prompt}}", once=True),),
            "s",
            kind="bargauge",
        ),
        Panel(
            "Requests by prompt size",
            "Per second.",
            "A change of mix explains a change of TTFT without any fault.",
            (Query(total(f"{BY_PROMPT}_count", ROUTE, "prompt"), "{{prompt}}"),),
            "reqps",
            stack="normal",
        ),
        Panel(
            "TTFT, all of it",
            "How many requests took how long.",
            "Two bands are two kinds of requests: cached and not, small and large, one pool and another.",
            (Query(total("firsttoken_ttft_seconds_bucket", BOTH, "le"), "{{le}}", form="heatmap"),),
            "s",
            kind="heatmap",
        ),
        Panel(
            "Cached share of prompts",
            "The mean share of prompt tokens that engines found in their cache.",
            "A fall is a restart, an eviction, or callers that changed the beginning of their prompts.",
            (Query(mean("firsttoken_prefix_hit_ratio", f'{POOL}, source="reported"', "pool"), "{{pool}}"),),
            "percentunit",
            most=1,
        ),
        Panel(
            "Lost attempts",
            "Attempts that failed, stayed silent or were refused, per second, by pool.",
            "Each cost its request time (stage `failover`). Pools says which endpoint.",
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

OURSELVES = Row(
    "The gateway itself",
    (
        Panel(
            "Loop lag",
            "How late our event loop was: what any event would have waited.",
            "Above some milliseconds we make requests slow: too many for one core (see CPU: add workers), or a "
            "neighbour takes our core.",
            (
                Query(quantile(0.5, "firsttoken_loop_lag_seconds", JOB), "p50"),
                Query(quantile(0.99, "firsttoken_loop_lag_seconds", JOB), "p99"),
                Query(most("firsttoken_loop_lag_max_seconds", JOB), "longest since the last scrape"),
            ),
            "s",
        ),
        Panel(
            "Loop stalls",
            "Times per minute that the loop stood still for 5 ms or more.",
            "One a minute is said in the log, with its length.",
            (Query(f"60 * {total('firsttoken_loop_stalls_total', JOB, 'instance')}", "{{instance}}"),),
            "short",
        ),
        Panel(
            "Our own work per request",
            "Mean time of the stages that are ours alone.",
            "Some tenths of a millisecond; more with long prompts that were never seen before (estimate), or when "
            "the loop lags.",
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
            "Cores that each gateway process uses.",
            "Near 1: one process can do no more; `server.workers`.",
            (Query(total("process_cpu_seconds_total", JOB, "instance"), "{{instance}}"),),
            "none",
        ),
        Panel(
            "Memory",
            "Resident memory of each gateway.",
            "It levels off with the number of prompts that are remembered; what does not is a leak, and ours.",
            (Query(every("process_resident_memory_bytes", JOB, "instance"), "{{instance}}"),),
            "bytes",
        ),
        Panel(
            "In progress",
            "Requests that are being served by each gateway.",
            "Unequal between gateways: the balancer before them.",
            (Query(every("firsttoken_requests_in_progress", JOB, "instance"), "{{instance}}"),),
            "short",
        ),
        Panel(
            "Replicas and versions",
            "Gateways that know of each other, and how many of each version run.",
            "Fewer than there are: they do not reach the same Redis. Two versions for long: a roll-out that "
            "stands still.",
            (
                Query(most("firsttoken_replicas", JOB), "replicas"),
                Query(f"count by (version) (firsttoken_build_info{{{JOB}}})", "{{version}}"),
            ),
            "none",
            kind="stat",
        ),
        Panel(
            "Redis",
            "Whether Redis is reached by every gateway (1), and errors per second.",
            "Down: each gateway goes on alone, quotas may overshoot by what docs/operations.md states. No request "
            "waits.",
            (
                Query(least("firsttoken_redis_up", JOB), "up"),
                Query(total("firsttoken_redis_errors_total", JOB), "errors per s"),
            ),
            "none",
        ),
        Panel(
            "Spans",
            "Spans exported, and lost, per second.",
            "Lost: the collector is gone or too slow. Requests do not notice.",
            (
                Query(total("firsttoken_spans_exported_total", JOB), "exported"),
                Query(total("firsttoken_spans_lost_total", JOB), "lost"),
            ),
            "short",
        ),
        Panel(
            "Access log lines lost",
            "Per second.",
            "Whoever reads the log is too slow, or the disk is.",
            (Query(total("firsttoken_access_log_lines_lost_total", JOB), "lost"),),
            "short",
        ),
        Panel(
            "Configuration",
            "Age of the configuration in force, and reloads in the last hour by result.",
            "refused: the file on disk is wrong, and the one before is in force; `firsttoken check` says why.",
            (
                Query(f"time() - {least('firsttoken_config_loaded_timestamp_seconds', JOB)}", "age, s"),
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
    "From a late first token to the stage, the kind of request and the part that made it late.",
    (WHERE, WHICH, OURSELVES),
)
