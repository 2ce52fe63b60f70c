"""Finds the pools of a route that can serve an operation: natively, through a translation, or not at all; and makes
the bodies for them, in the server's dialect and within what facts say of the model there (`backends.fitting`).

A pool's servers may lack an operation that their kind usually serves (a chat model has no embeddings): the first
request that is refused for it shows that to its caller, and a second caller's to all; the pool is not asked again for a
minute. Where the pool has served the operation before, one refusal shows nothing about the next request: a caller may
have provoked it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from backends.facts.facts import Facts
from backends.fitting.custom_tools import as_functions
from backends.fitting.fit import FITTED, Plan, fit, plan
from backends.fitting.target import Author
from backends.fitting.tools import takes_responses
from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.registry import chain
from backends.translation.reply_translation import SHAPE_ERRORS
from backends.translation.translation import Translation, UntranslatableError
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.strict_json import encode
from policies.routes.route import Route

FactsOf = Callable[[str], Facts]  # by pool

LACKING = 60.0  # s until a pool is asked again
MOST_PLANS = 2_000  # models times operations
WITNESSES = 2  # callers that find the same, to count for all

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class OperationFit:
    """Operations that servers lack or have answered, by pool. Size: at most pools times operations."""

    # by pool: until when, by caller that has found it
    lacking: dict[tuple[str, Operation], dict[str, float]] = field(default_factory=dict)
    served: set[tuple[str, Operation]] = field(default_factory=set)
    plans: dict[tuple[int, Operation, Author], Plan] = field(default_factory=dict)

    def concerns(self, request: InferenceRequest, route: Route, facts: FactsOf) -> bool:
        """Whether a pool that speaks the request's dialect may need another body. Costs two lookups a pool."""
        if request.operation not in FITTED:
            return False
        author = _author(route)
        return any(
            self._plan(request.operation, facts(pool), author).concerns(request.body)
            or (not facts(pool).custom_tools and bool(request.body.get("tools")))
            for pool in route.pools
        )

    def fit(
        self, request: InferenceRequest, route: Route, native: Mapping[str, frozenset[Operation]], facts: FactsOf
    ) -> None:
        """Note bodies for pools that need another than the caller's, and unfit pools, on the request. `native`:
        operations by pool."""
        unfit: dict[str, str] = {}
        made: dict[str, TranslatedBody] = {}
        known: dict[tuple[Any, ...], TranslatedBody | None] = {}
        for pool in route.pools:
            believed = facts(pool)
            spoken = self._spoken(pool, native[pool], request.caller)
            steps = self._steps(request, spoken, believed)
            if steps is None:
                unfit[pool] = f"its servers do not serve {request.operation.value}"
                continue
            try:
                if (steps, id(believed)) not in known:
                    known[steps, id(believed)] = self._made(request, steps, route, believed)
                if (body := known[steps, id(believed)]) is not None:
                    made[pool] = body
            except UntranslatableError as refusal:
                unfit[pool] = str(refusal)
            except SHAPE_ERRORS:
                if steps:
                    unfit[pool] = "the request has no known shape"
        request.unfit, request.translated = unfit, made

    def found_lacking(
        self, pool: str, request: InferenceRequest, route: Route, native: frozenset[Operation], facts: Facts
    ) -> bool:
        """Note that a pool lacks the operation. True: the request can be translated for it."""
        if (pool, request.operation) not in self.served:
            self._note(self.lacking.setdefault((pool, request.operation), {}), request.caller)
        steps = chain(request.operation, self._spoken(pool, native, request.caller) - {request.operation})
        if steps is None:
            return False
        try:
            body = self._made(request, steps, route, facts)
        except SHAPE_ERRORS:
            return False
        assert body is not None
        request.translated = {**request.translated, pool: body}
        return True

    def _steps(
        self, request: InferenceRequest, spoken: frozenset[Operation], facts: Facts
    ) -> tuple[Translation, ...] | None:
        """Translations into an operation that the servers speak, and that takes tools where the request has some."""
        operation = request.operation
        if Operation.RESPONSES in spoken and operation in (Operation.CHAT, Operation.MESSAGES):
            target = self._plan(operation, facts, Author.GATEWAY).target
            if takes_responses(request.body, operation, target):
                return chain(operation, frozenset({Operation.RESPONSES}))
        return chain(operation, spoken)

    def _made(
        self, request: InferenceRequest, steps: tuple[Translation, ...], route: Route, facts: Facts
    ) -> TranslatedBody | None:
        """The body for a pool; None: the caller's own. Raises UntranslatableError, and SHAPE_ERRORS."""
        told = Omissions(route.drop)
        if steps:
            return self._translated(request, steps, told, facts)
        author, operation = _author(route), request.operation
        if operation not in FITTED:
            return None
        rules, body, answers = self._plan(operation, facts, author), request.body, list[Translation]()
        before: list[Mapping[str, Any]] = []
        if operation is Operation.CHAT and not facts.custom_tools and (body.get("tools")):
            body = _plain_if_custom(body)
            if (functions := as_functions(body)) is not None:
                answers, before, body = [functions], [body], functions.request(body, told)
        if rules.concerns(body):
            fitted = fit(body, rules, told)
            if fitted.answer is not None:
                answers, before = [*answers, fitted.answer], [*before, body]
            body = fitted.body
        if not told.noted and not answers and _is_same(body, request.body):
            return None
        return TranslatedBody(operation, body, tuple(answers), tuple(before), told.noted)

    def _translated(
        self, request: InferenceRequest, steps: tuple[Translation, ...], told: Omissions, facts: Facts
    ) -> TranslatedBody:
        body: Mapping[str, Any] = _decode(encode(request.body))
        done: list[Translation] = []
        before: list[Mapping[str, Any]] = []

        def take(step: Translation) -> Mapping[str, Any]:
            done.append(step)
            before.append(body)
            return step.request(body, told)

        for step in steps:
            if (functions := _functions(step.caller, step.backend, body, facts)) is not None:
                body = take(functions)
            body = take(step)
        operation = steps[-1].backend
        if (functions := _functions(operation, None, body, facts)) is not None:
            body = take(functions)
        if operation in FITTED:
            fitted = fit(body, self._plan(operation, facts, Author.GATEWAY), told)
            if fitted.answer is not None:
                done.append(fitted.answer)
                before.append(body)
            body = fitted.body
        return TranslatedBody(operation, body, tuple(done), tuple(before), told.noted)

    def _plan(self, operation: Operation, facts: Facts, author: Author) -> Plan:
        """The plan for facts, which are one object as long as they stay the same."""
        key = id(facts), operation, author
        known = self.plans.get(key)
        if known is None or known.target.facts is not facts:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            known = self.plans[key] = plan(operation, facts, author)
        return known

    def _note(self, found: dict[str, float], caller: str) -> None:
        """Keep the latest two callers: they are enough for all."""
        found.pop(caller, None)
        found[caller] = monotonic() + LACKING
        if len(found) > WITNESSES:
            del found[next(iter(found))]

    def _spoken(self, pool: str, native: frozenset[Operation], caller: str) -> frozenset[Operation]:
        if not self.lacking:
            return native
        lacking = list(self.lacking.items())  # a copy: large requests are translated in a thread
        return native - {operation for (name, operation), found in lacking if name == pool and _counts(found, caller)}


def _counts(found: Mapping[str, float], caller: str) -> bool:
    """Return whether the operation is lacking by the word of WITNESSES callers, or of this caller."""
    now = monotonic()
    recent = [one for one, until in list(found.items()) if now < until]
    return caller in recent or len(recent) >= WITNESSES


def _author(route: Route) -> Author:
    return Author.KNOWING if len(route.pools) == 1 else Author.CALLER


def _functions(
    operation: Operation, then: Operation | None, body: Mapping[str, Any], facts: Facts
) -> Translation | None:
    """The step that makes functions of custom tools, before a dialect or a server without."""
    if operation is not Operation.CHAT or (facts.custom_tools and then is not Operation.MESSAGES):
        return None
    return None if then is Operation.RESPONSES else as_functions(body)


def _plain_if_custom(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body decoded, where it may have custom tools."""
    return _decode(encode(body)) if b'"custom"' in encode(body.get("tools")) else body


def _is_same(body: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return body.keys() == given.keys() and all(body[name] is given[name] for name in given)
