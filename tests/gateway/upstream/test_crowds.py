"""Crowds of attempts that end at once: the event loop stays free for all other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.upstream.attempt import WireAttempt
from gateway.upstream.dispatcher import Dispatcher
from policies.attempts.budgets import RetryBudget
from tests.support.builders import RecordingFleet, wire

pytestmark = pytest.mark.virtual_time


class Later:
    """A queue of work that waits for the test."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def do(self, work: Callable[..., None], *given: Any) -> None:
        self.work.append(lambda: work(*given))


class Down:
    """A race that is told of endpoints found dead."""

    def __init__(self) -> None:
        self.told: list[WireAttempt] = []

    def endpoint_down(self, wire: WireAttempt) -> None:
        self.told.append(wire)


def test_attempts_at_an_endpoint_found_dead_are_given_up_one_by_one() -> None:
    """By the queue that spreads work over turns of the event loop; an attempt with a token goes on."""
    fleet, down = RecordingFleet(), Down()
    dispatcher = Dispatcher(fleet, RetryBudget())
    later = Later()
    dispatcher.losses = cast("Any", later)
    attempts = [wire(fleet) for _ in range(3)]
    dispatcher.races = dict.fromkeys(attempts, down)
    assert fleet.on_found_dead is not None
    fleet.on_found_dead([*attempts])
    assert (len(later.work), down.told) == (3, [])
    attempts[2].times.first_in = 1.0
    for work in later.work:
        work()
    assert down.told == attempts[:2]
