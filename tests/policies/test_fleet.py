"""What is learned of a fleet from what happens to its attempts."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.beliefs import Beliefs
from policies.facts import Candidate, Ending, Endpoint, EngineLoad, Health, Load, Pool, PoolEstimate, PrefixBlocks
from policies.fleet import Fleet, Reported
from tests.policies.virtual_engine import A100, CPU, H100, Profile, Request, conversations, serve

ONE, TWO, API = Endpoint("small/1", "small"), Endpoint("small/2", "small"), Endpoint("api/1", "api")
SMALL = Pool("small", "m", (ONE, TWO), kv_tokens=16_000)
HOSTED = Pool("api", "g", (API,), local=False)
KEYS = count()


def fleet() -> Fleet:
    return Fleet([SMALL, HOSTED])


def prompt(tokens: int = 1000, blocks: int = 0, scale: float = 1.0, first: int = 1) -> PoolEstimate:
    return PoolEstimate(tokens, PrefixBlocks(range(first, first + blocks), 16, scale), text_tokens=tokens - 7)


def send(
    to: Fleet, estimate: PoolEstimate | None = None, endpoint: Endpoint = ONE, now: float = 0.0, stream: bool = True
) -> int:
    """As a decision would; the key."""
    estimate, key = estimate or prompt(), next(KEYS)
    hit = to.hit(endpoint, estimate)
    forecast = to.forecast(endpoint, to.snapshot(now).loads[endpoint.id], estimate.tokens, hit, now)
    to.sent(key, Candidate(endpoint, 0, estimate.tokens, hit, forecast, 1.0, 0.0), estimate, now, stream)
    return key


def answer(
    to: Fleet, estimate: PoolEstimate | None = None, endpoint: Endpoint = ONE, now: float = 0.0, ttft: float = 0.1,
    reported: Reported | None = None,
) -> None:  # fmt: skip
    key = send(to, estimate, endpoint, now)
    to.first_token(key, now + ttft)
    to.ended(key, Ending.COMPLETED, now + ttft + 1, reported)


def load(of: Fleet, now: float = 0.0, endpoint: Endpoint = ONE) -> Load:
    return of.snapshot(now).loads[endpoint.id]


def median_ttft(of: Fleet, endpoint: Endpoint = ONE, tokens: int = 1000, now: float = 0.0) -> float:
    return of.forecast(endpoint, load(of, now, endpoint), tokens, 0, now).p50


def test_it_is_what_decisions_ask() -> None:
    """The Beliefs protocol."""
    beliefs: Beliefs = fleet()
    assert beliefs.hit(ONE, prompt()) == 0


# --------------------------------------------------------------------------- load


def test_an_attempt_counts_from_the_moment_it_is_sent() -> None:
    """The next decision sees it, or a burst would herd onto one engine."""
    to = fleet()
    key = send(to, prompt(4000))
    assert (load(to).ahead, load(to).prefilling, load(to).in_flight) == (4000, 1, 1)
    assert median_ttft(to, ONE) > median_ttft(to, TWO)
    to.first_token(key, 0.2)
    assert (load(to, 0.2).ahead, load(to, 0.2).prefilling, load(to, 0.2).running) == (0, 0, 1)
    to.ended(key, Ending.COMPLETED, 1.0)
    assert (load(to, 1.0).in_flight, load(to, 1.0).running) == (0, 0)


def test_a_snapshot_is_the_same_value_until_something_changes() -> None:
    """Decisions between events cost nothing, and what they saw stays as it was."""
    to = fleet()
    before = to.snapshot(0.0)
    assert to.snapshot(0.05) is before
    key = send(to)
    after = to.snapshot(0.05)
    assert after is not before
    assert (before.loads[ONE.id].in_flight, after.loads[ONE.id].in_flight) == (0, 1)
    assert after.loads[TWO.id] is before.loads[TWO.id]
    to.ended(key, Ending.CANCELLED, 0.05)


def test_between_events_a_forecast_lets_time_drain_what_is_ahead() -> None:
    """The same snapshot, a tenth of a second later."""
    to = fleet()
    send(to, prompt(8000))
    seen = load(to)
    early, late = (to.forecast(ONE, seen, 1000, 0, now).center for now in (0.0, 0.1))
    assert early - late == pytest.approx(0.1, rel=0.05)


def test_other_traffic_is_seen_in_two_scrapes_and_forgotten_when_they_stop() -> None:
    """One scrape may just be older than our news."""
    to = fleet()
    send(to)
    said = EngineLoad(running=3, waiting=5)
    to.scraped(ONE.id, said, 0.0)
    assert (load(to).running, load(to).waiting) == (0, 1)
    to.scraped(ONE.id, said, 0.5)
    seen = load(to, 0.5)
    assert (seen.running, seen.waiting, seen.in_flight) == (3, 5, 1)
    assert seen.ahead > 1000
    assert (load(to, 60.0).running, load(to, 60.0).waiting) == (0, 1)


def test_our_own_requests_in_a_scrape_are_not_counted_twice() -> None:
    """The ledger knows them already."""
    to = fleet()
    keys = [send(to) for _ in range(4)]
    for key in keys[:3]:
        to.first_token(key, 0.1)
    for now in (0.2, 0.3):
        to.scraped(ONE.id, EngineLoad(running=4, waiting=0), now)
    assert (load(to, 0.3).running, load(to, 0.3).waiting) == (3, 1)


events = st.tuples(
    st.sampled_from(["send", "first", "end", "scrape", "lost", "found"]),
    st.integers(0, 7),
    st.sampled_from([ONE, TWO, API]),
    st.sampled_from(list(Ending)),
    st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(events, max_size=50))
def test_nothing_is_left_in_flight_whatever_the_order_of_events(history: list) -> None:
    """Twice, late, out of order, for keys that never were: 400 leaked counts a day sank another router."""
    to, now = fleet(), 0.0
    for what, key, endpoint, ending, stream in history:
        now += 0.1
        if what == "send":
            estimate = prompt(500, blocks=20 + key)
            seen = to.forecast(endpoint, load(to, now, endpoint), 500, to.hit(endpoint, estimate), now)
            candidate = Candidate(endpoint, 0, 500, to.hit(endpoint, estimate), seen, 1.0, 0.0)
            to.sent(key, candidate, estimate, now, stream)
        elif what == "first":
            to.first_token(key, now, 0.05)
        elif what == "end":
            to.ended(key, ending, now, Reported(500, 16 * key, 10, 0.02, 0.05, connected=stream))
        elif what == "scrape":
            to.scraped(endpoint.id, EngineLoad(running=key, waiting=key, kv_blocks=50 + key), now)
        elif what == "lost":
            to.unreachable(endpoint.id, now)
        else:
            to.reachable(endpoint.id, now)
        for seen in to.snapshot(now).loads.values():
            assert 0 <= seen.prefilling <= seen.in_flight <= 8
            assert seen.ahead >= 0
    for key in range(8):
        to.ended(key, Ending.CANCELLED, now)
    idle = [(seen.in_flight, seen.prefilling) for seen in to.snapshot(now + 60).loads.values()]
    assert idle == [(0, 0)] * 3
    assert all(seen.ahead == 0 for seen in to.snapshot(now + 60).loads.values())


def test_an_endpoint_that_was_slow_at_first_is_not_avoided_for_ever() -> None:
    """A cold engine's first answer says little; without its siblings' news it would get no second chance."""
    to = fleet()
    answer(to, endpoint=TWO, now=0.0, ttft=2.0)
    for i in range(20):
        answer(to, endpoint=ONE, now=10.0 + 2 * i, ttft=0.1)
    assert median_ttft(to, TWO, now=60.0) == pytest.approx(median_ttft(to, ONE, now=60.0), rel=0.1)


def test_an_endpoint_that_has_shown_itself_slow_is_believed() -> None:
    """After 32 answers of its own, whatever its siblings do."""
    to = fleet()
    for i in range(40):
        answer(to, endpoint=TWO, now=5.0 * i, ttft=0.5)
        answer(to, endpoint=ONE, now=5.0 * i, ttft=0.1)
    assert median_ttft(to, TWO, now=300.0) == pytest.approx(0.5, rel=0.1)


# --------------------------------------------------------------------------- prefixes


def test_a_prompt_sent_is_believed_cached_there_at_once() -> None:
    """So that siblings follow it before it is even computed."""
    to = fleet()
    send(to, prompt(1000, blocks=62))
    assert (to.hit(ONE, prompt(1000, blocks=62)), to.hit(TWO, prompt(1000, blocks=62))) == (992, 0)


@pytest.mark.parametrize(("tokens", "hit"), [(993, 992), (992, 976), (500, 496)])
def test_a_hit_is_whole_blocks_and_less_than_the_prompt(tokens: int, hit: int) -> None:
    """vLLM always computes the last token."""
    to = fleet()
    send(to, prompt(2000, blocks=120))
    assert to.hit(ONE, prompt(tokens, blocks=62)) == hit


def test_a_hit_is_counted_in_the_engines_tokens_and_blocks() -> None:
    """62 blocks of 16 tokens of ours, a fifth more of its own, in blocks of 128."""
    to = fleet()
    to.scraped(ONE.id, EngineLoad(block_size=128), 0.0)
    send(to, prompt(2000, blocks=62, scale=1.2))
    assert to.hit(ONE, prompt(2000, blocks=62, scale=1.2)) == 1152


def test_a_failed_attempt_leaves_no_prefix() -> None:
    """Nothing was computed."""
    to = fleet()
    for ending in (Ending.FAILED, Ending.CANCELLED, Ending.RATE_LIMITED, Ending.SILENT):
        to.ended(send(to, prompt(1000, blocks=62)), ending, 0.01)
        assert to.hit(ONE, prompt(1000, blocks=62)) == 0


def test_an_attempt_cancelled_after_its_first_token_leaves_its_prefix() -> None:
    """It was computed, whatever became of the answer."""
    to = fleet()
    key = send(to, prompt(1000, blocks=62))
    to.first_token(key, 0.1)
    to.ended(key, Ending.CANCELLED, 0.2)
    assert to.hit(ONE, prompt(1000, blocks=62)) == 992


def test_the_engines_own_capacity_bounds_what_is_believed() -> None:
    """Ten blocks of 128 tokens hold 80 of 16."""
    to = fleet()
    to.scraped(ONE.id, EngineLoad(block_size=128, kv_blocks=10), 0.0)
    send(to, prompt(4000, blocks=240))
    assert to.statistics(ONE.id, 0.0).prefix_blocks == 80


def test_an_engine_that_reports_fewer_cached_tokens_is_believed_to_hold_less() -> None:
    """Something else uses its cache."""
    to = fleet()
    before = to.statistics(ONE.id, 0.0).prefix_capacity
    for now in range(10):
        answer(to, prompt(1000, blocks=62), now=10.0 * now, reported=Reported(cached_tokens=0))
    assert to.statistics(ONE.id, 100.0).prefix_capacity < 0.3 * before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (EngineLoad(started_at=100.0), EngineLoad(started_at=160.0)),
        (EngineLoad(prefix_queries=9e4, prefix_hits=3e4), EngineLoad(prefix_queries=10.0, prefix_hits=0.0)),
    ],
)
def test_a_restarted_engine_forgets_its_prefixes(before: EngineLoad, after: EngineLoad) -> None:
    """It started at another time, or its counters began again; and others' requests went with it."""
    to = fleet()
    to.scraped(ONE.id, replace(before, running=9), 0.0)
    to.scraped(ONE.id, replace(before, running=9), 0.5)
    answer(to, prompt(1000, blocks=62))
    assert to.hit(ONE, prompt(1000, blocks=62)) == 992
    to.scraped(ONE.id, replace(after, running=0), 1.0)
    assert to.hit(ONE, prompt(1000, blocks=62)) == 0
    assert load(to, 1.0).running == 0


def test_a_scrape_of_the_same_engine_forgets_nothing() -> None:
    """Its own start time is computed and wobbles; counters grow."""
    to = fleet()
    answer(to, prompt(1000, blocks=62))
    to.scraped(ONE.id, EngineLoad(started_at=100.0, prefix_queries=5.0), 0.0)
    to.scraped(ONE.id, EngineLoad(started_at=100.2, prefix_queries=9.0), 1.0)
    assert to.hit(ONE, prompt(1000, blocks=62)) == 992


def test_where_nobody_answers_any_more_nothing_is_cached() -> None:
    """Two refused connections: whoever comes back begins anew."""
    to = fleet()
    answer(to, prompt(1000, blocks=62))
    for _ in range(2):
        to.ended(send(to, now=2.0), Ending.FAILED, 2.0, Reported(connected=False))
    assert to.hit(ONE, prompt(1000, blocks=62)) == 0


def test_the_caches_of_an_api_are_not_modelled() -> None:
    """Nobody knows which of its machines answers."""
    to = fleet()
    answer(to, prompt(1000, blocks=62), API)
    assert to.hit(API, prompt(1000, blocks=62)) == 0


# --------------------------------------------------------------------------- learning


def test_a_stranger_is_expected_to_be_like_its_siblings() -> None:
    """A slow pool's new endpoint is not taken for a fast one; other pools are."""
    to, api_before = fleet(), median_ttft(fleet(), API)
    for now in range(20):
        answer(to, prompt(1000), ONE, now=10.0 * now, ttft=5.0)
    assert median_ttft(to, ONE, now=500.0) == pytest.approx(5.0, rel=0.15)
    assert median_ttft(to, TWO, now=500.0) == pytest.approx(5.0, rel=0.15)
    assert median_ttft(to, API, now=500.0) == api_before
    assert to.forecast(TWO, load(to, 500.0, TWO), 1000, 0, 500.0).samples == 0


def test_silence_teaches_that_it_takes_at_least_as_long() -> None:
    """Of an attempt that was left; one that failed at once teaches nothing of speed."""
    left, failed = fleet(), fleet()
    before = median_ttft(left)
    for now in range(4):
        left.ended(send(left, now=now * 10.0), Ending.CANCELLED, now * 10.0 + 5.0)
        failed.ended(send(failed, now=now * 10.0), Ending.FAILED, now * 10.0 + 5.0)
    assert median_ttft(left, now=50.0) > 2.0
    assert median_ttft(failed, now=50.0) == before


def test_an_answer_that_is_not_streamed_teaches_only_by_what_the_engine_says() -> None:
    """Its duration is not a TTFT, and neither is its silence."""
    to = fleet()
    before = median_ttft(to)
    for ending in (Ending.COMPLETED, Ending.CANCELLED, Ending.SILENT):
        to.ended(send(to, stream=False), ending, 30.0)
    assert (median_ttft(to, now=40.0), load(to, 40.0).health) == (before, Health.UP)
    for now in range(20):
        key = send(to, now=50.0 + now, stream=False)
        to.ended(key, Ending.COMPLETED, 50.9 + now, Reported(engine_ttft=0.4))
    assert median_ttft(to, now=80.0) == pytest.approx(0.4, rel=0.15)


def test_tpot_and_token_counts_are_learned_from_reports() -> None:
    """Twenty answers at 80 ms a token, from a pool whose template costs 60 tokens."""
    to = fleet()
    for now in range(20):
        answer(to, prompt(507), now=10.0 * now, reported=Reported(prompt_tokens=560, mean_itl=0.08))
    assert to.forecast(ONE, load(to, 300.0), 500, 0, 300.0).tpot == pytest.approx(0.08, rel=0.1)
    assert to.token_scale("small").correct(500, 1) == pytest.approx(560, abs=3)
    assert to.token_scale("api").correct(500, 1) == 507


def test_the_length_of_answers_is_learned_by_route() -> None:
    """And bounded by what may be generated."""
    to = fleet()
    for _ in range(300):
        to.observe_output("chat", 40)
    assert to.expected_output("chat") == pytest.approx(40, abs=1)
    assert (to.expected_output("chat", 20), to.expected_output("code")) == (20, 256)


# --------------------------------------------------------------------------- health


def test_an_endpoint_that_fails_is_down_and_then_on_trial() -> None:
    """Though nothing happens meanwhile, the snapshot moves on; the trial is for one."""
    to = fleet()
    for _ in range(5):
        to.ended(send(to), Ending.FAILED, 0.0)
    assert [load(to, now).health for now in (0.0, 4.9, 5.2)] == [Health.DOWN, Health.DOWN, Health.PROBING]
    key = send(to, now=5.2)
    assert load(to, 5.2).health is Health.DOWN
    to.first_token(key, 5.3)
    assert load(to, 5.3).health is Health.UP


def test_an_endpoint_that_comes_back_is_on_trial_at_the_next_scrape() -> None:
    """A minute of nobody there, then a scrape."""
    to = fleet()
    for now in range(60):
        to.unreachable(ONE.id, float(now))
    assert load(to, 60.0).health is Health.DOWN
    to.scraped(ONE.id, EngineLoad(), 60.0)
    assert load(to, 60.0).health is Health.PROBING


def test_an_api_is_tried_again_within_ten_seconds() -> None:
    """No probe would tell that it is back."""
    to, now = fleet(), 0.0
    for _ in range(12):
        to.ended(send(to, endpoint=API, now=now), Ending.FAILED, now)
        if load(to, now, API).health is Health.DOWN:
            now += 10.2
            assert load(to, now, API).health is Health.PROBING


def test_silence_that_the_forecast_cannot_explain_takes_an_endpoint_out() -> None:
    """A stopped process accepts connections; one whose answer was merely due late stays."""
    hung, slow = fleet(), fleet()
    for to in (hung, slow):
        for now in range(40):
            answer(to, now=10.0 * now, ttft=0.1)
    hung.ended(send(hung, now=500.0), Ending.SILENT, 503.0)
    slow.ended(send(slow, now=500.0), Ending.SILENT, 500.1)
    assert (load(hung, 503.0).health, load(slow, 500.1).health) == (Health.DOWN, Health.UP)


def test_a_rate_limit_blocks_until_the_provider_said() -> None:
    """And says nothing of health."""
    to = fleet()
    to.ended(send(to, endpoint=API), Ending.RATE_LIMITED, 1.0, Reported(retry_after=7.0))
    assert (load(to, 1.0, API).blocked_until, load(to, 1.0, API).health) == (8.0, Health.UP)


# --------------------------------------------------------------------------- reload


def test_a_reload_keeps_what_was_learned_of_what_stays() -> None:
    """And lets attempts on what is gone end in peace."""
    to = fleet()
    answer(to, prompt(1000, blocks=62), ttft=2.0)
    expected, flying = median_ttft(to, now=9.0), [send(to, endpoint=endpoint, now=9.0) for endpoint in (ONE, TWO)]
    to.reload([replace(SMALL, endpoints=(ONE,))])
    assert set(to.snapshot(9.0).loads) == {ONE.id}
    assert (load(to, 9.0).in_flight, to.hit(ONE, prompt(1000, blocks=62))) == (1, 992)
    for key in flying:
        to.ended(key, Ending.COMPLETED, 10.0, Reported(1000, 0, 10, 0.02))
    to.scraped(TWO.id, EngineLoad(running=1), 10.0)
    assert set(to.snapshot(10.0).loads) == {ONE.id}
    assert (load(to, 10.0).in_flight, median_ttft(to, now=10.0)) == (0, pytest.approx(expected, rel=0.01))


def test_another_model_behind_the_same_address_is_a_stranger() -> None:
    """Neither its cache nor its speed is the old one's."""
    to = fleet()
    for now in range(9):
        answer(to, prompt(1000, blocks=62), now=10.0 * now, ttft=5.0)
    to.reload([replace(SMALL, model="other", endpoints=(ONE,))])
    assert to.hit(ONE, prompt(1000, blocks=62)) == 0
    assert median_ttft(to, now=100.0) < 0.5


# --------------------------------------------------------------------------- on a virtual engine


def wrong(answered: list[Request]) -> float:
    """Median relative error of the predicted medians."""
    return median(abs(request.ttft / request.forecast.p50 - 1) for request in answered)


@pytest.mark.parametrize("profile", [H100, A100, CPU], ids=["H100", "A100", "CPU"])
@pytest.mark.parametrize(("busy", "most"), [(0.1, 0.08), (0.5, 0.10), (0.8, 0.15)])
def test_after_fifty_requests_ttft_is_predicted_within_a_tenth(profile: Profile, busy: float, most: float) -> None:
    """Conversations on an engine of any speed, from idle to a queue; half of all errors are smaller."""
    answered, _ = serve(profile, conversations(profile, 300, busy, Random(3)))
    assert wrong(answered[50:]) < most


@pytest.mark.parametrize("profile", [H100, CPU], ids=["H100", "CPU"])
def test_nine_of_ten_first_tokens_come_before_their_p90(profile: Profile) -> None:
    """Over three engines' worth of requests at half load."""
    answered = [r for seed in range(3) for r in serve(profile, conversations(profile, 300, 0.5, Random(seed)))[0][50:]]
    shares = [sum(r.ttft <= r.forecast.quantile(q) for r in answered) / len(answered) for q in (0.5, 0.9)]
    assert shares == pytest.approx([0.5, 0.9], abs=0.06)


@pytest.mark.parametrize("profile", [H100, A100, CPU], ids=["H100", "A100", "CPU"])
def test_a_fivefold_slow_down_is_learned_within_ten_requests(profile: Profile) -> None:
    """The tenth to the thirtieth after it are predicted within a third."""
    answered, _ = serve(profile, conversations(profile, 260, 0.15, Random(4)), slowdown=5.0, after=200)
    assert wrong(answered[200:203]) > 0.5
    assert wrong(answered[210:230]) < 0.33


def test_hits_are_those_that_the_engine_reports() -> None:
    """Same capacity, same order of eviction: the belief is exact while all traffic is ours."""
    profile = replace(H100, kv_tokens=30_000)
    answered, _ = serve(profile, conversations(profile, 600, 0.3, Random(5)))
    assert sum(request.hit == request.cached for request in answered) >= 0.97 * len(answered)
    assert sum(request.cached > 0 for request in answered) > 0.2 * len(answered)
