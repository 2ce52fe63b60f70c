"""Hooks of an answer, for parts that judge whole answers or continue broken answers at other endpoints.

A `recover` hook of the plan creates a `Recovery` for each request. The rest of a broken answer comes from further
attempts of the same race, and passes the same filters to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from backends.http.connection import Sink
from backends.interface import Failure
from backends.stream.redaction import Rewriter
from gateway.api.inference_request import InferenceRequest
from gateway.upstream.attempt import WireAttempt
from gateway.upstream.routed_request import RoutedRequest
from policies.types import Attempt, AttemptKind, Candidate


class Rest(Protocol):
    """The rest of a broken answer. `others`: candidates that may write the rest, in order; `kind`: of their attempts,
    which `continues` an answer."""

    others: Sequence[Candidate]
    kind: AttemptKind

    async def send(self, wire: WireAttempt, sink: Sink) -> None:
        """Ask the candidate of this attempt for the rest. Called for one attempt after the other."""
        ...

    def hear(self, data: bytes) -> bytes | Failure:
        """Read the first bytes of the attempt. Returns the events that are new to the caller."""
        ...

    def link(self) -> Rewriter:
        """Let the attempt write the rest of the answer. Returns the first filter for its further bytes."""
        ...

    def asks_anew(self) -> bool:
        """The attempt was refused. True: the same endpoint may be asked in another way."""
        ...

    def unwritten(self, last: Failure | None) -> Failure:
        """The failure told to the caller where no candidate has written the rest. `last`: of the last attempt."""
        ...

    def refuse(self) -> None:
        """Note that no further attempt is allowed."""
        ...

    def prompt_tokens(self) -> int | None:
        """Prompt tokens of the request, as counted by the endpoint that goes on."""
        ...

    def tokens_before(self) -> int:
        """Tokens of the answer before the rest."""
        ...


class Recovery(Protocol):
    """Records the answer of one request, and finds candidates to continue a broken answer."""

    def link(self) -> Rewriter:
        """The first filter of an answer that begins."""
        ...

    def patience(self, own: Attempt, tpot: float | None, others: Sequence[Candidate]) -> float:
        """Seconds without a byte after which the stream is abandoned for one of `others`; FOREVER: never."""
        ...

    def recover(self, wire: WireAttempt, failure: Failure, unwritten: bool, others: Sequence[Candidate]) -> Rest | None:
        """The answer of an attempt has broken. `unwritten`: words of its last read have not reached the caller;
        `others`: candidates without a failure."""
        ...

    def end(self, winner: WireAttempt | None) -> None:
        """The request is over."""
        ...


Recover = Callable[[RoutedRequest], Recovery | None]  # None: no candidate could continue an answer to this request


class Judge(Protocol):
    """Judges whole answers in the caller's dialect. Never raises: an error of the judge must not fail the answer."""

    def objection(self, request: InferenceRequest, reply: bytes) -> str:
        """The reason to ask another pool; empty: none."""
        ...

    def kept(self, routed: RoutedRequest, objection: str) -> None:
        """The answer is kept while another pool is asked."""
        ...


class Remedy(Enum):
    """Course after a refusal of the request (400, 422), before anything of an answer was written."""

    NONE = "none"  # the request is refused on its merits
    AGAIN = "again"  # retry at the same endpoint, with the pool's `changes` and `translated`
    ELSEWHERE = "elsewhere"  # the form is at fault, or the server lacks a feature: try another pool


class Mend(Protocol):
    """Finds other forms of requests that servers refuse."""

    def refused(self, routed: RoutedRequest, wire: WireAttempt) -> Remedy:
        """The attempt has failed by such a refusal. May set `changes` and `translated` of the request, for its pool."""
        ...

    def answered(self, routed: RoutedRequest, wire: WireAttempt) -> None:
        """The attempt, in the other form, has won."""
        ...


class AnswerHooks(Protocol):
    """Those of a plan, in order. The first that makes a Recovery has the answer; the first objection counts, and the
    first remedy."""

    @property
    def recover(self) -> tuple[Recover, ...]: ...

    @property
    def judge(self) -> tuple[Judge, ...]: ...

    @property
    def mend(self) -> tuple[Mend, ...]: ...


@dataclass(frozen=True, slots=True)
class GivenHooks:
    """Hooks of an answer without a plan."""

    recover: tuple[Recover, ...] = ()
    judge: tuple[Judge, ...] = ()
    mend: tuple[Mend, ...] = ()


NO_ANSWER_HOOKS = GivenHooks()
