"""A fleet and an engine with KV events, beside an engine without."""

from __future__ import annotations

from policies.fleet.fleet import AttemptReport, Fleet
from policies.prefix_cache.residency import Residency
from policies.types import AttemptOutcome, EngineLoad
from tests.policies.fleets import ONE, TWO, answer, fleet, prompt, send

ASKED = prompt(645, blocks=40)
THEIRS = range(1, 41)


def heard() -> tuple[Fleet, Residency]:
    to = fleet()
    cache = to.cache(ONE.id)
    assert cache is not None
    return to, cache.enable_events()


def serve(to: Fleet, engine: Residency) -> None:
    """The prompt is answered, and the engine says what it stored (without a session)."""
    key = send(to, ASKED)
    engine.on_stored(THEIRS, None, 16)
    to.on_first_token(key, 0.1)
    to.on_ended(key, AttemptOutcome.COMPLETED, 0.2, AttemptReport(prompt_tokens=645, cached_tokens=0))


def test_a_hit_is_what_the_engine_still_holds() -> None:
    """In whole blocks; its sibling's is what was sent there."""
    to, engine = heard()
    serve(to, engine)
    answer(to, ASKED, TWO)
    engine.on_removed(THEIRS[25:])
    assert (to.hit(ONE, ASKED), to.hit(TWO, ASKED)) == (400, 640)


def test_an_eviction_says_nothing_of_the_caches_size() -> None:
    """The engine's own word is enough; only without it is the bound of the index what answers bear out."""
    to, engine = heard()
    serve(to, engine)
    for now in range(20):
        key = send(to, ASKED, now=now)
        engine.on_stored(THEIRS, None, 16)
        to.on_first_token(key, now + 0.1)
        to.on_ended(key, AttemptOutcome.COMPLETED, now + 0.2, AttemptReport(prompt_tokens=645, cached_tokens=0))
        answer(to, ASKED, TWO, now=now, reported=AttemptReport(prompt_tokens=645, cached_tokens=0))
    assert [to.statistics(one.id, 30.0).prefix_capacity < 100 for one in (ONE, TWO)] == [False, True]


def test_an_emptied_engine_is_cold() -> None:
    """By its events or by its next scrape, whichever comes first."""
    to, engine = heard()
    serve(to, engine)
    to.on_cache_cleared(ONE.id)
    assert (to.hit(ONE, ASKED), engine.statistics().blocks, to.cache_lost) == (0, 0, {ONE.id})
    serve(to, engine)
    to.on_scrape(ONE.id, EngineLoad(started_at=1.0), 5.0)
    to.on_scrape(ONE.id, EngineLoad(started_at=9.0), 6.0)
    assert (to.hit(ONE, ASKED), engine.statistics().blocks) == (0, 0)


def test_what_an_engine_holds_is_told() -> None:
    """For people; None where it does not say."""
    to, engine = heard()
    serve(to, engine)
    one, two = (to.statistics(endpoint.id, 1.0).resident for endpoint in (ONE, TWO))
    assert one is not None
    assert (one.blocks, one.anchored, one.unanchored, two) == (40, 1, 0, None)
