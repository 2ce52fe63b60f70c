"""A request with route and decision. Builds the backend request of each attempt, and attempt limits.

Connections, dialect and configured values of an endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.http.connection_pool import ConnectionPool
from backends.interface import Backend, BackendRequest, Operation
from backends.stream.redaction import Rewriter
from backends.translation.masked_messages import MASKED_MESSAGES
from backends.translation.reply_translation import AnswerTranslation, RewrittenAnswer
from backends.translation.translation import AnswerContext, Translation
from gateway.api.inference_request import InferenceRequest
from gateway.api.operation_fit import NO_SERVERS, Servers
from gateway.api.request_headers import new_request_id
from gateway.observe.timeline import RequestTimeline
from policies.attempts.wire import AttemptLimits
from policies.routes.route import Route
from policies.types import FOREVER, Attempt, Decision, Endpoint, Price, PromptEstimate

EVERYWHERE = (Operation.CHAT, Operation.COMPLETION)  # served by every backend: a 404 is the server's fault


@dataclass(frozen=True, slots=True)
class Upstream:
    """Connections to an endpoint, and the dialect of the server."""

    connections: ConnectionPool
    backend: Backend
    model: str
    pool: str = ""
    kv_events: bool = False  # the engine publishes cache events, in which the session id names the request
    priority: bool = False  # the engine schedules by priority
    traced: bool = True  # the endpoint gets the trace context, with tracing on
    price: Price = field(default_factory=Price)


WHOLE_ANSWER = 600.0  # s for an answer without streaming: the SDKs' own default timeout
NO_DEADLINE = 2**53 - 1  # ms; after every deadline, and exact where JSON numbers are doubles


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Changes of the answers of an endpoint for the caller. `answer`: into another dialect, or by a hook of the plan;
    None: neither. `secret`: the gateway's key, masked in errors. `masks_counts`: counts of cached tokens are hidden."""

    answer: RewrittenAnswer | None = None
    secret: bytes = b""
    masks_counts: bool = False


UNCHANGED = Rewriting()


class BothRewritten:
    """An answer that is rewritten twice: into the caller's dialect, then by a hook."""

    def __init__(self, first: RewrittenAnswer, then: RewrittenAnswer) -> None:
        self._first, self._then = first, then

    def whole(self, reply: bytes) -> bytes:
        return self._then.whole(self._first.whole(reply))

    def stream(self) -> BothStreams:
        return BothStreams(self._first.stream(), self._then.stream())


class BothStreams:
    """A `Rewriter` of two."""

    def __init__(self, first: Rewriter, then: Rewriter) -> None:
        self._first, self._then = first, then

    def feed(self, data: bytes) -> bytes:
        return self._then.feed(self._first.feed(data))

    def drop(self) -> bytes:
        return self._first.drop() + self._then.drop()

    def close(self) -> bytes:
        return self._then.feed(self._first.close()) + self._then.close()


@dataclass(slots=True, kw_only=True)
class RoutedRequest:
    """A request with a routing decision. `upstreams`: by endpoint id; `first_token_limit`: s."""

    request: InferenceRequest
    route: Route
    estimate: PromptEstimate
    decision: Decision
    timeline: RequestTimeline
    upstreams: Mapping[str, Upstream]
    first_token_limit: float
    limit_is_meant: bool = False  # `first_token_limit` is of the configuration
    limits_are_meant: bool = False  # that, or a pool's own
    model: str = ""  # for the servers, as the caller names it; empty: the pool's own
    servers: Servers = NO_SERVERS  # of the route's pools
    cache_group: str = ""  # tenants with shared prefix caches; empty: all
    path: str = ""  # of the caller's request
    masked_pools: frozenset[str] = frozenset()  # pools of which no caller may learn the counts of cached tokens
    idle: float = FOREVER  # s without a byte in mid-stream
    judged: bool = False  # whole answers are, so they are asked for as such
    rewrite: Callable[[str], RewrittenAnswer] | None = None  # of the answer of an endpoint in the caller's own dialect
    assembled: bool = field(init=False)  # asked for as a stream, and put together for the caller
    unseen: frozenset[str] = frozenset()  # endpoints that are asked for a whole answer nevertheless

    def __post_init__(self) -> None:
        self.assembled = not self.request.stream and self._may_assemble()

    def _may_assemble(self) -> bool:
        """True if a pool of the decision can stream this answer without loss, it is of use to see its tokens, and whole
        answers are not judged. The endpoints of other pools are asked for whole answers."""
        if self.route.upstream_stream == "off" or self.judged or not self._is_watched:
            return False
        pools = self.decision.pools
        lossy = {endpoint.pool for endpoint in pools if self._has_assembly_obstacle(endpoint)}
        if lossy and len(lossy) < len(pools):
            ranked = (candidate.endpoint for candidate in self.decision.ranked)
            self.unseen = frozenset(endpoint.id for endpoint in ranked if endpoint.pool in lossy)
        return len(lossy) < len(pools)

    def _has_assembly_obstacle(self, endpoint: Endpoint) -> bool:
        backend = self.upstreams[endpoint.id].backend
        operation, body = self._spoken(endpoint.pool, backend)
        sent = BackendRequest(operation, body, model="", stream=True, headers=self.request.dialect_headers)
        return bool(backend.assembly_obstacle(sent))

    @property
    def _is_watched(self) -> bool:
        """Tokens that come, or do not, tell of a promise of the first token or the whole, or are the sign to go to
        another endpoint. A stream costs the gateway, and the engine, some us for every token."""
        if self.decision.deadline < FOREVER or self.route.total is not None:
            return True
        route = self.route
        can_wait = route.workload == "batch" or route.done_within(self.request.by) < FOREVER
        return not can_wait and route.max_attempts > 1 and len(self.decision.ranked) > 1

    def _spoken(self, pool: str, backend: Backend) -> tuple[Operation, Mapping[str, Any]]:
        """Operation and body in the dialect of the pool."""
        if (translated := self.request.translated.get(pool)) is not None:
            return translated.operation, translated.body
        return self.request.operation, self.request.sent_to(backend)

    @property
    def hides_usage(self) -> bool:
        """Usage is always requested upstream, and removed for callers without `include_usage`."""
        return self.request.stream and not self.request.wants_usage

    @property
    def limits(self) -> AttemptLimits:
        """Limits of the attempt machine."""
        route, request, seen = self.route, self.request, self.request.stream or self.assembled
        return AttemptLimits(
            max_attempts=route.max_attempts,
            tiers=route.attempt_rules,
            stream=seen,
            unseen=self.unseen,
            whole=WHOLE_ANSWER,
            hedge=route.hedge != "off",
            first_token_limit=self.first_token_limit if seen else WHOLE_ANSWER,
            limit_is_meant=self.limit_is_meant and seen,
            budget=self.timeline.record.budgets.ttft or 0.0,
            checks_forecasts=self.limits_are_meant or route.total is not None,
            limit_at=self.timeline.record.arrival + route.total_limit,
            idle=self.idle,
            longer_context=route.fallback.context,
            other_filter=route.fallback.content_filter,
            longest_output=route.output_cap(request.max_tokens) or self.estimate.output_tokens,
        )

    def model_at(self, endpoint: Endpoint, upstream: Upstream) -> str:
        """Model name to send to an endpoint."""
        return self.model or self.route.variants.get(endpoint.pool, upstream.model)

    def backend_request(self, upstream: Upstream, attempt: Attempt) -> BackendRequest:
        request, pool = self.request, attempt.candidate.endpoint.pool
        request_id = new_request_id()
        trace, traceparent, tracestate = self.timeline.record.trace, "", ""
        if trace is None:  # tracing is off
            traceparent = request.traceparent
        elif upstream.traced:
            traceparent, tracestate = trace.sent_by(attempt.number), trace.state
        operation, body = self._spoken(pool, upstream.backend)
        return BackendRequest(
            operation=operation,
            body=body,
            headers=request.dialect_headers,
            model=self.model_at(attempt.candidate.endpoint, upstream),
            stream=request.stream or (self.assembled and attempt.candidate.endpoint.id not in self.unseen),
            max_tokens=self.decision.output_limits.get(pool, self.route.limits.output_tokens),
            request_id=request_id,
            traceparent=traceparent,
            tracestate=tracestate,
            baggage=request.baggage if upstream.traced else "",
            cache_salt=request.cache_groups.get(pool, self.cache_group),
            priority=self._priority() if upstream.priority else None,
            session_id=request_id if upstream.kv_events else "",
            model_is_callers=bool(self.model),
            changes=request.changes.get(pool, ()),
        )

    def _priority(self) -> int:
        """Deadline as Unix time in ms, which orders the requests of several gateways: vLLM takes the smallest first,
        and any 64-bit integer."""
        if self.decision.deadline == FOREVER:
            return NO_DEADLINE
        record = self.timeline.record
        return int((record.wall + self.decision.deadline - record.arrival) * 1e3)

    def rewriting(self, upstream: Upstream, endpoint: Endpoint, *, recovers: bool = False) -> Rewriting:
        """`recovers`: any pool of the decision may write the rest of the answer."""
        pools = self.decision.pools if recovers and self.masked_pools else (endpoint,)
        masked = bool(self.masked_pools) and any(each.pool in self.masked_pools for each in pools)
        is_changed = masked or self.rewrite is not None or endpoint.pool in self.request.translated
        answer = self._rewritten_answer(endpoint, masked) if is_changed else None
        return Rewriting(answer, upstream.backend.secret, masked)

    def _rewritten_answer(self, endpoint: Endpoint, masked: bool) -> RewrittenAnswer | None:
        translated = self.request.translated.get(endpoint.pool)
        steps: tuple[Translation, ...] = () if translated is None else translated.translations
        bodies: tuple[Mapping[str, Any], ...] = () if translated is None else translated.before
        if masked and self.request.operation is Operation.MESSAGES:
            steps, bodies = (MASKED_MESSAGES, *steps), (self.request.body, *bodies)
        by_hook = None if self.rewrite is None else self.rewrite(endpoint.id)
        if not steps:
            return by_hook
        answer = AnswerTranslation(steps, bodies, self._context(endpoint.pool))
        is_native = steps[-1].backend is self.request.operation
        return answer if by_hook is None or not is_native else BothRewritten(answer, by_hook)

    def _context(self, pool: str) -> AnswerContext:
        translated, estimate = self.request.translated.get(pool), self.estimate.pools.get(pool)
        maker = "" if translated is None else translated.maker
        return AnswerContext(maker, None if estimate is None else estimate.tokens)


def header_safe(model: str) -> str:
    """A caller's model name, safe for a header; `-` if the name could inject header fields."""
    return model if model.isascii() and model.isprintable() and len(model) <= 128 else "-"
