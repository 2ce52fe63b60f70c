"""Applies the limits of callers' keys to requests: claim, refusal, settlement.

Rules:
- Only keys with limits come here; other requests pay a comparison.
- A request is judged twice: by its head, before the body is parsed (requests per minute, concurrency, tokens of which
  none is left), and by its claim. A large body is not even read where the head is refused.
- A request holds its place from its head on, and gives it back on every path: the Record settles the last reservation.
- A claim is the largest prompt estimate of all pools, the expected answer (or the caller's own bound, if smaller) for
  each choice, and the largest cost of both. What is left of a limit is held beyond that, up to what SHARE of the key's
  own answers have used; of a key without enough answers, tokens up to UNKNOWN_ANSWER and costs up to the longest answer
  that is allowed. The Record settles the claim.
- A refusal tells its cause: a limit that is used, one that requests in progress hold, or a request above a whole limit.
- A claim is by the most that the estimate allows. Where it is refused by tokens or cost, the prompt is counted.
- An estimate learns from the key's own texts, which may teach it wrong. Of what the key has left, the estimated prompts
  in flight could take no more than DOUBTED beyond their claims, with a token in each byte; the others are counted.
- Every request counts. Tokens and costs are those of all attempts that a server may bill, lost attempts and hedges
  included: the prompt, and the output so far.
- A refusal has the outcome `refused`, counted by no objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from backends.fitting.hints import SPEEDS
from gateway.admission.auth import Tenant
from gateway.admission.local_quotas import LocalQuotas
from gateway.admission.redis_quotas import RedisQuotas
from gateway.api.api_error import ApiError, retry_later
from gateway.core.hooks import NO_DOOR, NO_HOOKS, Ask, Door, Hooks, RoutePlan
from gateway.core.part import Part
from gateway.downstream.http_request import HttpRequest
from gateway.observe.metrics.series import counter
from gateway.observe.part_notes import RESERVATION
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.timeline import RequestTimeline
from gateway.runtime import Runtime
from gateway.wiring import Core
from policies.latency.answer_lengths import LongestAnswers
from policies.quota.key_limits import HEAD_CLAIM, NANO, Claim, KeyLimits, QuotaLimit, RefusalCause, Reservation
from policies.types import Pool, PromptEstimate

ESTIMATED = (QuotaLimit.TOKENS, QuotaLimit.COST)
DOUBTED = 0.25  # of the tokens left
UNKNOWN_ANSWER = 2_048  # tokens held for an answer of a key whose answers are not known yet
LONGEST_ANSWER = 131_072  # tokens, where neither caller, route nor context window bounds an answer
HEADERS = "x-ratelimit-"
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


class Admission(Part):
    """Reserves before a request, and settles by the Record."""

    def __init__(self, core: Core) -> None:
        local = LocalQuotas() if core.worker is None else core.worker.quotas
        self.quotas: Quotas = core.find(RedisQuotas) or local
        self._decider = core.decider
        self._recorder, self._registry = core.recorder, core.registry
        self._settling = False
        self.doubts = Counter[str]()  # of estimated prompts in flight, by account
        self.longest = LongestAnswers()
        self.refused = counter("firsttoken_quota_refused_total")

    def check(self, tenant: Tenant) -> QuotaExceeded | None:
        """The reason to refuse a request of this key by the head. Claims nothing."""
        limits = tenant.limits
        if limits is None or (limit := (verdict := self.quotas.check(tenant.account, limits)).limit) is None:
            return None
        return QuotaExceeded(Reservation(tenant.account, limits, HEAD_CLAIM, verdict, 0, monotonic()), limit)

    def at_door(self, runtime: Runtime) -> Door:
        if not runtime.keys.limited:
            return NO_DOOR
        return Door(check=self.check, enter=self.enter, aside=self.claim_aside)

    def on(self, plan: RoutePlan) -> Hooks:
        return Hooks(admit=self.admit) if plan.runtime.keys.limited else NO_HOOKS

    def enter(self, http: HttpRequest, tenant: Tenant, timeline: RequestTimeline) -> None:
        """Claim a place by the head, unless a fault has refused the request already. Raises ApiError."""
        if isinstance(http.fault, QuotaExceeded):
            self._reserved(http.fault.reservation, http, timeline)
        if http.fault is None and tenant.limits is not None:
            self._reserved(self.quotas.enter(tenant.account, tenant.limits), http, timeline)

    async def claim_aside(self, http: HttpRequest, tenant: Tenant, timeline: RequestTimeline) -> None:
        """Claim a request without tokens in place of its head. Raises ApiError (429)."""
        if tenant.limits is not None:
            await self._claim(tenant, tenant.limits, Claim(), http, timeline)

    async def admit(self, ask: Ask) -> None:
        """Claim the whole request in place of its head. Raises ApiError (429).

        Where the limits do not admit the most that the estimate allows, the prompt is counted."""
        tenant, estimate = ask.tenant, ask.estimate
        if (limits := tenant.limits) is None:
            return
        request, route, pools = ask.request, ask.route, ask.runtime.pools
        longest = self.longest.tokens(tenant.account, route.name)
        speed = next((each for name in SPEEDS if isinstance(each := request.body.get(name), str)), "")
        answer = AnswerBounds(
            request.choices, route.output_cap(request.max_tokens), longest, limits.cost is not None, speed
        )
        claim = claim_of(estimate, answer, pools, request.size)
        if self._is_doubtful(tenant.account, limits, claim):
            estimate = await self._count(ask)
            claim = claim_of(estimate, answer, pools)
        try:
            await self._claim(tenant, limits, claim, ask.http, ask.timeline)
        except QuotaExceeded as exceeded:
            if estimate.counted or exceeded.reservation.verdict.limit not in ESTIMATED:
                raise
            claim = claim_of(await self._count(ask), answer, pools)
            RESERVATION.put(ask.timeline.record, None)
            await self._claim(tenant, limits, claim, ask.http, ask.timeline)

    async def _count(self, ask: Ask) -> PromptEstimate:
        ask.estimate = await self._decider.counted(ask.request, ask.route, ask.tenant, ask.estimate)
        return ask.estimate

    def _is_doubtful(self, account: str, limits: KeyLimits, claim: Claim) -> bool:
        """The estimated prompts in flight, and this one, could exceed their claims by too much."""
        if limits.tokens is None or not claim.doubt:
            return False
        return claim.doubt + self.doubts[account] > DOUBTED * self.quotas.check(account, limits).tokens_left

    async def _claim(
        self, tenant: Tenant, limits: KeyLimits, claim: Claim, http: HttpRequest, timeline: RequestTimeline
    ) -> None:
        head = RESERVATION.of(timeline.record)
        RESERVATION.put(timeline.record, None)
        self._reserved(await self.quotas.reserve(tenant.account, limits, claim, head), http, timeline)

    def _reserved(self, made: Reservation, http: HttpRequest, timeline: RequestTimeline) -> None:
        """Note a reservation, in the headers of the answer too. Raises ApiError (429) for a refused one."""
        if not self._settling:  # gateways without limits do not pay for this sink
            self._settling = True
            self._recorder.sinks.append(self.settle)
            self._registry.register(self.refused)
        RESERVATION.put(timeline.record, made)
        others = (line for line in http.lines if not line.startswith(HEADERS))
        http.lines = (*others, *quota_headers(made))
        if (limit := made.verdict.limit) is not None:
            raise QuotaExceeded(made, limit)
        if made.claim.doubt:
            self.doubts[made.account] += made.claim.doubt

    def settle(self, record: Record) -> None:
        """A sink of Records."""
        reservation = RESERVATION.take(record)
        if reservation is None:
            return
        if (limit := reservation.verdict.limit) is None:
            if doubt := reservation.claim.doubt:
                self.doubts[reservation.account] -= doubt
                self.doubts += Counter()  # without zeros
            if record.answer.output_tokens and record.end is RequestOutcome.COMPLETED:
                longest = -(-record.answer.output_tokens // record.asked.choices)
                self.longest.observe(reservation.account, record.route.name, longest)
            self.quotas.settle(reservation, tokens_of(record), round(record.cost_usd * NANO))
        else:
            self.refused.of[record.tenant, limit.value].value += 1


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """`choices`: answers to generate; `cap`: most tokens of each that caller and route allow; `longest`: as learned of
    the key. None: not known. `priced`: the key has a limit on cost. `speed`: as asked for, whatever is served."""

    choices: int
    cap: int | None = None
    longest: int | None = None
    priced: bool = False
    speed: str = ""

    @property
    def tokens(self) -> int:
        """Most tokens of all choices, for a limit of tokens."""
        each = UNKNOWN_ANSWER if self.longest is None else self.longest
        return self.choices * (each if self.cap is None else min(each, self.cap))

    def billed(self, window: int | None, prompt: int) -> int:
        """Most tokens of all choices, for a limit of costs. `window`: context window of the pool; None: not known."""
        allowed = LONGEST_ANSWER if window is None else max(window - prompt, 1)
        return self.choices * min(bound for bound in (allowed, self.cap, self.longest) if bound is not None)


def claim_of(estimate: PromptEstimate, answer: AnswerBounds, pools: Mapping[str, Pool], size: int = 0) -> Claim:
    """`pools`: for their prices and context windows. `size`: bytes of the body."""
    prompts = {name: pool.tokens + pool.margin for name, pool in estimate.pools.items()}
    tokens, output = max(prompts.values()), estimate.output_tokens * answer.choices
    doubt = 0 if estimate.counted else max(size - tokens, 0)
    cost = most = 0.0
    if answer.priced:
        priced = [(pools[name], pools[name].price.factor(answer.speed), each) for name, each in prompts.items()]
        cost = max([factor * pool.price.at_most(prompt, output) for pool, factor, prompt in priced])
        most = max(
            [
                factor * pool.price.at_most(prompt, answer.billed(pool.context_window, prompt))
                for pool, factor, prompt in priced
            ]
        )
    return Claim(tokens + output, round(cost * NANO), doubt, tokens + answer.tokens, round(most * NANO))


def tokens_of(record: Record) -> int:
    """Tokens to settle: of every attempt that the caller is charged for."""
    return sum([attempt.tokens for attempt in record.attempts if attempt.charged])


def refusal(made: Reservation, limit: QuotaLimit) -> tuple[str, str, str, Mapping[str, str]]:
    """Message, type, code and headers of the error in OpenAI's dialect: the limit, its size, the cause, and when to
    retry."""
    limits, wait, cause = made.limits, made.verdict.wait, made.verdict.cause
    type, code = "tokens" if limit is QuotaLimit.TOKENS else "requests", "rate_limit_exceeded"
    if cause is RefusalCause.SPENT:
        type = code = "insufficient_quota"
        return _spent(limits.cost or 0, made.verdict.spent, made.claim.cost), type, code, NO_RETRY
    if cause is RefusalCause.TOO_LARGE:
        size = f"may take {made.claim.tokens} tokens, and this key has {limits.tokens} per minute"
        if limit is QuotaLimit.COST:
            size = f"may cost {usd(made.claim.cost)}, and this key has {usd(limits.cost)} for a whole calendar month"
        return (
            f"The request is too large: it {size}. Shorten it, or bound its answer by max_tokens.",
            type,
            code,
            NO_RETRY,
        )
    size = {
        QuotaLimit.REQUESTS: f"{limits.requests} requests per minute",
        QuotaLimit.TOKENS: f"{limits.tokens} tokens per minute",
        QuotaLimit.CONCURRENT: f"{limits.concurrent} requests at a time",
        QuotaLimit.COST: f"{usd(limits.cost)} of this calendar month (UTC)",
    }[limit]
    message = f"This key has reached its limit of {size}."
    if cause is RefusalCause.HELD:
        message = f"Requests in progress hold what is left of this key's {size}, until they end."
    return f"{message} Try again in {duration(wait or 0.0)}.", type, code, retry_later(wait or 0.0)


def _spent(limit: int, spent: int, cost: int) -> str:
    whole = f"{usd(limit)} of this calendar month (UTC)"
    if spent >= limit or not cost:
        return f"This key has used its {whole}."
    return f"This key has {usd(limit - spent)} left of its {whole}, and the request may cost {usd(cost)}."


def quota_headers(made: Reservation) -> Iterable[str]:
    """Header lines of the limits set."""
    limits, verdict = made.limits, made.verdict
    for unit, limit, left, reset in (
        ("requests", limits.requests, verdict.requests_left, verdict.requests_reset),
        ("tokens", limits.tokens, verdict.tokens_left, verdict.tokens_reset),
    ):
        if limit is not None:
            yield f"{HEADERS}limit-{unit}: {limit}"
            yield f"{HEADERS}remaining-{unit}: {left}"
            yield f"{HEADERS}reset-{unit}: {duration(reset)}"


def duration(seconds: float) -> str:
    """In OpenAI's format: 12ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f}m{rest:.4g}s" if minutes else f"{rest:.4g}s"


def usd(nano: int | None) -> str:
    """In cents, or as many digits as there are where cents would tell too little."""
    amount = (nano or 0) / NANO
    cents = f"{amount:.2f}"
    return f"{cents if abs(float(cents) - amount) <= amount / 200 else f'{amount:.9f}'.rstrip('0')} USD"
