"""The forecast where cached tokens lie in slower tiers of the engine's KV cache."""

from __future__ import annotations

import pytest

from policies.fleet.engine_kv_cache import PRIOR
from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport, Fleet
from policies.prefix_cache.residency import Residency
from policies.types import TRAINED_SAMPLES, AttemptOutcome, Candidate, Endpoint, Pool, PoolEstimate, PrefixBlocks
from tests.support.learned_fleet import KEYS

B, BLOCKS = 16, 400  # tokens; 6,400 of them
ONE, TWO = Endpoint("p/1", "p"), Endpoint("p/2", "p")
ASKED = PoolEstimate(BLOCKS * B + 5, PrefixBlocks(range(1, BLOCKS + 1), B, 1.0), text_tokens=BLOCKS * B)
FRESH = PoolEstimate(1_000, PrefixBlocks((), B, 1.0), text_tokens=993)


def candidate(to: Fleet, prompt: PoolEstimate, endpoint: Endpoint, now: float) -> Candidate:
    """As a decision would have it."""
    load = to.snapshot(now).loads[endpoint.id]
    return to.view.candidates({endpoint.id: load}, prompt, 0, 0.0, now, 60.0)[0]


def serve(to: Fleet, prompt: PoolEstimate, endpoint: Endpoint, now: float, ttft: float, blocks: range | None) -> None:
    key = next(KEYS)
    to.on_sent(key, candidate(to, prompt, endpoint, now), prompt, now, True, session=str(key))
    cache = to.cache(endpoint.id)
    assert cache is not None
    if blocks and cache.residency is not None:
        cache.residency.on_stored(blocks, None, B, session=str(key))
    to.on_first_token(key, now + ttft)
    cached = candidate(to, prompt, endpoint, now).hit if blocks is None else 0
    to.on_ended(key, AttemptOutcome.COMPLETED, now + ttft + 0.5, AttemptReport(prompt.tokens, cached))


@pytest.fixture
def held() -> tuple[Fleet, Residency]:
    """Two trained engines: the first holds the prompt, in the GPU and in the CPU's memory."""
    to = Fleet([Pool("p", "m", (ONE, TWO), kv_tokens=16_000)])
    cache = to.cache(ONE.id)
    assert cache is not None
    residency = cache.enable_events()
    for number in range(TRAINED_SAMPLES):
        for endpoint in (ONE, TWO):
            serve(to, FRESH, endpoint, 10.0 * number, 0.1, None)
    serve(to, ASKED, ONE, 200.0, 0.4, range(1, BLOCKS + 1))
    residency.on_offloaded(range(1, BLOCKS + 1), 0, "cpu")
    return to, residency


def test_a_hit_in_the_cpu_costs_its_load_and_is_no_miss(held: tuple[Fleet, Residency]) -> None:
    to, residency = held
    in_gpu = candidate(to, ASKED, ONE, 300.0)
    residency.on_removed(range(BLOCKS, 0, -1))
    in_cpu, missed = candidate(to, ASKED, ONE, 300.0), candidate(to, ASKED, TWO, 300.0)
    assert (in_gpu.hit, in_gpu.hit_tiers) == (BLOCKS * B, {})
    assert (in_cpu.hit, in_cpu.hit_tiers, missed.hit) == (BLOCKS * B, {"cpu": BLOCKS * B}, 0)
    load_s = BLOCKS * B * PRIOR["cpu"]
    assert in_cpu.forecast.point_estimate - in_gpu.forecast.point_estimate == pytest.approx(load_s)
    assert missed.forecast.point_estimate - in_cpu.forecast.point_estimate > 10 * load_s


def test_measured_loads_make_the_forecast_and_teach_no_prefill(held: tuple[Fleet, Residency]) -> None:
    """Of an engine whose loads take ten times as long as published."""
    to, residency = held
    residency.on_removed(range(BLOCKS, 0, -1))
    before = candidate(to, FRESH, ONE, 300.0).forecast.point_estimate
    slow = 10 * BLOCKS * B * PRIOR["cpu"]
    gpu = candidate(to, ASKED, ONE, 300.0).forecast.point_estimate - BLOCKS * B * PRIOR["cpu"]
    for number in range(60):
        serve(to, ASKED, ONE, 300.0 + 10 * number, gpu + slow, None)
    assert candidate(to, ASKED, ONE, 1000.0).forecast.point_estimate == pytest.approx(gpu + slow, rel=0.1)
    assert candidate(to, FRESH, ONE, 1000.0).forecast.point_estimate == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize(("usage", "hit"), [(0.5, BLOCKS * B), (0.9, 0)])
def test_a_hit_that_the_gpu_has_no_room_to_load_is_none(held: tuple[Fleet, Residency], usage: float, hit: int) -> None:
    """It would wait for answers to end, which the forecast of a load does not know."""
    to, residency = held
    residency.on_removed(range(BLOCKS, 0, -1))
    to.on_scrape(ONE.id, EngineLoad(running=1, kv_usage=usage, block_size=B, kv_blocks=1_000), 300.0)
    found = candidate(to, ASKED, ONE, 300.1)
    assert (found.hit, sum(found.to_load)) == (hit, hit)


def test_the_index_has_room_for_what_slower_tiers_hold(held: tuple[Fleet, Residency]) -> None:
    """By the next scrape: a prompt that the GPU has dropped would be forgotten with its place in the CPU."""
    to, residency = held
    residency.on_removed(range(BLOCKS, 0, -1))
    before = to.view.statistics(ONE.id, 300.0)
    to.on_scrape(ONE.id, EngineLoad(block_size=B, kv_blocks=1_000), 301.0)
    after = to.view.statistics(ONE.id, 301.0)
    assert (before.prefix_capacity, after.prefix_capacity) == (1_000, 1_000 + BLOCKS)
