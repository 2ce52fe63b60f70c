"""Finds the pools of a route that can serve an operation: natively, through a translation, or not at all.

A pool's servers may lack an operation that their kind usually serves (a chat model has no embeddings): the first
request that is refused for it shows that to its caller, and a second caller's to all; the pool is not asked again for a
minute. Where the pool has served the operation before, one refusal shows nothing about the next request: a caller may
have provoked it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from backends.interface import Operation
from backends.translation.omissions import Omissions
from backends.translation.registry import chain
from backends.translation.reply_translation import SHAPE_ERRORS
from backends.translation.translation import Translation, UntranslatableError
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.strict_json import encode
from policies.routes.route import Route

LACKING = 60.0  # s until a pool is asked again
WITNESSES = 2  # callers that find the same, to count for all

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class OperationFit:
    """Operations that servers lack or have answered, by pool. Size: at most pools times operations."""

    # by pool: until when, by caller that has found it
    lacking: dict[tuple[str, Operation], dict[str, float]] = field(default_factory=dict)
    served: set[tuple[str, Operation]] = field(default_factory=set)

    def fit(self, request: InferenceRequest, route: Route, native: Mapping[str, frozenset[Operation]]) -> None:
        """Note translated bodies and unfit pools on the request. `native`: operations by pool."""
        unfit: dict[str, str] = {}
        translated: dict[str, TranslatedBody] = {}
        known: dict[tuple[Translation, ...], TranslatedBody] = {}
        for pool in route.pools:
            spoken = self._spoken(pool, native[pool], request.caller)
            if request.operation in spoken:
                continue
            steps = chain(request.operation, spoken)
            if steps is None:
                unfit[pool] = f"its servers do not serve {request.operation.value}"
                continue
            try:
                if steps not in known:
                    known[steps] = _translated(request, steps, route.drop)
                translated[pool] = known[steps]
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
        try:
            request.translated = {**request.translated, pool: _translated(request, steps, route.drop)}
        except SHAPE_ERRORS:
            return False
        return True

    def translated_into(self, operation: Operation, request: InferenceRequest, route: Route) -> TranslatedBody | None:
        """The body for servers that are asked at another operation; None: it cannot be expressed there."""
        if not (steps := chain(request.operation, frozenset({operation}))):
            return None
        try:
            return _translated(request, steps, route.drop)
        except SHAPE_ERRORS:
            return None

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


def _translated(request: InferenceRequest, steps: tuple[Translation, ...], drop: frozenset[str]) -> TranslatedBody:
    bodies, dropped = [_decode(encode(request.body))], Omissions(drop)
    for step in steps:
        bodies.append(step.request(bodies[-1], dropped))
    return TranslatedBody(steps[-1].backend, bodies[-1], steps, tuple(bodies[:-1]), dropped.noted)
