"""Network time of an endpoint, as the fleet reads it."""

from __future__ import annotations

from typing import Protocol


class NetworkTime(Protocol):
    """Implemented by the connections to an endpoint."""

    @property
    def rtt(self) -> float:
        """Seconds of a round trip; 0: not known."""

    @property
    def wait_to_connect(self) -> float:
        """Seconds until a request sent now is on the wire: those of a new connection; 0 while one is idle."""
