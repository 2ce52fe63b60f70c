"""Fleet state learned from attempts and scrapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport
from policies.prefix_cache.residency import MAX_BLOCKS
from policies.routing.fleet_view import FleetView
from policies.types import AttemptOutcome, Candidate
from tests.support.learned_fleet import API, ONE, TWO, answer, events, fleet, load, median_ttft, prompt, send


def test_the_view_of_a_fleet_is_a_fleet_view() -> None:
    """The protocol that decisions use."""
    to = fleet()
    beliefs: FleetView = to.view
    assert [p.hit for p in beliefs.candidates({ONE.id: load(to)}, prompt(), 0, 0.0, 0.0, 1.0)] == [0]


def test_candidates_of_many_endpoints_equal_single_forecasts() -> None:
    """For an idle endpoint with the prompt cached, and for an endpoint with a backlog beyond the deadline."""
    to, asked = fleet(), prompt(1000, blocks=62)
    answer(to, asked, ONE)
    send(to, prompt(20_000), TWO, now=2.0)
    loads = {endpoint.id: load(to, 2.1, endpoint) for endpoint in (ONE, TWO)}
    found = to.view.candidates(loads, asked, 1, 0.25, 2.1, 0.3)
    assert [p.hit for p in found] == [to.view.hit(endpoint, asked) for endpoint in (ONE, TWO)] == [992, 0]
    for p, (name, seen) in zip(found, loads.items(), strict=True):
        assert p.forecast == to.view.forecast(p.endpoint, seen, 1000, p.hit, 2.1)
        assert (p.endpoint.id, p.load, p.prompt_tokens, p.blocks) == (name, seen, asked.tokens, asked.blocks)
        assert (p.tier, p.price, p.probability) == (1, 0.25, p.forecast.probability(0.3))


# --------------------------------------------------------------------------- load


def test_an_attempt_counts_as_load_from_its_sending() -> None:
    """The next decision sees the attempt; otherwise a burst would herd onto one engine."""
    to = fleet()
    key = send(to, prompt(4000))
    assert (load(to).queued_tokens, load(to).prefilling, load(to).in_flight) == (4000, 1, 1)
    assert median_ttft(to, ONE) > median_ttft(to, TWO)
    to.on_first_token(key, 0.2)
    assert (load(to, 0.2).queued_tokens, load(to, 0.2).prefilling, load(to, 0.2).running) == (0, 0, 1)
    to.on_ended(key, AttemptOutcome.COMPLETED, 1.0)
    assert (load(to, 1.0).in_flight, load(to, 1.0).running) == (0, 0)


def test_a_snapshot_is_reused_until_an_event() -> None:
    """Decisions between events cost nothing, and an old snapshot never changes."""
    to = fleet()
    before = to.snapshot(0.0)
    assert to.snapshot(0.05) is before
    key = send(to)
    after = to.snapshot(0.05)
    assert after is not before
    assert (before.loads[ONE.id].in_flight, after.loads[ONE.id].in_flight) == (0, 1)
    assert after.loads[TWO.id] is before.loads[TWO.id]
    to.on_ended(key, AttemptOutcome.CANCELLED, 0.05)
    assert list(after.loads) == [ONE.id, TWO.id, API.id]  # in configured order, so that a replay iterates alike


def test_a_forecast_drains_the_queued_tokens_by_time() -> None:
    """From the same snapshot, 0.1 s later."""
    to = fleet()
    send(to, prompt(8000))
    seen = load(to)
    early, late = (to.view.forecast(ONE, seen, 1000, 0, now).point_estimate for now in (0.0, 0.1))
    assert early - late == pytest.approx(0.1, rel=0.05)


def test_other_traffic_needs_two_scrapes_and_expires_without_scrapes() -> None:
    """A single scrape can be older than the gateway's own events."""
    to = fleet()
    send(to)
    said = EngineLoad(running=3, waiting=5)
    to.on_scrape(ONE.id, said, 0.0)
    assert (load(to).running, load(to).waiting) == (0, 1)
    to.on_scrape(ONE.id, said, 0.5)
    seen = load(to, 0.5)
    assert (seen.running, seen.waiting, seen.in_flight) == (3, 5, 1)
    assert seen.queued_tokens > 1000
    assert (load(to, 60.0).running, load(to, 60.0).waiting) == (0, 1)


def test_own_requests_in_a_scrape_are_not_counted_twice() -> None:
    """In-flight attempts are subtracted from the engine's counts."""
    to = fleet()
    keys = [send(to) for _ in range(4)]
    for key in keys[:3]:
        to.on_first_token(key, 0.1)
    for now in (0.2, 0.3):
        to.on_scrape(ONE.id, EngineLoad(running=4, waiting=0), now)
    assert (load(to, 0.3).running, load(to, 0.3).waiting) == (3, 1)


@settings(max_examples=80, deadline=None)
@given(st.lists(events, max_size=50))
def test_no_order_of_events_leaks_in_flight_counts(history: list) -> None:
    """Repeated, late, out-of-order and unknown events: 400 leaked counts a day have broken another router."""
    to, now = fleet(), 0.0
    for what, key, endpoint, ending, stream in history:
        now += 0.1
        if what == "send":
            estimate = prompt(500, blocks=20 + key)
            seen = to.view.forecast(endpoint, load(to, now, endpoint), 500, to.view.hit(endpoint, estimate), now)
            candidate = Candidate(endpoint, 0, 500, to.view.hit(endpoint, estimate), seen, 1.0, 0.0)
            to.on_sent(key, candidate, estimate, now, stream)
        elif what == "first":
            to.on_first_token(key, now, 0.05)
        elif what == "end":
            to.on_ended(key, ending, now, AttemptReport(500, 16 * key, 10, 0.02, 0.05, connected=stream))
        elif what == "scrape":
            to.on_scrape(endpoint.id, EngineLoad(running=key, waiting=key, kv_blocks=50 + key), now)
        elif what == "lost":
            to.on_probe_failed(endpoint.id, now)
        else:
            to.on_probe_answered(endpoint.id, now)
        for seen in to.snapshot(now).loads.values():
            assert 0 <= seen.prefilling <= seen.in_flight <= 8
            assert seen.queued_tokens >= 0
    for key in range(8):
        to.on_ended(key, AttemptOutcome.CANCELLED, now)
    idle = [(seen.in_flight, seen.prefilling) for seen in to.snapshot(now + 60).loads.values()]
    assert idle == [(0, 0)] * 3
    assert all(seen.queued_tokens == 0 for seen in to.snapshot(now + 60).loads.values())


def test_a_slow_first_answer_is_forgotten() -> None:
    """The first answer of a cold engine says little; without the samples of siblings the engine would get no traffic
    again."""
    to = fleet()
    answer(to, endpoint=TWO, now=0.0, ttft=2.0)
    for i in range(20):
        answer(to, endpoint=ONE, now=10.0 + 2 * i, ttft=0.1)
    assert median_ttft(to, TWO, now=60.0) == pytest.approx(median_ttft(to, ONE, now=60.0), rel=0.1)


def test_a_persistently_slow_endpoint_keeps_its_own_prediction() -> None:
    """After 32 samples of its own, whatever the siblings' samples are."""
    to = fleet()
    for i in range(40):
        answer(to, endpoint=TWO, now=5.0 * i, ttft=0.5)
        answer(to, endpoint=ONE, now=5.0 * i, ttft=0.1)
    assert median_ttft(to, TWO, now=300.0) == pytest.approx(0.5, rel=0.1)


# --------------------------------------------------------------------------- prefixes


def test_a_sent_prompt_counts_as_cached_at_once() -> None:
    """So prompts with the same prefix follow before the prefill is computed."""
    to = fleet()
    send(to, prompt(1000, blocks=62))
    assert (to.view.hit(ONE, prompt(1000, blocks=62)), to.view.hit(TWO, prompt(1000, blocks=62))) == (992, 0)


@pytest.mark.parametrize(("tokens", "hit"), [(993, 992), (992, 976), (500, 496)])
def test_a_hit_is_whole_blocks_and_less_than_the_prompt(tokens: int, hit: int) -> None:
    """vLLM always computes the last token."""
    to = fleet()
    send(to, prompt(2000, blocks=120))
    assert to.view.hit(ONE, prompt(tokens, blocks=62)) == hit


def test_a_hit_is_counted_in_the_engines_tokens_and_blocks() -> None:
    """62 gateway blocks of 16 tokens, 1.2 engine tokens per gateway token, in engine blocks of 128."""
    to = fleet()
    to.on_scrape(ONE.id, EngineLoad(block_size=128), 0.0)
    send(to, prompt(2000, blocks=62, scale=1.2))
    assert to.view.hit(ONE, prompt(2000, blocks=62, scale=1.2)) == 1152


def test_a_failed_attempt_leaves_no_prefix() -> None:
    """No prompt was computed."""
    to = fleet()
    for ending in (AttemptOutcome.FAILED, AttemptOutcome.CANCELLED, AttemptOutcome.RATE_LIMITED, AttemptOutcome.SILENT):
        to.on_ended(send(to, prompt(1000, blocks=62)), ending, 0.01)
        assert to.view.hit(ONE, prompt(1000, blocks=62)) == 0


def test_an_attempt_cancelled_after_its_first_token_leaves_its_prefix() -> None:
    """The prompt was computed before the cancellation."""
    to = fleet()
    key = send(to, prompt(1000, blocks=62))
    to.on_first_token(key, 0.1)
    to.on_ended(key, AttemptOutcome.CANCELLED, 0.2)
    assert to.view.hit(ONE, prompt(1000, blocks=62)) == 992


def test_the_reported_cache_capacity_bounds_the_prefix_index() -> None:
    """Ten blocks of 128 tokens hold 80 of 16."""
    to = fleet()
    to.on_scrape(ONE.id, EngineLoad(block_size=128, kv_blocks=10), 0.0)
    send(to, prompt(4000, blocks=240))
    assert to.view.statistics(ONE.id, 0.0).prefix_blocks == 80


def test_an_absurd_cache_capacity_leaves_the_prefix_index_bounded() -> None:
    """A block takes 8 bytes and a share of a run: the index may not grow for ever."""
    to = fleet()
    to.on_scrape(ONE.id, EngineLoad(block_size=16, kv_blocks=10**9), 0.0)
    cache = to.cache(ONE.id)
    assert cache is not None
    assert cache.index.capacity == MAX_BLOCKS


def test_reported_cached_tokens_shrink_the_assumed_capacity() -> None:
    """Other traffic uses the cache."""
    to = fleet()
    before = to.view.statistics(ONE.id, 0.0).prefix_capacity
    for now in range(10):
        answer(to, prompt(1000, blocks=62), now=10.0 * now, reported=AttemptReport(cached_tokens=0))
    assert to.view.statistics(ONE.id, 100.0).prefix_capacity < 0.3 * before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EngineLoad(started_at=100.0), EngineLoad(started_at=160.0)),
        (EngineLoad(prefix_queries=9e4, prefix_hits=3e4), EngineLoad(prefix_queries=10.0, prefix_hits=0.0)),
    ],
)
def test_a_restarted_engine_forgets_its_prefixes(before: EngineLoad, after: EngineLoad) -> None:
    """After another start time, or counters that went back to zero; requests of other traffic are gone too."""
    to = fleet()
    to.on_scrape(ONE.id, replace(before, running=9), 0.0)
    to.on_scrape(ONE.id, replace(before, running=9), 0.5)
    answer(to, prompt(1000, blocks=62))
    assert to.view.hit(ONE, prompt(1000, blocks=62)) == 992
    to.on_scrape(ONE.id, replace(after, running=0), 1.0)
    assert to.view.hit(ONE, prompt(1000, blocks=62)) == 0
    assert load(to, 1.0).running == 0


def test_a_scrape_of_the_same_engine_forgets_nothing() -> None:
    """A computed start time wobbles; counters grow."""
    to = fleet()
    answer(to, prompt(1000, blocks=62))
    to.on_scrape(ONE.id, EngineLoad(started_at=100.0, prefix_queries=5.0), 0.0)
    to.on_scrape(ONE.id, EngineLoad(started_at=100.2, prefix_queries=9.0), 1.0)
    assert to.view.hit(ONE, prompt(1000, blocks=62)) == 992


def test_two_refused_connections_clear_the_prefix_index() -> None:
    """The next engine at the address starts with an empty cache."""
    to = fleet()
    answer(to, prompt(1000, blocks=62))
    for _ in range(2):
        to.on_ended(send(to, now=2.0), AttemptOutcome.FAILED, 2.0, AttemptReport(connected=False))
    assert to.view.hit(ONE, prompt(1000, blocks=62)) == 0


def test_the_caches_of_an_api_are_not_modelled() -> None:
    """An API has many machines, and does not say which of the machines answers."""
    to = fleet()
    answer(to, prompt(1000, blocks=62), API)
    assert to.view.hit(API, prompt(1000, blocks=62)) == 0


def test_the_size_of_a_kv_cache_is_the_engines_own_report() -> None:
    """0 until it is reported, and for an endpoint that a reload has removed: the configuration's is a guess."""
    to = fleet()
    assert to.view.engine_kv_tokens(ONE.id) == 0
    to.on_scrape(ONE.id, EngineLoad(block_size=32, kv_blocks=100), 0.0)
    assert (to.view.engine_kv_tokens(ONE.id), to.view.engine_kv_tokens("p/gone")) == (3_200, 0)
