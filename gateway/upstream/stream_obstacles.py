"""Endpoints whose streams cannot be assembled into a whole answer, or not exactly.

Rules:
- After the first such stream, the endpoint gets the caller's requests unstreamed, and after a second caller's such
  stream all requests. A fault in tool calls concerns only requests with tools.
- Streams are tried again after KEPT seconds: servers are upgraded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from backends.interface import Operation
from gateway.api.inference_request import InferenceRequest

log = logging.getLogger("firsttoken")

KEPT = 86_400.0  # s
WITNESSES = 2  # callers, after whom all callers are concerned
MOST = 1000  # endpoints, operations and kinds of request

Kind = tuple[str, Operation, bool]  # endpoint, operation of the caller, with tools


@dataclass(slots=True)
class _Obstacle:
    until: float
    callers: set[str] = field(default_factory=set)


class StreamObstacles:
    """Knowledge of the streams of endpoints. `bought_twice`: whole answers that were asked for again."""

    def __init__(self) -> None:
        self.bought_twice = 0
        self._known: dict[Kind, _Obstacle] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def concerned(self, request: InferenceRequest, now: float) -> frozenset[str]:
        """The endpoints to be asked for a whole answer."""
        asked = [request.operation, bool(request.tools)]
        return frozenset(
            endpoint
            for (endpoint, *kind), known in self._known.items()
            if kind == asked and _counts(known, request.caller, now)
        )

    def note_lost(self, endpoint: str, request: InferenceRequest, what: str, now: float, *, calls: bool) -> None:
        """A stream could not be put together: its answer is bought again, at the gateway's expense."""
        self.bought_twice += 1
        self._note(endpoint, request, now, calls)
        log.warning(
            "endpoint %s: the stream of a whole answer cannot be put together (%s); it is asked again, which no key is "
            "charged for; such answers are asked for whole from now on",
            endpoint,
            what,
        )

    def note_odd(self, endpoint: str, request: InferenceRequest, what: str, now: float, *, calls: bool) -> None:
        """An answer was used that may differ from the server's own."""
        self._note(endpoint, request, now, calls)
        log.info(
            "endpoint %s: the stream of a whole answer differs from a whole answer (%s); it was used, and such answers "
            "are asked for whole from now on",
            endpoint,
            what,
        )

    def _note(self, endpoint: str, request: InferenceRequest, now: float, calls: bool) -> None:
        for tools in (True,) if calls else (True, False):
            kind = endpoint, request.operation, tools
            known = self._known.pop(kind, None)
            if known is None or known.until <= now:
                known = _Obstacle(now + KEPT)
            if len(known.callers) < WITNESSES:
                known.callers.add(request.caller)
            self._known[kind] = known
        while len(self._known) > MOST:
            del self._known[next(iter(self._known))]


def _counts(known: _Obstacle, caller: str, now: float) -> bool:
    return now < known.until and (caller in known.callers or len(known.callers) >= WITNESSES)
