"""The best Retry-After that could have been named: the same replay, in which one refused caller comes back at another
time.

At each first refusal the replay is forked (`lab.replay.counterfactual.Fork`) once for every time of RETRIES, the
policy's own first, until the caller is answered at that return. The caller is known to the gateway whenever it comes,
and all others fare as they do. So the share of callers with such a time is what a gateway that knows the future could
reach by `retry-after` alone, one caller at a time; that all of them could have their times together is not said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

from lab.replay.counterfactual import Fork
from lab.replay.player import Player
from lab.replay.results import RequestResult, Results
from lab.replay.sim_fleet import Scenario
from lab.replay.sim_gateway import ActiveRequest, DecisionOverride, SimGateway
from lab.traffic.traces import Arrival
from policies.queue.late_work import LONGEST_RETRY, RETURNED_PATIENCE, RefusedRequests
from policies.queue.queued_request import QueuedRequest
from policies.types import Decision

RETRIES = (LONGEST_RETRY, 30.0, 15.0, 5.0)  # s: SDKs wait no longer than the first
LOOK = 0.5  # s between two looks whether the caller has its answer: then a copy of the replay ends


@dataclass(frozen=True, slots=True)
class Return:
    """A refused request. `own`: answered at the return that the policy named; `best`: s of a time of RETRIES
    at which it would have been, the policy's own included; None: at none."""

    number: int
    own: bool
    best: float | None


class NamesAll(DecisionOverride):
    """Forks at every first refusal. `every`: only of each so-many-th, in order."""

    def __init__(self, fork: Fork, every: int = 1) -> None:
        self.found: list[Return] = []
        self._fork = fork
        self._every = every
        self._refused = 0

    def on_refusal(self, request: ActiveRequest, refusal: Decision) -> Decision:
        if self._fork.is_copy or request.result.refusals or not refusal.retry_after:
            return refusal
        self._refused += 1
        if self._refused % self._every:
            return refusal
        for seconds in (refusal.retry_after, *RETRIES):
            if self._fork.tries(request, self._fork.player.clock.now + seconds + RETURNED_PATIENCE):
                known(request.number)
                Watch(self._fork.player, request.result).look()
                return replace(refusal, retry_after=seconds)
            if self._fork.in_time[request.number]:
                self.found.append(Return(request.number, seconds == refusal.retry_after, seconds))
                return refusal
        self.found.append(Return(request.number, False, None))
        return refusal


def known(number: int) -> None:
    """In a copy: the gateway knows the caller again, however late it comes back."""
    take = RefusedRequests.take

    def knows(refused: RefusedRequests, queued: QueuedRequest, now: float) -> bool:
        return take(refused, queued, now) or queued.request_key == number

    patch.object(RefusedRequests, "take", knows).start()


class Watch:
    """Ends a copy of the replay once the caller is answered, or refused a second time."""

    def __init__(self, player: Player, result: RequestResult) -> None:
        self._player = player
        self._result = result

    def look(self) -> None:
        clock = self._player.clock
        if self._result.first_at is not None or len(self._result.refusals) > 1:
            self._player.end = clock.now
        clock.at(clock.now + LOOK, self.look)


def answered_at_return(result: RequestResult) -> bool:
    """With its first token, and no second refusal."""
    return result.first_at is not None and len(result.refusals) == 1


def play_returns(
    scenario: Scenario, arrivals: Sequence[Arrival], seed: int, every: int = 1
) -> tuple[Results, list[Return]]:
    """The replay, by one gateway process, and its refused callers."""
    fork = Fork(Player(scenario, arrivals, seed), answered_at_return)
    names = NamesAll(fork, every)
    gateway: SimGateway
    (gateway,) = fork.player.gateways
    gateway.override = names
    return fork.play(), names.found
