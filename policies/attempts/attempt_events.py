"""Events, facts and actions of the attempt machine (`policies.attempts.attempt_machine`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from policies.blame.blame import Blame
from policies.routes.levels import AttemptRules
from policies.types import FOREVER, NEVER, Attempt, AttemptOutcome, Candidate, FirstTokenOutlook

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Begin:
    """The request is decided."""


@dataclass(slots=True)
class FirstToken:
    """Visible content of an attempt; a preamble, a ping or an error is not."""

    number: int


@dataclass(slots=True)
class Answered:
    """A whole answer is complete and was judged. `shortcoming`: for which the route would rather have another pool's;
    empty: none."""

    number: int
    shortcoming: str = ""


@dataclass(slots=True)
class Failed:
    """An attempt has ended, and nothing of an answer has been written.

    `retry_after`: s, as the server asked. `accepted`: the server had taken the request. `translated`: the pool can be
    asked in another dialect. `doubtful`: the endpoint refuses what its siblings answer. `anew`: an endpoint that
    refuses to go on with an answer may be asked in another way; None: it was not asked to go on. `whole`: the
    endpoint has answered by a stream that the gateway could not put together, and is asked for a whole answer.
    `whole_at_last`: it may be the stream alone that has failed, and no other endpoint may be left. `mended`: the
    endpoint has refused a form of the request, and can be asked in another.
    """

    number: int
    blame: Blame
    retry_after: float | None = None
    accepted: bool = False
    translated: bool = False
    doubtful: bool = False
    anew: bool | None = None
    whole: bool = False
    whole_at_last: bool = False
    mended: bool = False


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
    """The committed stream broke, of which a part has been written. `others`: who may write the rest, in order."""

    blame: Blame
    others: Sequence[Candidate] = ()


Event = Begin | FirstToken | Answered | Failed | EndpointDown | TimerFired | ClientGone | Broken

# --------------------------------------------------------------------------- facts


@dataclass(slots=True)
class Progress:
    """The committed stream, or an attempt without a token, as seen now."""

    heard_at: float = NEVER  # the latest byte, of whatever kind
    tpot: float | None = None  # s
    complete: bool = False  # the answer has ended, and the connection has not
    relayed: bool = False  # all of a complete answer was written to the caller, its last event included
    paused: bool = False  # the caller does not read, so nothing is read from the server


class AttemptFacts(Protocol):
    """Facts that the machine asks for when a rule needs them."""

    closes: bool  # an endpoint may have a cap or a rate limit

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        """A request sent to the candidate now would exceed a cap or a rate limit."""
        ...

    def is_saturated(self) -> bool:
        """A hedge would take another request's place."""
        ...

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        """The first token of a pending attempt, and of one sent to `upcoming` now, by what endpoints do now."""
        ...

    def is_overtaken(self, number: int) -> bool:
        """The endpoint of the attempt has answered requests that were sent to it later."""
        ...

    def progress(self, number: int) -> Progress: ...

    def patience(self, number: int, others: Sequence[Candidate]) -> float:
        """Seconds without a byte after which the committed stream is left for one of `others` to write the rest."""
        ...

    def without_larger_window(self, pool: str) -> frozenset[str]:
        """Pools that have no room either for what exceeds the context window of `pool`."""
        ...


class NoFacts:
    """Nothing is known."""

    closes = False

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        return False

    def is_saturated(self) -> bool:
        return False

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        return FirstTokenOutlook(sent_at, attempt.candidate.forecast, NEVER, upcoming.forecast)

    def is_overtaken(self, number: int) -> bool:
        return False

    def progress(self, number: int) -> Progress:
        return Progress()

    def patience(self, number: int, others: Sequence[Candidate]) -> float:
        return FOREVER

    def without_larger_window(self, pool: str) -> frozenset[str]:
        return frozenset({pool})


NO_FACTS = NoFacts()


@dataclass(slots=True, kw_only=True)
class AttemptLimits:
    """Limits set by the request and its route. Times in seconds."""

    max_attempts: int
    stream: bool = True  # tokens arrive as they are written, so silence is evidence
    unseen: frozenset[str] = frozenset()  # endpoints that are asked for a whole answer nevertheless
    whole: float = FOREVER  # for such an answer
    hedge: bool = False
    first_token_limit: float = FOREVER
    limit_is_meant: bool = False  # by the configuration: else a server that is slow for a reason has longer
    budget: float = 0.0  # s to the first token that the route promises; 0: none
    checks_forecasts: bool = False  # a forecast may exceed its limit
    limit_at: float = FOREVER  # end of the time for the whole answer
    idle: float = FOREVER  # without a byte, in mid-stream
    recovers: bool = False  # others may write the rest of a broken stream
    longer_context: bool = True  # a prompt too long for one pool may go to another
    other_filter: bool = False  # a content refused by one pool may go to another
    longest_output: int | None = None  # tokens
    tiers: AttemptRules | None = None  # rules of the route's tiers; None: the route has none


# --------------------------------------------------------------------------- actions


@dataclass(slots=True)
class Open:
    """Send an attempt. `charged`: to the budget of retries or of hedges."""

    attempt: Attempt
    charged: bool = False


@dataclass(slots=True)
class Cancel:
    number: int
    outcome: AttemptOutcome


@dataclass(slots=True)
class Keep:
    """Hold this answer while another pool is asked, for its shortcoming."""

    number: int
    shortcoming: str


@dataclass(slots=True)
class Commit:
    """Relay this attempt's bytes to the client. `was_kept`: the answer was held while another pool was asked."""

    number: int
    was_kept: bool = False


class Leaving(Enum):
    """Reason to stop reading a committed stream."""

    COMPLETE = "complete"
    READ = "read"  # by a caller that has the whole answer, and left before the server closed
    SILENT = "silent"
    LATE = "late"


@dataclass(slots=True)
class Leave:
    number: int
    why: Leaving


class Ending(Enum):
    """Reason to give up."""

    NO_CANDIDATE = "no candidate"
    OVERDUE = "overdue"
    TOO_SLOW = "too slow"
    REFUSED = "refused"
    BUDGET = "retry budget"
    DEATHS = "deaths"
    ATTEMPTS = "attempts"
    CANDIDATES = "candidates"
    SILENCE = "silence"
    CLOSED = "closed"
    NOT_CONTINUED = "not continued"


@dataclass(slots=True)
class GiveUp:
    """`reason`: in words, for people."""

    ending: Ending
    reason: str


Action = Open | Cancel | Keep | Commit | Leave | GiveUp


@dataclass(slots=True)
class AttemptStep:
    """Actions in order, and the time of the next TimerFired if no other event comes before."""

    actions: tuple[Action, ...] = ()
    wake_at: float | None = None
