"""State that backends keep for callers of Responses and Messages: in requests, on its own paths, over WebSockets."""

from __future__ import annotations

from backends.interface import Operation
from gateway.core.hooks import Hooks, RoutePlan
from gateway.core.part import Part
from gateway.parts.responses.kept_state import KeptState
from gateway.parts.responses.responses_sockets import ResponsesSockets
from gateway.parts.responses.stored_responses import StoredPaths
from gateway.wiring import Core


class ResponsesPart(Part):
    def __init__(self, core: Core) -> None:
        self.sockets = ResponsesSockets()
        self._state = KeptState(core.decider)
        core.side_paths |= StoredPaths().paths
        core.socket_paths[Operation.RESPONSES.value] = self.sockets

    def on(self, plan: RoutePlan) -> Hooks:
        return self._state.on(plan)
