"""Callers' quotas on the way of a request: what it claims, how a refusal reads, and the settling of what was let in.

Rules:
- Only keys with limits come here; a request of any other pays one comparison.
- Claimed are the estimated prompt, as the pool counts it that counts most, the answer that the route usually gives
  (the caller's own bound, if that is less), and what both cost where they cost most. The Record settles it.
- A request counts, whatever becomes of it; its tokens if there was an answer, its prompt if the caller left before.
- Refused is the caller's own doing: outcome `refused`, which no objective counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry

from gateway.admission.auth import Tenant
from gateway.admission.reservations import Quotas, Reservation
from gateway.api.api_error import ApiError, retry_later
from gateway.observe.metrics.series import counter
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.recorder import Recorder
from gateway.observe.timeline import RequestTimeline
from policies.quota.key_limits import NANO, Claim, KeyLimits, QuotaLimit
from policies.types import Pool, PromptEstimate

NO_RETRY = {"x-should-retry": "false"}  # which the SDKs of OpenAI obey


class Admission:
    """Applies the limits of callers' keys to requests."""

    def __init__(self, quotas: Quotas, recorder: Recorder, registry: CollectorRegistry) -> None:
        self._quotas = quotas
        self._recorder = recorder
        self._registry = registry
        self._settling = False
        self.refused = counter("firsttoken_quota_refused_total")

    async def reserve(
        self,
        tenant: Tenant,
        limits: KeyLimits,
        estimate: PromptEstimate,
        pools: Mapping[str, Pool],
        timeline: RequestTimeline,
    ) -> None:
        """Raises Refusal (429)."""
        if not self._settling:  # nobody has paid for this sink until now
            self._settling = True
            self._recorder.sinks.append(self.settle)
            self._registry.register(self.refused)
        claim = claim_of(estimate, None if limits.cost is None else pools)
        made = await self._quotas.reserve(tenant.name, limits, claim)
        timeline.reserved(made)
        if (limit := made.verdict.limit) is not None:
            self.refused.of[tenant.name, limit.value].value += 1
            raise refusal(made, limit)

    def settle(self, record: Record) -> None:
        """A sink of Records."""
        reservation = record.quota
        if reservation is not None and reservation.verdict.limit is None:
            self._quotas.settle(reservation, tokens_of(record), round(record.cost_usd * NANO))


def claim_of(estimate: PromptEstimate, pools: Mapping[str, Pool] | None) -> Claim:
    """`pools`: for their prices; None: the key has no limit on cost."""
    found, output = estimate.pools, estimate.output_tokens
    tokens = max([pool.tokens for pool in found.values()])
    if pools is None:
        return Claim(tokens + output)
    cost = max([pools[name].price.of(pool.tokens, output) for name, pool in found.items()])
    return Claim(tokens + output, round(cost * NANO))


def tokens_of(record: Record) -> int:
    """What a request took in truth."""
    if record.ttft is None and record.end is not RequestOutcome.CLIENT_GONE:
        return 0
    prompt = record.prompt_tokens_reported
    return (record.prompt_tokens_estimated or 0 if prompt is None else prompt) + (record.output_tokens or 0)


def refusal(made: Reservation, limit: QuotaLimit) -> ApiError:
    """In OpenAI's dialect: which limit, how much of it, and when there is room again."""
    limits, verdict = made.limits, made.verdict
    if limit is QuotaLimit.COST:
        return ApiError(
            429,
            f"This key has used its {usd(limits.cost)} of this calendar month (UTC).",
            type="insufficient_quota",
            code="insufficient_quota",
            headers=NO_RETRY,
        )
    if verdict.wait is None:
        said = f"may take {made.claim.tokens} tokens, and this key has {limits.tokens} per minute"
        return ApiError(
            429,
            f"The request is too large: it {said}. Shorten it, or bound its answer by max_tokens.",
            type="tokens",
            code="rate_limit_exceeded",
            headers=NO_RETRY,
        )
    most, of = {
        QuotaLimit.REQUESTS: (limits.requests, "requests per minute"),
        QuotaLimit.TOKENS: (limits.tokens, "tokens per minute"),
        QuotaLimit.CONCURRENT: (limits.concurrent, "requests at a time"),
    }[limit]
    return ApiError(
        429,
        f"This key has reached its limit of {most} {of}. Try again in {duration(verdict.wait)}.",
        type="tokens" if limit is QuotaLimit.TOKENS else "requests",
        code="rate_limit_exceeded",
        headers=retry_later(verdict.wait),
    )


def quota_headers(made: Reservation) -> Iterable[str]:
    """Header lines for the limits that there are."""
    limits, verdict = made.limits, made.verdict
    for of, most, left, reset in (
        ("requests", limits.requests, verdict.requests_left, verdict.requests_reset),
        ("tokens", limits.tokens, verdict.tokens_left, verdict.tokens_reset),
    ):
        if most is not None:
            yield (
                f"x-ratelimit-limit-{of}: {most}\r\nx-ratelimit-remaining-{of}: {left}\r\n"
                f"x-ratelimit-reset-{of}: {duration(reset)}"
            )


def duration(seconds: float) -> str:
    """As OpenAI writes it: 12ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:.4g}s" if minutes else f"{rest:.4g}s"


def usd(nano: int | None) -> str:
    return f"{(nano or 0) / NANO:.2f} USD"
