"""TPOT budgets that no engine of a pool can keep, even for an answer alone."""

from __future__ import annotations

import pytest

from gateway.config.yaml_source import with_preset
from gateway.lost_promises import HOLD, LostPromise, LostPromises
from policies.fleet.fleet import AttemptReport
from policies.latency.tpot import TpotPredictor
from policies.routes.route import Route
from tests.support.learned_fleet import ONE, TWO, answer, fleet

CHAT = Route.model_validate(with_preset("chat", {"name": "chat", "tiers": ["a", "b"], "tpot": {"budget": "50ms"}}))
NIGHT = Route.model_validate(with_preset("batch", {"name": "night", "tiers": ["a"]}))


def test_a_promise_is_reported_when_lost_and_when_kept_again() -> None:
    """Once each; a TPOT that varies by a tenth around the budget changes nothing. Unknown pools are absent."""
    promises, changes = LostPromises(), []
    for turn, alone in enumerate((0.04, 0.051, 0.06, 0.049, 0.046, 0.044, 0.049)):
        changes += promises.update([CHAT, NIGHT], {"a": alone, "b": None}.get, turn * HOLD)
    assert changes == [LostPromise("chat", "a", 0.051, 0.05), LostPromise("chat", "a", 0.044, 0.05)]
    assert promises.is_lost == {("chat", "a"): False}


def test_a_pair_changes_at_most_once_a_minute() -> None:
    """Within a minute the state stays, and the log is silent."""
    promises = LostPromises()
    changes = [promises.update([CHAT], {"a": (0.06, 0.01)[turn % 2]}.get, float(turn)) for turn in range(122)]
    assert [turn for turn, found in enumerate(changes) if found] == [0, 61]
    assert promises.is_lost == {("chat", "a"): False}


def test_a_removed_route_or_pool_is_forgotten() -> None:
    promises = LostPromises()
    promises.update([CHAT], {"a": 1.0, "b": 1.0}.get, 0.0)
    assert promises.is_lost == {("chat", "a"): True, ("chat", "b"): True}
    assert promises.update([], {}.get, 1.0) == []
    assert promises.is_lost == {}


@pytest.mark.parametrize("source", ["answers", "progress"])
def test_the_tpot_of_an_answer_alone_is_known_after_a_few_answers_or_seconds(source: str) -> None:
    """The prior of an unknown engine is no finding."""
    predictor, known = TpotPredictor(), []
    for _ in range(30):
        known.append(predictor.tpot_alone)
        if source == "answers":
            predictor.observe(2, 2000.0, 0.1)
        else:
            predictor.observe_at_rest(2, 2000.0, 0.4, 4, 0.2)
    assert known[2] is None
    assert known[-1] == pytest.approx(0.1, rel=0.1)


def test_the_tpot_of_a_pool_is_that_of_the_fastest_engine_in_use() -> None:
    """Of all engines while none is in use: an outage is no news of the hardware."""
    engines = fleet()
    assert (engines.view.tpot_alone("small"), engines.view.tpot_alone("removed")) == (None, None)
    for turn in range(8):
        for endpoint, itl in ((ONE, 0.03), (TWO, 0.09)):
            answer(
                engines, endpoint=endpoint, now=turn * 5.0, reported=AttemptReport(completion_tokens=100, mean_itl=itl)
            )
    fast = engines.view.tpot_alone("small")
    assert fast == pytest.approx(0.03, rel=0.15)
    for turn in range(3):
        engines.on_probe_failed(ONE.id, 50.0 + turn)
    assert engines.view.tpot_alone("small") == pytest.approx(0.09, rel=0.15)
    for turn in range(3):
        engines.on_probe_failed(TWO.id, 50.0 + turn)
    assert engines.view.tpot_alone("small") == fast
