"""Asks how many engines each pool needs, every minute, and holds the answers.

Rules:
- Replays cost at most CPU_SHARE of a core: a round that took more, or failed, is followed by a longer pause, and the
  next ones replay less.
- Without an answer the last number stands: the present number of engines at first, between the bounds. Where no engine
  has been found yet there is no number: the lower bound would end engines that run.
- Of several gateways one is read, with a part of the sessions; the answer is for all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic, time
from typing import Any

from gateway.cli.gateway_client import Gone
from gateway.config.config_errors import ConfigError
from gateway.config.models import Config
from lab.autoscale.demand import DemandWindow
from lab.autoscale.gateway_reader import FleetState, GatewayReader
from lab.autoscale.replay_process import ReplayFailed, ReplayProcess, ReplicasAnswer, ReplicasJob
from lab.capacity.replica_law import ReplicaLaw
from policies.routes.route import Route
from policies.types import Pool

log = logging.getLogger("firsttoken")

INTERVAL = 60.0  # s
CPU_SHARE = 0.05  # of a core, for replays of all pools
FIRST_COST, LEAST_COST, MOST_COST = 1_000, 200, 50_000  # requests of a round's replays
USED = 0.8  # of the affordable cost: the next traffic may be dearer


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """`start_time`: s from the decision to an engine that serves: pod, model, warm-up."""

    least: int
    most: int
    start_time: float


@dataclass(slots=True)
class PoolScale:
    """`law`: holds the desired number; None: no engine has been found yet."""

    bounds: PoolBounds
    law: ReplicaLaw | None = None
    current: int = 0
    answer: ReplicasAnswer = field(default_factory=ReplicasAnswer)
    answered_at: float | None = None  # Unix time, s

    @property
    def desired(self) -> int | None:
        return None if self.law is None else self.law.desired

    def find(self, engines: int) -> None:
        self.current = engines
        if self.law is None and engines:
            self.law = ReplicaLaw(self.bounds.least, self.bounds.most, engines, monotonic())

    def as_json(self) -> dict[str, Any]:
        return {
            "desired": self.desired,
            "current": self.current,
            "needed": self.answer.needed or None,
            "min": self.bounds.least,
            "max": self.bounds.most,
            "reason": self.answer.reason or "no replay has ended yet",
            "curve": {str(n): share for n, share in self.answer.curve.items()},
            "answered_at": self.answered_at,
        }


class Autoscaler:
    """`configuration`: reads it, for each round anew. `on_answer`: gets a line of JSON for each answer."""

    def __init__(
        self,
        admin: str,
        pools: Mapping[str, PoolBounds],
        configuration: Callable[[], Config],
        on_answer: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._configuration = configuration
        self._config = configuration()
        self._on_answer = on_answer
        self._demand = DemandWindow()
        self._reader = GatewayReader(admin, self._demand)
        self._process = ReplayProcess()
        self._fleet = FleetState()
        self._cost = FIRST_COST
        self._pools = {name: PoolScale(bounds) for name, bounds in pools.items()}
        self._is_away = False
        self._watch_routes()

    def desired(self) -> Mapping[str, int | None]:
        """Replicas by pool; None: not known yet."""
        return {name: scale.desired for name, scale in self._pools.items()}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_forever())
                tasks.create_task(self._ask_forever())
        finally:
            self._process.close()

    # -- read -------------------------------------------------------------------------------

    async def _read_forever(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(self._reader.pause)

    async def read(self) -> None:
        """New Records, and at first the fleet, which KEDA asks for."""
        try:
            self._reader.take(await asyncio.to_thread(self._reader.fetch))
            if not self._fleet.endpoints:
                await self.read_fleet()
        except Gone as gone:
            self._say_away(gone)
        else:
            self._is_away = False

    def _say_away(self, gone: Gone) -> None:
        if not self._is_away:
            self._is_away = True
            log.warning("autoscale: the gateway's admin port cannot be read: %s", gone)

    async def read_fleet(self) -> None:
        """Raises Gone."""
        self._fleet = await asyncio.to_thread(self._reader.fleet)
        for name, scale in self._pools.items():
            scale.find(len(self._fleet.endpoints.get(name, ())))

    def _reload(self) -> None:
        try:
            self._config = self._configuration()
        except ConfigError as error:
            log.warning("autoscale: the configuration cannot be read, the one before stays: %s", error)
        self._watch_routes()

    def _watch_routes(self) -> None:
        scaled = self._pools.keys()
        self._demand.routes = frozenset(
            name for name, route in self._config.named_routes.items() if scaled & {*route.pools}
        )

    # -- ask --------------------------------------------------------------------------------

    async def _ask_forever(self) -> None:
        pause = INTERVAL
        while True:
            await asyncio.sleep(pause)
            cpu = 0.0
            try:
                self._reload()
                await self.read_fleet()
                cpu = await self.ask_all()
            except Gone as gone:
                self._say_away(gone)
            except Exception:
                log.exception("autoscale: the traffic could not be replayed")
            pause = max(INTERVAL, cpu / CPU_SHARE)

    async def ask_all(self) -> float:
        """A round of questions, one for each pool with engines. Returns CPU seconds."""
        asked = [(name, scale) for name, scale in self._pools.items() if scale.current]
        cpu = requests = 0.0
        for name, scale in asked:
            try:
                answer = await self._ask(name, scale, int(self._cost / len(asked)))
            except ReplayFailed as failure:
                self._cost, cpu = max(self._cost // 2, LEAST_COST), cpu + failure.cpu
                log.warning("autoscale: the traffic of pool %s could not be replayed: %s", name, failure)
                continue
            cpu, requests = cpu + answer.cpu, requests + answer.requests
        if requests:
            affordable = USED * INTERVAL * CPU_SHARE * requests / max(cpu, 1e-3)
            self._cost = int(min(max(affordable, LEAST_COST), MOST_COST))
        return cpu

    async def _ask(self, name: str, scale: PoolScale, cost: int) -> ReplicasAnswer:
        scale.answer = answer = await self._process.ask(self._job(name, scale, cost))
        if scale.law is not None:
            scale.law.on_need(answer.needed, monotonic())
        scale.answered_at = round(time(), 3)
        self._on_answer(json.dumps({"pool": name, **scale.as_json()}))
        return answer

    def _job(self, name: str, scale: PoolScale, cost: int) -> ReplicasJob:
        config, found = self._config, self._fleet
        routes = {each: route for each, route in config.named_routes.items() if name in route.pools}
        pools = [self._with_endpoints(pool) for pool in config.fleet() if _is_of(pool, routes.values())]
        return ReplicasJob(
            pool=name,
            current=scale.current,
            least=scale.bounds.least,
            most=scale.bounds.most,
            start_time=scale.bounds.start_time,
            now=time() - self._demand.delay,
            since=self._demand.since,
            cost=cost,
            rows=self._demand.rows(routes),
            pools=tuple(pools),
            routes=routes,
            seen=self._demand.share / found.processes,
            first_token=config.defaults.first_token,
            profiles={each.name: known for each in pools if (known := config.pools[each.name].profile) is not None},
            learned={
                each.name: [found.learned[one.id] for one in each.endpoints if one.id in found.learned]
                for each in pools
            },
            kv_tokens=self._demand.kv_tokens(),
        )

    def _with_endpoints(self, pool: Pool) -> Pool:
        """Those that the gateway has found."""
        return replace(pool, endpoints=tuple(self._fleet.endpoints.get(pool.name, pool.endpoints)))


def _is_of(pool: Pool, routes: Iterable[Route]) -> bool:
    return any(pool.name in route.pools for route in routes)
