"""The network between the gateway and an endpoint, as decisions read it."""

from __future__ import annotations

from typing import Protocol


class NetworkPath(Protocol):
    """Implemented by the connections to an endpoint."""

    def network_s(self) -> tuple[float, float]:
        """Seconds of a round trip, 0 where not known; and until a request sent now is on the wire: of a new connection,
        0 while one is idle."""
        ...
