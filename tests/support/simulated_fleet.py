"""A fleet with one simulated engine, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from backends.server_profiles import PROFILES, EngineProfile
from lab.engines.engine import Engine
from lab.engines.engine_events import EngineFirstToken, EngineRequest
from lab.engines.virtual_engine import VirtualEngine
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Candidate, Endpoint, Forecast, Pool, PoolEstimate

ONE = Endpoint("main/1", "main")


@dataclass(slots=True)
class TimedRequest:
    """A request. `ttft` None: abandoned before the first token."""

    at: float
    prompt: int
    forecast: Forecast
    ttft: float | None = None


class SimulatedFleet:
    """Poisson arrivals at `load` of the engine's prefill rate; prompts share no prefix.

    A request without a token at the quantile `patience` of its forecast is abandoned.
    """

    def __init__(
        self, profile: str = "8b-h100", load: float = 0.3, patience: float | None = None, seed: int = 1
    ) -> None:
        found = PROFILES[profile]
        assert isinstance(found, EngineProfile)
        self.engine = VirtualEngine(Engine(found, seed))
        self.fleet = Fleet([Pool("main", "m", (ONE,))])
        self.now, self._random, self._patience, self._numbers = 0.0, Random(seed), patience, count()
        self._gap = 2500 / found.tokens_per_ms / 1e3 / load
        self._open: dict[int, TimedRequest] = {}
        self._answering: set[int] = set()

    def serve(self, requests: int) -> list[TimedRequest]:
        """Sends the next requests, in order; returns all after their first token or abandonment."""
        sent = [self._send(next(self._numbers)) for _ in range(requests)]
        while self._open:
            self._run(self.now + self._gap)
        return sent

    def _send(self, key: int) -> TimedRequest:
        self._run(self.now + self._random.expovariate(1 / self._gap))
        prompt, output = min(int(self._random.lognormvariate(7.3, 1.0)) + 20, 30_000), self._random.randrange(10, 200)
        load = self.fleet.snapshot(self.now).loads[ONE.id]
        forecast = self.fleet.view.forecast(ONE, load, prompt, 0, self.now)
        one = self._open[key] = TimedRequest(self.now, prompt, forecast)
        self.fleet.on_sent(key, Candidate(ONE, 0, prompt, 0, forecast, 1.0, 0.0), PoolEstimate(prompt), self.now, True)
        self.engine.submit(EngineRequest(key, prompt, output), self.now)
        return one

    def _run(self, until: float) -> None:
        for at, key in sorted(self._abandonments(until)):
            self._advance_engine(at)
            if key in self._open:
                del self._open[key]
                self.engine.abort(key)
                self.fleet.on_ended(key, AttemptOutcome.CANCELLED, at)
        self._advance_engine(until)

    def _abandonments(self, until: float) -> Iterator[tuple[float, int]]:
        for key, one in self._open.items():
            if self._patience is not None and (at := one.at + one.forecast.quantile(self._patience)) <= until:
                yield at, key

    def _advance_engine(self, until: float) -> None:
        for event in self.engine.run_until(until):
            key = int(event.id)
            if isinstance(event, EngineFirstToken):
                one = self._open.pop(key)
                one.ttft = event.at - one.at
                self.fleet.on_first_token(key, event.at)
            else:
                self.fleet.on_ended(
                    key, AttemptOutcome.COMPLETED, event.at, AttemptReport(completion_tokens=event.output_tokens)
                )
        self.now = max(self.now, until)
