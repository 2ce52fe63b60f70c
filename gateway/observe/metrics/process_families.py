"""Metrics of the gateway itself: shared state, processes."""

from __future__ import annotations

from gateway.observe.metrics.metric_family import Merge, counter, gauge, histogram

LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

SHARED = (
    counter(
        "firsttoken_quota_refused_total{key,limit} requests",
        help="Requests refused because a key's quota was used up",
        more="`limit` is `requests`, `tokens`, `concurrent` or `cost`; `key` is the name in the configuration.",
        moves="A key that exceeds its quota.",
        act="Contact its owner, or raise the limit.",
    ),
    gauge(
        "firsttoken_redis_up",
        help="Redis reachability: 1 reachable, 0 not",
        moves="Redis, or the network to it.",
        act="At 0 each replica counts quotas and load by itself. Requests are served.",
        merge=Merge.MIN,
    ),
    counter(
        "firsttoken_redis_errors_total",
        help="Redis commands that failed or timed out",
        moves="Redis, or the network to it.",
        act="A few an hour: the network. Many with `firsttoken_redis_up` 1: the latency of Redis.",
    ),
    counter(
        "firsttoken_learned_state_saves_total{result} saves",
        help="Saves of what was learned of engines, which a restart begins with",
        more="Only with `state: {dir: ...}` or Redis. `result`: saved or failed.",
        moves="Every 30 s with traffic, and at a stop.",
        act="`failed`: the log has the reason. The next restart begins with what was saved last.",
    ),
    gauge(
        "firsttoken_learned_state_restored_endpoints endpoints",
        help="Endpoints that began with what an earlier process had learned",
        more="Only with `state: {dir: ...}` or Redis.",
        moves="A start.",
        act="0 after a restart: the log says why the saved state was ignored.",
    ),
    gauge(
        "firsttoken_replicas",
        help="Gateways that share this state, this one included",
        moves="A rollout, or a gateway that stopped.",
        act="Fewer than deployed: the missing ones do not reach Redis.",
    ),
    gauge(
        "firsttoken_kubernetes_endpoints_left_out{source}",
        help="Ready endpoints of a service or an InferencePool beyond the first 512, which get no requests",
        moves="A service that has grown beyond the bound.",
        act="Divide the service in two, each with its own pool, as tiers of the same route.",
    ),
)

LLM_D = (
    gauge(
        "llm_d_epp_ready_endpoints{inference_pool} endpoints",
        help="Endpoints that can be picked",
        more="With `pick`, as all of this section: names of llm-d's endpoint picker, for objects that query these.",
        moves="Engines start, stop or fail.",
        act="See `firsttoken_endpoint_state`.",
    ),
    gauge(
        "llm_d_epp_request_running{inference_pool} requests",
        help="Requests in progress at endpoints that can be picked",
        moves="As `firsttoken_endpoint_in_flight`.",
        act="A trigger of KEDA objects.",
    ),
    gauge(
        "llm_d_epp_flow_control_queue_size{inference_pool} requests",
        help="Requests held by the gateway for the pool",
        more="A request counts in the first pool of its route.",
        moves="As `firsttoken_queue_depth`.",
        act="A trigger of KEDA objects.",
        merge=Merge.SUM,
    ),
    gauge(
        "llm_d_epp_flow_control_pool_saturation{inference_pool} share",
        help="Mean over endpoints of the greater of waiting requests over 5 and KV usage over 0.8; from 1 saturated",
        more="Requests held by the gateway count as waiting, spread over the endpoints. 1 without an endpoint.",
        moves="Load; endpoints.",
        act="A trigger of KEDA objects. `firsttoken autoscale` knows the budgets, and is the better one.",
    ),
)

OURSELVES = (
    gauge(
        "firsttoken_build_info{version}",
        help="Always 1; `version` is the running version",
        moves="A rollout.",
        act="Two versions for long: a stuck rollout.",
    ),
    histogram(
        "firsttoken_loop_lag_seconds",
        LAG_BOUNDS,
        help="Lateness of a timer of the event loop",
        more="20 times a second: the delay of any event then. Below a millisecond: the resolution of the timer.",
        moves="A gateway short of CPU; blocking code in it.",
        act="Add workers, or dedicate cores. Below 60% of a core and still late: a bug of the gateway.",
    ),
    gauge(
        "firsttoken_loop_lag_max_seconds",
        help="The greatest lateness since the last scrape",
        more="Any client's scrape resets it.",
        moves="One stall.",
        act="As above; the log states the time.",
    ),
    counter(
        "firsttoken_loop_stalls_total",
        help="Timers late by 5 ms or more",
        more="One a minute is logged.",
        moves="As above.",
        act="As above.",
    ),
    gauge(
        "firsttoken_connections connections",
        help="Connections of callers",
        moves="Traffic, and idle connections that callers keep.",
        act="Near `server.max_connections` new connections are refused: more workers, or a higher bound.",
        merge=Merge.SUM,
    ),
    gauge(
        "firsttoken_body_bytes bytes",
        help="Bodies of requests in progress",
        more="Their bytes as received; a parsed body takes some times as much memory.",
        moves="Large prompts, slow uploads, answers that take long.",
        act="Near `server.max_body_bytes` large bodies are refused: a higher bound, where there is memory.",
        merge=Merge.SUM,
    ),
    counter(
        "firsttoken_intake_refused_total{reason} requests",
        help="Connections and requests refused before the body was read",
        more="`connections`, `bodies`: a bound of `server` is reached (503). `head`: path, method, host, key or quota.",
        moves="Overload; for `head`, callers without a key or above its limits, and scanners, that send bodies.",
        act="`connections`, `bodies`: raise the bound, or add workers. `head`: nothing is lost; look for the sender.",
    ),
    gauge(
        "firsttoken_workers",
        help="Workers that serve",
        more="With several workers only.",
        moves="A worker that died, or starts.",
        act="Fewer than `server.workers` for more than a second: stderr states the reason.",
    ),
    gauge(
        "firsttoken_workers_stalled",
        help="Workers whose event loop has stood still for more than 5 s",
        more="With several workers only. A worker that stands still is killed and replaced after 30 s.",
        moves="A stopped process, a hung disk, a bug that never yields.",
        act="Look at the process: its state in ps, the disk of the access log. Stderr names it.",
    ),
    counter(
        "firsttoken_worker_starts_total{worker}",
        help="Worker processes started",
        more="With several workers only.",
        moves="Each start, the first included.",
        act="More than one each: a worker dies. Stderr states the cause.",
    ),
    counter(
        "firsttoken_access_log_lines_lost_total",
        help="Access log lines that were not written",
        more="Only with an access log.",
        moves="A full or slow disk, or a slow reader.",
        act="Free space or speed up the reader. Requests are not delayed.",
    ),
    counter(
        "firsttoken_records_lost_total",
        help="Records that were not stored",
        more="Only with `records`.",
        moves="A disk that is full or slow, a file that is damaged, or locked by another program.",
        act="Stderr names the file and the reason. Requests are not delayed.",
    ),
    counter(
        "firsttoken_spans_exported_total",
        help="Spans accepted by the OpenTelemetry collector",
        more="Only with `telemetry.otlp`.",
        moves="Traffic and sampling.",
        act="0 although traces are expected: check `firsttoken_spans_lost_total`.",
    ),
    counter(
        "firsttoken_spans_lost_total",
        help="Spans dropped or not accepted",
        more="The export queue was full, or the collector refused them or did not accept them in time.",
        moves="A collector that is unavailable or too slow.",
        act="Check the collector. Requests are not delayed.",
    ),
    counter(
        "firsttoken_otlp_metric_exports_failed_total",
        help="Exports of GenAI metrics that the OpenTelemetry collector did not accept",
        more="Each worker exports by itself; the next export has the same sums and more.",
        moves="A collector that is unavailable, or refuses metrics.",
        act="Stderr states the reason. Requests are not delayed.",
    ),
    gauge(
        "firsttoken_certificate_end_timestamp_seconds s since 1970",
        help="End of the data port's certificate in force, or of one of its chain",
        more="Only with `server.tls`.",
        moves="A renewal.",
        act="Less than a week ahead: the renewal fails, or the new files are not seen. Stderr states the reason.",
        merge=Merge.MIN,
    ),
    gauge(
        "firsttoken_certificate_refused",
        help="1 if the data port's certificate files have changed and cannot be used",
        more="Only with `server.tls`. The certificate before stays in force.",
        moves="A renewal that fails, or has written one of two files.",
        act="1 for more than a minute: stderr states the reason.",
        merge=Merge.MAX,
    ),
    counter(
        "firsttoken_config_reloads_total{result}",
        help="Configuration reloads by result",
        more="`applied` or `refused`.",
        moves="A changed file, SIGHUP, or `POST /reload`.",
        act="`refused`: the old configuration stays in force; the log states the reason.",
    ),
    gauge(
        "firsttoken_config_loaded_timestamp_seconds s since 1970",
        help="Time at which the configuration in force was read",
        moves="A start or a reload.",
        act="Earlier than the last change of the file: the change was refused, or not seen.",
        merge=Merge.MIN,
    ),
)
