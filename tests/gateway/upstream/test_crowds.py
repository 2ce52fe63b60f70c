"""Crowds of attempts that end at once: the event loop stays free for all other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.upstream.dispatcher import Dispatcher
from policies.attempts.attempt_events import EndpointDown, Event
from policies.attempts.budgets import RetryBudget
from tests.support.builders import RecordingFleet, wire

pytestmark = pytest.mark.virtual_time


class Later:
    """A queue of work that waits for the test."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def do(self, work: Callable[..., None], *given: Any) -> None:
        self.work.append(lambda: work(*given))


def test_attempts_at_an_endpoint_found_dead_are_given_up_one_by_one() -> None:
    """By the queue that spreads work over turns of the event loop; an attempt with a token goes on."""
    fleet, told = RecordingFleet(), list[Event]()
    dispatcher = Dispatcher(fleet, RetryBudget())
    later = Later()
    dispatcher.losses = cast("Any", later)
    attempts = [wire(fleet) for _ in range(3)]
    dispatcher.races = dict.fromkeys(attempts, told.append)
    assert fleet.on_found_dead is not None
    fleet.on_found_dead([*attempts])
    assert (len(later.work), told) == (3, [])
    attempts[2].times.first_in = 1.0
    for work in later.work:
        work()
    assert told == [EndpointDown(1)] * 2
