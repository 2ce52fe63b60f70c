"""Lessons of attempts: noted by events, learned together."""

from __future__ import annotations

from policies.fleet.fleet import AttemptReport, Fleet
from policies.fleet.lessons import BATCH
from policies.latency.ttft_predictor import MATURE_SAMPLES
from policies.types import AttemptOutcome, Candidate, Endpoint, Forecast, Pool, PoolEstimate

ENGINE = Endpoint("main/0", "main")


def samples(fleet: Fleet, now: float) -> int:
    return fleet.view.statistics(ENGINE.id, now).samples


def answer(fleet: Fleet, number: int) -> None:
    """A request with its first token after 0.2 s, and its end."""
    at = float(number)
    candidate = Candidate(ENGINE, 0, 100, 0, Forecast(0.2), 1.0, 0.0)
    fleet.on_sent(number, candidate, PoolEstimate(100), at, stream=True)
    fleet.on_first_token(number, at + 0.2)
    fleet.on_ended(number, AttemptOutcome.COMPLETED, at + 0.5, AttemptReport(100, 0, 20, 0.015))


def mature_fleet() -> tuple[Fleet, list[str]]:
    """A fleet with enough samples, and the requests to learn that it makes from then on."""
    fleet, asked = Fleet([Pool("main", "m", (ENGINE,))]), list[str]()
    for number in range(MATURE_SAMPLES):
        answer(fleet, number)
    fleet.request_learning = lambda: asked.append("learn")
    return fleet, asked


def test_an_endpoint_of_which_little_is_known_learns_at_once() -> None:
    fleet = Fleet([Pool("main", "m", (ENGINE,))])
    fleet.request_learning = lambda: None
    answer(fleet, 0)
    assert samples(fleet, 1.0) == 1


def test_lessons_of_a_known_endpoint_wait_for_one_another() -> None:
    """Learning is asked for once, however many lessons follow."""
    fleet, asked = mature_fleet()
    answer(fleet, 100)
    answer(fleet, 101)
    assert (samples(fleet, 102.0), asked) == (MATURE_SAMPLES, ["learn"])
    fleet.learn()
    assert samples(fleet, 102.0) == MATURE_SAMPLES + 2


def test_a_batch_is_learned_without_waiting_for_more() -> None:
    fleet, _ = mature_fleet()
    for number in range(BATCH // 2):  # of two lessons each
        answer(fleet, 100 + number)
    assert samples(fleet, 200.0) == MATURE_SAMPLES + BATCH // 2


def test_what_is_pending_is_learned_before_the_model_changes() -> None:
    """It is of the model before."""
    fleet, _ = mature_fleet()
    fleet.on_model(ENGINE.id, "first")
    answer(fleet, 100)
    fleet.on_model(ENGINE.id, "second")
    assert samples(fleet, 101.0) == 0
    fleet.learn()
    assert samples(fleet, 101.0) == 0
    fleet.on_model(ENGINE.id, "first")
    assert samples(fleet, 101.0) == MATURE_SAMPLES + 1
