"""Metrics of requests: outcomes, times, objectives; of predictions; and of prompts: parts, sessions, and prefixes that
break.
"""

from __future__ import annotations

from gateway.observe.metrics.metric_family import Merge, counter, gauge, histogram

# Each family reaches the limits of time that the defaults allow: 60 s and 300 s for a first token, 600 s for a whole
# answer, 30 s and 120 s between two chunks, and so between two tokens.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)
GAP_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BOUNDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0),
)
STAGE_BOUNDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
ERROR_BOUNDS = (
    *(-300.0, -60.0, -30.0, -5.0, -1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0),
    *(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 60.0, 300.0),
)
SIZE_ERROR_BOUNDS = (0.0, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0)
RATIO_BOUNDS = tuple(i / 10 for i in range(11))

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
    counter(
        "firsttoken_served_total{route,model,region,key,goodput} requests",
        help="Requests by the model of their pool, the region of their endpoint, the caller's key, and goodput",
        more=(
            "`goodput`: met (completed within every budget), missed, or unjudged. `key` is empty unless "
            "`telemetry.label_keys` lists the key; `region` where endpoints have none. No caller makes a series."
        ),
        moves="Traffic, and the causes of missed budgets.",
        act="One model, region or key that misses more than the others: `firsttoken why` with one of its requests.",
    ),
    histogram(
        "firsttoken_served_ttft_seconds{model,region,key}",
        TTFT_BOUNDS,
        help="TTFT of streams by the model of their pool, the region of their endpoint, and the caller's key",
        more="Each route's budget is a bucket. Labels as above.",
        moves="The causes of TTFT; distance to a region.",
        act="One region far above the others: `prefer: latency`, or endpoints nearer to the callers.",
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
        "firsttoken_longest_gap_seconds{route,pool}",
        GAP_BOUNDS,
        help="Longest time between two tokens of a stream",
        more="Streams of at least two tokens, as these came from the servers; less than 10 ms counts as 0. Time in "
        "which the caller did not read is not counted; the silence before a break, or before a peer continues, is.",
        moves="Prefills between the tokens of answers, preempted answers, a server that stalls.",
        act="p99 far above TPOT: limit concurrent requests or the length of prompts beside answers.",
    ),
    counter(
        "firsttoken_long_gaps_total{route,pool} gaps",
        help="Times above 1 s between two tokens of a stream",
        more="A reader takes such an answer for one that has stopped.",
        moves="As above.",
        act="`firsttoken_endpoint_preemptions_per_second` above 0: less concurrency. Else the engine's log.",
    ),
    histogram(
        "firsttoken_stage_seconds{route,stage}",
        STAGE_BOUNDS,
        help="Time of a request by stage",
        more="All but `stream` sum to TTFT; `engine_queue` and `engine_prefill` are the engine's parts of `upstream`.",
        moves=(
            "`queue`: engines without capacity. `rate_limit`: a provider's rate limit. `failover`: lost attempts. "
            "`upstream`: the engine. `estimate`, `parse`: long new prompts. `relay`, "
            "`decide`: a gateway short of CPU."
        ),
        act=(
            "Mostly `queue` and `upstream`: add engines. `rate_limit`: a higher limit, or another tier. Stages of the "
            "gateway: check `firsttoken_loop_lag_seconds`."
        ),
    ),
    counter(
        "firsttoken_slo_total{route,objective,met} requests",
        help="Objectives met and missed",
        more=(
            "`objective` is `ttft`, `tpot`, `gap` (of routes that promise it), `total` (of batch work: done by its "
            "deadline), or `goodput` for the first four at once; the rules are below."
        ),
        moves="Missed budgets, shed or failed requests.",
        act="Attainment is met / all. `firsttoken_requests_total` tells late from shed and failed requests.",
    ),
    counter(
        "firsttoken_slow_total{route,cause} requests",
        help="Requests that missed a budget or failed, by cause",
        more="One cause for each request, of the closed list in [trouble.md](trouble.md).",
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
        "firsttoken_cached_tokens_total{route,pool} tokens",
        help="Prompt tokens of answered requests that were in the cache of the engine or provider",
        more='As reported, or else as forecast; a part of `firsttoken_tokens_total{direction="input"}`.',
        moves="Shared prompts, conversations that return to their engine, broken prefixes, restarts.",
        act="A fall: `firsttoken why --route ROUTE` tells `cold_cache`, `cache_broken` and `evicted_session`.",
    ),
    counter(
        "firsttoken_cost_usd_total{route,pool}",
        help="Cost of requests, by the prices of the pools",
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
    counter(
        "firsttoken_total_prediction_covered_total{route,percentile,covered} requests",
        help="Completed answers that were whole within the predicted percentile, or not",
        more="Routes with a `total` budget, or a `prefer` that looks at the end of the answer.",
        moves="`p50` should cover half, `p90` nine in ten; lengths of answers that change, paces that do.",
        act="p90 below 0.85 for long: answers of the route have grown. Raise `total: {target}` until it recovers.",
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


STEP_BOUNDS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0)
PAUSE_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
KEPT_BOUNDS = tuple(i / 10 for i in range(11))

PROMPTS = (
    counter(
        "firsttoken_prefix_breaks_total{route,class} breaks",
        help="Prompts that depart from the one before, although the text behind is the same, by what changed",
        more="The classes are those of [prefix-doctor.md](prefix-doctor.md). Only answered requests are compared.",
        moves="A time, an id or a counter early in prompts; tools in another order; a history that is cut.",
        act="`firsttoken advise` ranks the places by cost, with a mend for each.",
    ),
    counter(
        "firsttoken_prompt_part_tokens_total{route,part} tokens",
        help="Tokens of prompts by part",
        more="`part`: system, tools, history, tool_results, last_turn or images. They add up to the prompts.",
        moves="Longer system prompts, more tools, longer conversations and results of tools.",
        act="A part that grows from week to week: `firsttoken advise` compares the weeks.",
    ),
    counter(
        "firsttoken_repaired_total{route,rule} requests",
        help="Requests whose prompt was changed by a rule, so that its prefix stays the same",
        more="`rule`: as in `routes.R.repair`; `strip_cch` also where Claude Code's line is left out unasked.",
        moves="Callers with such prompts, and the rules of the route.",
        act="No action: what the rules do. `firsttoken advise` tells what they save.",
    ),
    histogram(
        "firsttoken_session_steps{route} steps",
        STEP_BOUNDS,
        help="Number of each answered prompt within its session",
        more=(
            "A session is a conversation, as the client names it, else by its first message. The bucket of 1 counts "
            "sessions that began: all steps over these are the steps of a session. Prompts of 128 tokens or more."
        ),
        moves="Agents that take more steps for a task.",
        act="More steps at the same TTFT make a task slower: a budget for the step, or steps in parallel.",
    ),
    histogram(
        "firsttoken_session_pause_seconds{route}",
        PAUSE_BOUNDS,
        help="End of a step of a session to the arrival of its next step",
        more="The time of tools, and of people who read.",
        moves="Slow tools, and people.",
        act="Longer than engines keep a prefix: more KV cache, or an offload of it.",
    ),
    histogram(
        "firsttoken_session_kept_ratio{route}",
        KEPT_BOUNDS,
        help="Share of the prompt before, of the same session, with which a prompt begins",
        more="1: nothing was changed, and the engine may find all of it in its cache.",
        moves="Prompts that change early: a time, tools in another order, a history that is cut.",
        act="Below 1: `firsttoken advise` names the place, what changed there, and the cost.",
    ),
)
