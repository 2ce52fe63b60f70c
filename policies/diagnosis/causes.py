"""The closed list of causes of a slow or failed request, each with its mend.

The value is the name in the log, in metrics and on the page. A cause is named in docs/trouble.md, with the evidence
that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Cause(StrEnum):
    """`mend`: one sentence with the configuration key to change; {route}, {pool} and {tenant} are filled in."""

    COLD_CACHE = (
        "cold_cache",
        "Name `kv_events` of each endpoint of `pools.{pool}`, so that turns follow their cache; before an engine is "
        "restarted, take it out of `endpoints`.",
    )
    CACHE_BROKEN = (
        "cache_broken",
        "Have the caller ({tenant}) move what changes (a time, an id, the order of tools) behind the stable part of "
        "its prompt; no key of the gateway can mend it.",
    )
    LONG_PROMPT = (
        "long_prompt",
        "Let the budget grow with the prompt: `routes.{route}.ttft.per_1k_tokens`, or shorten the prompt.",
    )
    QUEUED = (
        "queued",
        "Add an engine to `pools.{pool}.endpoints`, or another pool to `routes.{route}.tiers`.",
    )
    NOISY_NEIGHBOUR = (
        "noisy_neighbour",
        "Bound the caller named above: `keys[].tokens_per_minute`, `keys[].concurrent_requests`, or a smaller "
        "`keys[].weight`.",
    )
    RATE_LIMIT = (
        "rate_limit",
        "Add a key to `pools.{pool}.api_keys`, or another pool to `routes.{route}.tiers`.",
    )
    SLOW_REGION = (
        "slow_region",
        "Set `routes.{route}.prefer: latency`, or take that region's endpoints out of `pools.{pool}.endpoints`.",
    )
    EVICTED_SESSION = (
        "evicted_session",
        "Give the engines of `pools.{pool}` more KV cache, or add one to `pools.{pool}.endpoints`: the sessions in "
        "use do not fit.",
    )
    KV_FULL = (
        "kv_full",
        "Lower `pools.{pool}.concurrent_requests`: the engine's KV cache has no room for the answers in progress.",
    )
    DECODE_BOUND = (
        "decode_bound",
        "Lower `pools.{pool}.concurrent_requests`, or bound the answer by the caller's `max_tokens`.",
    )
    MODEL_THINKS = (
        "model_thinks",
        "Have the caller lower its `reasoning_effort`, or set `routes.{route}.ttft.of: any`.",
    )
    GATEWAY_STALLED = (
        "gateway_stalled",
        "Raise `server.workers`, or give the gateway a processor of its own: see `firsttoken_loop_lag_seconds`.",
    )
    CONNECTION = (
        "connection",
        "Check name, port and network of `pools.{pool}.endpoints`; `defaults.connect` bounds the wait.",
    )
    ENDPOINT_FAILED = (
        "endpoint_failed",
        "See the attempt's status and cause above, and the server's own log; `routes.{route}.hedge` and a second "
        "endpoint bound the wait.",
    )
    CALLER_SLOW = (
        "caller_slow",
        "Look at the caller ({tenant}) and the network to it; no key of the gateway can mend it.",
    )
    UNKNOWN = ("unknown", "Compare the stages above with their usual values, and the engine's own log at that time.")

    mend: str

    def __new__(cls, name: str, mend: str) -> Self:
        cause = str.__new__(cls, name)
        cause._value_, cause.mend = name, mend
        return cause


@dataclass(frozen=True, slots=True)
class CauseFound:
    """A cause with its evidence: figures, in words. `culprit`: an endpoint, a pool, or `caller NAME`; empty: the one
    that the cause is usually of (`policies.diagnosis.waiting_cause`). `own`: the work that the request waited for was
    its caller's own; `witnessed`: seen by this request, not told by others."""

    cause: Cause
    evidence: str
    culprit: str = ""
    own: bool = False
    witnessed: bool = True


@dataclass(frozen=True, slots=True)
class CauseVerdict:
    """The cause of one slow request. `part`: where the time went; `over`: s over the budget, or of a failed request;
    `culprit` and `witnessed` as in CauseFound; `own`: the caller by name, where its own work is the reason."""

    cause: Cause
    evidence: str
    mend: str
    part: str
    over: float
    culprit: str = ""
    own: str = ""
    failed: bool = False
    witnessed: bool = True
