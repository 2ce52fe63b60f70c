"""The product's own way of a request to a server and of an answer back, without sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from backends.interface import Operation
from backends.stream.redaction import Rewriter
from gateway.api.api_error import ApiError
from gateway.api.inference_request import parse
from gateway.api.operation_fit import OperationFit
from gateway.config.models import Config
from gateway.observe.timeline import RequestTimeline
from gateway.runtime import Runtime, build_runtime
from gateway.upstream.routed_request import RoutedRequest
from policies.types import Attempt, AttemptKind, PromptEstimate
from tests.programs.field.rules import Target, targets
from tests.support.builders import candidate, decided, record
from tests.support.gateways import document

DIALECTS = {"chat": Operation.CHAT, "messages": Operation.MESSAGES, "responses": Operation.RESPONSES}


@dataclass(frozen=True)
class Sent:
    """A request as a server gets it."""

    dialect: str
    body: dict[str, Any]
    stream: bool
    routed: RoutedRequest
    endpoint: Any
    runtime: Runtime

    def back(self, answer: bytes) -> bytes:
        """The answer as the caller gets it."""
        rewriting = self.routed.rewriting(self.runtime.upstreams[self.endpoint.id], self.endpoint)
        if rewriting.answer is None:
            return answer
        if not self.stream:
            return rewriting.answer.whole(answer)
        stream: Rewriter = rewriting.answer.stream()
        cut = len(answer) // 2  # in two reads, torn anywhere
        return stream.feed(answer[:cut]) + stream.feed(answer[cut:]) + stream.close()


@dataclass(frozen=True)
class Unfit:
    """A request that the gateway refuses by name, before anything is sent."""

    reason: str


class Pipeline:
    """A gateway's configuration with a pool and a route for every target."""

    def __init__(self) -> None:
        pools = {target.pool: _pool(target) for target in targets()}
        routes = {target.pool: {"tiers": [target.pool]} for target in targets()}
        self.runtime = build_runtime(Config.model_validate(document(pools, routes)))
        self.operations = OperationFit()

    def send(
        self, target: Target, operation: Operation, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Sent | Unfit:
        raw = json.dumps({**body, "model": target.pool}).encode()
        try:
            request = parse(operation, raw, headers, 0.0, "req-1")
        except ApiError as refusal:
            return Unfit(f"400 {refusal}")
        route = next(route for route in self.runtime.routes.all if route.name == target.pool)
        self._fit(request, route)
        if request.unfit:
            return Unfit(request.unfit[target.pool])
        endpoint = next(iter(self.runtime.pools[target.pool].endpoints))
        upstream, chosen = self.runtime.upstreams[endpoint.id], candidate(endpoint.id)
        routed = RoutedRequest(
            request=request,
            route=route,
            estimate=PromptEstimate({}),
            decision=decided(chosen),
            timeline=RequestTimeline(record()),
            upstreams=self.runtime.upstreams,
            first_token_limit=60.0,
            native=self.runtime.operations,
            **self._more(),
        )
        forward = routed.backend_request(upstream, Attempt(1, AttemptKind.PRIMARY, chosen))
        call = upstream.backend.call(forward)
        dialect = next(name for name, each in DIALECTS.items() if each is forward.operation)
        return Sent(dialect, json.loads(call.body), forward.stream, routed, endpoint, self.runtime)

    def _fit(self, request: Any, route: Any) -> None:
        """As the reader of requests does."""
        given: list[Any] = [request, route, self.runtime.operations]
        if "facts" in signature(self.operations.fit).parameters:
            given.append(self.runtime.facts_at)  # type: ignore[attr-defined]
        self.operations.fit(*given)

    def _more(self) -> dict[str, Any]:
        """Facts, where the product has them."""
        facts = getattr(self.runtime, "facts_at", None)
        return {} if facts is None else {"facts": facts}


def _pool(target: Target) -> dict[str, Any]:
    rules = target.rules
    return {"backend": rules["backend"], "model": target.model, "api_key": "sk-field", "endpoints": [rules["url"]]}
