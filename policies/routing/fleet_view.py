"""What a decision may ask of the learned state: the seam between deciding and learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from policies.scorers.scorer import CandidateInput
from policies.types import Endpoint, Load, PoolEstimate


class FleetView(Protocol):
    """Read-only to decisions; `policies.fleet.fleet.Fleet` is the implementation that learns."""

    def prospects(
        self,
        endpoints: Sequence[Endpoint],
        loads: Sequence[Load],
        prompt: PoolEstimate,
        tier: int,
        price: float,
        now: float,
    ) -> list[CandidateInput]:
        """All that is believed of a prompt sent at `now` to these endpoints of one pool, in their order.

        One question for all of them: a call costs more than most of what is worked out in it.
        """
        ...
