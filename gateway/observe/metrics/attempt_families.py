"""Metrics of attempts, endpoints, tokens and cost."""

from __future__ import annotations

from gateway.observe.metrics.metric_family import Merge, counter, gauge

SENT = (
    counter(
        "firsttoken_attempts_total{pool,region,kind,outcome} attempts",
        help="Attempts by the region of their endpoint, kind and outcome",
        more="Counted once each, at their end. `region` is empty where endpoints have none.",
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
        help="Answers after which another pool was asked, on routes with `escalate`",
        more="`refusal`, `empty`, `length`, `invalid_json`.",
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
        more="By the prices of the pools, of all attempts.",
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
        "firsttoken_picked_answers_total{route,sight} answers",
        help="Answers carried by another proxy, by what has told their end",
        more=(
            "`body`: all of it was seen. `access_log`: the body to the first token, then Envoy's access log. "
            "`headers`: the head of the reply alone."
        ),
        moves="Body modes and the access log of the data plane.",
        act="`headers`: no TTFT is judged; show the body. `body` in mode STREAMED: add the access log, it costs less.",
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
        help="Endpoint state: 3 drained by an operator, 2 asleep, 1 up, 0.5 being probed, 0 down",
        moves="Consecutive failures, or no server at the address.",
        act="Check the engine; each change is logged on stderr.",
        merge=Merge.MIN,
    ),
    gauge(
        "firsttoken_endpoint_rtt_seconds{pool,endpoint}",
        help="Least round trip to the endpoint of the last 5 to 10 minutes",
        more="By the kernel, of connections that are open anyway; none behind a proxy.",
        moves="Distance; another way through the network. Load of the engine does not.",
        act="Part of every TTFT there: `region: {prefer: nearest}`, or an endpoint nearer to the gateway.",
        merge=Merge.MIN,
    ),
    counter(
        "firsttoken_endpoint_ejections_total{pool,endpoint,cause}",
        help="Openings of the endpoint's circuit breaker by cause",
        more="`failures`, `unreachable`, `unhealthy` (its health page), `silent`, `misconfigured`, `quota`, or `peer` "
        "(another process's report).",
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
        "firsttoken_endpoint_preemptions_per_second{pool,endpoint} answers/s",
        help="Answers that the engine put back into its queue for want of KV cache, over the last minute",
        more="Only for engines that report it.",
        moves="More answers in progress, or longer ones, than the KV cache has room for.",
        act="Above 0: answers stall and are computed again. Fewer concurrent requests, or more memory.",
    ),
    gauge(
        "firsttoken_endpoint_rejections_per_second{pool,endpoint} requests/s",
        help="Requests that the engine refused by its own queue limit, over the last minute",
        more="Only for engines that report it (vLLM); those of other clients too.",
        moves="More requests at once than `--max-num-queued-reqs` or `--max-num-queued-tokens` allow.",
        act="Above 0 for long: `concurrent_requests` of the pool at or below the limit, or more engines.",
    ),
    gauge(
        "firsttoken_endpoint_evictions_per_second{pool,endpoint} blocks/s",
        help="Blocks that the engine dropped from its prefix cache, over the last minute",
        more="Only of endpoints with `kv_events`; in the engine's blocks.",
        moves="Prompts that share little, and more of them than the cache holds.",
        act="With a falling share of cached tokens: more memory, or fewer sessions for each engine.",
    ),
    gauge(
        "firsttoken_endpoint_speculative_acceptance_ratio{pool,endpoint}",
        help="Accepted share of the tokens that speculative decoding proposed, over the last minute",
        more="Only for engines that decode so and report it.",
        moves="Text that the draft model does not predict.",
        act="Below about 0.4 drafts cost more than they bring where engines are busy: fewer draft tokens, or none.",
        merge=Merge.MIN,
    ),
    gauge(
        "firsttoken_pool_bound{pool}",
        help="What limits a pool: 0 idle, 1 nothing, 2 decoding, 3 prefill, 4 KV cache",
        more="The verdict of most of its engines (see [trouble](trouble.md#what-limits-a-pool)).",
        moves="The mix of long prompts, long answers and concurrency.",
        act="2: fewer concurrent answers. 3: shorter prompts, more cache hits. 4: more KV cache. All: more engines.",
    ),
    gauge(
        "firsttoken_pool_external{pool}",
        help="1 for a pool of an external API, 0 for a pool of own engines",
        moves="The configuration.",
        act="No action: with `firsttoken_requests_total`, the share of requests that leave the own engines.",
    ),
    gauge(
        "firsttoken_tpot_unattainable{route,pool}",
        help="1 where no engine of the pool keeps the route's TPOT budget even for an answer alone, else 0",
        more="From the third answer of an engine on, or 5 s of decoding.",
        moves="Slow hardware, a busy host, a larger model, a tight `tpot`.",
        act="A higher `tpot`, or `off`: see [trouble](trouble.md#a-tpot-that-no-engine-keeps).",
    ),
)
