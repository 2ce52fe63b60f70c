"""The simulated fleet of a replay: engines and APIs in virtual time, and what befalls them.

Rules:
- Nothing here decides or predicts: requests go in, events come out, in the order of their times.
- A machine is run only as far as nobody could still change what it does: a request reaches its
  scheduler `overhead` after it was sent, so between two moments at which something is sent the
  outcome is exact.
- Hung requests were accepted and are never answered, as behind a stuck server thread. A death takes them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from random import Random
from typing import NamedTuple

from backends.simulated.engine import Engine
from backends.simulated.events import EngineRequest, Event, RequestId
from backends.simulated.hosted import HostedApi
from backends.simulated.profiles import ApiProfile, Profile
from backends.simulated.virtual_engine import VirtualEngine
from gateway.replay.traces import BLOCK
from policies.types import EngineLoad

Machine = VirtualEngine | HostedApi

API_OVERHEAD = 0.015  # s, where there are only APIs: far below their shortest time to a first token


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at` seconds an endpoint becomes `slow` (by `factor`; 1 heals it), dies (`kill`) or is back (`restart`)."""

    at: float
    endpoint: str
    what: str
    factor: float = 1.0


class Happened(NamedTuple):
    at: float
    endpoint: str
    event: Event


class SimFleet:
    """`profiles` by endpoint id. `hung`: the share of requests that are never answered."""

    def __init__(self, profiles: Mapping[str, Profile], seed: int = 0, hung: float = 0.0) -> None:
        self._random, self._hung = Random(seed), hung
        self.machines: dict[str, Machine] = {
            endpoint: _machine(profile, seed * 1000 + i) for i, (endpoint, profile) in enumerate(profiles.items())
        }
        self._swallowed: dict[RequestId, str] = {}
        ahead = [m.engine.profile.overhead for m in self.machines.values() if isinstance(m, VirtualEngine)]
        self.overhead = min(ahead, default=API_OVERHEAD)  # s that machines may be run ahead of the next request

    def submit(self, endpoint: str, request: EngineRequest, now: float) -> None:
        """Raises Refused where the machine does not take it, ValueError where it never could."""
        machine = self.machines[endpoint]
        if self._hung and machine.alive and self._random.random() < self._hung:
            self._swallowed[request.id] = endpoint
            return
        machine.submit(request, now)

    def abort(self, endpoint: str, request_id: RequestId) -> None:
        if self._swallowed.pop(request_id, None) is None:
            self.machines[endpoint].abort(request_id)

    def run_until(self, until: float) -> Iterable[Happened]:
        """What becomes visible up to `until`, in order of time."""
        streams: list[Sequence[Happened]] = []
        for endpoint, machine in self.machines.items():
            if events := machine.run_until(until):
                streams.append([Happened(event.at, endpoint, event) for event in events])
        if not streams:
            return ()
        return streams[0] if len(streams) == 1 else merge(*streams, key=lambda happened: happened.at)

    def befall(self, fault: Fault, now: float) -> tuple[RequestId, ...]:
        """Returns the requests that were lost."""
        machine = self.machines[fault.endpoint]
        if fault.what == "slow":
            machine.slow(fault.factor)
            return ()
        if fault.what == "kill":
            return (*machine.kill(), *self._drop_swallowed(fault.endpoint))
        machine.restart(now)
        return ()

    def _drop_swallowed(self, endpoint: str) -> list[RequestId]:
        gone = [key for key, where in self._swallowed.items() if where == endpoint]
        for key in gone:
            del self._swallowed[key]
        return gone

    def progress(self, endpoint: str) -> Iterable[tuple[RequestId, int]]:
        """Tokens that each answer under way has by now."""
        machine = self.machines[endpoint]
        return machine.engine.progress() if isinstance(machine, VirtualEngine) else ()

    def load_of(self, endpoint: str, born: float) -> EngineLoad | None:
        """What a scrape would say; None where nobody answers."""
        machine = self.machines[endpoint]
        if not isinstance(machine, VirtualEngine):
            return None
        engine = machine.engine
        if not engine.alive:
            return None
        return EngineLoad(
            running=engine.running,
            waiting=engine.waiting,
            kv_usage=engine.kv_usage,
            block_size=engine.profile.block_size,
            kv_blocks=engine.profile.num_blocks,
            started_at=born,
            prefix_queries=float(engine.prefix_queries),
            prefix_hits=float(engine.prefix_hits),
        )


def _machine(profile: Profile, seed: int) -> Machine:
    if isinstance(profile, ApiProfile):
        return HostedApi(profile, seed)
    longest = max(profile.max_model_len, profile.kv_tokens)
    return VirtualEngine(Engine(replace(profile, block_size=BLOCK, max_model_len=longest), seed))
