"""Asks how many engines each pool with `autoscale` needs, every minute, and publishes the answers.

Rules:
- Replays cost at most CPU_SHARE of a core: a round that took more, or failed, is followed by a longer pause, and the
  next ones replay less.
- Without an answer the last number stands: the present number of engines at first, between `min` and `max`. Where no
  engine has been found yet there is no number: `min` would end engines that run.
- Of several gateways, or workers, each sees a part of the sessions, and asks for engines for all: the leader of the
  workers alone asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.autoscale.demand import DemandWindow
from gateway.autoscale.replay_child import ChildFailed, ReplayChild
from gateway.autoscale.replay_messages import ReplicasAnswer, ReplicasJob
from gateway.config.pool_section import AutoscaleSection
from gateway.observe.metrics.series import counter, gauge
from gateway.observe.recorder import Recorder
from gateway.runtime import RuntimeHolder
from policies.autoscale.replica_law import ReplicaLaw
from policies.fleet.fleet import Fleet
from policies.latency.learned_state import LearnedEndpoint

log = logging.getLogger("firsttoken")

INTERVAL = 60.0  # s
CPU_SHARE = 0.05  # of a core, for replays of all pools
FIRST_COST, LEAST_COST, MOST_COST = 1_000, 200, 50_000  # requests of a round's replays
USED = 0.8  # of the affordable cost: the next traffic may be dearer


@dataclass(slots=True)
class PoolScale:
    """`law`: holds the desired number; None: no engine has been found yet."""

    section: AutoscaleSection
    law: ReplicaLaw | None
    current: int = 0
    answer: ReplicasAnswer = field(default_factory=ReplicasAnswer)
    answered_at: float | None = None  # Unix time, s

    @property
    def desired(self) -> int | None:
        return None if self.law is None else self.law.desired

    def as_json(self) -> dict[str, Any]:
        return {
            "desired": self.desired,
            "current": self.current,
            "needed": self.answer.needed or None,
            "min": self.section.min,
            "max": self.section.max,
            "reason": self.answer.reason or "no replay has ended yet",
            "curve": {str(n): share for n, share in self.answer.curve.items()},
            "answered_at": self.answered_at,
        }


class Autoscaler(Collector):
    """Gets the Records of `recorder` while a pool is scaled. `processes`: gateways and workers that share the traffic,
    this one included."""

    def __init__(self, recorder: Recorder, fleet: Fleet, runtime: RuntimeHolder, processes: Callable[[], int]) -> None:
        self._fleet = fleet
        self._runtime = runtime
        self._recorder = recorder
        self._demand = DemandWindow(recorder.lives)
        self._processes = processes
        self._child = ReplayChild()
        self._cost = FIRST_COST
        self._pools: Mapping[str, PoolScale] = {}
        self._replays = counter("firsttoken_replica_replays_total")
        self._seconds = counter("firsttoken_replica_replay_seconds_total")
        self._task: asyncio.Task[None] | None = None
        self.reload()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._ask_forever())

    def reload(self) -> None:
        """Takes over the pools of the configuration in force, and keeps the traffic of their routes from now on."""
        runtime = self._runtime.current
        self._pools = {
            name: self._scale(name, section.autoscale, len(runtime.pools[name].endpoints))
            for name, section in runtime.config.pools.items()
            if section.autoscale is not None
        }
        scaled = self._pools.keys()
        self._demand.routes = frozenset(route.name for route in runtime.routes.all if scaled & {*route.pools})
        sinks = self._recorder.sinks
        if self._demand in sinks:
            sinks.remove(self._demand)
        if self._demand.routes:
            sinks.append(self._demand)

    def _scale(self, name: str, section: AutoscaleSection, current: int) -> PoolScale:
        known = self._pools.get(name)
        if known is None or known.section != section:
            present = current if known is None else known.desired or current
            known = PoolScale(section, _law(section, present))
        elif known.law is None:
            known.law = _law(section, current)
        known.current = current
        return known

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._child.close()

    # -- read -------------------------------------------------------------------------------

    def desired(self) -> Mapping[str, int | None]:
        """Replicas by pool; None: not known yet."""
        return {name: scale.desired for name, scale in self._pools.items()}

    def view(self) -> dict[str, Any]:
        """Reply of GET /scale."""
        return {"pools": {name: scale.as_json() for name, scale in self._pools.items()}}

    def collect(self) -> Iterable[Metric]:
        if not (pools := self._pools):
            return
        desired = [((name,), scale.law.desired) for name, scale in pools.items() if scale.law is not None]
        yield gauge("firsttoken_desired_replicas", desired)
        curves = (((name, str(n)), share) for name, scale in pools.items() for n, share in scale.answer.curve.items())
        yield gauge("firsttoken_replicas_curve", curves)
        yield from self._replays.collect()
        yield from self._seconds.collect()

    # -- ask --------------------------------------------------------------------------------

    async def _ask_forever(self) -> None:
        pause = INTERVAL
        while True:
            await asyncio.sleep(pause)
            cpu = 0.0
            try:
                cpu = await self.ask_all()
            except Exception:
                log.exception("replicas: the traffic could not be replayed")
            pause = max(INTERVAL, cpu / CPU_SHARE)

    async def ask_all(self) -> float:
        """A round of questions, one for each pool with engines. Returns CPU seconds."""
        asked = [(name, scale) for name, scale in self._pools.items() if scale.current]
        cpu = requests = 0.0
        for name, scale in asked:
            try:
                answer = await self._ask(name, scale, int(self._cost / len(asked)))
            except ChildFailed as failure:
                self._replays.of[("failed",)].value += 1
                self._cost, cpu = max(self._cost // 2, LEAST_COST), cpu + failure.cpu
                log.warning("replicas: the traffic of pool %s could not be replayed: %s", name, failure)
                continue
            self._replays.of[("answered",)].value += 1
            cpu, requests = cpu + answer.cpu, requests + answer.requests
        self._seconds.of[()].value += cpu
        if requests:
            affordable = USED * INTERVAL * CPU_SHARE * requests / max(cpu, 1e-3)
            self._cost = int(min(max(affordable, LEAST_COST), MOST_COST))
        return cpu

    async def _ask(self, name: str, scale: PoolScale, cost: int) -> ReplicasAnswer:
        rows = self._demand.rows({route.name for route in self._runtime.current.routes.all if name in route.pools})
        scale.answer = answer = await self._child.ask(self._job(name, scale, len(rows), cost), rows)
        if scale.law is not None:
            scale.law.on_need(answer.needed, monotonic())
        scale.answered_at = round(time(), 3)
        return answer

    def _job(self, name: str, scale: PoolScale, rows: int, cost: int) -> ReplicasJob:
        runtime, section = self._runtime.current, scale.section
        routes = [route for route in runtime.routes.all if name in route.pools]
        pools = {pool: runtime.pools[pool] for route in routes for pool in route.pools}
        profiles = {pool: runtime.config.pools[pool].profile for pool in pools}
        ids = {pool: [endpoint.id for endpoint in found.endpoints] for pool, found in pools.items()}
        return ReplicasJob(
            pool=name,
            current=scale.current,
            least=section.min,
            most=section.max,
            start_time=section.start_time,
            now=monotonic(),
            since=self._demand.since,
            rows=rows,
            cost=cost,
            pools=tuple(pools.values()),
            routes={route.name: route.model_dump(mode="json") for route in routes},
            seen=self._demand.share / self._processes(),
            first_token=runtime.config.defaults.first_token,
            profiles={pool: profile for pool, profile in profiles.items() if profile is not None},
            learned={pool: list(self._learned(found)) for pool, found in ids.items()},
            kv_tokens=dict(self._kv_tokens(ids)),
        )

    def _kv_tokens(self, endpoints: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, int]]:
        """By pool: the least that an engine of it has reported lately."""
        loads = self._fleet.view.engine_loads(monotonic())
        for pool, ids in endpoints.items():
            known = [load for each in ids if (load := loads.get(each)) is not None]
            if rooms := [load.kv_blocks * load.block_size for load in known if load.kv_blocks and load.block_size]:
                yield pool, min(rooms)

    def _learned(self, endpoints: Iterable[str]) -> Iterator[LearnedEndpoint]:
        for endpoint in endpoints:
            with suppress(ValueError):  # values out of their bounds
                if (known := self._fleet.view.learned(endpoint, monotonic())) is not None:
                    yield known


def _law(section: AutoscaleSection, present: int) -> ReplicaLaw | None:
    return ReplicaLaw(section.min, section.max, present, monotonic()) if present else None
