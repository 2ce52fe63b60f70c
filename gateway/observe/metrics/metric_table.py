"""Table of all metric families: type, labels, buckets, help, causes of change, the operator's action.

Rules:
- `gateway.observe.metrics.series` makes series from the table, `scripts/metrics_page.py` writes docs/metrics.md, and
  gauges of several workers are merged by `Family.merge`.
- Names end in the unit: seconds, tokens, usd, ratio.
- Label values come from the configuration or from small fixed sets, never from callers.
- Times are in seconds, measured from arrival unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """Merges the same gauge of several workers. Counters and histograms are always summed."""

    SUM = "sum"  # each worker has a part
    MAX = "max"
    MIN = "min"  # the worst or latest worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric. `name` is the name in queries; a counter ends in `_total`."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram: inclusive upper bounds; +Inf is implied
    unit: str = ""  # of `bounds` and values, as shown to readers
    help: str  # one line, the HELP text
    more: str = ""  # details beyond the HELP line
    moves: str  # causes of a change
    act: str  # the operator's action on a change
    merge: Merge = Merge.MAX

    @property
    def family(self) -> str:
        """Name in prometheus-client."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name


TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TPOT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STAGE_BOUNDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
ERROR_BOUNDS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
SIZE_ERROR_BOUNDS = (0.0, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0)
RATIO_BOUNDS = tuple(i / 10 for i in range(11))
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

UNITS = {"_seconds": "s", "_ratio": "0 to 1", "_usd_total": "USD"}  # by the end of a name


def _family(kind: MetricKind, series: str, **columns: Any) -> Family:
    """`series`: name and labels as in PromQL, and the unit where the name does not end in a unit."""
    named, _, unit = series.partition(" ")
    name, _, labels = named.removesuffix("}").partition("{")
    unit = unit or next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
    return Family(name=name, kind=kind, labels=tuple(filter(None, labels.split(","))), unit=unit, **columns)


def counter(series: str, **columns: Any) -> Family:
    return _family(MetricKind.COUNTER, series, **columns)


def gauge(series: str, **columns: Any) -> Family:
    return _family(MetricKind.GAUGE, series, **columns)


def histogram(series: str, bounds: tuple[float, ...], **columns: Any) -> Family:
    return _family(MetricKind.HISTOGRAM, series, bounds=bounds, **columns)


PROMISED = (
    counter(
        "firsttoken_requests_total{route,pool,outcome} requests",
        help="Requests by outcome",
        more="Counted once each, at their end.",
        moves="Traffic. `pool` is the last chosen pool, `-` if none was chosen.",
        act="`failed`, `unavailable`, `upstream_broke`: the attempts. `shed`: add engines. `internal`: our bug.",
    ),
    histogram(
        "firsttoken_ttft_seconds{route,pool}",
        TTFT_BOUNDS,
        help="Arrival to first token written (streams: content; otherwise: the whole answer)",
        more=(
            "Each route's budget is a bucket, so that on a route of streams the share within it is exact; elsewhere "
            "`firsttoken_ttft_by_prompt_seconds` has the share. Buckets carry a trace id (OpenMetrics)."
        ),
        moves="All work before the first token: queues and prefills of engines, long prompts, a lost cache.",
        act="`firsttoken_stage_seconds` shows the stage, `firsttoken_ttft_by_prompt_seconds` shows growing prompts.",
    ),
    histogram(
        "firsttoken_first_reasoning_seconds{route,pool}",
        TTFT_BOUNDS,
        help="Arrival to first token of reasoning, of streams that reason before they answer",
        more="Each route's budget is a bucket. Reasoning that a provider hides has no token.",
        moves="The causes of TTFT.",
        act="As for `firsttoken_ttft_seconds`.",
    ),
    histogram(
        "firsttoken_first_answer_seconds{route,pool}",
        TTFT_BOUNDS,
        help="Arrival to first token of the answer: text, refusal, tool call, audio, image or citation",
        more="Each route's budget is a bucket: on a route with `ttft: {of: answer}` the share within it is exact.",
        moves="The causes of TTFT, and the length of the reasoning.",
        act="Far above `firsttoken_first_reasoning_seconds`: less reasoning effort, or a tier that does not reason.",
    ),
    histogram(
        "firsttoken_ttft_on_screen_seconds{route}",
        TTFT_BOUNDS,
        help="Sending of the request to its first token on screen, as reported by callers",
        more="By `POST /ttft`, at most once a request. Each route's budget is a bucket.",
        moves="The causes of TTFT, and the network and the page between gateway and reader.",
        act="Far above `firsttoken_ttft_seconds`: a proxy in between that buffers, or a page that renders late.",
    ),
    histogram(
        "firsttoken_ttft_by_prompt_seconds{route,prompt}",
        TTFT_BOUNDS,
        help="TTFT of streams by prompt size",
        more="`prompt`: tokens, by the engine or estimated; lower bound inclusive. Each route's budget is a bucket.",
        moves="One class alone: its prefill. All at once: queues.",
        act="Only long prompts miss the budget: a tier for them (`when: {prompt_tokens: ...}`), or another budget.",
    ),
    histogram(
        "firsttoken_tpot_seconds{route,pool}",
        TPOT_BOUNDS,
        help="Time per output token after the first",
        more="Streams of at least two tokens.",
        moves="Concurrent answers, prefills between their tokens, long contexts.",
        act="Limit concurrent requests on the engines (`--max-num-seqs`), or add engines.",
    ),
    histogram(
        "firsttoken_stage_seconds{route,stage}",
        STAGE_BOUNDS,
        help="Time of a request by stage",
        more="All but `stream` sum to TTFT; `engine_queue` and `engine_prefill` are the engine's parts of `upstream`.",
        moves=(
            "`queue`: engines without capacity. `rate_limit`: a provider's rate limit. `failover`: lost attempts. "
            "`upstream`: the engine. `estimate`, `parse`: long new prompts. `relay`, `decide`: a gateway short of "
            "CPU."
        ),
        act=(
            "Mostly `queue` and `upstream`: add engines. `rate_limit`: a higher limit, or another tier. Stages of the "
            "gateway: check `firsttoken_loop_lag_seconds`."
        ),
    ),
    counter(
        "firsttoken_slo_total{route,objective,met} requests",
        help="Objectives met and missed",
        more="`objective` is `ttft`, `tpot` or `total`; the rules are below.",
        moves="Missed budgets, shed or failed requests.",
        act="Attainment is met / all. `firsttoken_requests_total` tells late from shed and failed requests.",
    ),
    counter(
        "firsttoken_slow_total{route,cause} requests",
        help="Requests that missed a budget or failed, by cause",
        more="One cause for each request, of the closed list in [why-slow.md](why-slow.md).",
        moves="Missed budgets, shed or failed requests.",
        act="`firsttoken why --route ROUTE` compares causes; `firsttoken why REQUEST_ID` has evidence and mend.",
    ),
    gauge(
        "firsttoken_route_ttft_budget_seconds{route}",
        help="The TTFT budget of a route",
        more=(
            "Only for routes with a TTFT budget. Budgets named by callers are not included, nor what `per_1k_tokens` "
            "adds for a prompt: on such a route `firsttoken_slo_total` alone has the attainment."
        ),
        moves="The configuration.",
        act="No action: the reference for TTFT.",
    ),
    gauge(
        "firsttoken_route_ttft_target_ratio{route}",
        help="The share of requests that a route must serve within its TTFT budget",
        more="Only for routes with a TTFT budget.",
        moves="The configuration.",
        act="No action: 1 - target is the error budget.",
    ),
    gauge(
        "firsttoken_requests_in_progress requests",
        help="Requests that have arrived and not ended",
        more="Queued, sent, or streaming.",
        moves="Traffic times the duration of answers.",
        act="Growth without more traffic: answers became slower, or callers do not read.",
        merge=Merge.SUM,
    ),
    counter(
        "firsttoken_tokens_total{route,pool,direction} tokens",
        help="Tokens of answered requests",
        more="`input` and `output`, reported by the engine or else estimated and counted.",
        moves="Traffic, longer prompts, longer answers.",
        act="Plan capacity by tokens: engines run out of tokens per second, not of requests.",
    ),
    counter(
        "firsttoken_cost_usd_total{route,pool}",
        help="Cost of requests, by the prices in the configuration",
        more="Lost attempts that a provider may bill count: the prompt, and the output so far.",
        moves="Tokens, and the chosen tier.",
        act="A more expensive pool answers more: check the misses of the preferred pool.",
    ),
)

PREDICTED = (
    histogram(
        "firsttoken_ttft_predicted_seconds{pool}",
        TTFT_BOUNDS,
        help="Predicted TTFT (p50)",
        more="Answered streams, by the prediction of the attempt that answered; from arrival, like TTFT.",
        moves="The load that the gateway sees, and the learned state of the engines.",
        act="Compare with `firsttoken_ttft_seconds` of the pool.",
    ),
    histogram(
        "firsttoken_ttft_prediction_error_seconds{pool}",
        ERROR_BOUNDS,
        help="Actual minus predicted p50 TTFT",
        more="Streams only.",
        moves="An engine that became slower or faster; other clients of the engine that its metrics do not show.",
        act="Above 0 for long: safe budgets are missed. Check `/fleet`, and the scrapes of the engine's `/metrics`.",
    ),
    counter(
        "firsttoken_ttft_prediction_covered_total{pool,percentile,covered} requests",
        help="Requests with a TTFT within the predicted percentile, or not",
        more="Streams only; `true` / all of a percentile is its calibration.",
        moves="`p50` should cover half, `p90` nine in ten.",
        act="p90 below 0.85: routes run closer to their budgets than intended. Raise `target` until it recovers.",
    ),
    histogram(
        "firsttoken_prefix_hit_ratio{pool,source}",
        RATIO_BOUNDS,
        help="Share of prompt tokens cached, by source",
        more="`predicted` by the gateway and `reported` by the engine.",
        moves="Shared prompts, conversations that return to their engine; a restart or too small a cache lowers it.",
        act="`reported` far below `predicted`: the engine evicts blocks of the index; enable cache events.",
    ),
    histogram(
        "firsttoken_prompt_tokens_error_ratio{pool}",
        SIZE_ERROR_BOUNDS,
        help="Estimated prompt tokens over reported ones, as the distance from 1",
        more="Of the estimate that the request was placed by, where the engine reports its count.",
        moves="Prompts unlike all before of their key; another chat template or tokenizer behind the pool.",
        act="Above 0.1 for most: name the `tokenizer` of the pool's model. Routing takes no harm from less.",
    ),
)

SENT = (
    counter(
        "firsttoken_attempts_total{pool,kind,outcome} attempts",
        help="Attempts by kind and outcome",
        more="Counted once each, at their end.",
        moves="More than one per request: failures, rate limits, silence.",
        act="`failed`, `broken`: the engine's log. `rate_limited`: the provider's limit. `silent`: too slow. "
        "`misconfigured`: model name, path and key of the pool. `quota`: the account with the provider.",
    ),
    counter(
        "firsttoken_hedges_total{route,result} attempts",
        help="Hedges by result",
        more="`won` (had the first token), `lost` (the other attempt had, or the caller disconnected), `failed`.",
        moves="First tokens later than predicted, on routes with `hedge`.",
        act="Mostly `lost`: hedges cost and do not help. Lower `max_extra`.",
    ),
    counter(
        "firsttoken_external_refused_total{route} requests",
        help="Requests kept from external APIs by `limits.external`",
        more="Counted once each, if an API was left out of the last decision.",
        moves="Engines that cannot take the route's load, while it has used what the limit allows.",
        act="Rises with TTFT misses: raise the limit, or add engines.",
    ),
    counter(
        "firsttoken_escalations_total{route,reason} answers",
        help="Whole answers after which another pool was asked, on routes with `escalate`",
        more="`refusal`, `length`, `invalid_json`.",
        moves="Answers of the first tier that refuse, are cut at the limit, or break their JSON schema.",
        act="Rises: the first tier's model is too small for this route, or its callers' max_tokens too low.",
    ),
    counter(
        "firsttoken_tagged_requests_total{tag,outcome} requests",
        help="Requests by the tags that callers gave them, and by outcome",
        more="Only tags of `telemetry.tags`. A request with several tags counts for each.",
        moves="The traffic of the team or job that sends the tag.",
        act="No action: what a tag uses.",
    ),
    counter(
        "firsttoken_tagged_tokens_total{tag} tokens",
        help="Tokens of prompts and answers by tag, of all attempts",
        more="As counted for quotas.",
        moves="As above, and the length of prompts and answers.",
        act="No action: what a tag uses.",
    ),
    counter(
        "firsttoken_tagged_cost_usd_total{tag}",
        help="Cost of requests by tag",
        more="By the prices in the configuration, of all attempts.",
        moves="As above, and the tiers that answer.",
        act="Above what a team may spend: a limit on its key.",
    ),
    counter(
        "firsttoken_answer_cache_total{route,result} requests",
        help="Requests looked up in the cache of answers, by result",
        more="Only of routes with a `cache`, and of requests whose answers may repeat. `result`: hit or miss.",
        moves="Equal requests within the `ttl` of the route.",
        act="Few hits: callers vary their requests, or ask for samples; without hits, remove the `cache`.",
    ),
    counter(
        "firsttoken_left_out_total{route,pool,member} requests",
        help="Answered requests of which a member was left out, as the dialect of the pool cannot express it",
        more="Members that the route drops, and labels without effect on an answer (docs/dialects.md).",
        moves="Clients that send members of the own dialect to pools of another.",
        act="A member that should count: a pool of the caller's dialect for the route, or no `drop` of the member.",
    ),
    counter(
        "firsttoken_rescues_total{route,outcome} streams",
        help="Streams that broke after the first token on routes with `rescue: on`, by outcome",
        more=(
            "`rescued` (a peer wrote the rest), `failed` (no peer did), `refused` (tool calls, reasoning, structured "
            "output, no peer up: the debug log has the reason)."
        ),
        moves="Engines that die or stall in the middle of answers.",
        act="`refused` or `failed` rises: `firsttoken_attempts_total` with kind `rescue`; add endpoints to the pool.",
    ),
    counter(
        "firsttoken_junk_events_total{pool} events",
        help="Events of streams that are no JSON, and did not reach the caller",
        more="The stream goes on without the event, or ends by an error event where text may be lost with it.",
        moves="A proxy that writes into bodies, or an engine that fails in the middle of an event.",
        act="Look at the pool's servers and what stands between; `firsttoken_attempts_total` has the `broken` ones.",
    ),
    gauge(
        "firsttoken_queue_depth{route} requests",
        help="Requests queued in the gateway",
        moves="More requests than the engines have capacity for.",
        act="With TTFT met the queue works as intended; with misses, add engines. See [routing](routing.md).",
        merge=Merge.SUM,
    ),
    gauge(
        "firsttoken_endpoint_in_flight{pool,endpoint} attempts",
        help="Attempts in flight to the endpoint",
        moves="Traffic, and the duration of answers.",
        act="One endpoint far above the rest of its pool answers slowly: check `/fleet`.",
    ),
    gauge(
        "firsttoken_endpoint_uncached_tokens_ahead{pool,endpoint} tokens",
        help="Uncached prompt tokens in flight without a first token",
        more="Counted by the gateway, ahead of the engine's own metrics.",
        moves="Long prompts without a cached prefix.",
        act="Divided by the prefill rate: the wait of the next request there.",
    ),
    gauge(
        "firsttoken_endpoint_state{pool,endpoint}",
        help="Endpoint state: 1 up, 0.5 being probed, 0 down",
        moves="Consecutive failures, or no server at the address.",
        act="Check the engine; each change is logged on stderr.",
        merge=Merge.MIN,
    ),
    counter(
        "firsttoken_endpoint_ejections_total{pool,endpoint,cause}",
        help="Openings of the endpoint's circuit breaker by cause",
        more="`failures`, `unreachable`, `silent`, `misconfigured`, `quota`, or `peer` (another process's report).",
        moves="A dead, overloaded or wrongly configured engine; a revoked key; an account without money.",
        act="`misconfigured`: model name, path and key of the pool. `quota`: pay. Else: the engine's log.",
    ),
    gauge(
        "firsttoken_endpoint_running{pool,endpoint} requests",
        help="Requests running on the engine, as reported by the engine",
        more="Only for engines that report it, from a scrape of the last 5 s.",
        moves="Traffic of the gateway and of other clients.",
        act="Above `firsttoken_endpoint_in_flight` for long: the engine has other clients.",
    ),
    gauge(
        "firsttoken_endpoint_waiting{pool,endpoint} requests",
        help="Requests waiting in the engine's queue",
        more="Only for engines that report it, from a scrape of the last 5 s.",
        moves="More requests than it runs at a time; exhausted KV-cache memory.",
        act="Above 0 for long the engine's queue decides which requests are late: add engines, or remove clients.",
    ),
    gauge(
        "firsttoken_endpoint_kv_usage_ratio{pool,endpoint}",
        help="Share of the engine's KV cache in use",
        more="Only for engines that report it, from a scrape of the last 5 s.",
        moves="Answers in progress, times their lengths.",
        act="Near 1 answers are preempted and restarted: fewer concurrent requests, or more memory.",
    ),
    gauge(
        "firsttoken_tpot_unattainable{route,pool}",
        help="1 where no engine of the pool keeps the route's TPOT budget even for an answer alone, else 0",
        more="From the third answer of an engine on, or 5 s of decoding.",
        moves="Slow hardware, a busy host, a larger model, a tight `tpot`.",
        act="A higher `tpot`, or `off`: see [operations](operations.md#a-tpot-that-no-engine-keeps).",
    ),
)

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

# Sections of docs/metrics.md, in order: heading and metrics.
GROUPS: Mapping[str, tuple[Family, ...]] = {
    "Requests": PROMISED,
    "Predictions": PREDICTED,
    "Attempts and endpoints": SENT,
    "Shared state": SHARED,
    "The gateway itself": OURSELVES,
}
CATALOG: Mapping[str, Family] = {family.name: family for group in GROUPS.values() for family in group}
BY_FAMILY: Mapping[str, Family] = {family.family: family for family in CATALOG.values()}  # by prometheus-client's names
