"""The simulated side of a replay: the scenario, virtual time, engines and APIs, faults, messages between replicas.

Rules:
- Nothing here decides or predicts: requests go in, events come out in time order.
- A server runs only up to the next possible change of input: a request reaches the scheduler `overhead`
  seconds after it was sent, so the outcome between two sends is exact.
- A hung request is accepted and never answered, as behind a stuck server thread. Killing the server loses the request.
- The gateway counts events of a stream, never tokens: with several tokens per event, their number is learned from the
  usage that ends an answer. The first token is an event of its own, as with vLLM's `--stream-interval`. The text of an
  event is taken to be too short to tell its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, merge
from itertools import count
from random import Random
from typing import Any

from backends.server_profiles import PROFILES, ApiProfile, Profile
from gateway.cluster.gossip import FULL_INTERVAL, SEND_INTERVAL, Peers, PendingUpdates
from gateway.config.models import Config
from gateway.config.pool_section import PoolSection
from gateway.records.log_entries import ChosenBreaks
from lab.engines.engine import Engine
from lab.engines.engine_events import EngineRequest, Event, RequestId
from lab.engines.kv_cache import CacheChange
from lab.engines.lora_adapters import LoraAdapters
from lab.engines.virtual_engine import HostedApi, VirtualEngine
from lab.scorers.research_scorers import REPLAY_SCORERS
from lab.traffic.traces import BLOCK
from policies.fleet.engine_load import EngineLoad
from policies.fleet.peers import PeerLoad, PeerReader
from policies.routes.route import Route
from policies.types import FOREVER, Pool
from policies.variants import Variants

API_OVERHEAD = 0.015  # s, for a fleet of APIs only: far below their shortest TTFT


class Clock:
    """Virtual time. The owner advances `now`; timers due at the same time run in the order of their registration."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    @property
    def upcoming(self) -> float:
        return self._timers[0][0] if self._timers else FOREVER

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        heappush(self._timers, (max(when, self.now), next(self._order), act, args))

    def run(self) -> None:
        """Run all due timers, including timers due meanwhile."""
        while self.upcoming <= self.now:
            _, _, act, args = heappop(self._timers)
            act(*args)


# ---------------------------------------------------------------- servers


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """At `at` seconds: `slow` (steps take `factor` times as long; 1 restores), `kill` or `restart` of an endpoint;
    `cold`: its cache is that of a new engine, and its requests go on."""

    at: float
    endpoint: str
    kind: str
    factor: float = 1.0


class SimFleet:
    """`profiles` by endpoint id. `hung`: share of requests that are never answered; `adapters`: LoRA adapters by
    endpoint id; `tokens_per_event`: of the streams of engines; `block`: tokens per hash of a prompt."""

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        seed: int = 0,
        hung: float = 0.0,
        adapters: Mapping[str, Variants | None] | None = None,
        tokens_per_event: int = 1,
        block: int = BLOCK,
    ) -> None:
        held = adapters or {}
        self._tokens_per_event = tokens_per_event
        self.servers = {
            endpoint: _server(profile, seed * 1000 + i, held.get(endpoint), block)
            for i, (endpoint, profile) in enumerate(profiles.items())
        }
        self._random = Random(seed)
        self._hung = hung
        self._hanging: dict[RequestId, str] = {}
        self._started_at = dict.fromkeys(profiles, 0.0)
        engines = [server.engine for server in self.servers.values() if isinstance(server, VirtualEngine)]
        # Seconds that servers may run ahead of the next request.
        self.overhead = min((engine.profile.overhead for engine in engines), default=API_OVERHEAD)

    def submit(self, endpoint: str, request: EngineRequest, now: float) -> None:
        """Raises Refused if the server declines the request now, ValueError above the limits of the server."""
        server = self.servers[endpoint]
        if self._hung and server.alive and self._random.random() < self._hung:
            self._hanging[request.id] = endpoint
        else:
            server.submit(request, now)

    def abort(self, endpoint: str, request_id: RequestId) -> None:
        if self._hanging.pop(request_id, None) is None:
            self.servers[endpoint].abort(request_id)

    def run_until(self, until: float) -> Iterable[Event]:
        """Events up to `until`, in time order."""
        streams = [events for server in self.servers.values() if (events := server.run_until(until))]
        return streams[0] if len(streams) == 1 else merge(*streams, key=lambda event: event.at)

    def apply_fault(self, fault: ScheduledFault, now: float) -> tuple[RequestId, ...]:
        """Returns the requests lost."""
        server = self.servers[fault.endpoint]
        if fault.kind == "slow":
            server.slow(fault.factor)
        elif fault.kind == "kill":
            hanging = [key for key, endpoint in self._hanging.items() if endpoint == fault.endpoint]
            for key in hanging:
                del self._hanging[key]
            return (*server.kill(), *hanging)
        else:
            server.forget() if fault.kind == "cold" else server.restart(now)
            self._started_at[fault.endpoint] = now
        return ()

    def progress(self, endpoint: str) -> Iterable[tuple[RequestId, int]]:
        """Events so far in the stream of each running request."""
        server = self.servers[endpoint]
        tokens = server.engine.progress() if isinstance(server, VirtualEngine) else ()
        if self._tokens_per_event == 1:
            return tokens
        return [(key, events_of(count, self._tokens_per_event)) for key, count in tokens]

    def listen(self, endpoint: str) -> None:
        """The engine publishes KV events from now on."""
        if isinstance(server := self.servers[endpoint], VirtualEngine):
            server.engine.cache.changes = []

    def cache_changes(self, endpoint: str) -> Sequence[CacheChange]:
        """KV events since the last call."""
        server = self.servers[endpoint]
        if not isinstance(server, VirtualEngine) or not (changes := server.engine.cache.changes):
            return ()
        server.engine.cache.changes = []
        return changes

    def load_of(self, endpoint: str) -> EngineLoad | None:
        """Metrics that a scrape would return; None for an API or a dead engine."""
        server = self.servers[endpoint]
        if not isinstance(server, VirtualEngine) or not server.alive:
            return None
        engine = server.engine
        return EngineLoad(
            running=engine.running,
            waiting=engine.waiting,
            kv_usage=engine.kv_usage,
            block_size=engine.profile.block_size,
            kv_blocks=engine.profile.num_blocks,
            started_at=self._started_at[endpoint],
            prefix_queries=float(engine.prefix_queries),
            prefix_hits=float(engine.prefix_hits),
            variants=tuple(sorted(engine.running_adapters)) if engine.adapters.names else (),
        )


def events_of(tokens: int, per_event: int) -> int:
    """Events written after `tokens` tokens: the first token alone, then `per_event` at a time."""
    return 1 + (tokens - 1) // per_event


def _server(profile: Profile, seed: int, adapters: Variants | None, block: int) -> VirtualEngine | HostedApi:
    if isinstance(profile, ApiProfile):
        return HostedApi(profile, seed)
    longest = max(profile.max_model_len, profile.kv_tokens)
    held = None if adapters is None else LoraAdapters(set(adapters.names), adapters.slots, adapters.load_s)
    return VirtualEngine(Engine(replace(profile, block_size=block, max_model_len=longest), seed, held))


# ---------------------------------------------------------------- messages between replicas


class Node:
    """Implements `policies.fleet.peers.PeerLink` for one replica, and joins `nodes`, the replicas linked over Redis.

    `delay`: s of a message in transit; None: every message is lost.
    """

    def __init__(self, clock: Clock, delay: float | None, nodes: list[Node], knows: Callable[[str], bool]) -> None:
        name = len(nodes).to_bytes(8, "little")
        self.outbox = PendingUpdates(name, name)
        self.peers = Peers(name, knows)
        self._clock = clock
        self._delay = delay
        self._nodes = nodes
        self._scheduled = False
        nodes.append(self)
        clock.at(0.0, self._send_periodically)

    def publish(self, endpoint_id: str, burden: PeerLoad) -> None:
        self.outbox.publish(endpoint_id, burden)
        self._schedule()

    def publish_prompt(self, endpoint_id: str, hashes: Sequence[int]) -> None:
        self.outbox.publish_prompt(endpoint_id, hashes)
        self._schedule()

    def merge(self, reader: PeerReader, now: float) -> None:
        self.peers.merge(reader, now)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._clock.at(self._clock.now + SEND_INTERVAL, self._send)

    def _send(self) -> None:
        self._scheduled = False
        message = self.outbox.message(self._clock.now)
        if message is not None and self._delay is not None:
            self._clock.at(self._clock.now + self._delay, self._deliver, message)

    def _deliver(self, raw: bytes) -> None:
        for node in self._nodes:  # the sender ignores own messages
            node.peers.on_message(raw, self._clock.now)

    def _send_periodically(self) -> None:
        self._send()
        self._clock.at(self._clock.now + FULL_INTERVAL, self._send_periodically)


ENGINE, API = "8b-h100", "api"  # profiles where the configuration names none
OURS, REFERENCE, POOLED = "ours", "reference", "pooled:"
REFERENCE_LRU = "reference_lru"  # real caches in place of perfect ones
REFERENCES = (REFERENCE, REFERENCE_LRU)
BASELINES = tuple(name for name in REPLAY_SCORERS if name != "predicted")
POOLABLE = ("least_request", "lpwl", "lmetric", "token_load", "argmin_ttft")  # scores that are comparable between pools
SCORERS = (OURS, *BASELINES, *(POOLED + name for name in POOLABLE), *REFERENCES)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`profiles` by endpoint id. `scorer`: one of SCORERS; `ours` leaves every route as configured.

    `starts`: time at which each late server comes up, by endpoint id. Until then connections are refused and probes
    fail; others are up before the gateway.
    """

    pools: tuple[Pool, ...]
    routes: Mapping[str, Route]
    profiles: Mapping[str, Profile]
    faults: tuple[ScheduledFault, ...] = ()
    starts: Mapping[str, float] = field(default_factory=dict)  # s
    tokens_per_event: int = 1  # of the streams of engines
    late_counts: bool = False  # gateways know the tokens of answers in progress as of their count before
    hung: float = 0.0  # share of requests that an engine accepts and never answers
    first_token: float = 120.0  # s: limit of a silent attempt, and of the time in the queue
    scorer: str = OURS
    workers: int = 1  # gateway processes on one machine
    replicas: int = 1  # gateways on separate machines, one process each
    peer_delay: float | None = 0.002  # s until replicas receive each other's updates; None: never
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant; 1 where absent
    score_per_1k: float | None = None  # s per 1,000 new tokens in scored TTFT budgets; None: as the routes say
    returns: int = 0  # times that a refused caller comes back when Retry-After says; SDKs of OpenAI and Anthropic: 2
    block: int = BLOCK  # tokens per hash of a prompt
    kv_events: tuple[str, ...] = ()  # media of KV events that the one gateway process hears: gpu, cpu
    repaired: ChosenBreaks | None = None  # breaks of prefixes that access logs are played without
    seconds: float = 0.0  # of offered traffic: no session takes a turn later; 0: until the last arrival

    @property
    def scored_routes(self) -> Mapping[str, Route]:
        """Routes with the TTFT budgets that results are scored by: one measure for policies with different budgets."""
        if self.score_per_1k is None:
            return self.routes
        growth = {"per_1k_tokens": self.score_per_1k or None}
        budgets = {name: route.ttft and route.ttft.model_copy(update=growth) for name, route in self.routes.items()}
        return {name: route.model_copy(update={"ttft": budgets[name]}) for name, route in self.routes.items()}

    @property
    def all_faults(self) -> tuple[ScheduledFault, ...]:
        """Scheduled faults: `faults`, and a kill at 0 s and a restart for each endpoint of `starts`."""
        down = (ScheduledFault(0.0, endpoint, "kill") for endpoint in self.starts)
        up = (ScheduledFault(at, endpoint, "restart") for endpoint, at in self.starts.items())
        return (*down, *up, *self.faults)

    @property
    def clairvoyant(self) -> bool:
        return self.scorer in REFERENCES

    @property
    def perfect_caches(self) -> bool:
        return self.scorer != REFERENCE_LRU

    @property
    def pooled(self) -> bool:
        return self.scorer.startswith(POOLED)

    @property
    def first_token_limit(self) -> float:
        """Seconds that an attempt may be silent. The references have no limit."""
        return FOREVER if self.clairvoyant else self.first_token

    @property
    def queue_limit(self) -> float:
        """Seconds that a request may be queued. With perfect caches, late requests take nothing from others."""
        return FOREVER if self.scorer == REFERENCE else self.first_token

    def with_scorer(self, scorer: str) -> Scenario:
        """The same scenario with a baseline or the clairvoyant reference in place of the configured policy."""
        if scorer not in SCORERS:
            raise ValueError(f"no scorer '{scorer}'; known: {', '.join(SCORERS)}")
        if scorer in REFERENCES:
            return replace(self, scorer=scorer, routes=self.scored_routes)
        if scorer == OURS:
            return replace(self, scorer=scorer)
        # A copy is not validated: routes of a configuration cannot name research scorers.
        update = {"scorer": scorer.removeprefix(POOLED), "hedge": "off", "rescue": "off"}
        routes = {name: route.model_copy(update=update) for name, route in self.routes.items()}
        return replace(self, routes=routes, scorer=scorer)


def scenario_from(config: Config) -> Scenario:
    """The pools and routes of a configuration, with a simulated server per endpoint.

    A pool with API profiles is remote to the decision too, whatever the backend kind.
    """
    profiles = {name: dict(_profiles(name, pool)) for name, pool in config.pools.items()}
    apis = {
        name for name, found in profiles.items() if any(isinstance(profile, ApiProfile) for profile in found.values())
    }
    return Scenario(
        pools=tuple(replace(pool, local=pool.local and pool.name not in apis) for pool in config.fleet()),
        routes=dict(config.named_routes),
        profiles={endpoint: profile for found in profiles.values() for endpoint, profile in found.items()},
        first_token=config.defaults.first_token,
        workers=config.server.workers,
    )


def _profiles(name: str, pool: PoolSection) -> Iterator[tuple[str, Profile]]:
    """By endpoint id: the endpoint's own profile, else the pool's, else the default of the backend kind."""
    own = {endpoint.url: endpoint.profile for endpoint in pool.endpoints}  # a resolved host name counts as one server
    for endpoint, address in pool.addresses(name, None).items():
        yield endpoint, PROFILES[own.get(address.url) or pool.profile or _default_profile(pool)]


def _default_profile(pool: PoolSection) -> str:
    return ENGINE if pool.kind.local else API


def assumed_profiles(config: Config) -> dict[str, str]:
    """Pools without a configured profile, and the assumed profiles."""
    return {
        name: _default_profile(pool)
        for name, pool in config.pools.items()
        if pool.profile is None and not (pool.endpoints and all(endpoint.profile for endpoint in pool.endpoints))
    }
