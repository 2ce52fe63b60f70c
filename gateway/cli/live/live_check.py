"""`firsttoken check --live`: asks every endpoint for its models and for one token, and reports faults and warnings.

Rules:
- Requests use the gateway's own connections, TLS, proxies, dialects and first-token detection.
- The requests and their price are printed before sending. `--no-tokens` sends only free requests.
- Total time is bounded: STEPS timeouts per endpoint, MAX_ASKED endpoints at a time.
- A first token over budget is measured again: the first request may have waited for a model to load.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import Any

from backends.failures import TransportError
from backends.http.connection_pool import BufferedReply, ConnectionPool
from backends.interface import FailureKind, Operation
from gateway.cli.live import live_findings as findings
from gateway.cli.live.live_facts import (
    EndpointFacts,
    ListingFacts,
    PageFacts,
    TokenFacts,
    likely_urls,
    read_ends,
    read_names,
    read_window,
    secrets_of,
)
from gateway.cli.live.sunsets import sunsets
from gateway.cli.tables import aligned
from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from gateway.config.notes import duration
from gateway.fleet.endpoint_poll import EndpointPoll, PollTarget
from gateway.process import loop_factory, raise_file_limit
from gateway.runtime import Runtime, UpstreamAddress, build_runtime, tokenizers, upstream_addresses
from gateway.synthetic_request import PING, QUESTIONS, send_synthetic, synthetic
from gateway.tokenize.estimator import Estimator
from gateway.tokenize.prompt import prompt_of
from gateway.tokenize.prompt_reader import PromptText
from gateway.tokenize.tokenizers import EncoderError
from policies.fleet.fleet import Fleet
from policies.types import Endpoint, PoolEstimate

TIMEOUT = 10.0  # s of one request
MAX_ASKED = 32  # endpoints at a time
STEPS = 4  # timeouts of one endpoint
MAX_LISTING = 4 << 20  # bytes of a list of models
PROMPT_TOKENS = 16  # of the question, its template included
NAMELESS = "azure"  # lists the models of the resource, not the names of its deployments
LOOKING = 1.0  # s for each place where an API may be


def live_check(config: Config, *, tokens: bool, timeout: float) -> None:
    """Prints the report. Raises ConfigError with the faults."""
    raise_file_limit()
    print(announcement(config, tokens=tokens), flush=True)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            found = runner.run(_ask_all(config, tokens, timeout))
    except EncoderError as error:
        raise ConfigError([str(error)]) from None
    lines, faults = report(config, found)
    print("\n".join(lines), flush=True)
    if faults:
        raise ConfigError(faults)


def announcement(config: Config, *, tokens: bool) -> str:
    """List the requests that the check is going to send, with prices."""
    counts = {name: len(config.addresses_of(name)) for name, pool in config.pools.items() if not pool.caller_keys}
    text = f"live: each of {sum(counts.values())} endpoints is asked for its models"
    asked = [name for name in counts if config.pools[name].model]
    if not tokens or not asked:
        return f"{text}; no tokens, no costs"
    usd = sum(2 * counts[name] * config.pools[name].price_in_force.at_most(PROMPT_TOKENS, 1) for name in asked)
    text += f" and for one token, again where it is late: {usd:.6f} USD at most, by the prices of the pools"
    free = [name for name in asked if not (config.pools[name].kind.local or _priced(config, name))]
    return f"{text} (without a price: {', '.join(free)})" if free else text


def _unasked(config: Config) -> list[str]:
    """A line for pools that cannot be asked."""
    names = [name for name, pool in config.pools.items() if pool.caller_keys]
    return [f"not asked: {', '.join(names)}, for which callers have the keys"] if names else []


def _priced(config: Config, pool: str) -> bool:
    return config.pools[pool].price_in_force.at_most(1, 1) > 0


def report(config: Config, found: Sequence[EndpointFacts]) -> tuple[list[str], list[str]]:
    """Lines of the report, warnings included; and the faults."""
    secrets = secrets_of(config)
    seen = {facts.id: findings.finding(facts, secrets, keyed=findings.is_keyed(config, facts.pool)) for facts in found}
    rows = [("endpoint", "models", "first token", "")]
    for facts in found:
        ttft = None if facts.token is None else facts.token.ttft
        names, problem = facts.listing.names, seen[facts.id]
        cells = "-" if names is None else str(len(names)), "-" if ttft is None else duration(round(ttft, 3))
        rows.append((facts.id, *cells, "ok" if problem is None else problem.kind))
    late = findings.budgets(config, findings.fastest(found))
    everything = [
        *(one for one in seen.values() if one),
        *findings.clock(found),
        *findings.windows(config, found),
        *sunsets(config, found, datetime.now(UTC).date()),
        *late,
    ]
    warnings = [one.line for one in everything if not one.fault]
    notes = [*findings.unset_windows(config, found), *findings.unset_queue_limits(config, found)]
    return [*aligned(rows, {0, 3}), *_unasked(config), *notes, *warnings], [one.line for one in everything if one.fault]


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """The gateway's parts that a request needs."""

    runtime: Runtime
    fleet: Fleet
    estimator: Estimator
    addresses: dict[str, UpstreamAddress]
    tokens: bool
    timeout: float

    def estimate(self, pool: str, operation: Operation, body: Mapping[str, Any] = PING) -> PoolEstimate:
        return self.estimator.estimate(PromptText(prompt_of(operation, body), [pool])).pools[pool]

    def operation(self, pool: str) -> Operation | None:
        """The operation whose body a question is; None: the pool takes no such question."""
        return next((each for each in QUESTIONS if each in self.runtime.operations[pool]), None)


@asynccontextmanager
async def live_fleet(config: Config, *, tokens: bool, timeout: float) -> AsyncIterator[LiveFleet]:
    """`tokens`: requests with prompts will be sent. `timeout`: s of a request."""
    runtime, fleet = build_runtime(config), Fleet(config.fleet())
    estimator = Estimator(tokenizers(config), fleet.view.token_scale)
    try:
        if tokens:
            estimator.warm()  # else the first request waits for the vocabularies
        yield LiveFleet(runtime, fleet, estimator, upstream_addresses(config), tokens, timeout)
    finally:
        await asyncio.gather(*(pool.close() for pool in runtime.connections.values()))
        estimator.close()


async def _ask_all(config: Config, tokens: bool, timeout: float) -> list[EndpointFacts]:
    """In the order of the configuration."""
    places = asyncio.Semaphore(MAX_ASKED)
    async with live_fleet(config, tokens=tokens, timeout=timeout) as live:

        async def one(endpoint: Endpoint) -> EndpointFacts:
            async with places:
                return await ask_endpoint(live, endpoint)

        pools = [pool for name, pool in live.runtime.pools.items() if not config.pools[name].caller_keys]
        endpoints = [endpoint for pool in pools for endpoint in pool.endpoints]
        return list(await asyncio.gather(*map(one, endpoints)))


async def ask_endpoint(live: LiveFleet, endpoint: Endpoint) -> EndpointFacts:
    """Asks for the models, and for a token where `live.tokens`."""
    config, pool = live.runtime.config, endpoint.pool
    section = config.pools[pool]
    adapters = () if section.adapters is None else section.adapters.names
    models = () if section.backend == NAMELESS else (*((section.model,) if section.model else ()), *adapters)
    url = live.addresses[endpoint.id].url
    facts = EndpointFacts(endpoint.id, pool, url, models, section.kind.local, ListingFacts(), overdue=True)
    with suppress(TimeoutError):
        async with asyncio.timeout(STEPS * live.timeout):
            facts = replace(facts, listing=await _list_models(live, endpoint))
            if facts.listing.status:
                facts = replace(facts, page=await _read_page(live, endpoint))
            if facts.listing.status and facts.listing.status != 401 and live.tokens and not facts.page.asleep:
                facts = replace(facts, token=await _ask_tokens(live, endpoint))
            facts = replace(facts, overdue=False)
    return facts


async def _list_models(live: LiveFleet, endpoint: Endpoint) -> ListingFacts:
    upstream = live.runtime.upstreams[endpoint.id]
    try:
        reply = await upstream.connections.fetch(upstream.backend.listing(), live.timeout, MAX_LISTING)
    except TransportError as error:
        return ListingFacts(failure=error.failure, certificate=_certificate_fault(error))
    skew = _skew(reply)
    if 200 <= reply.status < 300 and (names := read_names(reply.body)) is not None:
        window = read_window(reply.body, [live.runtime.pools[endpoint.pool].model])
        return ListingFacts(reply.status, names, skew=skew, window=window, ends=read_ends(reply.body))
    failure = None
    if not 200 <= reply.status < 300:
        failure = upstream.backend.failure(reply.status, reply.headers, reply.body)
    elsewhere = await _find_api(live, endpoint) if _may_be_path(reply.status) else ""
    return ListingFacts(reply.status, None, failure, skew=skew, elsewhere=elsewhere)


async def _read_page(live: LiveFleet, endpoint: Endpoint) -> PageFacts:
    """Read the load page like the gateway's polls."""
    upstream = live.runtime.upstreams[endpoint.id]
    if upstream.backend.load() is None:
        return PageFacts()
    poll = EndpointPoll(endpoint.id, PollTarget(upstream.connections, upstream.backend, upstream.pool), 0.0)
    found = await poll.ask()
    asleep = found.load is not None and bool(found.load.asleep)
    return PageFacts(found.fault, bool(found.other_ranks), asleep)


def _certificate_fault(error: TransportError) -> str:
    cause = error.__cause__
    return cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else ""


def _may_be_path(status: int) -> bool:
    return status < 400 or status in (404, 405)


def _skew(reply: BufferedReply) -> float | None:
    """Seconds that the server's clock is ahead, to a second."""
    try:
        return parsedate_to_datetime(reply.headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError, TypeError, OverflowError):
        return None


async def _find_api(live: LiveFleet, endpoint: Endpoint) -> str:
    """The base URL of this host at which models are listed; empty: none of the likely ones."""
    upstream, address = live.runtime.upstreams[endpoint.id], live.addresses[endpoint.id]
    for url in likely_urls(address.url, findings.default_url(live.runtime.config, endpoint.pool)):
        tls = None if address.tls is None else address.tls.context()
        connections = ConnectionPool(url, connect_timeout=LOOKING, tls=tls, proxy=address.proxy)
        with suppress(TransportError):
            reply = await connections.fetch(upstream.backend.listing(), LOOKING, MAX_LISTING)
            if reply.status == 401 or (reply.status == 200 and read_names(reply.body) is not None):
                return url
        await connections.close()
    return ""


async def _ask_tokens(live: LiveFleet, endpoint: Endpoint) -> TokenFacts | None:
    """The faster of two first tokens, if the first one is later than a budget."""
    upstream = live.runtime.upstreams[endpoint.id]
    operation = live.operation(endpoint.pool)
    if operation is None or not upstream.model:
        return None
    facts = await _ask_token(live, endpoint, operation)
    if facts.ttft is None or facts.ttft <= _tightest(live.runtime.config, endpoint.pool):
        return facts
    again = await _ask_token(live, endpoint, operation)
    return facts if again.ttft is None or again.ttft > facts.ttft else again


def _tightest(config: Config, pool: str) -> float:
    """The shortest TTFT budget of the routes of a pool."""
    budgets = [route.ttft.budget for route in config.all_routes if route.ttft is not None and pool in route.pools]
    return min(budgets, default=float("inf"))


async def _ask_token(live: LiveFleet, endpoint: Endpoint, operation: Operation) -> TokenFacts:
    upstream = live.runtime.upstreams[endpoint.id]
    estimate = live.estimate(endpoint.pool, operation)
    request = synthetic(upstream, operation, PING, upstream.model)
    began = monotonic()
    wire = await send_synthetic(live.fleet, endpoint, upstream, request, estimate, live.timeout)
    if wire.times.first_in is not None:
        return TokenFacts(ttft=wire.times.first_in - began)
    if wire.failure is not None and wire.failure.kind is FailureKind.TIMEOUT:
        return TokenFacts()
    return TokenFacts(failure=wire.failure)
