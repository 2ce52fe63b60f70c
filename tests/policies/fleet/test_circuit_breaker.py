"""One endpoint's health."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.circuit_breaker import PEER_REPORTS_IGNORED, TRANSITIONS, BreakerEvent, BreakerState, CircuitBreaker
from policies.types import NEVER, AttemptOutcome, Health


def failed(times: int, connected: bool = True, now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for number in range(times):
        breaker.on_sent(number, now)
        breaker.on_ended(number, AttemptOutcome.FAILED, now, connected)
    return breaker


def refused_probe(breaker: CircuitBreaker, now: float) -> None:
    breaker.on_sent("probe", now)
    breaker.on_ended("probe", AttemptOutcome.FAILED, now)


def test_the_table_knows_no_way_from_open_to_closed_but_through_half_open() -> None:
    """Nobody is trusted with everything at once."""
    assert {
        sign
        for (state, sign), after in TRANSITIONS.items()
        if (state, after) == (BreakerState.OPEN, BreakerState.CLOSED)
    } == set()
    assert TRANSITIONS[BreakerState.HALF_OPEN, BreakerEvent.TRIAL_ANSWERED] is BreakerState.CLOSED


def test_five_failures_in_a_row_open_it() -> None:
    """Four do not."""
    assert [failed(n).health(0.0) for n in (4, 5)] == [Health.UP, Health.DOWN]


def test_an_answer_between_failures_starts_the_count_again() -> None:
    """In a row means in a row; a request refused for its own fault is an answer too."""
    for answer in (AttemptOutcome.COMPLETED, AttemptOutcome.REFUSED):
        breaker = failed(4)
        breaker.on_ended("good", answer, 0.0)
        breaker.on_ended("bad", AttemptOutcome.FAILED, 0.0)
        assert breaker.health(0.0) is Health.UP


def test_answers_that_die_half_way_count_though_they_began() -> None:
    """Otherwise an engine that always dies in decode would never be left."""
    breaker = CircuitBreaker()
    for number in range(5):
        breaker.on_sent(number, 0.0)
        breaker.on_answer(number, 0.0)
        breaker.on_ended(number, AttemptOutcome.BROKEN, 0.0)
    assert breaker.health(0.0) is Health.DOWN


def test_two_refused_connections_open_it() -> None:
    """Nobody is there: three more requests would not learn more."""
    assert [failed(n, connected=False).health(0.0) for n in (1, 2)] == [Health.UP, Health.DOWN]


def test_one_refused_connection_is_enough_if_the_probe_finds_nobody_either() -> None:
    """In either order."""
    first = failed(1, connected=False)
    first.on_probe_failed(0.0)
    second = CircuitBreaker()
    second.on_probe_failed(0.0)
    second.on_ended("a", AttemptOutcome.FAILED, 0.0, connected=False)
    assert (first.health(0.0), second.health(0.0)) == (Health.DOWN, Health.DOWN)


def test_silence_beyond_the_forecast_opens_it_if_nobody_else_was_answered_since() -> None:
    """A process that is stopped accepts connections and says nothing."""
    silent, spoken = CircuitBreaker(), CircuitBreaker()
    spoken.on_answer("other", 1.5)
    for breaker in (silent, spoken):
        breaker.on_silent("a", sent_at=1.0, now=2.0, overdue=True)
    assert (silent.health(2.0), spoken.health(2.0)) == (Health.DOWN, Health.UP)


def test_silence_that_the_forecast_explains_is_one_failure() -> None:
    """The budget was short, the engine may be well."""
    breaker = CircuitBreaker()
    breaker.on_silent("a", sent_at=1.0, now=2.0, overdue=False)
    assert breaker.health(2.0) is Health.UP


def test_after_the_ejection_one_attempt_may_try() -> None:
    """While it is out the endpoint is not for others."""
    breaker = failed(5)
    assert [breaker.health(now) for now in (4.9, 5.0)] == [Health.DOWN, Health.PROBING]
    breaker.on_sent("probe", 5.0)
    assert breaker.health(5.0) is Health.DOWN
    breaker.on_answer("probe", 5.2)
    assert breaker.health(5.2) is Health.UP


def test_a_trial_that_was_cancelled_decided_nothing() -> None:
    """The next may try."""
    breaker = failed(5)
    breaker.on_sent("probe", 5.0)
    breaker.on_ended("probe", AttemptOutcome.CANCELLED, 5.1)
    assert breaker.health(5.1) is Health.PROBING


def test_only_the_trial_itself_closes_or_opens_it_again() -> None:
    """Attempts sent before it opened say what was, not what is."""
    breaker = failed(5)
    breaker.on_sent("probe", 5.0)
    for old in (AttemptOutcome.FAILED, AttemptOutcome.COMPLETED):
        breaker.on_ended("old", old, 5.1)
        assert breaker.health(5.1) is Health.DOWN
    breaker.on_ended("probe", AttemptOutcome.COMPLETED, 5.3)
    assert breaker.health(5.3) is Health.UP


def test_ejections_that_follow_one_another_double_up_to_five_minutes() -> None:
    """5, 10, 20 ... 300 s."""
    breaker, now, ejections = failed(5), 0.0, []
    for _ in range(8):
        ejections.append(breaker.until - now)
        now = breaker.until
        refused_probe(breaker, now)
    assert ejections == [5, 10, 20, 40, 80, 160, 300, 300]


def test_a_minute_without_trouble_forgives() -> None:
    """The next ejection is a first one."""
    breaker = failed(5)
    refused_probe(breaker, 5.0)
    breaker.on_sent("probe", 20.0)
    breaker.on_answer("probe", 20.0)
    for _ in range(5):
        breaker.on_ended("late", AttemptOutcome.FAILED, 81.0)
    assert breaker.until == 86.0


def test_a_server_that_probes_find_again_is_tried_at_once() -> None:
    """Not at the end of an ejection that may last minutes."""
    breaker = failed(2, connected=False)
    breaker.on_probe_failed(1.0)
    breaker.on_probe_answered(2.0)
    assert breaker.health(2.0) is Health.PROBING


def test_a_probe_that_was_never_in_vain_does_not_end_an_ejection() -> None:
    """A server can answer GET /health and fail every request."""
    breaker = failed(5)
    breaker.on_probe_answered(1.0)
    assert breaker.health(1.0) is Health.DOWN


def test_a_server_that_probes_do_not_find_is_not_tried_with_a_request() -> None:
    """A request would have to fail over; a probe costs nobody anything."""
    breaker = failed(2, connected=False)
    for now in range(1, 30):
        breaker.on_probe_failed(float(now))
    assert breaker.health(30.0) is Health.DOWN


def test_a_token_from_an_older_attempt_half_opens_it() -> None:
    """A sign of life."""
    breaker = failed(5)
    breaker.on_answer("old", 1.0)
    assert breaker.health(1.0) is Health.PROBING


def test_a_rate_limit_says_until_when_and_nothing_of_health() -> None:
    """One second where the provider does not say; never beyond a minute."""
    waits = []
    for retry_after in (None, 7.0, 0.0, 1e9):
        breaker = CircuitBreaker()
        for _ in range(9):
            breaker.on_rate_limited(10.0, retry_after)
            breaker.on_ended("a", AttemptOutcome.RATE_LIMITED, 10.0)
        assert breaker.health(10.0) is Health.UP
        waits.append(round(breaker.blocked_until - 10.0, 9))
    assert waits == [1.0, 7.0, 0.1, 60.0]


# --------------------------------------------------------------------------- peer reports


def peer_reported(down_at: float = 1.0, now: float = 1.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.on_peer_report(down_at, now)
    return breaker


def test_a_peer_report_opens_it_and_is_not_passed_on() -> None:
    """Until one attempt may try."""
    breaker = peer_reported()
    assert (breaker.health(1.0), breaker.health(5.9), breaker.health(6.0)) == (Health.DOWN, Health.DOWN, Health.PROBING)
    assert breaker.down_since == NEVER


def test_what_we_saw_alive_since_is_not_down() -> None:
    """An answer or a probe, at that time or later."""
    for sign in ("spoke", "reachable"):
        breaker = CircuitBreaker()
        breaker.on_answer("a", 2.0) if sign == "spoke" else breaker.on_probe_answered(2.0)
        breaker.on_peer_report(2.0, 2.1)
        assert breaker.health(2.1) is Health.UP
        breaker.on_peer_report(2.05, 2.1)
        assert breaker.health(2.1) is Health.DOWN


def test_a_sign_of_life_disproves_a_peer_report_and_later_ones_for_a_while() -> None:
    """A probe, or a token of an attempt that was sent before. One attempt tries; then all may."""
    for sign in ("spoke", "reachable"):
        breaker = peer_reported()
        breaker.on_answer("old", 1.2) if sign == "spoke" else breaker.on_probe_answered(1.2)
        assert breaker.health(1.2) is Health.PROBING
        breaker.on_sent("trial", 1.3)
        breaker.on_answer("trial", 1.4)
        breaker.on_peer_report(20.0, 20.0)
        assert breaker.health(20.0) is Health.UP
        breaker.on_peer_report(1.2 + PEER_REPORTS_IGNORED, 1.2 + PEER_REPORTS_IGNORED)
        assert breaker.health(1.2 + PEER_REPORTS_IGNORED) is Health.DOWN


def test_a_failure_of_our_own_confirms_a_peer_report() -> None:
    """A probe in vain, an attempt that fails: it stays open whatever others say, and is told on."""
    for sign in ("unreachable", "failed", "trial"):
        breaker = peer_reported()
        if sign == "unreachable":
            breaker.on_probe_failed(2.0)
        else:
            breaker.on_sent("a", 6.5 if sign == "trial" else 0.5)
            breaker.on_ended("a", AttemptOutcome.FAILED, 2.0 if sign == "failed" else 7.0)
        assert breaker.down_since in (2.0, 7.0), sign
        breaker.on_peer_report(NEVER, 7.1)
        assert (breaker.state, breaker.openings) == (BreakerState.OPEN, 1), sign


def test_a_withdrawn_peer_report_half_opens_it() -> None:
    """The peer withdrew the report, or disappeared."""
    breaker = peer_reported()
    breaker.on_peer_report(NEVER, 2.0)
    assert breaker.health(2.0) is Health.PROBING


def test_since_when_it_is_down_does_not_move_while_it_is() -> None:
    """An opinion that was disproved is not renewed by an attempt that failed as well."""
    breaker = failed(5, now=1.0)
    refused_probe(breaker, 6.0)
    assert breaker.down_since == 1.0
    breaker.on_sent("trial", 30.0)
    breaker.on_answer("trial", 30.0)
    assert breaker.down_since == NEVER


signs = st.tuples(
    st.sampled_from(
        ["sent", "spoke", "fail", "refuse", "silent", "done", "cancel", "lost", "found", "reported", "withdrawn"]
    ),
    st.integers(0, 3),
)


@given(st.lists(signs, max_size=60))
def test_whatever_happens_it_gives_another_chance_within_five_minutes(history: list) -> None:
    """Once all its attempts have ended and probes keep still."""
    breaker, now = CircuitBreaker(), 0.0
    for what, key in history:
        now += 1.0
        if what == "sent":
            breaker.on_sent(key, now)
        elif what == "spoke":
            breaker.on_answer(key, now)
        elif what == "silent":
            breaker.on_silent(key, now - 1, now, overdue=True)
        elif what == "lost":
            breaker.on_probe_failed(now)
        elif what == "found":
            breaker.on_probe_answered(now)
        elif what in ("reported", "withdrawn"):
            breaker.on_peer_report(now if what == "reported" else NEVER, now)
        else:
            ending = {"done": AttemptOutcome.COMPLETED, "cancel": AttemptOutcome.CANCELLED}.get(
                what, AttemptOutcome.FAILED
            )
            breaker.on_ended(key, ending, now, connected=what != "refuse")
    for key in range(4):
        breaker.on_ended(key, AttemptOutcome.CANCELLED, now)
    assert breaker.health(now + 300.0) is not Health.DOWN
