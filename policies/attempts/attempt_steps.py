"""What an attempt machine (`policies.attempts.attempt_machine`) is told, and what it says to do."""

from __future__ import annotations

from policies.types import Attempt, AttemptOutcome
from policies.value import value

# --------------------------------------------------------------------------- events


@value
class Begin:
    """The request is decided."""


@value
class FirstToken:
    """Visible content of an attempt: a preamble, a ping or an error is not."""

    number: int


@value
class Failed:
    """An attempt has ended without a token.

    `retryable`: another endpoint might do better. `died`: the connection did, as opposed to an
    overload reply. `retry_after`: s, as the server asked. `taken`: it died with a request that it
    had accepted.
    """

    number: int
    retryable: bool = True
    connection_lost: bool = False
    retry_after: float | None = None
    taken: bool = False


@value
class TimerFired:
    """The time of the last step's `wake_at` has come."""


@value
class ClientGone:
    """The caller has left."""


Event = Begin | FirstToken | Failed | TimerFired | ClientGone

# --------------------------------------------------------------------------- actions


@value
class Open:
    attempt: Attempt


@value
class Cancel:
    number: int
    ending: AttemptOutcome


@value
class Commit:
    """This attempt's bytes go to the client."""

    number: int


@value
class GiveUp:
    reason: str


Action = Open | Cancel | Commit | GiveUp


@value
class AttemptStep:
    """What to do now, in this order, and when to send a Wake if nothing happens before."""

    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
