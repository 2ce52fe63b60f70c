"""Predictions, health and reloads of a fleet."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from policies.fleet.endpoint_state import MAX_MODELS
from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport, Fleet
from policies.types import AttemptOutcome, Endpoint, Health
from tests.support.learned_fleet import (
    API,
    ONE,
    SMALL,
    TWO,
    answer,
    fleet,
    load,
    median_error,
    median_ttft,
    prompt,
    send,
)
from tests.support.virtual_engine import A100, CPU, H100, Profile, conversations, serve

pytestmark = pytest.mark.virtual_time

# --------------------------------------------------------------------------- learning


def test_a_new_endpoint_is_predicted_like_its_siblings() -> None:
    """The slow samples of a pool count for its new endpoints, and not for other pools."""
    to, api_before = fleet(), median_ttft(fleet(), API)
    for now in range(20):
        answer(to, prompt(1000), ONE, now=10.0 * now, ttft=5.0)
    assert median_ttft(to, ONE, now=500.0) == pytest.approx(5.0, rel=0.15)
    assert median_ttft(to, TWO, now=500.0) == pytest.approx(5.0, rel=0.15)
    assert median_ttft(to, API, now=500.0) == api_before
    assert to.view.forecast(TWO, load(to, 500.0, TWO), 1000, 0, 500.0).samples == 0


def test_siblings_without_an_answer_expect_as_many_tokens_in_an_event() -> None:
    """One software, one setting; what an endpoint has seen itself is kept."""
    to = fleet()
    seen = []
    for endpoint, tokens in ((ONE, 200), (TWO, 100), (ONE, 200)):
        key = send(to, endpoint=endpoint)
        to.on_first_token(key, 0.1)
        to.on_progress([(key, 50)], 1.0)
        to.on_ended(key, AttemptOutcome.COMPLETED, 2.0, AttemptReport(completion_tokens=tokens))
        seen.append([to._states[each.id].interference.tokens_per_event for each in (ONE, TWO, API)])
    assert seen == [[4.0, 4.0, 1.0], [4.0, 2.0, 1.0], [4.0, 2.0, 1.0]]


def test_an_endpoint_that_has_seen_no_answer_teaches_its_siblings_nothing() -> None:
    """A failed attempt on an endpoint that a reload has added."""
    one, two, added = (Endpoint(f"small/{i}", "small") for i in range(3))
    to = Fleet([replace(SMALL, endpoints=(one, two))])
    key = send(to, endpoint=one)
    to.on_first_token(key, 0.1)
    to.on_progress([(key, 50)], 1.0)
    to.on_ended(key, AttemptOutcome.COMPLETED, 2.0, AttemptReport(completion_tokens=200))
    to.reload([replace(SMALL, endpoints=(one, two, added))])
    to.on_ended(send(to, endpoint=added, now=3.0), AttemptOutcome.FAILED, 3.1)
    assert [to._states[each.id].interference.tokens_per_event for each in (one, two)] == [4.0, 4.0]


def test_a_few_samples_scale_the_predictor_of_a_sibling() -> None:
    """Three times slower than a sibling with 100 samples, which show how TTFT grows with the prompt."""
    to = fleet()
    for i in range(100):
        tokens = 500 + 137 * i % 7000
        answer(to, prompt(tokens), ONE, now=10.0 * i, ttft=0.02 + tokens / 20_000)
        if i % 20 == 19:
            answer(to, prompt(1000), TWO, now=10.0 * i + 5, ttft=3 * 0.07)
    assert median_ttft(to, TWO, 6000, now=2000.0) == pytest.approx(3 * 0.32, rel=0.15)
    assert median_ttft(to, ONE, 6000, now=2000.0) == pytest.approx(0.32, rel=0.1)


def test_a_new_endpoint_starts_from_the_most_similar_sibling() -> None:
    """Three samples tell a fast sibling from a slow one."""
    fast, slow, new = (Endpoint(f"small/{i}", "small") for i in range(3))
    to = Fleet([replace(SMALL, endpoints=(fast, slow, new))])
    for i in range(60):
        answer(to, prompt(1000), fast, now=10.0 * i, ttft=0.1)
        answer(to, prompt(1000 + 100 * i), slow, now=10.0 * i + 3, ttft=0.5 + i / 20)
    for i in range(3):
        answer(to, prompt(1000), new, now=700.0 + 10 * i, ttft=0.5)
    assert median_ttft(to, new, 5000, now=800.0) == pytest.approx(median_ttft(to, slow, 5000, now=800.0), rel=0.15)


def test_an_abandoned_attempt_is_a_lower_bound_of_ttft() -> None:
    """A failed attempt teaches no speed."""
    left, failed = fleet(), fleet()
    before = median_ttft(left)
    for now in range(4):
        left.on_ended(send(left, now=now * 10.0), AttemptOutcome.CANCELLED, now * 10.0 + 5.0)
        failed.on_ended(send(failed, now=now * 10.0), AttemptOutcome.FAILED, now * 10.0 + 5.0)
    assert median_ttft(left, now=50.0) > 2.0
    assert median_ttft(failed, now=50.0) == before


def test_a_whole_answer_teaches_only_the_engines_own_ttft() -> None:
    """Neither the duration nor the silence of a whole answer is a TTFT."""
    to = fleet()
    before = median_ttft(to)
    for ending in (AttemptOutcome.COMPLETED, AttemptOutcome.CANCELLED, AttemptOutcome.SILENT):
        to.on_ended(send(to, stream=False), ending, 30.0)
    assert (median_ttft(to, now=40.0), load(to, 40.0).health) == (before, Health.UP)
    for now in range(20):
        key = send(to, now=50.0 + now, stream=False)
        to.on_ended(key, AttemptOutcome.COMPLETED, 50.9 + now, AttemptReport(engine_ttft=0.4))
    assert median_ttft(to, now=80.0) == pytest.approx(0.4, rel=0.15)


def test_tpot_and_token_counts_are_learned_from_reports() -> None:
    """Twenty answers at 80 ms a token, from a pool whose template costs 60 tokens."""
    to = fleet()
    for now in range(20):
        answer(to, prompt(507), now=10.0 * now, reported=AttemptReport(prompt_tokens=560, mean_itl=0.08))
    assert to.view.forecast(ONE, load(to, 300.0), 500, 0, 300.0).tpot == pytest.approx(0.08, rel=0.1)
    assert to.view.token_scale("small").correct(500, 1) == pytest.approx(560, abs=3)
    assert to.view.token_scale("api").correct(500, 1) == 507


# --------------------------------------------------------------------------- health


def test_a_failing_endpoint_is_down_and_then_probing() -> None:
    """The snapshot changes by time alone; the trial is one request."""
    to = fleet()
    for _ in range(5):
        to.on_ended(send(to), AttemptOutcome.FAILED, 0.0)
    assert [load(to, now).health for now in (0.0, 4.9, 5.2)] == [Health.DOWN, Health.DOWN, Health.PROBING]
    key = send(to, now=5.2)
    assert load(to, 5.2).health is Health.DOWN
    to.on_first_token(key, 5.3)
    assert load(to, 5.3).health is Health.UP


def test_a_lost_endpoint_is_probing_after_the_next_scrape() -> None:
    """After a minute of failed probes."""
    to = fleet()
    for now in range(60):
        to.on_probe_failed(ONE.id, float(now))
    assert load(to, 60.0).health is Health.DOWN
    to.on_scrape(ONE.id, EngineLoad(), 60.0)
    assert load(to, 60.0).health is Health.PROBING


def test_an_api_is_ejected_for_ten_seconds_at_most() -> None:
    """APIs are not probed, so only a request can show the recovery."""
    to, now = fleet(), 0.0
    for _ in range(12):
        to.on_ended(send(to, endpoint=API, now=now), AttemptOutcome.FAILED, now)
        if load(to, now, API).health is Health.DOWN:
            now += 10.2
            assert load(to, now, API).health is Health.PROBING


def test_silence_beyond_the_forecast_takes_an_endpoint_down() -> None:
    """A stopped process accepts connections. An endpoint with an answer that is slightly late stays up."""
    hung, slow = fleet(), fleet()
    for to in (hung, slow):
        for now in range(40):
            answer(to, now=10.0 * now, ttft=0.1)
    hung.on_ended(send(hung, now=500.0), AttemptOutcome.SILENT, 503.0)
    slow.on_ended(send(slow, now=500.0), AttemptOutcome.SILENT, 500.1)
    assert (load(hung, 503.0).health, load(slow, 500.1).health) == (Health.DOWN, Health.UP)


def test_a_rate_limit_blocks_an_api_until_retry_after() -> None:
    """Health is unchanged."""
    to = fleet()
    to.on_ended(send(to, endpoint=API), AttemptOutcome.RATE_LIMITED, 1.0, AttemptReport(retry_after=7.0))
    assert (load(to, 1.0, API).limits.blocked_until, load(to, 1.0, API).health) == (8.0, Health.UP)


# --------------------------------------------------------------------------- reload


def test_a_reload_keeps_learned_state_of_remaining_endpoints() -> None:
    """Attempts at removed endpoints end without effect."""
    to = fleet()
    answer(to, prompt(1000, blocks=62), ttft=2.0)
    expected, flying = median_ttft(to, now=9.0), [send(to, endpoint=endpoint, now=9.0) for endpoint in (ONE, TWO)]
    to.reload([replace(SMALL, endpoints=(ONE,))])
    assert set(to.snapshot(9.0).loads) == {ONE.id}
    assert (load(to, 9.0).in_flight, to.view.hit(ONE, prompt(1000, blocks=62))) == (1, 992)
    for key in flying:
        to.on_ended(key, AttemptOutcome.COMPLETED, 10.0, AttemptReport(1000, 0, 10, 0.02))
    to.on_scrape(TWO.id, EngineLoad(running=1), 10.0)
    assert set(to.snapshot(10.0).loads) == {ONE.id}
    assert (load(to, 10.0).in_flight, median_ttft(to, now=10.0)) == (0, pytest.approx(expected, rel=0.01))


def test_another_model_at_the_same_address_starts_unlearned() -> None:
    """Neither the prefix cache nor the speed carries over."""
    to = fleet()
    for now in range(9):
        answer(to, prompt(1000, blocks=62), now=10.0 * now, ttft=5.0)
    to.reload([replace(SMALL, model="other", endpoints=(ONE,))])
    assert to.view.hit(ONE, prompt(1000, blocks=62)) == 0
    assert median_ttft(to, now=100.0) < 0.5


def test_an_attempt_at_a_replaced_endpoint_changes_nothing_at_its_successor() -> None:
    """Neither cache nor health."""
    to = fleet()
    flying = [send(to, endpoint=ONE, now=9.0) for _ in range(3)]
    to.reload([replace(SMALL, model="other", endpoints=(ONE,))])
    to.cache_lost.clear()
    to.on_ended(
        send(to, prompt(1000, blocks=62), endpoint=ONE, now=9.0),
        AttemptOutcome.COMPLETED,
        9.5,
        AttemptReport(1000, 0, 10, 0.02),
    )
    for key in flying:
        to.on_ended(key, AttemptOutcome.FAILED, 10.0, AttemptReport(connected=False))
    assert (to.view.hit(ONE, prompt(1000, blocks=62)), to.cache_lost) == (992, set())
    assert load(to, 10.0).health is Health.UP


@pytest.mark.parametrize("profile", [H100, A100, CPU], ids=["H100", "A100", "CPU"])
@pytest.mark.parametrize(("busy", "most"), [(0.1, 0.08), (0.5, 0.10), (0.8, 0.15)])
def test_after_fifty_requests_ttft_is_predicted_within_a_tenth(profile: Profile, busy: float, most: float) -> None:
    """The median error for conversations on an engine of any speed: 8% idle, 15% with a queue."""
    answered, _ = serve(profile, conversations(profile, 300, busy, Random(3)))
    assert median_error(answered[50:]) < most


@pytest.mark.parametrize("profile", [H100, CPU], ids=["H100", "CPU"])
def test_the_predicted_p50_and_p90_are_calibrated(profile: Profile) -> None:
    """Over three runs at half load."""
    answered = [r for seed in range(3) for r in serve(profile, conversations(profile, 300, 0.5, Random(seed)))[0][50:]]
    shares = [sum(r.ttft <= r.forecast.quantile(q) for r in answered) / len(answered) for q in (0.5, 0.9)]
    assert shares == pytest.approx([0.5, 0.9], abs=0.06)


@pytest.mark.parametrize("profile", [H100, A100, CPU], ids=["H100", "A100", "CPU"])
def test_a_fivefold_slow_down_is_learned_within_ten_requests(profile: Profile) -> None:
    """The tenth to the thirtieth request after the change are predicted within a third."""
    answered, _ = serve(profile, conversations(profile, 260, 0.15, Random(4)), slowdown=5.0, after=200)
    assert median_error(answered[200:203]) > 0.5
    assert median_error(answered[210:230]) < 0.33


def test_predicted_hits_equal_the_engines() -> None:
    """With equal capacity and order of eviction, while the gateway sends all traffic."""
    profile = replace(H100, kv_tokens=30_000)
    answered, _ = serve(profile, conversations(profile, 600, 0.3, Random(5)))
    assert sum(request.hit == request.cached for request in answered) >= 0.97 * len(answered)
    assert sum(request.cached > 0 for request in answered) > 0.2 * len(answered)


def test_a_first_token_that_is_known_late_moves_no_clock_back() -> None:
    """It is inferred from the next report of the engine, and another token came since."""
    to = fleet()
    early, late = send(to, now=0.0), send(to, now=0.1)
    to.on_first_token(late, 0.9)
    to.on_first_token(early, 0.5)
    assert load(to, 1.0).last_token_at == 0.9


# --------------------------------------------------------------------------- another model behind the URL


def test_times_are_learned_by_model_and_prefixes_of_another_are_forgotten() -> None:
    """The first name is no change; the times of a model return with the model."""
    to, asked = fleet(), prompt(1000, blocks=62)
    untaught = median_ttft(to)
    assert to.on_model(ONE.id, "a") == ""
    for number in range(40):
        answer(to, prompt(1000, blocks=62, first=1000 * number), now=10.0 * number, ttft=2.0)
    answer(to, asked, now=500.0, ttft=2.0)
    slow = median_ttft(to, now=600.0)
    assert (to.on_model(ONE.id, "a"), to.view.hit(ONE, asked)) == ("", 992)
    assert (to.on_model(ONE.id, "b"), to.view.hit(ONE, asked)) == ("a", 0)
    assert ONE.id in to.cache_lost
    assert median_ttft(to, now=600.0) == untaught < slow / 2
    assert to.on_model(ONE.id, "a") == "b"
    assert median_ttft(to, now=600.0) == slow


def test_an_engine_that_names_a_new_model_each_time_fills_no_memory() -> None:
    to = fleet()
    for number in range(100):
        to.on_model(ONE.id, f"model-{number}")
    assert len(to._states[ONE.id]._times) == MAX_MODELS
