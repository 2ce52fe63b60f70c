"""Faults and warnings of `check --live`, each in one line with its mend, from the facts of the endpoints.

A fault is what a request of a caller would meet; a warning is what it would not, or not always.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from backends.catalog import KINDS
from backends.interface import RATE_LIMITS, Failure, FailureKind
from gateway.cli.live.live_facts import EndpointFacts, harmless
from gateway.config.config_errors import dotted, nearest
from gateway.config.models import Config
from gateway.config.notes import duration
from policies.routes.route import Route, Ttft

MAX_SKEW = 30.0  # s between two clocks
HEADROOM = 1.5  # budget that is proposed, in times of what was measured
NO_MATTER = "of no matter if the pool is for embeddings or reranking, or its model reasons before its first token"
WAKE = "wake it (POST /wake_up), or write wake: true into its pool"
UNKNOWN_LOAD = "its own requests are counted, and it is used; switch the engine's metrics on, or look into its log"
_UNREACHABLE = (  # beginning of the cause, and the mend
    ("connection refused", "start the server, or correct the port"),
    ("no connection", "correct the address, start the host, or let the connection through the firewall"),
    ("name not resolved", "correct the host name"),
    ("name leads to", "correct the host name: it leads to an address of this machine's cloud, or to none"),
    ("TLS handshake failed", "write http:// if the server has no TLS; else correct its TLS settings"),
    ("connection closed", "correct the port: what listens there closes at once"),
    ("proxy", "correct `proxy` of the pool, or let the proxy open this connection"),
    ("not HTTP", "correct the port, or write https:// if the server has TLS: what listens there speaks no HTTP"),
    ("the server closed", "write https:// if the server has TLS; else look into the log of the server"),
    ("a reply larger", "correct the URL: a list of models is not as large as this"),
    ("no answer within", "look at the server: it accepts connections and does not answer"),
)
_CERTIFICATES = (  # part of OpenSSL's words, and the mend
    ("has expired", "renew the certificate of the server"),
    ("not yet valid", "set the clock of this machine, or wait until the certificate is valid"),
    ("self-signed", "write the certificate of its authority into tls: {ca: FILE} of the pool"),
    ("self signed", "write the certificate of its authority into tls: {ca: FILE} of the pool"),
    ("issuer", "write the certificate of its authority into tls: {ca: FILE} of the pool"),
    ("mismatch", "write the host name that the certificate has into the URL"),
    ("not valid for", "write the host name that the certificate has into the URL"),
)
_PASSING = frozenset(
    {*RATE_LIMITS, FailureKind.QUEUE_LIMIT, FailureKind.OVERLOADED, FailureKind.SERVER, FailureKind.PROVIDER}
)
_LOST = frozenset(
    {FailureKind.CONNECT, FailureKind.UNRESOLVED, FailureKind.RESET, FailureKind.TIMEOUT, FailureKind.PROTOCOL}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """`kind`: one word for the table."""

    kind: str
    text: str
    fault: bool = True

    @property
    def line(self) -> str:
        return f"{'fault' if self.fault else 'warning'}: {self.text}"


def finding(facts: EndpointFacts, secrets: Sequence[str], *, keyed: bool) -> Finding | None:
    """The first cause of an endpoint's trouble; None: the endpoint is well. `keyed`: its pool has a key."""
    listing, token = facts.listing, facts.token
    if facts.overdue:
        return _of(facts, "silent", "took longer than its time", "look at the server: its replies do not end")
    if listing.certificate:
        return _certificate(facts)
    if listing.failure is not None and (not listing.status or listing.status == 401):
        return _failed(facts, listing.failure, secrets, keyed)
    if facts.page.asleep:
        return _of(facts, "asleep", "is asleep: it gets no request until it is woken", WAKE, fault=False)
    if token is None:
        return _without_token(facts, secrets, keyed) or _of_page(facts, secrets)
    if token.failure is not None and facts.page.other_ranks:
        return _of(facts, "rank", harmless(facts.page.fault, secrets), "correct dp_rank of the endpoint")
    if token.failure is not None:
        return _failed(facts, token.failure, secrets, keyed)
    if token.ttft is None:
        return _of(facts, "silent", "has sent no token in its time", "look at the server, or raise --timeout")
    return _of_page(facts, secrets)


def _of_page(facts: EndpointFacts, secrets: Sequence[str]) -> Finding | None:
    """Callers are answered, and the load is not known."""
    words = harmless(facts.page.fault, secrets)
    if facts.page.other_ranks:
        return _of(facts, "rank", words, "correct dp_rank of the endpoint", fault=facts.token is None)
    return _of(facts, "load", f"its load is not known: {words}", UNKNOWN_LOAD, fault=False) if words else None


def _without_token(facts: EndpointFacts, secrets: Sequence[str], keyed: bool) -> Finding | None:
    listing = facts.listing
    if listing.failure is not None and listing.failure.kind is not FailureKind.CONTENT:
        return _failed(facts, listing.failure, secrets, keyed)
    if listing.names is None:
        return _path(facts, "has no list of models there")
    return _unlisted(facts, secrets, fault=facts.local) if facts.missing else None


def _failed(facts: EndpointFacts, failure: Failure, secrets: Sequence[str], keyed: bool) -> Finding:
    cause = harmless(failure.said, secrets)
    if failure.kind is FailureKind.AUTH:
        return _key(facts, cause, keyed)
    if failure.kind is FailureKind.QUOTA:
        return _of(facts, "unpaid", f"answers: {cause}", "pay, or raise the limit of the account")
    if failure.kind in (FailureKind.MISCONFIGURED, FailureKind.UNSUPPORTED, FailureKind.CONTENT):
        return _not_found(facts, cause, secrets)
    if failure.kind in _PASSING:
        return _of(facts, "failing", f"answers: {cause}", "look at the server, or try again", fault=False)
    if failure.kind in _LOST:
        return _unreachable(facts, cause)
    words = f"refuses a chat of one token: {harmless(failure.message, secrets)}"
    return _of(facts, "refusing", words, NO_MATTER, fault=False)


def _certificate(facts: EndpointFacts) -> Finding:
    words = harmless(facts.listing.certificate, ())
    mend = next((mend for part, mend in _CERTIFICATES if part in words), "correct the certificate of the server")
    return _of(facts, "certificate", f"has a certificate that cannot be verified: {words}", mend)


def _unreachable(facts: EndpointFacts, cause: str) -> Finding:
    if "redirect" in cause or 300 <= facts.listing.status < 400:
        return _path(facts, "answers with a redirect, which is never followed")
    return _of(facts, "unreachable", cause, mend_of(cause))


def mend_of(cause: str) -> str:
    """The mend of a failed connection."""
    return next((mend for part, mend in _UNREACHABLE if cause.startswith(part)), "look at the server, and at the URL")


def _key(facts: EndpointFacts, cause: str, keyed: bool) -> Finding:
    place = dotted(("pools", facts.pool))
    if keyed:
        name = "api_keys" if "/key" in facts.id else "api_key"
        return _of(facts, "key", f"refuses the key: {cause}", f"correct the variable in {name} of {place}")
    return _of(facts, "key", f"wants a key: {cause}", f'add api_key: "${{NAME}}" to {place}')


def _not_found(facts: EndpointFacts, cause: str, secrets: Sequence[str]) -> Finding:
    if facts.listing.names is None:
        return _path(facts, f"has no API there ({cause})")
    if facts.missing:
        return _unlisted(facts, secrets, fault=True)
    return _of(facts, "model", f"lists the model and refuses it: {cause}", "take another model, or look at the server")


def _unlisted(facts: EndpointFacts, secrets: Sequence[str], *, fault: bool) -> Finding:
    names, missing = sorted(harmless(name, secrets) for name in facts.listing.names or ()), facts.missing[0]
    hint = nearest(missing, names)
    known = f"; it has {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names and not hint else ""
    mend = f"correct the model of {dotted(('pools', facts.pool))}{hint}{known}"
    return _of(facts, "model", f"does not know the model '{missing}'", mend, fault=fault)


def _path(facts: EndpointFacts, words: str) -> Finding:
    if facts.listing.elsewhere:
        return _of(facts, "path", words, f"write {facts.listing.elsewhere}")
    return _of(facts, "path", words, "correct the path of the URL: it is the one before /chat/completions")


def _of(facts: EndpointFacts, kind: str, words: str, mend: str, *, fault: bool = True) -> Finding:
    return Finding(kind, f"{facts.id} ({facts.url}): {words}; {mend}", fault)


# --------------------------------------------------------------------------- of all endpoints


def clock(found: Sequence[EndpointFacts]) -> Iterator[Finding]:
    """Clocks that differ by more than MAX_SKEW seconds; that of this machine, where the median endpoint differs."""
    skews = {facts.id: facts.listing.skew for facts in found if facts.listing.skew is not None}
    if not skews:
        return
    middle = median(skews.values())
    if len(skews) > 1 and abs(middle) > MAX_SKEW:
        yield Finding("clock", f"the clock of this machine is {_apart(-middle)} its endpoints; set it (NTP)", False)
        return
    for id, skew in skews.items():
        if abs(skew) > MAX_SKEW:
            mend = "set the wrong one (NTP): certificates and limits of rates go by it"
            yield Finding("clock", f"the clock of {id} is {_apart(skew)} this machine's; {mend}", False)


def windows(config: Config, found: Sequence[EndpointFacts]) -> Iterator[Finding]:
    """Pools with a larger context window than their servers tell."""
    for pool, window in _windows(found).items():
        if (known := config.pools[pool].context_window) is not None and known > window:
            text = f"context_window of {dotted(('pools', pool))} is {known}, and its servers take {window}; lower it"
            yield Finding("window", text, False)


def unset_windows(config: Config, found: Sequence[EndpointFacts]) -> Iterator[str]:
    """A note for each pool without the context window that its servers tell."""
    for pool, window in _windows(found).items():
        if config.pools[pool].context_window is None:
            yield f"note: {dotted(('pools', pool))} takes prompts of any length; add context_window: {window}"


_QUEUE_FLAGS = {"vllm": "vLLM with --max-num-queued-reqs", "sglang": "SGLang with --max-queued-requests"}


def unset_queue_limits(config: Config, found: Sequence[EndpointFacts]) -> Iterator[str]:
    """A note for each pool whose engines answer and take any number of requests, as far as the gateway knows."""
    for pool in dict.fromkeys(facts.pool for facts in found if facts.listing.status == 200):
        section = config.pools[pool]
        if section.concurrent_requests is None and (flag := _QUEUE_FLAGS.get(section.backend)) is not None:
            yield (
                f"note: {dotted(('pools', pool))} takes any number of requests at once; start {flag}, "
                "whose refusals teach the gateway the limit, or add concurrent_requests"
            )


def _windows(found: Sequence[EndpointFacts]) -> Mapping[str, int]:
    """The least that the servers of a pool tell, by pool."""
    told: dict[str, int] = {}
    for facts in found:
        if (window := facts.listing.window) is not None:
            told[facts.pool] = min(window, told.get(facts.pool, window))
    return told


def _apart(skew: float) -> str:
    return f"{duration(round(abs(skew)))} {'ahead of' if skew > 0 else 'behind'}"


def budgets(config: Config, best: Mapping[str, tuple[float, str]]) -> Iterator[Finding]:
    """Routes with a TTFT budget below the time that the best endpoint, idle, has needed for one token.

    `best`: seconds and id of the fastest endpoint, by pool.
    """
    for route in config.all_routes:
        known = [best[pool] for pool in route.pools if pool in best]
        if known and route.ttft is not None and min(known)[0] > route.ttft.budget:
            yield Finding("budget", _too_short(config, route, route.ttft, *min(known)), False)


def infeasible(config: Config, best: Mapping[str, tuple[float, str]]) -> Iterator[Finding]:
    """The same as faults, by a profile: of routes whose pools are all known, for another one may be faster."""
    for route in config.all_routes:
        if route.ttft is not None and best.keys() >= {*route.pools}:
            seconds, id = min(best[pool] for pool in route.pools)
            if seconds > route.ttft.budget:
                yield Finding("budget", _too_short(config, route, route.ttft, seconds, id))


def _too_short(config: Config, route: Route, ttft: Ttft, seconds: float, id: str) -> str:
    place = "passthrough" if route is config.passthrough_route else dotted(("routes", route.name, "ttft", "budget"))
    return (
        f"{place} is {duration(ttft.budget)}, and its best endpoint, {id}, has needed"
        f" {duration(round(seconds, 3))} idle; raise it to {_proposal(seconds)}, or add a faster pool"
    )


def _proposal(seconds: float) -> str:
    """A budget with headroom, of two digits."""
    return duration(float(f"{seconds * HEADROOM:.2g}"))


def fastest(found: Sequence[EndpointFacts]) -> Mapping[str, tuple[float, str]]:
    """TTFT and id of the fastest endpoint, by pool."""
    best: dict[str, tuple[float, str]] = {}
    for facts in found:
        if facts.token is not None and facts.token.ttft is not None:
            best[facts.pool] = min(best.get(facts.pool, (facts.token.ttft, facts.id)), (facts.token.ttft, facts.id))
    return best


def is_keyed(config: Config, pool: str) -> bool:
    section = config.pools[pool]
    return any(section.keys) or bool({"authorization", "api-key", "x-api-key"} & section.headers.keys())


def default_url(config: Config, pool: str) -> str | None:
    return KINDS[config.pools[pool].backend].base_url
