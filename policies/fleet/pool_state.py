"""What the endpoints of one pool share.

What they learned goes to siblings that know much less: not only to those that know nothing, since one that was
slow at its first request, as cold engines are, would be avoided for ever after, and so never learn better. And
from the sibling that is most like them: a pool may be of two kinds of machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.fleet.endpoint_state import EndpointState
from policies.latency.token_scale import TokenScale
from policies.latency.ttft_predictor import TAUGHT
from policies.types import Pool

MORE = 2  # times its own samples that an endpoint's teacher must have
GROWN = 1.25  # times the samples it had when it last taught, at which a teacher has news


@dataclass(slots=True)
class PoolState:
    """The endpoints of a pool. Those in `untaught` may know less than their siblings."""

    pool: Pool
    scale: TokenScale
    members: list[EndpointState] = field(default_factory=list)
    untaught: list[EndpointState] = field(default_factory=list)

    def teach(self, state: EndpointState, now: float) -> Iterator[EndpointState]:
        """`state` has learned something. Yields those whose beliefs changed by it."""
        self.untaught = [other for other in self.untaught if other.predictor.samples < TAUGHT]
        for other in self.untaught:
            if other is state or state.predictor.samples >= GROWN * other.taught_by:
                teachers = [one for one in self.members if one.predictor.samples > MORE * other.predictor.samples]
                if teachers:
                    _follow(other, teachers, now)
                    yield other


def _follow(state: EndpointState, teachers: list[EndpointState], now: float) -> None:
    """The most similar of them."""
    state.warm_start_from(min(teachers, key=lambda other: state.predictor.distance(other.predictor, now)), now)
    state.taught_by = max(other.predictor.samples for other in teachers)
