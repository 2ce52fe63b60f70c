"""Profile of a simulated engine from what the gateway has learned of a real one.

The gateway's terms are linear in tokens, attention pairs, decoding requests and context. The profile has the same ones:
a step takes its constant, each scheduled token, pair and context token as learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from operator import mul

from backends.server_profiles import EngineProfile
from policies.latency.learned_state import LearnedEndpoint
from policies.latency.tpot import DECODE_BASE, DECODE_CONTEXT, DECODE_RUNNING
from policies.latency.ttft_predictor import BASE, LENGTH, MIN_TOKEN, PAIR, TOKEN
from policies.types import TRAINED_SAMPLES

USUAL = 4_000  # tokens of a prompt by which engines are compared
LEAST_OVERHEAD = 0.001  # s before the scheduler of an engine sees a request
LEAST_STEP = 0.001  # s


def representative(known: Iterable[LearnedEndpoint]) -> LearnedEndpoint | None:
    """The fastest engine of a pool: where KV caches are full, others have learned the wait as if it were work."""
    trained = [each for each in known if each.engine is not None and each.engine.samples >= TRAINED_SAMPLES]
    return min(trained, key=_seconds, default=None)


def _seconds(learned: LearnedEndpoint) -> float:
    """Of a usual prompt, without a queue."""
    if learned.engine is None:
        return inf
    terms = (BASE, USUAL * LENGTH, USUAL * TOKEN, USUAL * USUAL / 2 * PAIR)
    return float(sum(map(mul, learned.engine.regression.coefficients, terms)))


def learned_profile(learned: LearnedEndpoint | None, assumed: EngineProfile, kv_tokens: int | None) -> EngineProfile:
    """`assumed`: where too little is known, and for the limits of its scheduler. `kv_tokens`: as the engine reports."""
    known = replace(assumed, kv_tokens=kv_tokens or assumed.kv_tokens)
    if learned is None or learned.engine is None or learned.engine.samples < TRAINED_SAMPLES:
        return known
    base, length, token, pair, _ = learned.engine.regression.coefficients
    decode, running, context = learned.tpot.regression.coefficients
    step = max(decode * DECODE_BASE, LEAST_STEP)
    per_token = max(token * TOKEN + length * LENGTH, MIN_TOKEN)
    return replace(
        known,
        name="learned",
        step_ms=step * 1e3,
        weights_ms=0.0,  # within `step_ms`: no smooth maximum
        tokens_per_ms=1 / (per_token * 1e3),
        allreduce_ms=0.0,
        attention_ns=pair * PAIR * 1e9,
        context_us=context * DECODE_CONTEXT * 1e6,
        sequence_ms=max(running * DECODE_RUNNING - per_token, 0.0) * 1e3,
        overhead=max(base * BASE - step, LEAST_OVERHEAD),
    )
