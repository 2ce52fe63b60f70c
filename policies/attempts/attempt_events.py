"""Events and actions of the attempt machine (`policies.attempts.attempt_machine`)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from policies.types import Attempt, AttemptOutcome

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Begin:
    """The request is decided."""


@dataclass(slots=True)
class FirstToken:
    """Visible content of an attempt; a preamble, a ping or an error is not."""

    number: int


@dataclass(slots=True)
class Failed:
    """An attempt has ended without a token.

    `retryable`: another endpoint might succeed. `connection_lost`, as opposed to an overload reply. `retry_after`: s,
    as the server asked. `taken`: the connection was lost after the server had accepted the request. `again`: the same
    endpoint might succeed. `avoid`: pools that would fail in the same way. `restart`: the endpoint refuses to continue
    an answer, and is asked for the whole of it.
    """

    number: int
    retryable: bool = True
    connection_lost: bool = False
    retry_after: float | None = None
    taken: bool = False
    again: bool = True
    avoid: frozenset[str] = frozenset()
    restart: bool = False


@dataclass(frozen=True, slots=True)
class EndpointDown:
    """The endpoint of an attempt does not answer its probes any more."""

    number: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The last step's `wake_at` is reached."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The caller has disconnected."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The committed stream broke, and its answer can be continued.

    `unable`: endpoints not to be used; `patience`: s without a token until the continuing attempt is abandoned.
    """

    connection_lost: bool
    patience: float
    unable: Collection[str] = ()


Event = Begin | FirstToken | Failed | EndpointDown | TimerFired | ClientGone | Broken

# --------------------------------------------------------------------------- actions


@dataclass(slots=True)
class Open:
    attempt: Attempt


@dataclass(slots=True)
class Cancel:
    number: int
    outcome: AttemptOutcome


@dataclass(slots=True)
class Commit:
    """Relay this attempt's bytes to the client."""

    number: int


@dataclass(slots=True)
class GiveUp:
    reason: str


Action = Open | Cancel | Commit | GiveUp


@dataclass(slots=True)
class AttemptStep:
    """Actions in order, and the time of the next TimerFired if no other event comes before."""

    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
