"""Interface between the attempt machine (`policies.attempts.attempt_machine`) and the connections to servers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from policies.blame.blame import Blame
from policies.routes.levels import AttemptRules
from policies.types import FOREVER, NEVER, Attempt, AttemptOutcome, Candidate, FirstTokenOutlook


@dataclass(slots=True)
class Failed:
    """An attempt that has ended before anything of an answer was written.

    `retry_after`: seconds requested by the server. `accepted`: the server had accepted the request. `translated`: the
    pool can be tried in another dialect. `doubtful`: the endpoint refuses a request that siblings answer. `anew`: an
    endpoint that refuses to continue an answer may be asked in another way; None: no rest was asked for. `whole`:
    the stream could not be assembled, so the endpoint is asked for a whole answer. `whole_at_last`: as `whole`, but
    only if no other endpoint is left. `mended`: the endpoint refused the form of the request, and another form exists.
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


@dataclass(slots=True)
class Progress:
    """The committed stream, or an attempt without a token, as seen now."""

    heard_at: float = NEVER  # the latest byte, of whatever kind
    complete: bool = False  # the answer has ended, and the connection has not
    relayed: bool = False  # all of a complete answer was written to the caller, its last event included
    paused: bool = False  # the caller does not read, so nothing is read from the server


class Wire:
    """Performs decisions of the attempt machine for one request, and answers its queries. Default answers assume
    nothing known. A call may re-enter the machine with an event."""

    closes = False  # an endpoint may have a cap or a rate limit
    drained: Set[str] = frozenset()  # endpoints that an operator has taken out, also since the decision; by id

    # -- performed ------------------------------------------------------------------------------

    def open(self, attempt: Attempt) -> None:
        """Send an attempt."""
        raise NotImplementedError

    def cancel(self, number: int, outcome: AttemptOutcome) -> None:
        """Stop an attempt. COMPLETED: its whole answer has arrived."""
        raise NotImplementedError

    def commit(self, number: int, *, was_kept: bool = False) -> None:
        """Relay this attempt's bytes to the caller. `was_kept`: the answer was held while another pool was asked."""
        raise NotImplementedError

    def keep(self, number: int, objection: str) -> None:
        """Hold an answer with an objection while another pool is asked."""

    def leave(self, number: int) -> None:
        """Stop reading the committed stream: it is silent, or complete on an open connection."""
        raise NotImplementedError

    def give_up(self, reason: str, *, unasked: bool = False) -> None:
        """End without an answer, or with a part of it. `reason`: in words, for people; `unasked`: no endpoint is
        expected to answer in time, so none was asked."""
        raise NotImplementedError

    def wake(self, at: float) -> None:
        """Call `AttemptMachine.look` at this time; in place of the time before. FOREVER: not at all."""
        raise NotImplementedError

    # -- asked, when a rule needs it ------------------------------------------------------------

    def is_closed(self, candidate: Candidate, now: float) -> bool:
        """True if a request sent now would exceed a cap or a rate limit."""
        return False

    def is_saturated(self) -> bool:
        """A hedge would take another request's place."""
        return False

    def outlook(self, attempt: Attempt, sent_at: float, upcoming: Candidate, now: float) -> FirstTokenOutlook:
        """First-token forecasts of a pending attempt, and of an attempt sent to `upcoming` now, by present loads."""
        return FirstTokenOutlook(sent_at, attempt.candidate.forecast, NEVER, upcoming.forecast)

    def is_overtaken(self, number: int) -> bool:
        """True if the endpoint has answered requests sent later than the attempt."""
        return False

    def progress(self, number: int) -> Progress:
        return Progress()

    def patience(self, number: int, others: Sequence[Candidate]) -> float:
        """Seconds without a byte after which the committed stream is left for one of `others` to write the rest."""
        return FOREVER

    def without_larger_window(self, pool: str) -> frozenset[str]:
        """Pools with no larger context window than `pool`, itself included."""
        return frozenset({pool})


@dataclass(slots=True, kw_only=True)
class AttemptLimits:
    """Limits set by the request and its route. Times in seconds."""

    max_attempts: int
    stream: bool = True  # tokens arrive as they are written, so silence is evidence
    unseen: frozenset[str] = frozenset()  # endpoints that are asked for a whole answer nevertheless
    whole: float = FOREVER  # for such an answer
    hedge: bool = False
    first_token_limit: float = FOREVER
    limit_is_meant: bool = False  # configured: else a server slow for a reason has longer
    budget: float = 0.0  # s to the first token that the route promises; 0: none
    checks_forecasts: bool = False  # a forecast may exceed its limit
    limit_at: float = FOREVER  # end of the time for the whole answer
    idle: float = FOREVER  # without a byte, in mid-stream
    recovers: bool = False  # other endpoints may continue a broken stream
    longer_context: bool = True  # a prompt too long for one pool may go to another
    other_filter: bool = False  # a content refused by one pool may go to another
    longest_output: int | None = None  # tokens
    tiers: AttemptRules | None = None  # rules of the route's tiers; None: the route has none
