"""Finds the pools of a route that can serve an operation: natively, through a translation, or not at all.

A pool's servers may lack an operation that their kind usually serves (a chat model has no embeddings): the first
request that is refused for it shows that, and the pool is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from backends.interface import Operation
from backends.translation.answer import SHAPE_ERRORS
from backends.translation.registry import chain
from backends.translation.translation import Translation, UntranslatableError
from gateway.api.inference_request import InferenceRequest, TranslatedBody
from gateway.strict_json import encode
from policies.routes.route import Route

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class OperationFit:
    """Operations that pools were found to lack."""

    lacking: set[tuple[str, Operation]] = field(default_factory=set)  # by pool: bounded by the configuration

    def fit(self, request: InferenceRequest, route: Route, native: Mapping[str, frozenset[Operation]]) -> None:
        """Note translated bodies and unfit pools on the request. `native`: operations by pool."""
        unfit: dict[str, str] = {}
        translated: dict[str, TranslatedBody] = {}
        for pool in route.pools:
            spoken = self._spoken(pool, native[pool])
            if request.operation in spoken:
                continue
            steps = chain(request.operation, spoken)
            if steps is None:
                unfit[pool] = f"its servers do not serve {request.operation.value}"
                continue
            try:
                translated[pool] = _translated(request, steps, route.drop)
            except UntranslatableError as refusal:
                unfit[pool] = str(refusal)
            except SHAPE_ERRORS:
                unfit[pool] = "the request has no known shape"
        request.unfit, request.translated = unfit, translated

    def found_lacking(self, pool: str, request: InferenceRequest, route: Route, native: frozenset[Operation]) -> bool:
        """Note that a pool lacks the operation. True: the request can be translated for it."""
        self.lacking.add((pool, request.operation))
        steps = chain(request.operation, self._spoken(pool, native))
        if steps is None:
            return False
        try:
            request.translated = {**request.translated, pool: _translated(request, steps, route.drop)}
        except SHAPE_ERRORS:
            return False
        return True

    def _spoken(self, pool: str, native: frozenset[Operation]) -> frozenset[Operation]:
        return native - {operation for name, operation in self.lacking if name == pool}


def _translated(request: InferenceRequest, steps: tuple[Translation, ...], dropped: frozenset[str]) -> TranslatedBody:
    bodies = [_decode(encode(request.body))]
    for step in steps:
        bodies.append(step.request(bodies[-1], dropped))
    return TranslatedBody(steps[-1].backend, bodies[-1], steps, tuple(bodies[:-1]))
