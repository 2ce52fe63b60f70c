"""Finds the pools of a route that can serve an operation, natively or through a translation, and builds bodies for
pools that need a changed body.

A pool's servers may lack an operation that their kind usually serves (a chat model has no embeddings). A refusal counts
for its own caller, and for all callers once a second caller is refused; the pool is not asked again for a minute.
After the pool has served the operation, a refusal counts for nothing: a caller may have provoked the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from backends.facts.model_facts import Facts
from backends.fitting.fit import Concerns
from backends.fitting.target import Author
from backends.interface import Operation
from backends.translation.reply_translation import SHAPE_ERRORS
from backends.translation.translation import UntranslatableError
from backends.translation.turn_state.history import Recall, TurnHistory, unknown
from backends.translation.turn_state.seals import MARK_BYTES
from gateway.api.fitted_bodies import FittedBodies, Server, Steps, signs_to_fit
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.strict_json import encode
from policies.routes.route import Route

LACKING = 60.0  # s until a pool is asked again
WITNESSES = 2  # callers that find the same, to count for all
_SIGNED = (Operation.MESSAGES, Operation.COUNT_TOKENS)
_DETAILS = b'"reasoning_details"'
_SIGNATURES = b'"signature"', b'"redacted_thinking"'
_NOTHING_KNOWN = Facts()


def nothing_known(pool: str) -> Facts:
    return _NOTHING_KNOWN


def nobody(pool: str) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers by pool. `native`: operations spoken; `facts`: facts of the request's model; `maker`: digest of account
    and model. `attributed`: pools whose servers read a client's line at the head of the prompt."""

    native: Mapping[str, frozenset[Operation]] = field(default_factory=dict)
    facts: Callable[[str], Facts] = nothing_known
    maker: Callable[[str], str] = nobody
    attributed: frozenset[str] = frozenset()

    def of(self, pool: str, spoken: frozenset[Operation], facts: Facts | None = None) -> Server:
        """Servers of a pool. `facts`: overrides the facts of the request's model."""
        known = self.facts(pool) if facts is None else facts
        return Server(spoken, known, self.maker(pool), pool in self.attributed)


NO_SERVERS = Servers()


@dataclass(slots=True)
class OperationFit:
    """Operations by pool that servers lack or have answered. Size: at most pools times operations."""

    # by pool and operation: expiry time, by the caller that found the lack
    lacking: dict[tuple[str, Operation], dict[str, float]] = field(default_factory=dict)
    served: set[tuple[str, Operation]] = field(default_factory=set)
    recall: Recall | None = None  # makers of signatures in answers relayed unchanged; None: disabled
    bodies: FittedBodies = field(default_factory=FittedBodies)

    def is_plain(self, request: InferenceRequest, signs: Concerns | None, written: bytes) -> bool:
        """True where every pool gets the body as it is. `signs`: of the route (`fitted_signs`); `written`: the body as
        the caller has sent it."""
        if signs is None or self.lacking or signs.holds(request.body, written):
            return False
        return not (request.has_turn_state or self.holds_state(request.operation, written))

    def work(
        self, request: InferenceRequest, route: Route, servers: Servers, written: bytes
    ) -> Callable[[], None] | None:
        """The fit of a request, which may take long; None: every pool gets the body as it is. `written`: the body as
        the caller has sent it."""
        has_state = request.has_turn_state or self.holds_state(request.operation, written)
        is_native = not self.lacking and all(request.operation in servers.native[pool] for pool in route.pools)
        if is_native and not has_state and not self.concerns(request, route, servers, written):
            return None
        return partial(self.fit, request, route, servers, has_state=has_state)

    def concerns(self, request: InferenceRequest, route: Route, servers: Servers, written: bytes) -> bool:
        """True where a pool that speaks the request's dialect may need another body."""
        return self.bodies.concerns(request, [servers.facts(pool) for pool in route.pools], _author(route), written)

    def holds_state(self, operation: Operation, body: bytes) -> bool:
        """The history has state that a provider has tied to a turn, as far as the gateway knows its maker."""
        if MARK_BYTES in body or (operation is Operation.CHAT and _DETAILS in body):
            return True
        return self.recall is not None and operation in _SIGNED and any(name in body for name in _SIGNATURES)

    def fit(self, request: InferenceRequest, route: Route, servers: Servers, *, has_state: bool = False) -> None:
        """Note bodies for pools that need another than the caller's, and unfit pools, on the request. `has_state`: the
        history has state of makers, which returns to each alone."""
        unfit: dict[str, str] = {}
        made: dict[str, TranslatedBody] = {}
        known: dict[tuple[Steps, int, str, bool], TranslatedBody | None] = {}
        for pool in route.pools:
            server = self._server(pool, servers, request.caller)
            steps = self.bodies.steps(request, server)
            if steps is None:
                unfit[pool] = f"its servers do not serve {request.operation.value}"
                continue
            try:
                key = steps, id(server.facts), server.maker, server.reads_attribution
                if key not in known:
                    known[key] = self._made(request, steps, _author(route), route.drop, server, has_state)
                if (body := known[key]) is not None:
                    made[pool] = body
            except UntranslatableError as refusal:
                unfit[pool] = str(refusal)
            except SHAPE_ERRORS:
                if steps:
                    unfit[pool] = "the request has no known shape"
        request.unfit, request.translated = unfit, made

    def found_lacking(self, pool: str, request: InferenceRequest, route: Route, servers: Servers) -> bool:
        """Note that a pool lacks the operation. True: the request can be translated for the pool."""
        if (pool, request.operation) not in self.served:
            self._note(self.lacking.setdefault((pool, request.operation), {}), request.caller)
        server = self._server(pool, servers, request.caller, without=request.operation)
        if (body := self.made_for(server, request, route)) is None:
            return False
        request.translated = {**request.translated, pool: body}
        return True

    def made_for(
        self, server: Server, request: InferenceRequest, route: Route, refused: frozenset[str] | None = None
    ) -> TranslatedBody | None:
        """The body for one kind of server; None: the caller's own body, or no body is possible. `refused`: members
        refused by the server. After a refusal, the body is fitted even for a caller who chose the server."""
        if (steps := self.bodies.steps(request, server)) is None:
            return None
        has_state = self.holds_state(request.operation, encode(request.body))
        author = _author(route) if refused is None else Author.CALLER
        try:
            return self._made(request, steps, author, route.drop | (refused or frozenset()), server, has_state)
        except SHAPE_ERRORS:
            return None

    def _made(
        self,
        request: InferenceRequest,
        steps: Steps,
        author: Author,
        drop: frozenset[str],
        server: Server,
        has_state: bool,
    ) -> TranslatedBody | None:
        """The body for a server; None: the caller's own. Raises UntranslatableError, and SHAPE_ERRORS."""
        history = None
        if has_state:
            history = TurnHistory(server.maker, request.operation, not steps, self.recall or unknown)
        if not steps:
            return self.bodies.own(request, server, author, drop, history)
        return self.bodies.translated(request, steps, server, drop, history)

    def _server(self, pool: str, servers: Servers, caller: str, without: Operation | None = None) -> Server:
        spoken = self._spoken(pool, servers.native[pool], caller) - {without}
        return servers.of(pool, spoken)

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


def fitted_signs(operation: Operation, route: Route, servers: Servers) -> Concerns | None:
    """Signs of a body that a pool of the route may need changed; None: some pool needs another one in any case, for it
    speaks another dialect."""
    if any(operation not in servers.native[pool] for pool in route.pools):
        return None
    return signs_to_fit(operation, [servers.facts(pool) for pool in route.pools], _author(route))


def _author(route: Route) -> Author:
    return Author.KNOWING if len(route.pools) == 1 else Author.CALLER
