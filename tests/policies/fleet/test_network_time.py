"""Network time apart from the engine's: measured, added to forecasts, and taken off what an engine's model learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import median

import pytest

from policies.fleet.fleet import Fleet
from policies.types import FOREVER, AttemptOutcome, Candidate, Endpoint, Pool, PoolEstimate

FAR, NEAR = Endpoint("mixed/far", "mixed", "us"), Endpoint("mixed/near", "mixed", "eu")
MIXED = Pool("mixed", "m", (FAR, NEAR))
APIS = Pool("mixed", "m", (FAR, NEAR), local=False)
PROMPT = 2000  # tokens
BASE, FAST, SLOW = 0.02, 1 / 40_000, 1 / 10_000  # s, and s per token
JITTER = 0.05  # of the engine's time, standard deviation
KEYS = count()


@dataclass
class Line:
    """A network between the gateway and an endpoint. `is_idle`: a connection is open."""

    rtt: float
    setup: float
    is_idle: bool = True

    @property
    def wait_to_connect(self) -> float:
        return 0.0 if self.is_idle else self.setup

    def network_s(self) -> tuple[float, float]:
        return self.rtt, self.wait_to_connect


def lines() -> dict[str, Line]:
    return {FAR.id: Line(0.14, 0.45), NEAR.id: Line(0.001, 0.003)}


class World:
    """Two engines, a fleet that learns of them, and whether the fleet is told of the network."""

    def __init__(self, pool: Pool = MIXED, told: bool = True, token_s: Mapping[str, float] | None = None) -> None:
        self.lines, self.random, self.now = lines(), Random(7), 0.0
        self.token_s = token_s or {FAR.id: FAST, NEAR.id: SLOW}
        self.fleet, self.told = Fleet([pool]), told
        if told:
            self.fleet.on_networks(self.lines)

    def candidate(self, endpoint: Endpoint) -> Candidate:
        loads = {endpoint.id: self.fleet.snapshot(self.now).loads[endpoint.id]}
        [found] = self.fleet.view.candidates(loads, PoolEstimate(PROMPT), 0, 0.0, self.now, FOREVER)
        return found

    def ask(self, endpoint: Endpoint) -> float:
        """One request, alone. Returns actual / predicted median TTFT."""
        line, found, key = self.lines[endpoint.id], self.candidate(endpoint), next(KEYS)
        self.fleet.on_sent(key, found, PoolEstimate(PROMPT), self.now, stream=True)
        if self.told and line.wait_to_connect:
            self.fleet.on_connected(key, line.wait_to_connect)
        engine_s = (BASE + self.token_s[endpoint.id] * PROMPT) * self.random.lognormvariate(0.0, JITTER)
        ttft = line.rtt + line.wait_to_connect + engine_s
        self.fleet.on_first_token(key, self.now + ttft)
        self.fleet.on_ended(key, AttemptOutcome.COMPLETED, self.now + ttft)
        self.now += 1.0
        return ttft / found.forecast.p50

    def engine_s(self, endpoint: Endpoint) -> float:
        """Forecast without the network."""
        line = self.lines[endpoint.id]
        return self.candidate(endpoint).forecast.point_estimate - line.rtt - line.wait_to_connect


@pytest.mark.parametrize("pool", [MIXED, APIS], ids=["engines", "APIs"])
def test_a_forecast_holds_a_round_trip_from_before_the_first_request_on(pool: Pool) -> None:
    """Of two endpoints of which nothing else is known, the distant one takes longer by the distance."""
    world, untold = World(pool), World(pool, told=False)
    far, near = (world.candidate(each).forecast.point_estimate for each in (FAR, NEAR))
    assert far - near == pytest.approx(0.139)
    assert untold.candidate(FAR).forecast.point_estimate == untold.candidate(NEAR).forecast.point_estimate
    assert world.candidate(FAR).rtt == 0.14


def test_what_is_learned_of_a_near_engine_forecasts_its_distant_sibling_at_once() -> None:
    """The same machines in another region: the first request there is forecast within 10%. Without the network's time
    the forecast is that of the near one."""
    alike = {FAR.id: FAST, NEAR.id: FAST}
    for told, least, most in ((True, 0.9, 1.1), (False, 2.0, 9.0)):
        world = World(told=told, token_s=alike)
        for _ in range(20):
            world.ask(NEAR)
        ratio = world.ask(FAR)
        print(f"told {told}: actual / forecast {ratio:.2f}")
        assert least < ratio < most


def test_a_distant_fast_engine_and_a_near_slow_one_are_forecast_right_from_the_first_requests_on() -> None:
    """From the fourth request to each on, within 10% in the median, although every third opens a connection."""
    world = World()
    errors = dict[str, list[float]]()
    for number in range(24):
        for endpoint in (FAR, NEAR):
            world.lines[endpoint.id].is_idle = number % 3 != 0
            errors.setdefault(endpoint.id, []).append(abs(world.ask(endpoint) - 1))
    assert all(median(found[3:]) < 0.1 for found in errors.values())
    assert all(max(found[8:]) < 0.3 for found in errors.values())


def test_new_connections_do_not_slow_the_model_of_an_engine() -> None:
    """Half of the requests take three times as long: the engine is as fast as it is, and its spread no wider."""
    world, untold = World(), World(told=False)
    for each in (world, untold):
        for number in range(40):
            each.lines[FAR.id].is_idle = number % 2 == 0
            each.ask(FAR)
    for each in (world, untold):
        each.lines[FAR.id].is_idle = True
        forecast = each.candidate(FAR).forecast
        print(f"told {each.told}: p50 {forecast.p50 * 1e3:.0f} ms, p90 {forecast.p90 * 1e3:.0f} ms")
    actual = BASE + FAST * PROMPT
    assert world.engine_s(FAR) == pytest.approx(actual, rel=0.1)
    assert world.candidate(FAR).forecast.ratio(0.9) < 1.1
    assert untold.candidate(FAR).forecast.ratio(0.9) > 1.5


def test_the_spread_is_that_of_the_whole_time() -> None:
    """An engine that varies by a twentieth, behind a network that does not vary, varies little in all: nine of ten are
    within the p90, which is close to the median."""
    world = World()
    for _ in range(60):
        world.ask(FAR)
    within = [world.ask(FAR) * world.candidate(FAR).forecast.ratio(0.5) for _ in range(200)]
    p90 = world.candidate(FAR).forecast.ratio(0.9)
    assert 0.8 <= sum(each <= p90 for each in within) / 200 <= 0.97
    assert p90 < 1.06


def test_requests_of_the_gateway_s_own_are_forecast_and_learned_alike() -> None:
    """Warm-ups and probes choose their endpoint themselves, without candidates."""
    world = World()
    load = world.fleet.snapshot(0.0).loads[FAR.id]
    assert world.fleet.view.forecast(FAR, load, PROMPT, 0, 0.0) == world.candidate(FAR).forecast
    for _ in range(40):
        forecast = world.fleet.view.forecast(FAR, load, PROMPT, 0, world.now)
        lone = Candidate(FAR, 0, PROMPT, 0, forecast, 1.0, 0.0)
        world.fleet.on_sent(key := next(KEYS), lone, PoolEstimate(PROMPT), world.now, stream=True)
        world.now += 0.14 + BASE + FAST * PROMPT
        world.fleet.on_first_token(key, world.now)
        world.fleet.on_ended(key, AttemptOutcome.COMPLETED, world.now)
    assert world.engine_s(FAR) == pytest.approx(BASE + FAST * PROMPT, rel=0.1)


def test_a_fleet_without_connections_knows_no_network() -> None:
    """Replays and pickers by name: forecasts are those of the engine alone."""
    fleet = Fleet([MIXED])
    assert fleet.view.rtts() == {}
    assert fleet.view.statistics(FAR.id, 0.0).rtt is None
    fleet.on_networks(lines())
    assert fleet.view.rtts() == {FAR.id: 0.14, NEAR.id: 0.001}
    assert fleet.view.statistics(FAR.id, 0.0).rtt == 0.14
