"""Room in the KV cache of an engine, and what waits for it teach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import Fleet
from policies.types import FOREVER, AttemptOutcome
from tests.support.learned_fleet import ONE, answer, fleet, load, median_ttft, prompt, send

FULL = EngineLoad(running=10, waiting=3, kv_usage=0.97, block_size=16, kv_blocks=1000)
WELL = replace(FULL, waiting=0, kv_usage=0.5)


def trained() -> Fleet:
    """First tokens after 0.1 s each, from 0 s to 20 s."""
    to = fleet()
    for number in range(20):
        answer(to, now=float(number))
    to.on_scrape(ONE.id, WELL, 29.9)
    return to


def test_the_room_is_free_blocks_less_a_reserve_and_what_was_sent_since() -> None:
    """5% of 16,000 tokens are the reserve."""
    to = trained()
    assert load(to, 30.0).kv_room == pytest.approx(7_200)
    send(to, prompt(2_000), now=30.0)
    assert load(to, 30.0).kv_room == pytest.approx(5_200)
    to.on_scrape(ONE.id, FULL, 30.5)
    assert load(to, 30.5).kv_room < 0


@pytest.mark.parametrize(
    "reported",
    [
        replace(FULL, kv_blocks=None),
        replace(FULL, kv_usage=None),
        replace(FULL, running=0, waiting=0),
    ],
)
def test_the_room_is_unknown_without_a_report_of_size_and_use_or_without_requests_that_run(
    reported: EngineLoad,
) -> None:
    """Nothing would end there to free blocks: such an engine must not be closed for ever."""
    to = trained()
    to.on_scrape(ONE.id, reported, 30.0)
    assert load(to, 30.0).kv_room == FOREVER


def test_the_room_is_unknown_once_the_report_is_old() -> None:
    """Also for what is learned: without metrics every first token teaches."""
    to = trained()
    to.on_scrape(ONE.id, FULL, 30.0)
    send(to, now=40.0)
    assert load(to, 40.0).kv_room == FOREVER
    before = to.view.statistics(ONE.id, 40.0).samples
    answer(to, now=40.5)
    assert to.view.statistics(ONE.id, 41.0).samples == before + 1


@pytest.mark.parametrize("scraped_at", [30.0, 35.0])
def test_a_wait_for_blocks_teaches_nothing_of_prefills(scraped_at: float) -> None:
    """Reported before the sending or during the wait; a caller who leaves teaches nothing either."""
    to = trained()
    before = median_ttft(to, now=29.9)
    if scraped_at < 31:
        to.on_scrape(ONE.id, FULL, scraped_at)
    waiting, left = send(to, now=31.0), send(to, now=31.0)
    if scraped_at > 31:
        to.on_scrape(ONE.id, FULL, scraped_at)
    to.on_first_token(waiting, 39.0)
    to.on_ended(waiting, AttemptOutcome.COMPLETED, 40.0)
    to.on_ended(left, AttemptOutcome.CANCELLED, 40.0)
    to.on_scrape(ONE.id, WELL, 40.0)
    assert (to.view.statistics(ONE.id, 41.0).samples, median_ttft(to, now=41.0)) == (20, pytest.approx(before, rel=0.1))


def test_an_unknown_engine_is_learned_even_from_waits() -> None:
    """A time that is too long is better than that of a typical engine."""
    to = fleet()
    to.on_scrape(ONE.id, FULL, 0.0)
    answer(to, now=0.1)
    assert to.view.statistics(ONE.id, 2.0).samples == 1


def test_a_prompt_that_ended_without_a_token_gives_its_room_back() -> None:
    """A caller that sends long prompts and hangs up would close the engine for all others until the next report. What
    the report has counted is in it."""
    to = trained()
    for _ in range(3):
        key = send(to, prompt(4_000), now=30.0)
        to.on_ended(key, AttemptOutcome.CANCELLED, 30.1)
    assert load(to, 30.2).kv_room == pytest.approx(7_200)
    key = send(to, prompt(4_000), now=30.3)
    to.on_scrape(ONE.id, replace(WELL, kv_usage=0.75), 30.4)
    to.on_ended(key, AttemptOutcome.CANCELLED, 30.5)
    assert load(to, 30.6).kv_room == pytest.approx(3_200)
