"""Applies the limits of callers' keys to requests: claim, refusal, settlement.

Rules:
- Only keys with limits come here; other requests pay a comparison.
- A request is judged twice: by its head, before the body is parsed (requests per minute, concurrency, tokens of which
  none is left), and by its claim. A large body is not even read where the head is refused.
- A request holds its place from its head on, and gives it back on every path: the Record settles the last reservation.
- A claim is the largest prompt estimate of all pools, the expected answer (or the caller's own bound, if smaller) for
  each choice, and the largest cost of both. The Record settles the claim.
- A claim is by the most that the estimate allows. Where it is refused by tokens or cost, the prompt is counted.
- An estimate learns from the key's own texts, which may teach it wrong. Of what the key has left, the estimated prompts
  in flight could take no more than DOUBTED beyond their claims, with a token in each byte; the others are counted.
- Every request counts. Tokens and costs are those of all attempts that a server may bill, lost attempts and hedges
  included: the prompt, and the output so far.
- A refusal has the outcome `refused`, counted by no objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic

from prometheus_client import CollectorRegistry

from gateway.admission.auth import Tenant
from gateway.admission.local_quotas import LocalQuotas
from gateway.admission.redis_quotas import RedisQuotas
from gateway.api.api_error import ApiError, retry_later
from gateway.api.inference_request import InferenceRequest
from gateway.observe.metrics.series import counter
from gateway.observe.record import Record
from gateway.observe.recorder import Recorder
from gateway.observe.timeline import RequestTimeline
from policies.quota.key_limits import HEAD_CLAIM, NANO, Claim, KeyLimits, QuotaLimit, Reservation
from policies.types import Pool, PromptEstimate

ESTIMATED = (QuotaLimit.TOKENS, QuotaLimit.COST)
DOUBTED = 0.25  # of the tokens left
NO_RETRY = {"x-should-retry": "false"}  # obeyed by OpenAI's SDKs


Quotas = (
    LocalQuotas | RedisQuotas
)  # `reserve` never fails or delays a request: without Redis, each process decides alone


class QuotaExceeded(ApiError):
    """429. `reservation`: the refused one."""

    def __init__(self, reservation: Reservation, limit: QuotaLimit) -> None:
        message, type, code, headers = refusal(reservation, limit)
        super().__init__(429, message, type=type, code=code, headers=headers)
        self.reservation = reservation


class Admission:
    """Reserves before a request, and settles by the Record."""

    def __init__(self, quotas: Quotas, recorder: Recorder, registry: CollectorRegistry) -> None:
        self._quotas = quotas
        self._recorder = recorder
        self._registry = registry
        self._settling = False
        self.doubts = Counter[str]()  # of estimated prompts in flight, by key
        self.refused = counter("firsttoken_quota_refused_total")

    def check(self, tenant: Tenant) -> QuotaExceeded | None:
        """The reason to refuse a request of this key by the head. Claims nothing."""
        limits = tenant.limits
        if limits is None or (limit := (verdict := self._quotas.check(tenant.name, limits)).limit) is None:
            return None
        return QuotaExceeded(Reservation(tenant.name, limits, HEAD_CLAIM, verdict, 0, monotonic()), limit)

    def enter(self, tenant: Tenant, fault: ApiError | None, timeline: RequestTimeline) -> None:
        """Claim a place by the head, unless `fault` has refused the request already. Raises ApiError."""
        if isinstance(fault, QuotaExceeded):
            self._reserved(fault.reservation, timeline)
        if fault is not None:
            raise fault
        if tenant.limits is not None:
            self._reserved(self._quotas.enter(tenant.name, tenant.limits), timeline)

    async def reserve(
        self,
        tenant: Tenant,
        limits: KeyLimits,
        estimate: PromptEstimate,
        request: InferenceRequest,
        pools: Mapping[str, Pool],
        timeline: RequestTimeline,
        count: Callable[[], Awaitable[PromptEstimate]],
    ) -> PromptEstimate:
        """Claim the whole request in place of its head. Raises ApiError (429).

        Returns the estimate: by an exact `count`, where the limits do not admit the most that it allows."""
        priced, choices = None if limits.cost is None else pools, request.choices
        claim = claim_of(estimate, choices, priced, request.size)
        if self._is_doubtful(tenant.name, limits, claim):
            estimate = await count()
            claim = claim_of(estimate, choices, priced)
        try:
            await self.claim(tenant, limits, claim, timeline)
        except QuotaExceeded as exceeded:
            if estimate.counted or exceeded.reservation.verdict.limit not in ESTIMATED:
                raise
            estimate = await count()
            timeline.reserved(None)
            await self.claim(tenant, limits, claim_of(estimate, choices, priced), timeline)
        return estimate

    def _is_doubtful(self, name: str, limits: KeyLimits, claim: Claim) -> bool:
        """The estimated prompts in flight, and this one, could exceed their claims by too much."""
        if limits.tokens is None or not claim.doubt:
            return False
        return claim.doubt + self.doubts[name] > DOUBTED * self._quotas.check(name, limits).tokens_left

    async def claim(self, tenant: Tenant, limits: KeyLimits, claim: Claim, timeline: RequestTimeline) -> None:
        """`reserve`, of a known claim."""
        head = timeline.record.quota
        timeline.reserved(None)
        self._reserved(await self._quotas.reserve(tenant.name, limits, claim, head), timeline)

    def _reserved(self, made: Reservation, timeline: RequestTimeline) -> None:
        """Raises ApiError (429) for a refused reservation."""
        if not self._settling:  # gateways without limits do not pay for this sink
            self._settling = True
            self._recorder.sinks.append(self.settle)
            self._registry.register(self.refused)
        timeline.reserved(made)
        if (limit := made.verdict.limit) is not None:
            raise QuotaExceeded(made, limit)
        if made.claim.doubt:
            self.doubts[made.name] += made.claim.doubt

    def settle(self, record: Record) -> None:
        """A sink of Records."""
        reservation = record.quota
        if reservation is None:
            return
        if (limit := reservation.verdict.limit) is None:
            if doubt := reservation.claim.doubt:
                self.doubts[reservation.name] -= doubt
                self.doubts += Counter()  # without zeros
            self._quotas.settle(reservation, tokens_of(record), round(record.cost_usd * NANO))
        else:
            self.refused.of[reservation.name, limit.value].value += 1


def claim_of(estimate: PromptEstimate, choices: int, pools: Mapping[str, Pool] | None, size: int = 0) -> Claim:
    """`choices`: answers to generate; `pools`: for their prices; None: the key has no limit on cost. `size`: bytes of
    the body."""
    found, output = estimate.pools, estimate.output_tokens * choices
    tokens = max([pool.tokens + pool.margin for pool in found.values()])
    doubt = 0 if estimate.counted else max(size - tokens, 0)
    if pools is None:
        return Claim(tokens + output, doubt=doubt)
    cost = max([pools[name].price.at_most(pool.tokens + pool.margin, output) for name, pool in found.items()])
    return Claim(tokens + output, round(cost * NANO), doubt)


def tokens_of(record: Record) -> int:
    """Tokens to settle: of every attempt that the caller is charged for."""
    return sum([attempt.tokens for attempt in record.attempts if attempt.charged])


def refusal(made: Reservation, limit: QuotaLimit) -> tuple[str, str, str, Mapping[str, str]]:
    """Message, type, code and headers of the error in OpenAI's dialect: the limit, its size, and when to retry."""
    limits, wait = made.limits, made.verdict.wait
    type, code = "tokens" if limit is QuotaLimit.TOKENS else "requests", "rate_limit_exceeded"
    headers: Mapping[str, str] = NO_RETRY
    if limit is QuotaLimit.COST:
        type = code = "insufficient_quota"
        message = f"This key has used its {usd(limits.cost)} of this calendar month (UTC)."
    elif wait is None:
        type = "tokens"
        size = f"may take {made.claim.tokens} tokens, and this key has {limits.tokens} per minute"
        message = f"The request is too large: it {size}. Shorten it, or bound its answer by max_tokens."
    else:
        reached = {
            QuotaLimit.REQUESTS: f"{limits.requests} requests per minute",
            QuotaLimit.TOKENS: f"{limits.tokens} tokens per minute",
            QuotaLimit.CONCURRENT: f"{limits.concurrent} requests at a time",
        }[limit]
        message = f"This key has reached its limit of {reached}. Try again in {duration(wait)}."
        headers = retry_later(wait)
    return message, type, code, headers


def quota_headers(made: Reservation) -> Iterable[str]:
    """Header lines of the limits set."""
    limits, verdict = made.limits, made.verdict
    for unit, limit, left, reset in (
        ("requests", limits.requests, verdict.requests_left, verdict.requests_reset),
        ("tokens", limits.tokens, verdict.tokens_left, verdict.tokens_reset),
    ):
        if limit is not None:
            yield f"x-ratelimit-limit-{unit}: {limit}"
            yield f"x-ratelimit-remaining-{unit}: {left}"
            yield f"x-ratelimit-reset-{unit}: {duration(reset)}"


def duration(seconds: float) -> str:
    """In OpenAI's format: 12ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:.4g}s" if minutes else f"{rest:.4g}s"


def usd(nano: int | None) -> str:
    return f"{(nano or 0) / NANO:.2f} USD"
