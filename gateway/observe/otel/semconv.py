"""Names in exported telemetry: the GenAI semantic conventions of OpenTelemetry, and attributes of our own.

The conventions are in development and were renamed once. The operator selects the set of names by OpenTelemetry's own
variable; the default is the older set, which dashboards know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OPT_IN, LATEST = "OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental"

# GenAI: attributes whose names are the same in both sets.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_MODEL = "gen_ai.response.model"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"  # s
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE = "gen_ai.token.type"

# General.
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_STATUS = "http.response.status_code"

# Our own: of a request.
REQUEST_ID = "firsttoken.request.id"
ROUTE = "firsttoken.route"
WORKLOAD = "firsttoken.workload"
TENANT = "firsttoken.tenant"
OUTCOME = "firsttoken.outcome"
ATTEMPTS = "firsttoken.attempts"
TIER = "firsttoken.tier"  # from 1
POOL = "firsttoken.pool"
ENDPOINT = "firsttoken.endpoint"
REGION = "firsttoken.region"
SCORER = "firsttoken.scorer"
TTFT = "firsttoken.ttft"  # s, like all times here
TTFT_BUDGET = "firsttoken.ttft.budget"
TTFT_P50 = "firsttoken.ttft.predicted.p50"
TTFT_P90 = "firsttoken.ttft.predicted.p90"
TTFT_MET = "firsttoken.ttft.met"
TPOT = "firsttoken.tpot"
TPOT_BUDGET = "firsttoken.tpot.budget"
TPOT_MET = "firsttoken.tpot.met"
TOTAL_BUDGET = "firsttoken.total.budget"
TOTAL_MET = "firsttoken.total.met"
PROBABILITY = "firsttoken.chance"
PROMPT_ESTIMATED = "firsttoken.prompt_tokens.estimated"
CACHED_PREDICTED = "firsttoken.cached_tokens.predicted"
LOOP_LAG = "firsttoken.loop_lag"
COST = "firsttoken.cost_usd"

# Our own: of an attempt.
ATTEMPT_NUMBER = "firsttoken.attempt.number"
ATTEMPT_KIND = "firsttoken.attempt.kind"
ATTEMPT_ENDING = "firsttoken.attempt.ending"
ENGINE_QUEUE = "firsttoken.engine.queue"
ENGINE_TTFT = "firsttoken.engine.ttft"

# GenAI: server metrics, the same in both sets.
SERVER_DURATION = "gen_ai.server.request.duration"
SERVER_TTFT = "gen_ai.server.time_to_first_token"
SERVER_TPOT = "gen_ai.server.time_per_output_token"

OPERATIONS = {"chat": "chat", "completion": "text_completion"}  # ours -> the conventions'
PROVIDERS = {
    "gemini": "gcp.gemini",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}  # by kind of backend, where the names differ

DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
SERVER_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS = tuple(float(4**n) for n in range(14))


@dataclass(frozen=True, slots=True)
class MetricNames:
    """Client metrics, whose names depend on the set. `usage`: tokens by type in one histogram; empty where the set has
    a counter and a histogram per type of token instead."""

    duration: str
    first_chunk: str
    per_chunk: str
    usage: str = ""
    counts: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)


_INFERENCE = "gen_ai.client.inference"
OLDER = MetricNames(
    "gen_ai.client.operation.duration",
    "gen_ai.client.operation.time_to_first_chunk",
    "gen_ai.client.operation.time_per_output_chunk",
    usage="gen_ai.client.token.usage",
)
NEWER = MetricNames(
    f"{_INFERENCE}.duration",
    f"{_INFERENCE}.time_to_first_chunk",
    f"{_INFERENCE}.time_per_output_chunk",
    counts={
        "input": f"{_INFERENCE}.usage.input_tokens",
        "output": f"{_INFERENCE}.usage.output_tokens",
        "cache_read": f"{_INFERENCE}.usage.cache_read.input_tokens",
    },
    sizes={"input": f"{_INFERENCE}.operation.input_tokens", "output": f"{_INFERENCE}.operation.output_tokens"},
)


def metric_names(environ: Mapping[str, str]) -> MetricNames:
    """The set that the operator selects by OTEL_SEMCONV_STABILITY_OPT_IN."""
    selected = {name.strip() for name in environ.get(OPT_IN, "").split(",")}
    return NEWER if LATEST in selected else OLDER
