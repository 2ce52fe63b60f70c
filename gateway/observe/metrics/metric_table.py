"""Every metric of the gateway, once: what it is, what moves it and what to do then.

Rules:
- Series are made from this table (`gateway.observe.metrics.series`), docs/metrics.md is written from it
  (`scripts/metrics_page.py`), and how workers' gauges are joined is looked up in it.
- What is measured in a unit has it in its name: seconds, tokens, usd, ratio.
- Values of labels come from the configuration or are few and fixed. Nothing that a caller writes becomes one.
- Times are seconds, from `arrival` where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Required, TypedDict, Unpack

from gateway.observe.metrics.metric_family import Family, Merge, MetricKind

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
TPOT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
STAGE_BOUNDS = (
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
ERROR_BOUNDS = (-5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
RATIO_BOUNDS = tuple(i / 10 for i in range(11))
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

SECONDS, TOKENS, RATIO, USD, REQUESTS, ATTEMPTS, NONE = "s", "tokens", "0 to 1", "USD", "requests", "attempts", ""


class HelpText(TypedDict, total=False):
    """In words: see `Family`."""

    help: Required[str]
    more: str
    moves: Required[str]
    act: Required[str]


def counter(name: str, unit: str, labels: str, **said: Unpack[HelpText]) -> Family:
    return Family(name=name, kind=MetricKind.COUNTER, unit=unit, labels=tuple(labels.split()), **said)


def gauge(name: str, unit: str, labels: str, merge: Merge = Merge.MAX, **said: Unpack[HelpText]) -> Family:
    return Family(name=name, kind=MetricKind.GAUGE, unit=unit, labels=tuple(labels.split()), merge=merge, **said)


def histogram(name: str, unit: str, labels: str, bounds: tuple[float, ...], **said: Unpack[HelpText]) -> Family:
    return Family(name=name, kind=MetricKind.HISTOGRAM, unit=unit, labels=tuple(labels.split()), bounds=bounds, **said)


PROMISED = (
    counter(
        "firsttoken_requests_total",
        REQUESTS,
        "route pool outcome",
        help="Requests by how they ended",
        more="Once each, at their end.",
        moves="Traffic; the pool is the one that was chosen last, `-` where none was.",
        act=(
            "`failed`, `unavailable` and `upstream_broke` are the engines': see their attempts. `shed` is a fleet "
            "that is too small for its promises. `internal` is our bug."
        ),
    ),
    histogram(
        "firsttoken_ttft_seconds",
        SECONDS,
        "route pool",
        TTFT_BOUNDS,
        help="Arrival to first token out (streams: content; otherwise: first byte)",
        more=(
            "Each route's budget is a bucket, so that on a route of streams the share within it is exact; those of "
            "other routes are in `firsttoken_ttft_by_prompt_seconds` alone. Its buckets carry a trace id (OpenMetrics)."
        ),
        moves="Everything before the first token: the engines' queues and prefills, long prompts, a lost cache.",
        act=(
            "`firsttoken_stage_seconds` says where it was spent, `firsttoken_ttft_by_prompt_seconds` whether the "
            "prompts grew."
        ),
    ),
    histogram(
        "firsttoken_ttft_on_screen_seconds",
        SECONDS,
        "route",
        TTFT_BOUNDS,
        help="Sending of the request to its first token on screen, as callers report it",
        more="By `POST /ttft`, at most once a request. Each route's budget is a bucket.",
        moves="What TTFT moves, and the network and the page between us and the reader.",
        act="Far above `firsttoken_ttft_seconds`: a proxy in between that buffers, or a page that draws late.",
    ),
    histogram(
        "firsttoken_ttft_by_prompt_seconds",
        SECONDS,
        "route prompt",
        TTFT_BOUNDS,
        help="TTFT of streams by the size of their prompts",
        more=(
            "`prompt` is the size in tokens, as reported where the engine says, else estimated; thousands, the lower "
            "end included. Each route's budget is a bucket."
        ),
        moves="One class alone: its prefill. All at once: queues.",
        act=(
            "Long prompts that miss a budget which short ones meet want a tier of their own (`when: {prompt_tokens: "
            "...}`), or another budget."
        ),
    ),
    histogram(
        "firsttoken_tpot_seconds",
        SECONDS,
        "route pool",
        TPOT_BOUNDS,
        help="Time per output token after the first",
        more="Streams of two tokens or more.",
        moves="Answers that are written at the same time, prefills between their tokens, long contexts.",
        act="Fewer requests at a time on the engines (`--max-num-seqs`), or more engines.",
    ),
    histogram(
        "firsttoken_stage_seconds",
        SECONDS,
        "route stage",
        STAGE_BOUNDS,
        help="Where the time went, by stage",
        more=(
            "All but `stream`, `engine_queue` and `engine_prefill` sum to TTFT; these two are parts of `upstream`, by "
            "the engine's own word."
        ),
        moves=(
            "`queue`: engines without room. `rate_limit`: a provider's. `failover`: attempts that were lost. "
            "`upstream`: the engine. `estimate`, `parse`: long prompts never seen. `relay`, `decide`: a gateway that "
            "is short of CPU."
        ),
        act=(
            "Most is `queue` and `upstream`: engines. `rate_limit`: a higher quota, or another tier. Of our own "
            "stages look at `firsttoken_loop_lag_seconds`."
        ),
    ),
    counter(
        "firsttoken_slo_total",
        REQUESTS,
        "route objective met",
        help="Objectives met and missed",
        more="`objective` is `ttft`, `tpot` or `total`; see below what counts.",
        moves="Budgets missed, requests shed or failed.",
        act="Attainment is met over all of them. Which of the two it was: `firsttoken_requests_total`.",
    ),
    gauge(
        "firsttoken_route_ttft_budget_seconds",
        SECONDS,
        "route",
        help="The TTFT that a route promises",
        more="Of routes that have one. A caller's own budget is not in it.",
        moves="The configuration.",
        act="Nothing: it is the line that TTFT is drawn against.",
    ),
    gauge(
        "firsttoken_route_ttft_target_ratio",
        RATIO,
        "route",
        help="The share of requests that a route promises it to",
        more="Of routes with a TTFT budget.",
        moves="The configuration.",
        act="Nothing: 1 less this is the error budget.",
    ),
    gauge(
        "firsttoken_requests_in_progress",
        REQUESTS,
        "",
        help="Requests that have arrived and not ended",
        more="Held back, sent, or being answered.",
        moves="Traffic times how long answers take.",
        act="If it grows and traffic does not, answers have become slower, or callers do not read.",
        merge=Merge.SUM,
    ),
    counter(
        "firsttoken_tokens_total",
        TOKENS,
        "route pool direction",
        help="Tokens of answered requests",
        more="`input` and `output`, as reported where the engine says, else estimated and counted.",
        moves="Traffic, longer prompts, longer answers.",
        act="Capacity: tokens, not requests, are what engines run out of.",
    ),
    counter(
        "firsttoken_cost_usd_total",
        USD,
        "route pool",
        help="What answered requests cost, by the prices in the configuration",
        moves="Tokens, and the tier that they went to.",
        act="A dearer pool takes more: see why the one before it misses.",
    ),
)

PREDICTED = (
    histogram(
        "firsttoken_ttft_predicted_seconds",
        SECONDS,
        "pool",
        TTFT_BOUNDS,
        help="The TTFT that was predicted (p50)",
        more="Streams that were answered, by the prediction of the attempt that answered; from arrival, like TTFT.",
        moves="The load that the gateway sees, and what it has learned of the engines.",
        act="Hold it against `firsttoken_ttft_seconds` of the pool.",
    ),
    histogram(
        "firsttoken_ttft_prediction_error_seconds",
        SECONDS,
        "pool",
        ERROR_BOUNDS,
        help="Actual minus predicted p50 TTFT",
        more="Streams only.",
        moves="An engine that has become slower or faster than it was; other traffic on it that it does not tell of.",
        act=(
            "Above 0 for long: budgets are missed that seemed safe. See `/fleet`, and whether the engine's `/metrics` "
            "can be read."
        ),
    ),
    counter(
        "firsttoken_ttft_prediction_covered_total",
        REQUESTS,
        "pool quantile covered",
        help="Whether TTFT was within the predicted quantile",
        more="Streams only; `true` over all of a quantile is its calibration.",
        moves="`p50` should cover half, `p90` nine in ten.",
        act=(
            "p90 that covers less than 0.85: the spread is underestimated, and routes run closer to their budgets "
            "than they should. Raise `target` meanwhile."
        ),
    ),
    histogram(
        "firsttoken_prefix_hit_ratio",
        RATIO,
        "pool source",
        RATIO_BOUNDS,
        help="Share of prompt tokens cached, by source",
        more="As `predicted` by us and as `reported` by the engine.",
        moves="Shared prompts, conversations that return to their engine; a restart or too small a cache lowers it.",
        act=(
            "`reported` far below `predicted`: the engine evicts what we think it holds; let it publish its cache "
            "events."
        ),
    ),
)

SENT = (
    counter(
        "firsttoken_attempts_total",
        ATTEMPTS,
        "pool kind outcome",
        help="Attempts by kind and how they ended",
        more="Once each, at their end.",
        moves="More than one a request: failures, rate limits, silence.",
        act=(
            "`failed`, `broken`: the engine's log. `rate_limited`: the provider's quota. `silent`: it is too slow for "
            "the budget."
        ),
    ),
    counter(
        "firsttoken_hedges_total",
        ATTEMPTS,
        "route result",
        help="Hedges by what came of them",
        more="`won` (its first token came first), `lost` (the other's did, or the caller left), `failed`.",
        moves="Predictions that come too late for the deadline, on routes with `hedge`.",
        act="Mostly `lost`: they cost and do not help. Lower `max_extra`.",
    ),
    gauge(
        "firsttoken_queue_depth",
        REQUESTS,
        "route",
        help="Requests held back now",
        moves="More than the engines have room for.",
        act="With TTFT met it is the room at work; with misses, too few engines. See [routing](routing.md).",
        merge=Merge.SUM,
    ),
    gauge(
        "firsttoken_endpoint_in_flight",
        ATTEMPTS,
        "pool endpoint",
        help="Attempts open there",
        moves="Traffic, and how long answers take.",
        act="One endpoint far above its siblings answers slowly: see `/fleet`.",
    ),
    gauge(
        "firsttoken_endpoint_uncached_tokens_ahead",
        TOKENS,
        "pool endpoint",
        help="Uncached prompt tokens sent that have no first token yet",
        more="The ledger: ours, sooner than the engine's own counts.",
        moves="Long prompts without a cached prefix.",
        act="Divided by its prefill rate it is what the next request waits there.",
    ),
    gauge(
        "firsttoken_endpoint_state",
        NONE,
        "pool endpoint",
        help="1 up, 0.5 being tried, 0 down",
        moves="Failures in a row, or nobody at the address.",
        act="Look at the engine; each change is a line on stderr.",
        merge=Merge.MIN,
    ),
    gauge(
        "firsttoken_endpoint_running",
        REQUESTS,
        "pool endpoint",
        help="Requests that the engine says it computes",
        more="Of engines that tell, as of the last look within 5 s.",
        moves="Its traffic, ours or others'.",
        act="More than `firsttoken_endpoint_in_flight` for long: somebody else uses it too.",
    ),
    gauge(
        "firsttoken_endpoint_waiting",
        REQUESTS,
        "pool endpoint",
        help="Requests that wait inside the engine",
        more="Of engines that tell, as of the last look within 5 s.",
        moves="More than it takes at a time; memory for the KV cache that has run out.",
        act="Above 0 for long the engine's own queue decides who is late: more engines, or nobody else on them.",
    ),
    gauge(
        "firsttoken_endpoint_kv_usage_ratio",
        RATIO,
        "pool endpoint",
        help="Share of the engine's KV cache in use",
        more="Of engines that tell, as of the last look within 5 s.",
        moves="Answers under way, times their lengths.",
        act="Near 1 answers are preempted and begun again: fewer at a time, or more memory.",
    ),
)

SHARED = (
    counter(
        "firsttoken_quota_refused_total",
        REQUESTS,
        "key limit",
        help="Requests refused because a key's quota was used up",
        more="`limit` is `requests`, `tokens`, `concurrent` or `cost`; `key` is the name in the configuration.",
        moves="A key that asks for more than it was given.",
        act="Talk to its owner, or raise the limit.",
    ),
    gauge(
        "firsttoken_redis_up",
        NONE,
        "",
        help="Whether Redis answers: 1, or 0",
        moves="Redis, or the way to it.",
        act="At 0 quotas and load are each replica's own. Requests go on.",
        merge=Merge.MIN,
    ),
    counter(
        "firsttoken_redis_errors_total",
        NONE,
        "",
        help="Commands to Redis that failed or were not answered in time",
        moves="Redis, or the way to it.",
        act="A few an hour are a network. Many with `firsttoken_redis_up` 1: its latency.",
    ),
    gauge(
        "firsttoken_replicas",
        NONE,
        "",
        help="Gateways that share this state, this one included",
        moves="A rollout, or a gateway that is gone.",
        act="Less than are deployed: those do not reach Redis.",
    ),
)

OURSELVES = (
    gauge(
        "firsttoken_build_info",
        NONE,
        "version",
        help="Always 1; which version runs",
        moves="A rollout.",
        act="Two versions at a time for long: a rollout that is stuck.",
    ),
    histogram(
        "firsttoken_loop_lag_seconds",
        SECONDS,
        "",
        LAG_BOUNDS,
        help="How late a timer of the event loop was",
        more=(
            "20 times a second: what any event would have waited that came at that moment. Under a millisecond it is "
            "the timer's own grain."
        ),
        moves="A gateway that is short of CPU; something in it that blocks.",
        act="More workers, or cores that others leave alone. Below 60% of a core and still late: our bug.",
    ),
    gauge(
        "firsttoken_loop_lag_max_seconds",
        SECONDS,
        "",
        help="The greatest lateness since the last scrape",
        more="Whoever scraped.",
        moves="One stall.",
        act="As above; the log says when.",
    ),
    counter(
        "firsttoken_loop_stalls_total",
        NONE,
        "",
        help="Times that the timer was late by 5 ms or more",
        more="One a minute is said in the log.",
        moves="As above.",
        act="As above.",
    ),
    gauge(
        "firsttoken_workers",
        NONE,
        "",
        help="Workers that serve",
        more="With several workers only.",
        moves="A worker that died, or starts.",
        act="Less than `server.workers` for more than a second: stderr says why.",
    ),
    counter(
        "firsttoken_worker_starts_total",
        NONE,
        "worker",
        help="Worker processes started",
        more="With several workers only.",
        moves="Each start, the first included.",
        act="More than one each: a worker dies. Stderr says of what.",
    ),
    counter(
        "firsttoken_access_log_lines_lost_total",
        NONE,
        "",
        help="Lines of the access log that were not written",
        more="Where there is an access log.",
        moves="A disk or a reader that is too slow or full.",
        act="Make room. Requests are not held up by it.",
    ),
    counter(
        "firsttoken_spans_exported_total",
        NONE,
        "",
        help="Spans that the OpenTelemetry collector took",
        more="Where `telemetry.otlp` is configured.",
        moves="Traffic and sampling.",
        act="0 where traces are wanted: see `firsttoken_spans_lost_total`.",
    ),
    counter(
        "firsttoken_spans_lost_total",
        NONE,
        "",
        help="Spans that were dropped, or not taken",
        more="Too many waited, the collector refused them, or did not take them in time.",
        moves="A collector that is away or too slow.",
        act="Look at the collector. Requests are not held up by it.",
    ),
    counter(
        "firsttoken_config_reloads_total",
        NONE,
        "result",
        help="Configurations that were read again",
        more="`applied` or `refused`.",
        moves="A changed file, SIGHUP, or `POST /reload`.",
        act="`refused`: the old one is still in force; the log says why.",
    ),
    gauge(
        "firsttoken_config_loaded_timestamp_seconds",
        "s since 1970",
        "",
        help="When the configuration in force was read",
        moves="A start or a reload.",
        act="Earlier than the last change of the file: it was refused, or not seen.",
        merge=Merge.MIN,
    ),
)

# In the order of docs/metrics.md: a heading, and what stands under it.
GROUPS: Mapping[str, tuple[Family, ...]] = {
    "What callers get": PROMISED,
    "What was predicted": PREDICTED,
    "What is sent where": SENT,
    "What is shared": SHARED,
    "The gateway itself": OURSELVES,
}
CATALOG: Mapping[str, Family] = {family.name: family for group in GROUPS.values() for family in group}
BY_FAMILY: Mapping[str, Family] = {family.family: family for family in CATALOG.values()}  # by the library's names
