"""The closed list of causes of a slow or failed request, each with its mend.

The value is the name in the log, in metrics and on the page. A cause is named in docs/trouble.md, with the evidence
that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Cause(StrEnum):
    """`gloss`: a few words; `mend`: one sentence with the configuration key to change, in which {route}, {pool} and
    {tenant} are filled in."""

    COLD_CACHE = (
        "cold_cache",
        "prefix in no cache",
        "Name `kv_events` of each endpoint of `pools.{pool}`, so that turns follow their cache; before an engine is "
        "restarted, take it out of `endpoints`.",
    )
    CACHE_BROKEN = (
        "cache_broken",
        "prompt changed near its beginning",
        "Have the caller ({tenant}) move what changes (a time, an id, the order of tools) behind the stable part of "
        "its prompt; no key of the gateway can mend it.",
    )
    LONG_PROMPT = (
        "long_prompt",
        "long prompts",
        "Let the budget grow with the prompt: `routes.{route}.ttft.per_1k_tokens`, or shorten the prompt.",
    )
    QUEUED = (
        "queued",
        "engines full",
        "Add an engine to `pools.{pool}.endpoints`, or another pool to `routes.{route}.tiers`.",
    )
    NOISY_NEIGHBOUR = (
        "noisy_neighbour",
        "work of one caller before the others'",
        "Bound that caller: `keys[].tokens_per_minute`, `keys[].concurrent_requests`, or a smaller `keys[].weight`.",
    )
    RATE_LIMIT = (
        "rate_limit",
        "rate limit of the API",
        "Add a key to `pools.{pool}.api_keys`, or another pool to `routes.{route}.tiers`.",
    )
    SLOW_REGION = (
        "slow_region",
        "slow region",
        "Set `routes.{route}.prefer: latency`, or take that region's endpoints out of `pools.{pool}.endpoints`.",
    )
    EVICTED_SESSION = (
        "evicted_session",
        "KV cache too small for the sessions in use",
        "Give the engines of `pools.{pool}` more KV cache, or add one to `pools.{pool}.endpoints`: the sessions in "
        "use do not fit.",
    )
    KV_FULL = (
        "kv_full",
        "KV cache full",
        "Lower `pools.{pool}.concurrent_requests`: the engine's KV cache has no room for the answers in progress.",
    )
    DECODE_BOUND = (
        "decode_bound",
        "answers in progress slow each other down",
        "Lower `pools.{pool}.concurrent_requests`, or bound the answer by the caller's `max_tokens`.",
    )
    MODEL_THINKS = (
        "model_thinks",
        "reasoning before the answer",
        "Have the caller lower its `reasoning_effort`, or set `routes.{route}.ttft.of: any`.",
    )
    GATEWAY_STALLED = (
        "gateway_stalled",
        "gateway short of CPU time",
        "Raise `server.workers`, or give the gateway a processor of its own: see `firsttoken_loop_lag_seconds`.",
    )
    CONNECTION = (
        "connection",
        "no connection",
        "Check name, port and network of `pools.{pool}.endpoints`; `defaults.connect` bounds the wait.",
    )
    ENDPOINT_FAILED = (
        "endpoint_failed",
        "errors or silence of the server",
        "See the attempt's status and cause in `firsttoken why`, and the log of the server; `routes.{route}.hedge` and "
        "a second endpoint bound the wait.",
    )
    DRAINED = (
        "drained",
        "endpoints drained by an operator",
        "Take them in again (`firsttoken drain --ready ENDPOINT`), or add another pool to `routes.{route}.tiers`.",
    )
    CALLER_SLOW = (
        "caller_slow",
        "caller reads slowly",
        "Look at the caller ({tenant}) and the network to it; no key of the gateway can mend it.",
    )
    UNKNOWN = (
        "unknown",
        "cause not found",
        "Compare the stages in `firsttoken why` with their usual values, and look into the log of the engine.",
    )

    gloss: str
    mend: str

    def __new__(cls, name: str, gloss: str, mend: str) -> Self:
        cause = str.__new__(cls, name)
        cause._value_ = name
        cause.gloss, cause.mend = gloss, mend
        return cause


GLOSSES = {cause.value: cause.gloss for cause in Cause}


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
