"""The first token of an attempt in flight, as expected by what its engine has done and been sent since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.fleet.fleet import Fleet
from policies.types import NEVER, AttemptOutcome, FirstTokenOutlook, Health
from tests.support.learned_fleet import API, ONE, TWO, answer, candidate_of, fleet, load, prompt, send


def trained() -> Fleet:
    """An engine that takes 0.1 s for 1,000 tokens and 1 s for 10,000."""
    to = fleet()
    for now in range(20):
        answer(to, prompt(1000), now=10.0 * now, ttft=0.1)
        answer(to, prompt(10_000), now=10.0 * now + 5, ttft=1.0)
    return to


def outlook(to: Fleet, key: int, now: float) -> FirstTokenOutlook:
    found = to.view.outlook(key, candidate_of(to, TWO, now), load(to, now, TWO), prompt(), now)
    assert found is not None
    return found


def test_a_prompt_alone_is_expected_as_at_its_sending() -> None:
    to = trained()
    at_sending = to.view.forecast(ONE, load(to, 500.0), 1000, 0, 500.0)
    key = send(to, prompt(1000), now=500.0)
    now = outlook(to, key, 500.2)
    assert (now.since, now.forecast.p50) == (500.0, pytest.approx(at_sending.p50))


def test_the_prompt_ahead_counts_until_its_first_token() -> None:
    """From there on the clock of the next one runs."""
    to = trained()
    first, second = send(to, prompt(10_000), now=500.0), send(to, prompt(1000), now=500.1)
    behind = outlook(to, second, 500.5)
    assert (behind.since, behind.forecast.p50) == (500.0, pytest.approx(1.1, rel=0.1))
    to.on_first_token(first, 503.0)
    alone = outlook(to, second, 503.0)
    assert (alone.since, alone.forecast.p50) == (503.0, pytest.approx(0.1, rel=0.2))


def test_prompts_sent_later_share_the_step() -> None:
    """Of a long one, no more than a step takes: the engine reads what was sent first, first."""
    to = trained()
    key = send(to, prompt(1000), now=500.0)
    alone = outlook(to, key, 500.1).forecast.p50
    beside = send(to, prompt(3000), now=500.0)
    shared = outlook(to, key, 500.1).forecast.p50
    assert shared == pytest.approx(outlook(to, beside, 500.1).forecast.p50, rel=0.05)
    assert shared > 3 * alone
    long = send(to, prompt(100_000), now=500.0)
    assert shared < outlook(to, key, 500.1).forecast.p50 < outlook(to, long, 500.1).forecast.p50 / 5


def test_one_prompt_in_twenty_may_have_lost_its_cached_prefix() -> None:
    """So that a silence beyond the forecast with the prefix is explained by the one without."""
    to = trained()
    cached = prompt(10_000, blocks=600)
    answer(to, cached, now=500.0, ttft=1.0)
    key = send(to, cached, now=510.0)
    forecast = outlook(to, key, 510.1).forecast
    assert forecast.p90 < 0.2
    assert 0.95 <= forecast.probability(0.5) < 0.98
    assert forecast.quantile(0.98) > 0.8


def test_an_engine_that_has_stopped_writing_reads_no_longer_prompt() -> None:
    """It writes its answers while it reads: none of them for a second is no lost prefix, but a hang."""
    to = trained()
    cached = prompt(10_000, blocks=600)
    answer(to, cached, now=500.0, ttft=1.0)
    writes = send(to, now=509.0)
    to.on_first_token(writes, 509.5)
    key = send(to, cached, now=510.0)
    assert outlook(to, key, 510.9).forecast.quantile(0.98) > 0.8
    assert outlook(to, key, 511.1).forecast.quantile(0.98) < 0.5
    for count in range(8):
        to.on_progress([(writes, 2 + count)], 510.0 + 0.2 * count)
    assert outlook(to, key, 511.6).forecast.quantile(0.98) > 0.8


def test_tokens_of_other_answers_show_life_once_they_are_counted() -> None:
    """At a count it is not known how long ago a token came: only that it came after the count before."""
    to = trained()
    writes = send(to, now=500.0)
    to.on_first_token(writes, 500.1)
    to.on_progress([(writes, 2)], 500.2)
    key = send(to, prompt(1000), now=500.3)
    to.on_progress([(writes, 5)], 500.4)
    assert outlook(to, key, 500.5).heard_at == 500.2
    to.on_progress([(writes, 9)], 500.6)
    to.on_progress([(writes, 9)], 500.8)
    assert outlook(to, key, 500.9).heard_at == 500.4


def test_of_an_api_nothing_is_known_beyond_its_forecast() -> None:
    """Other answers of a provider come from other machines."""
    to = trained()
    forecast, key = candidate_of(to, API, 500.0).forecast, send(to, endpoint=API, now=500.0)
    answer(to, endpoint=API, now=500.1)
    found = outlook(to, key, 500.5)
    assert (found.since, found.forecast, found.heard_at) == (500.0, forecast, NEVER)


def test_the_wait_for_an_engine_to_wake_stays_in_the_forecast() -> None:
    to = trained()
    candidate = candidate_of(to, ONE, 500.0)
    asleep = replace(candidate.load, health=Health.ASLEEP, wait=30.0)
    woken = replace(candidate, load=asleep, forecast=to.view.forecast(ONE, asleep, 1000, 0, 500.0))
    to.on_sent("woken", woken, prompt(), 500.0, stream=True)
    found = to.view.outlook("woken", candidate, None, prompt(), 510.0)
    assert found is not None
    assert found.forecast.p50 > 30


def test_of_an_attempt_that_has_ended_nothing_is_known() -> None:
    to = trained()
    assert to.view.outlook(10**9, candidate_of(to, TWO, 0.0), None, prompt(), 0.0) is None


def test_the_next_candidate_is_forecast_anew() -> None:
    """With what it has been sent since; as decided, where it has left the fleet."""
    to = trained()
    key, upcoming = send(to, now=500.0), candidate_of(to, TWO, 500.0)
    send(to, prompt(10_000), endpoint=TWO, now=500.1)
    busy = to.view.outlook(key, upcoming, load(to, 500.1, TWO), prompt(), 500.1)
    gone = to.view.outlook(key, upcoming, None, prompt(), 500.1)
    assert busy is not None
    assert gone is not None
    assert busy.upcoming.p50 > 5 * gone.upcoming.p50 == pytest.approx(5 * upcoming.forecast.p50)


def test_an_engine_that_writes_others_answers_is_not_taken_down_for_a_silence() -> None:
    """The attempt waits for a prompt that is longer than believed, or for blocks."""
    hung, alive = trained(), trained()
    for to in (hung, alive):
        writes = send(to, now=500.0)
        to.on_first_token(writes, 500.1)
        key = send(to, prompt(1000), now=500.3)
        for count in range(1, 16):
            to.on_progress([(writes, 1 + count * (to is alive))], 500.3 + 0.2 * count)
        to.on_ended(key, AttemptOutcome.SILENT, 503.3)
    assert (load(hung, 503.3).health, load(alive, 503.3).health) == (Health.DOWN, Health.UP)
