"""Request bodies by pool: translated to a dialect of the servers, with the turn state that the servers wrote, and
fitted to the model's facts (`backends.fitting`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from backends.facts.model_facts import Facts
from backends.fitting.custom_tools import as_functions
from backends.fitting.fit import FITTED, Concerns, Plan, fit, fit_for_translation, plan
from backends.fitting.target import Author
from backends.fitting.tools import takes_chat, takes_responses
from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.registry import chain
from backends.translation.reply_translation import SHAPE_ERRORS
from backends.translation.translation import Translation
from backends.translation.turn_state.history import TurnHistory
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.strict_json import encode

MOST_PLANS = 2_000  # models times operations
_CUSTOM = b'"custom"'
Body = Mapping[str, Any]
Steps = tuple[Translation, ...]

_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Server:
    """Servers of a pool, for one request. `maker`: digest of the account and model. `reads_attribution`: keep the
    client's line at the head of the prompt (`gateway.tokenize.prefix_breakers`)."""

    spoken: frozenset[Operation]
    facts: Facts
    maker: str = ""
    reads_attribution: bool = False


class _Bodies:
    """A body and the translations applied on the way to the server's dialect."""

    def __init__(self, body: Body, told: Omissions) -> None:
        self.body, self.told = body, told
        self.steps: list[Translation] = []
        self.before: list[Body] = []

    def take(self, step: Translation | None) -> None:
        if step is not None:
            self.note(step, step.request(self.body, self.told))

    def take_whole(self, made: Callable[[Body], Translation | None]) -> None:
        """A step that reads values within values, which a request's own body has not decoded."""
        whole = _decode(encode(self.body))
        if (step := made(whole)) is not None:
            self.note(step, step.request(whole, self.told))

    def note(self, step: Translation, body: Body) -> None:
        self.steps.append(step)
        self.before.append(self.body)
        self.body = body

    def fit(self, rules: Plan) -> None:
        fitted = fit(self.body, rules, self.told)
        if fitted.answer is None:
            self.body = fitted.body
        else:
            self.note(fitted.answer, fitted.body)

    def made(self, operation: Operation, maker: str) -> TranslatedBody:
        return TranslatedBody(operation, self.body, tuple(self.steps), tuple(self.before), self.told.noted, maker)


@dataclass(slots=True)
class FittedBodies:
    """Makes bodies by plans, which are made once for the facts of a model."""

    plans: dict[tuple[int, Operation, Author], Plan] = field(default_factory=dict)

    def concerns(self, request: InferenceRequest, believed: Sequence[Facts], author: Author, written: bytes) -> bool:
        """True where servers that speak the request's dialect may need another body. `believed`: of each pool;
        `written`: the body as the caller has sent it."""
        operation, body = request.operation, request.body
        if operation not in FITTED:
            return False
        if any(self._plan(operation, facts, author).concerns.holds(body, written) for facts in believed):
            return True
        plain = next((facts for facts in believed if not facts.custom_tools), None)
        return plain is not None and _may_be_custom(operation, body, plain)

    def steps(self, request: InferenceRequest, server: Server) -> Steps | None:
        """Translations to an operation that the servers speak and, for a request with tools, that accepts tools."""
        operation = request.operation
        if Operation.RESPONSES in server.spoken and operation in (Operation.CHAT, Operation.MESSAGES):
            target = self._plan(operation, server.facts, Author.GATEWAY).target
            if takes_responses(request.body, operation, target):
                return chain(operation, frozenset({Operation.RESPONSES}))
        if Operation.CHAT in server.spoken and operation in (Operation.MESSAGES, Operation.RESPONSES):
            target = self._plan(operation, server.facts, Author.GATEWAY).target
            if takes_chat(request.body, operation, target):
                return chain(operation, frozenset({Operation.CHAT}))
        return chain(operation, server.spoken)

    def own(
        self,
        request: InferenceRequest,
        server: Server,
        author: Author,
        drop: frozenset[str],
        history: TurnHistory | None,
    ) -> TranslatedBody | None:
        """The body in the caller's own dialect; None: as the caller has sent it. Raises UntranslatableError."""
        operation, told = request.operation, Omissions(drop)
        given = request.sent_to(server)
        bodies = _Bodies(given if history is None else _with_own_state(given, history, told), told)
        if operation in FITTED:
            if _may_be_custom(operation, bodies.body, server.facts):
                bodies.take_whole(as_functions)
            if (rules := self._plan(operation, server.facts, author)).reads(bodies.body):
                bodies.fit(rules)
        if not told.noted and not bodies.steps and _is_same(bodies.body, given):
            return None
        return bodies.made(operation, "")

    def translated(
        self, request: InferenceRequest, steps: Steps, server: Server, drop: frozenset[str], history: TurnHistory | None
    ) -> TranslatedBody:
        """The body that `steps` lead to. Raises UntranslatableError, and SHAPE_ERRORS."""
        bodies = _Bodies(_decode(encode(request.body)), Omissions(drop))
        if history is not None:
            bodies.body = history.opened(dict(bodies.body), bodies.told)
        for step in steps:
            bodies.body = fit_for_translation(dict(bodies.body), step.caller, server.facts, bodies.told)
            bodies.take(_functions(step.caller, step.backend, bodies.body, server.facts))
            bodies.take(step)
        operation = steps[-1].backend
        bodies.take(_functions(operation, None, bodies.body, server.facts))
        if operation in FITTED:
            bodies.fit(self._plan(operation, server.facts, Author.GATEWAY))
        return bodies.made(operation, server.maker)

    def _plan(self, operation: Operation, facts: Facts, author: Author) -> Plan:
        """The cached plan for facts. Unchanged facts are the same object."""
        key = id(facts), operation, author
        known = self.plans.get(key)
        if known is None or known.target.facts is not facts:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            known = self.plans[key] = plan(operation, facts, author)
        return known


def signs_to_fit(operation: Operation, believed: Sequence[Facts], author: Author) -> Concerns:
    """Signs of bodies that servers of the same dialect may need changed. `believed`: facts of each pool."""
    found = Concerns()
    for facts in believed if operation in FITTED else ():
        found |= plan(operation, facts, author).concerns
    may_be_custom = operation is Operation.CHAT and not all(facts.custom_tools for facts in believed)
    return found | Concerns(frozenset({"tools"})) if may_be_custom else found


def _with_own_state(given: Body, history: TurnHistory, told: Omissions) -> Body:
    """The body with the state of this server alone."""
    body = _decode(encode(given))
    try:
        own = history.opened(body, told)
    except SHAPE_ERRORS:
        return given  # the server decides
    return given if own == body else own


def _functions(operation: Operation, then: Operation | None, body: Body, facts: Facts) -> Translation | None:
    """The step that makes functions of custom tools, before a dialect or a server without."""
    if operation is not Operation.CHAT or (facts.custom_tools and then is not Operation.MESSAGES):
        return None
    return None if then is Operation.RESPONSES else as_functions(body)


def _may_be_custom(operation: Operation, body: Body, facts: Facts) -> bool:
    return operation is Operation.CHAT and not facts.custom_tools and _CUSTOM in encode(body.get("tools"))


def _is_same(body: Body, given: Body) -> bool:
    return body.keys() == given.keys() and all(body[name] is given[name] for name in given)
