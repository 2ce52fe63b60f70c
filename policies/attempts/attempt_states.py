"""States of the attempt machine (`policies.attempts.attempt_machine`), and the events that each accepts."""

from __future__ import annotations

from enum import Enum

from policies.attempts.attempt_events import (
    Answered,
    Begin,
    Broken,
    ClientGone,
    EndpointDown,
    Event,
    Failed,
    FirstToken,
    TimerFired,
)


class AttemptState(Enum):
    IDLE = "idle"
    RACING = "racing"
    COMMITTED = "committed"
    GAVE_UP = "gave_up"
    GONE = "gone"


# Events accepted by each state, and the possible next states.
TRANSITIONS: dict[AttemptState, dict[type[Event], frozenset[AttemptState]]] = {
    AttemptState.IDLE: {
        Begin: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.RACING: {
        FirstToken: frozenset({AttemptState.RACING, AttemptState.COMMITTED}),
        Answered: frozenset({AttemptState.RACING, AttemptState.COMMITTED}),
        Failed: frozenset({AttemptState.RACING, AttemptState.GAVE_UP, AttemptState.COMMITTED}),
        EndpointDown: frozenset({AttemptState.RACING, AttemptState.GAVE_UP, AttemptState.COMMITTED}),
        TimerFired: frozenset({AttemptState.RACING, AttemptState.GAVE_UP, AttemptState.COMMITTED}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.COMMITTED: {
        Failed: frozenset({AttemptState.COMMITTED, AttemptState.RACING, AttemptState.GAVE_UP}),
        Broken: frozenset({AttemptState.RACING, AttemptState.GAVE_UP}),
        TimerFired: frozenset({AttemptState.COMMITTED, AttemptState.GAVE_UP}),
        ClientGone: frozenset({AttemptState.GONE}),
    },
    AttemptState.GAVE_UP: {},
    AttemptState.GONE: {},
}
