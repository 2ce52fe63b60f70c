"""Asks an endpoint for one token, with the gateway's own credential and model, where one caller alone has met failures.

Rules:
- `policies.fleet.witness_schedule` decides when. The result reaches the fleet as any attempt's does, of no caller: what
  it shows counts for all.
- A pool that answers to the callers' own model names has no model to ask for, and one without chat or Messages no
  question to ask, and one of callers' keys has no credential to ask with: none of these is probed. Nor is a drained
  endpoint.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from backends.interface import Operation
from gateway.core.part import Part
from gateway.synthetic_request import PING, QUESTIONS, send_synthetic, synthetic
from gateway.tokenize.prompt import prompt_of
from gateway.tokenize.prompt_reader import PromptText
from gateway.upstream.routed_request import Upstream
from gateway.wiring import Core
from policies.fleet.witness_schedule import WitnessSchedule
from policies.types import AttemptOutcome, Endpoint

log = logging.getLogger("firsttoken")

TIMEOUT = 4.0  # s
ANSWERED = (AttemptOutcome.COMPLETED, AttemptOutcome.REFUSED)


class WitnessPart(Part):
    """Runs between the construction and `close`."""

    def __init__(self, core: Core) -> None:
        self._fleet = core.fleet
        self._estimator = core.estimator
        self._runtime = core.runtime
        self._schedule = WitnessSchedule()
        self._tasks: set[asyncio.Task[None]] = set()
        core.fleet.on_unconfirmed = self.ask

    @property
    def running(self) -> int:
        """Probes in progress."""
        return len(self._tasks)

    def ask(self, endpoint: Endpoint) -> None:
        """Probe an endpoint that has failed for one caller alone, unless the last probe is too recent."""
        runtime = self._runtime.current
        upstream = runtime.upstreams.get(endpoint.id)
        if upstream is None or not upstream.model or endpoint.pool == runtime.config.passthrough:
            return
        if endpoint.id in self._fleet.drained:
            return
        if runtime.config.pools[endpoint.pool].caller_keys:  # the gateway has no key to ask with
            return
        operation = next((each for each in QUESTIONS if each in runtime.operations[endpoint.pool]), None)
        if operation is None or not self._schedule.begin(endpoint.id, monotonic()):
            return
        task = asyncio.get_running_loop().create_task(self._probe(endpoint, upstream, operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe(self, endpoint: Endpoint, upstream: Upstream, operation: Operation) -> None:
        well = False
        try:
            found = self._estimator.estimate(PromptText(prompt_of(operation, PING), [endpoint.pool]))
            request, estimate = synthetic(upstream, operation, PING, upstream.model), found.pools[endpoint.pool]
            run = await send_synthetic(self._fleet, endpoint, upstream, request, estimate, TIMEOUT)
            well = run.outcome in ANSWERED
            told = "nothing yet" if run.outcome is None else run.outcome.value
            log.info("endpoint %s failed for one caller; asked by the gateway: %s", endpoint.id, told)
        except Exception:
            log.exception("the probe of endpoint %s failed", endpoint.id)
        finally:
            self._schedule.on_ended(endpoint.id, well)
