"""A fleet and an engine with KV events, beside an engine without."""

from __future__ import annotations

from policies.fleet.engine_load import EngineLoad
from policies.fleet.fleet import AttemptReport, Fleet
from policies.prefix_cache.residency import Residency
from policies.types import AttemptOutcome
from tests.support.learned_fleet import ONE, TWO, answer, fleet, prompt, send

ASKED = prompt(645, blocks=40)
THEIRS = range(1, 41)


def with_events() -> tuple[Fleet, Residency]:
    """A fleet, and the residency of an endpoint that publishes KV events."""
    to = fleet()
    cache = to.cache(ONE.id)
    assert cache is not None
    return to, cache.enable_events()


def serve(to: Fleet, engine: Residency) -> None:
    """Answers the prompt; the engine publishes the stored blocks, without a session."""
    key = send(to, ASKED)
    engine.on_stored(THEIRS, None, 16)
    to.on_first_token(key, 0.1)
    to.on_ended(key, AttemptOutcome.COMPLETED, 0.2, AttemptReport(prompt_tokens=645, cached_tokens=0))


def test_with_events_a_hit_is_the_resident_prefix() -> None:
    """In whole blocks. Without events, the hit is the sent prompt."""
    to, engine = with_events()
    serve(to, engine)
    answer(to, ASKED, TWO)
    engine.on_removed(THEIRS[25:])
    assert (to.view.hit(ONE, ASKED), to.view.hit(TWO, ASKED)) == (400, 640)


def test_with_events_reported_hits_do_not_shrink_the_capacity() -> None:
    """Only without events does the gateway estimate the capacity from reported hits."""
    to, engine = with_events()
    serve(to, engine)
    for now in range(20):
        key = send(to, ASKED, now=now)
        engine.on_stored(THEIRS, None, 16)
        to.on_first_token(key, now + 0.1)
        to.on_ended(key, AttemptOutcome.COMPLETED, now + 0.2, AttemptReport(prompt_tokens=645, cached_tokens=0))
        answer(to, ASKED, TWO, now=now, reported=AttemptReport(prompt_tokens=645, cached_tokens=0))
    assert [to.view.statistics(one.id, 30.0).prefix_capacity < 100 for one in (ONE, TWO)] == [False, True]


def test_a_cleared_or_restarted_engine_has_lost_its_cache() -> None:
    """By an event or by the next scrape."""
    to, engine = with_events()
    serve(to, engine)
    to.on_cache_cleared(ONE.id)
    assert (to.view.hit(ONE, ASKED), engine.statistics().blocks, to.cache_lost) == (0, 0, {ONE.id})
    serve(to, engine)
    to.on_scrape(ONE.id, EngineLoad(started_at=1.0), 5.0)
    to.on_scrape(ONE.id, EngineLoad(started_at=9.0), 6.0)
    assert (to.view.hit(ONE, ASKED), engine.statistics().blocks) == (0, 0)


def test_statistics_show_resident_blocks() -> None:
    """None for an engine without events."""
    to, engine = with_events()
    serve(to, engine)
    one, two = (to.view.statistics(endpoint.id, 1.0).resident for endpoint in (ONE, TWO))
    assert one is not None
    assert (one.blocks, one.anchored, one.unanchored, two) == (40, 1, 0, None)
