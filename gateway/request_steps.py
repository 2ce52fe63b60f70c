"""Steps of a request before the queue: key, body, route, estimate (`RequestReader`).

`Decider` parses and estimates, for /explain and other fronts too, and gives the pure decision code a parsed request, an
estimate, a snapshot and the clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import random
from time import monotonic
from typing import Any, TypeVar

from backends.interface import GENERATING, TOKEN_COUNTS, Operation
from gateway.admission.auth import ANYONE, Tenant
from gateway.api.inference_request import InferenceRequest, parse, with_model
from gateway.api.operation_fit import OperationFit
from gateway.core.hooks import Ask, Plans
from gateway.downstream.http_request import HttpRequest, caller_address
from gateway.observe.record import Record, RequestOutcome
from gateway.observe.timeline import landmarks
from gateway.runtime import RuntimeHolder
from gateway.tokenize.estimator import DeferredCounts, Estimator
from gateway.tokenize.prompt_reader import PromptText
from policies.fleet.fleet import Fleet
from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Route
from policies.routing.decide import decide
from policies.routing.prompt_counts import is_count_needed, uncached_tokens
from policies.types import UNUSABLE, Decision, PrefixBlocks, PromptEstimate, Quantiles

T = TypeVar("T")

LARGE = 150_000  # bytes of body: 0.4 ms to parse if nothing is cached
MANY, SUSPECT = 400, 15_000  # objects and arrays: 1 ms to parse; bytes of body enough for as many
COUNTING = 10  # times as long as parsing
NO_BLOCKS = PrefixBlocks()
UNKNOWN: Quantiles = ()  # lengths of answers
SAMPLES, SAMPLE = 8, 768  # places, and bytes in each, where they are counted: all of 100 KB would take 56 us


class Decider:
    """Steps common to the proxy, the request queue and /explain."""

    def __init__(self, estimator: Estimator, fleet: Fleet) -> None:
        self.estimator = estimator
        self.fleet = fleet
        self.answer_lengths = fleet.answer_lengths
        self.counts = DeferredCounts()

    async def parse(
        self,
        operation: Operation,
        raw: bytes,
        headers: Mapping[str, str],
        arrival: float,
        request_id: str,
        wanted_headers: frozenset[str] = frozenset(),
    ) -> InferenceRequest:
        """Parses a body, in a thread if slow enough to block the loop. Raises ApiError."""
        asked = operation, raw, headers, arrival, request_id, wanted_headers
        if len(raw) <= LARGE and (len(raw) <= SUSPECT or estimated_containers(raw) <= MANY):
            return parse(*asked)
        return await asyncio.get_running_loop().run_in_executor(self.estimator.executor, parse, *asked)

    async def with_model(self, raw: bytes, model: str) -> bytes:
        """A body with this model, in a thread if slow."""
        return await self.off_loop(len(raw), with_model, raw, model)

    async def off_loop(self, size: int, work: Callable[..., T], *given: Any) -> T:
        """Do work on a body of `size` bytes, in a thread if slow."""
        if size <= LARGE:
            return work(*given)
        return await asyncio.get_running_loop().run_in_executor(self.estimator.executor, work, *given)

    async def estimate(self, request: InferenceRequest, route: Route, tenant: Tenant) -> PromptEstimate:
        """Prompt tokens and prefix blocks for every pool of the route. Text that was not counted yet is counted once
        the request is sent; here, where the decision needs the count.

        Where the TTFT budget grows with the prompt, uncached tokens as of now: the deadline is fixed here.
        """
        text = _text(request, route, tenant)
        cap = route.output_cap(request.max_tokens)
        generates = request.operation in GENERATING
        expected = self.answer_lengths.expected_output(route.name, cap) if generates else 0
        estimate = await self._read(text, expected)
        if not estimate.counted:
            now = monotonic()
            pools, spent = self.fleet.snapshot(now).pools, self.fleet.view
            if request.operation in TOKEN_COUNTS or is_count_needed(route, estimate, cap, pools, spent, now):
                estimate = await self._count(text, expected)
            else:
                self.counts.add(text.prompt.size, self.estimator.count(text))
        if not route.budget_grows:
            return estimate
        fleet = self.fleet.snapshot_for(request.caller, monotonic())
        return replace(estimate, uncached_tokens=uncached_tokens(request, route, estimate, fleet, self.fleet.view.hit))

    async def counted(
        self, request: InferenceRequest, route: Route, tenant: Tenant, estimate: PromptEstimate
    ) -> PromptEstimate:
        """The estimate by an exact count."""
        text = _text(request, route, tenant)
        found = await self._count(text, estimate.output_tokens)
        return replace(found, uncached_tokens=estimate.uncached_tokens)

    async def _read(self, text: PromptText, expected_output: int) -> PromptEstimate:
        if text.prompt.effort <= LARGE:
            return self.estimator.read(self.estimator.recognise(text), text, expected_output)
        places = self.estimator.recognise(text)
        left = self.estimator.unread(places, text)
        return await self.off_loop(left, self.estimator.read, places, text, expected_output)

    async def _count(self, text: PromptText, expected_output: int) -> PromptEstimate:
        await self.off_loop(text.prompt.effort * COUNTING, deque, self.estimator.count(text), 0)
        return await self._read(text, expected_output)

    def decide(
        self, request: InferenceRequest, route: Route, estimate: PromptEstimate, tenant: Tenant, sequence: int
    ) -> Decision:
        """The decision at this moment without the queue. Changes nothing."""
        now = monotonic()
        queued = queued_request(self.fleet, request, route, estimate, tenant, sequence, now)
        return decide(queued, self.fleet.snapshot_for(request.caller, now), self.fleet.view, now)

    def learn(self, record: Record) -> None:
        """Record sink: learns the length of an answer of the route, by class where decisions need it, and of the
        reasoning before it."""
        if record.end is RequestOutcome.COMPLETED and record.answer.output_tokens:
            classes: Sequence[Hashable] = ()
            if record.route.weighs_completion:
                classes = record.asked.job_class, record.tenant, next(iter(record.prefix), 0)
            tokens = -(-record.answer.output_tokens // record.asked.choices)
            p90 = record.placed.total_p90
            under_p90 = None if p90 is None else record.total <= p90
            self.answer_lengths.observe_output(record.route.name, tokens, *classes, under_p90=under_p90)
        if record.route.promises_answer and record.asked.stream and record.ttft is not None:
            answered = record.total if record.promised is None else record.promised  # at least
            seconds, of = answered - record.ttft, (record.route.name, record.endpoint.pool, record.asked.job_class)
            self.answer_lengths.observe_reasoning(*of, seconds, monotonic())

    def any_usable(self, now: float) -> bool:
        """A caller would be answered: an endpoint is up for all callers, or down by the word of a page alone, or asleep
        and woken for a caller."""
        loads = self.fleet.snapshot(now).loads.values()
        return any(load.health not in UNUSABLE or load.doubted or load.wake_s for load in loads)


def queued_request(
    fleet: Fleet,
    request: InferenceRequest,
    route: Route,
    estimate: PromptEstimate,
    tenant: Tenant,
    sequence: int,
    now: float,
) -> QueuedRequest:
    lengths, tokens = fleet.answer_lengths, UNKNOWN
    if route.weighs_completion:
        cap = route.output_cap(request.max_tokens)
        tokens = lengths.quantiles(route.name, cap, request.job_class, tenant.name, _beginning(estimate))
    return QueuedRequest(
        *(id(request), request, estimate, route, sequence),
        tenant=tenant.name,
        weight=tenant.weight,
        reasoning=(
            lengths.expected_reasoning(route, request.job_class, now)
            if request.stream and route.promises_answer
            else None
        ),
        answer_tokens=tokens,
        decode_s=fleet.view.decode_seconds(route, tokens) if tokens else 0.0,
    )


def _text(request: InferenceRequest, route: Route, tenant: Tenant) -> PromptText:
    of = tenant.cache_group, tenant.name, route.variants, request.job_class
    return PromptText(request.prompt, route.pools, *of)


def _beginning(estimate: PromptEstimate) -> int:
    """Hash of the prompt's first tokens, as the first landmark of its Record; 0: it is shorter."""
    blocks = next(iter(estimate.pools.values())).blocks if estimate.pools else NO_BLOCKS
    return next(iter(landmarks(blocks)), 0)


def estimated_containers(raw: bytes) -> float:
    """Approximate number of objects and arrays in a body, from samples at random places: no caller knows them."""
    places = [int(random() * (len(raw) - SAMPLE)) for _ in range(SAMPLES)]
    found = sum(raw.count(b"{", at, at + SAMPLE) + raw.count(b"[", at, at + SAMPLE) for at in places)
    return found * len(raw) / (SAMPLES * SAMPLE)


@dataclass(slots=True, eq=False)
class RequestReader:
    """`operations`: translates bodies for pools of other dialects."""

    runtime: RuntimeHolder
    decider: Decider
    operations: OperationFit
    plans: Plans = field(default_factory=Plans)

    def authorize(self, http: HttpRequest) -> Tenant:
        """Raises ApiError for a caller without right: a web page where no key is required, or a wrong key."""
        runtime = self.runtime.current
        if runtime.same_origin is not None:
            runtime.same_origin.check(http.headers, http.writer.transport)
        return runtime.keys.tenant(http.headers) if runtime.keys.required else ANYONE

    def caller(self, http: HttpRequest, tenant: Tenant) -> str:
        return caller_address(http.writer.transport) if tenant is ANYONE else tenant.name

    async def parse(self, ask: Ask) -> None:
        """Raises ApiError."""
        http = ask.http
        if http.model:
            http.body = await self.decider.with_model(http.body, http.model)
        wanted, request_id = ask.runtime.wanted_headers, ask.timeline.record.request_id
        ask.request = await self.decider.parse(ask.operation, http.body, http.headers, http.arrival, request_id, wanted)

    def find_route(self, ask: Ask) -> None:
        """The route of the caller's name. Raises ApiError (404) where there is none that the key may use: before the
        timeline knows the route, whose name would be in the headers of the refusal."""
        routes, headers, model = ask.runtime.routes, ask.http.headers, ask.request.model
        ask.named = routes.match(model, ask.tenant, headers)
        if ask.tenant.routes is not None:
            routes.admit(ask.tenant, ask.named.route, model, headers)
        ask.plan = self.plans.of(ask.runtime, ask.named.route, ask.operation)

    async def estimate(self, ask: Ask) -> None:
        """Translate the body for pools of other dialects; estimate the prompt for every pool."""
        request, route, runtime, model = ask.request, ask.plan.route, ask.runtime, ask.named.model
        if model or not self.operations.is_plain(request, ask.plan.fitted, ask.http.body):
            work = self.operations.work(request, route, runtime.servers(model), ask.http.body)
            if work is not None:
                await self.decider.off_loop(request.size, work)
        for fit in ask.plan.fit:
            fit(ask)
        ask.estimate = await self.decider.estimate(request, route, ask.tenant)
        ask.timeline.estimated(request, route, ask.estimate)
