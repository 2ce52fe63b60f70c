"""Finds the pools of a route that can serve an operation: natively, through a translation, or not at all.

A pool's servers may lack an operation that their kind usually serves (a chat model has no embeddings): the first
request that is refused for it shows that to its caller, and a second caller's to all; the pool is not asked again for a
minute. Where the pool has served the operation before, one refusal shows nothing about the next request: a caller may
have provoked it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

import msgspec

from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.registry import chain
from backends.translation.reply_translation import SHAPE_ERRORS
from backends.translation.translation import Translation, UntranslatableError
from backends.translation.turn_state.history import Recall, TurnHistory, unknown
from backends.translation.turn_state.seals import MARK_BYTES
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.strict_json import encode
from policies.routes.route import Route

LACKING = 60.0  # s until a pool is asked again
_SIGNED = (Operation.MESSAGES, Operation.COUNT_TOKENS)
_SIGNATURES = b'"signature"', b'"redacted_thinking"'
WITNESSES = 2  # callers that find the same, to count for all

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class OperationFit:
    """Operations that servers lack or have answered, by pool. Size: at most pools times operations."""

    # by pool: until when, by caller that has found it
    lacking: dict[tuple[str, Operation], dict[str, float]] = field(default_factory=dict)
    served: set[tuple[str, Operation]] = field(default_factory=set)
    recall: Recall | None = None  # of signatures in answers that have passed untouched; None: nothing is remembered
    _makers: Mapping[str, str] = field(default_factory=dict)  # by pool

    def holds_state(self, operation: Operation, body: bytes) -> bool:
        """The history has state that a provider has tied to a turn, as far as the gateway knows its maker."""
        if MARK_BYTES in body:
            return True
        return self.recall is not None and operation in _SIGNED and any(name in body for name in _SIGNATURES)

    def fit(
        self,
        request: InferenceRequest,
        route: Route,
        native: Mapping[str, frozenset[Operation]],
        makers: Mapping[str, str] | None = None,
        *,
        has_state: bool = False,
    ) -> None:
        """Note translated bodies and unfit pools on the request. `native`: operations by pool; `makers`: of its turns.
        `has_state`: the history has state of makers, which returns to each alone."""
        unfit: dict[str, str] = {}
        translated: dict[str, TranslatedBody] = {}
        known: dict[tuple[tuple[Translation, ...], str], TranslatedBody] = {}
        self._makers = makers or self._makers
        for pool in route.pools:
            spoken = self._spoken(pool, native[pool], request.caller)
            maker = self._makers.get(pool, "")
            history = self._history(request, spoken, maker) if has_state else None
            if request.operation in spoken:
                if history is not None and (own := _with_own_state(request, history)) is not None:
                    translated[pool] = own
                continue
            steps = chain(request.operation, spoken)
            if steps is None:
                unfit[pool] = f"its servers do not serve {request.operation.value}"
                continue
            try:
                key = steps, maker if has_state else ""
                if key not in known:
                    known[key] = _translated(request, steps, route.drop, history)
                translated[pool] = replace(known[key], maker=maker)
            except UntranslatableError as refusal:
                unfit[pool] = str(refusal)
            except SHAPE_ERRORS:
                unfit[pool] = "the request has no known shape"
        request.unfit, request.translated = unfit, translated

    def found_lacking(self, pool: str, request: InferenceRequest, route: Route, native: frozenset[Operation]) -> bool:
        """Note that a pool lacks the operation. True: the request can be translated for it."""
        if (pool, request.operation) not in self.served:
            self._note(self.lacking.setdefault((pool, request.operation), {}), request.caller)
        steps = chain(request.operation, self._spoken(pool, native, request.caller) - {request.operation})
        if steps is None:
            return False
        maker = self._makers.get(pool, "")
        history = self._history(request, frozenset(), maker) if MARK_BYTES in encode(request.body) else None
        try:
            found = replace(_translated(request, steps, route.drop, history), maker=maker)
            request.translated = {**request.translated, pool: found}
        except SHAPE_ERRORS:
            return False
        return True

    def _history(self, request: InferenceRequest, spoken: frozenset[Operation], maker: str) -> TurnHistory:
        return TurnHistory(maker, request.operation, request.operation in spoken, self.recall or unknown)

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


def _translated(
    request: InferenceRequest, steps: tuple[Translation, ...], drop: frozenset[str], history: TurnHistory | None = None
) -> TranslatedBody:
    bodies, dropped = [_decode(encode(request.body))], Omissions(drop)
    sent = bodies[0] if history is None else history.opened(bodies[0], dropped)
    for step in steps:
        sent = step.request(sent, dropped)
        bodies.append(sent)
    return TranslatedBody(steps[-1].backend, bodies[-1], steps, tuple(bodies[:-1]), dropped.noted)


def _with_own_state(request: InferenceRequest, history: TurnHistory) -> TranslatedBody | None:
    """The body in the caller's own dialect, with the state of this pool alone; None: as the caller has sent it."""
    body, dropped = _decode(encode(request.body)), Omissions()
    try:
        own = history.opened(body, dropped)
    except SHAPE_ERRORS:
        return None  # the server judges it
    return None if own == body else TranslatedBody(request.operation, own, (), (), dropped.noted)
