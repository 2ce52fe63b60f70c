"""Blame for a failed attempt: the party at fault, the certainty, and the consequences.

Rules:
- A blame is derived once from the kind of a failure (`backends.interface.FailureKind`, by value), and read by the
  attempt machine (consequences for this request) and by the fleet (consequences for the endpoint and other callers).
- A single caller's requests never take an endpoint away from other callers: evidence counts for its own caller at once,
  and for all callers once a second caller, or a probe by the gateway with its own credential and model, meets the same
  failure (`Evidence.needs_witness`).
- Failures independent of the request (a refused connection, an unanswered probe) need no witness.
- A fault of the gateway, or of the DNS, is no evidence against an endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from policies.types import AttemptOutcome


class Fault(Enum):
    """Party at fault for a failed attempt."""

    REQUEST = "the request itself"
    OWN_CONTENT = "an id or the content of this caller"
    CREDENTIAL = "the gateway's credential"
    CALLER_CREDENTIAL = "the caller's credential, or its account"
    MODEL = "the configured model or path"
    MONEY = "the account's money"
    REQUEST_RATE = "the account's rate of requests"
    TOKEN_RATE = "the account's rate of tokens"
    RATE = "a rate limit of the account"
    REQUEST_SIZE = "the size of this request, for the account"
    OPERATION = "an operation that the server lacks"
    FORM = "the form in which the gateway has asked, or a feature that the server lacks"
    LOAD = "the load of the endpoint"
    QUEUE = "the engine's own limit of requests"
    ENDPOINT = "the endpoint"
    PROVIDER = "the whole pool or provider"
    NETWORK = "the network"
    RESOLVER = "the DNS"
    GATEWAY = "the gateway"


class Elsewhere(Enum):
    """Next destination of the request."""

    NOWHERE = "to nobody: the caller gets the error"
    NEXT = "to the next candidate"
    OTHER_POOL = "to another pool"
    OTHER_CREDENTIAL = "to another key of the server, or to another pool"
    LARGER_WINDOW = "to a pool with a larger context window, if the route allows it"
    OTHER_FILTER = "to another pool, if the route allows it"
    TRANSLATED = "to the same pool in another dialect, or to another pool"


class Evidence(Enum):
    """Finding of an attempt about the endpoint. It counts for its caller; for all, once a second caller or a request of
    the gateway's own has found the same."""

    NONE = "none"
    ANSWERED = "alive"  # a refusal of the request is an answer
    BUSY = "busy until it says"
    FAILED = "failed"
    UNREACHABLE = "unreachable"  # whatever is sent
    BROKE_OFF = "broke off"  # the connection died under this request
    DENIED = "denies the gateway"  # the gateway's credential or model
    UNPAID = "unpaid"

    @property
    def needs_witness(self) -> bool:
        """The request itself may have provoked the reply."""
        return self not in (Evidence.NONE, Evidence.ANSWERED, Evidence.UNREACHABLE)

    @property
    def is_failure(self) -> bool:
        """True if several in a row eject an endpoint. A busy endpoint states its own wait."""
        return self not in (Evidence.NONE, Evidence.ANSWERED, Evidence.BUSY)


@dataclass(frozen=True, slots=True)
class Blame:
    """Row of the table. `sure`: the reply says so itself, as opposed to an inference. `charged`: a retry in the same
    pool adds load, and needs the permission of the retry budget. `again`: the same endpoint may do better."""

    kind: str
    fault: Fault
    sure: bool
    elsewhere: Elsewhere
    evidence: Evidence
    outcome: AttemptOutcome
    charged: bool = False
    again: bool = False


_ROWS = (
    Blame("connect", Fault.NETWORK, True, Elsewhere.NEXT, Evidence.UNREACHABLE, AttemptOutcome.FAILED, again=True),
    Blame("unresolved", Fault.RESOLVER, True, Elsewhere.NEXT, Evidence.NONE, AttemptOutcome.FAILED, again=True),
    Blame("reset", Fault.NETWORK, False, Elsewhere.NEXT, Evidence.BROKE_OFF, AttemptOutcome.FAILED, again=True),
    Blame("timeout", Fault.ENDPOINT, False, Elsewhere.NEXT, Evidence.FAILED, AttemptOutcome.FAILED, again=True),
    Blame("protocol", Fault.ENDPOINT, True, Elsewhere.NEXT, Evidence.FAILED, AttemptOutcome.FAILED, again=True),
    Blame("server", Fault.ENDPOINT, False, Elsewhere.NEXT, Evidence.FAILED, AttemptOutcome.FAILED, True, again=True),
    Blame("provider", Fault.PROVIDER, True, Elsewhere.NEXT, Evidence.FAILED, AttemptOutcome.FAILED, True, again=True),
    Blame("overloaded", Fault.LOAD, True, Elsewhere.NEXT, Evidence.BUSY, AttemptOutcome.RATE_LIMITED, True, again=True),
    Blame(
        "queue_limit", Fault.QUEUE, True, Elsewhere.NEXT, Evidence.BUSY, AttemptOutcome.RATE_LIMITED, True, again=True
    ),
    Blame("rate_limited", Fault.RATE, False, Elsewhere.NEXT, Evidence.BUSY, AttemptOutcome.RATE_LIMITED, True),
    Blame("request_rate", Fault.REQUEST_RATE, True, Elsewhere.NEXT, Evidence.BUSY, AttemptOutcome.RATE_LIMITED, True),
    Blame("token_rate", Fault.TOKEN_RATE, True, Elsewhere.NEXT, Evidence.BUSY, AttemptOutcome.RATE_LIMITED, True),
    Blame("request_size", Fault.REQUEST_SIZE, True, Elsewhere.OTHER_POOL, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame("auth", Fault.CREDENTIAL, True, Elsewhere.NEXT, Evidence.DENIED, AttemptOutcome.MISCONFIGURED),
    Blame("misconfigured", Fault.MODEL, True, Elsewhere.NEXT, Evidence.DENIED, AttemptOutcome.MISCONFIGURED),
    Blame("quota", Fault.MONEY, True, Elsewhere.OTHER_CREDENTIAL, Evidence.UNPAID, AttemptOutcome.QUOTA),
    Blame("unsupported", Fault.OPERATION, True, Elsewhere.TRANSLATED, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame("unfit", Fault.FORM, True, Elsewhere.OTHER_POOL, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame("client", Fault.REQUEST, True, Elsewhere.NOWHERE, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame("context", Fault.REQUEST, True, Elsewhere.LARGER_WINDOW, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame("content_filter", Fault.OWN_CONTENT, True, Elsewhere.OTHER_FILTER, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame("content", Fault.OWN_CONTENT, True, Elsewhere.NOWHERE, Evidence.ANSWERED, AttemptOutcome.REFUSED),
    Blame(
        *("caller_credential", Fault.CALLER_CREDENTIAL, True, Elsewhere.OTHER_POOL, Evidence.ANSWERED),
        AttemptOutcome.REFUSED,
    ),
    Blame("gateway", Fault.GATEWAY, True, Elsewhere.NEXT, Evidence.NONE, AttemptOutcome.CANCELLED),
)
BLAME: Mapping[str, Blame] = {row.kind: row for row in _ROWS}  # by kind of failure


_BY_OUTCOME = {
    AttemptOutcome.FAILED: BLAME["server"],
    AttemptOutcome.BROKEN: BLAME["protocol"],
    AttemptOutcome.SILENT: BLAME["timeout"],
    AttemptOutcome.RATE_LIMITED: BLAME["rate_limited"],
    AttemptOutcome.MISCONFIGURED: BLAME["misconfigured"],
    AttemptOutcome.QUOTA: BLAME["quota"],
    AttemptOutcome.REFUSED: BLAME["client"],
    AttemptOutcome.CANCELLED: BLAME["gateway"],
}


def blame_of(outcome: AttemptOutcome, connected: bool = True) -> Blame | None:
    """Blame for an attempt of which only the outcome is known; None: it was answered."""
    if outcome is AttemptOutcome.FAILED and not connected:
        return BLAME["reset"]
    return _BY_OUTCOME.get(outcome)


_REASONS = {
    Fault.CREDENTIAL: "the provider refuses the gateway's key",
    Fault.MODEL: "the server does not know the configured model or path",
    Fault.MONEY: "the gateway's account with the provider is used up",
    Fault.REQUEST_RATE: "rate limit of requests reached",
    Fault.TOKEN_RATE: "rate limit of tokens reached",
    Fault.RATE: "rate limit reached",
    Fault.LOAD: "overloaded",
    Fault.QUEUE: "at the limit of its own queue",
}


def reason(blame: Blame, cause: str) -> str:
    """Reason of an ejection or a limit, for the operator. `cause`: status, code and message of the reply, or the
    socket's error. The message may hold content of the caller: what stands before the first colon is kept."""
    said = cause.partition(":")[0].strip()
    known = _REASONS.get(blame.fault)
    if known is None:
        return said
    return f"{known} ({said})" if said else known
