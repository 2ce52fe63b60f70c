"""An endpoint that an operator drains after the decision gets no further attempt of the request."""

from __future__ import annotations

from tests.support.attempt_script import A, B, C, GivenFacts, begun, fails, machine, silence, told


def test_a_candidate_drained_since_the_decision_is_passed_over() -> None:
    race = begun(A, B, C, facts=GivenFacts(drained={"b"}))
    assert told(race.failed(fails(1), 0.1)) == ["open 2 fallback c"]


def test_no_hedge_goes_to_a_drained_candidate() -> None:
    race = machine(A, B, C, hedge=True, facts=GivenFacts(drained={"b"}))
    step, _ = silence(race, race.begin(0.0))
    assert told(step) == ["open 2 hedge c"]


def test_the_attempt_in_progress_at_a_drained_endpoint_ends_as_usual() -> None:
    facts = GivenFacts()
    race = begun(A, B, facts=facts)
    facts.drained.add("a")
    assert told(race.first_token(1, 0.2)) == ["commit 1"]


def test_a_failed_attempt_is_not_repeated_at_an_endpoint_drained_meanwhile() -> None:
    """The only endpoint would be asked again after a second; the caller hears the failure, and waits for nothing."""
    facts = GivenFacts()
    race = begun(A, facts=facts)
    step = race.failed(fails(1, "overloaded", retry_after=0.5), 0.1)
    assert step.wake_at is not None
    facts.drained.add("a")
    assert told(race.look(step.wake_at))[0].startswith("give up")


def test_a_closed_candidate_that_is_drained_is_waited_for_no_longer() -> None:
    facts = GivenFacts(closed={"b"})
    race = begun(A, B, facts=facts)
    step = race.failed(fails(1), 0.1)
    assert told(step) == []
    facts.drained.add("b")
    step, now = silence(race, step)
    assert (told(step)[0].startswith("give up"), now < 1.0) == (True, True)
