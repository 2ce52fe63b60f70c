"""Circuit breaker of one endpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet.circuit_breaker import (
    MAX_EJECTION,
    PEER_REPORTS_IGNORED,
    TRANSITIONS,
    BreakerEvent,
    BreakerState,
    CircuitBreaker,
)
from policies.rate_limit.endpoint_limits import ProviderRefusal
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


def test_an_open_breaker_closes_only_through_half_open() -> None:
    """A recovered endpoint gets one trial attempt before all traffic."""
    assert {
        sign
        for (state, sign), after in TRANSITIONS.items()
        if (state, after) == (BreakerState.OPEN, BreakerState.CLOSED)
    } == set()
    assert TRANSITIONS[BreakerState.HALF_OPEN, BreakerEvent.TRIAL_ANSWERED] is BreakerState.CLOSED


def test_five_failures_in_a_row_open_the_breaker() -> None:
    """Four do not."""
    assert [failed(n).health(0.0) for n in (4, 5)] == [Health.UP, Health.DOWN]


def test_an_answer_resets_the_count_of_failures() -> None:
    """A refusal for the request's own fault is an answer too."""
    for answer in (AttemptOutcome.COMPLETED, AttemptOutcome.REFUSED):
        breaker = failed(4)
        breaker.on_ended("good", answer, 0.0)
        breaker.on_ended("bad", AttemptOutcome.FAILED, 0.0)
        assert breaker.health(0.0) is Health.UP


def test_an_endpoint_that_was_down_for_days_comes_back_at_its_first_answer() -> None:
    """Thousands of failed trials in a row: each ejection doubles, up to a limit."""
    breaker, now = failed(5), 0.0
    for trial in range(3000):
        now = max(breaker.until, now)
        breaker.on_sent(trial, now)
        breaker.on_ended(trial, AttemptOutcome.FAILED, now)
    assert breaker.until - now == MAX_EJECTION
    breaker.on_sent("good", breaker.until)
    breaker.on_answer("good", breaker.until)
    assert breaker.health(breaker.until) is Health.UP


def test_answers_broken_after_the_first_token_count_as_failures() -> None:
    """Otherwise an engine that always dies in decode would keep its traffic."""
    breaker = CircuitBreaker()
    for number in range(5):
        breaker.on_sent(number, 0.0)
        breaker.on_answer(number, 0.0)
        breaker.on_ended(number, AttemptOutcome.BROKEN, 0.0)
    assert breaker.health(0.0) is Health.DOWN


def test_two_refused_connections_open_the_breaker() -> None:
    """No server listens: three more requests would learn no more."""
    assert [failed(n, connected=False).health(0.0) for n in (1, 2)] == [Health.UP, Health.DOWN]


def test_a_refused_connection_and_a_failed_probe_open_the_breaker() -> None:
    """In either order."""
    first = failed(1, connected=False)
    first.on_probe_failed(0.0)
    second = CircuitBreaker()
    second.on_probe_failed(0.0)
    second.on_ended("a", AttemptOutcome.FAILED, 0.0, connected=False)
    assert (first.health(0.0), second.health(0.0)) == (Health.DOWN, Health.DOWN)


def test_silence_beyond_the_forecast_opens_the_breaker_unless_another_attempt_was_answered() -> None:
    """A stopped process accepts connections and sends no bytes."""
    silent, spoken = CircuitBreaker(), CircuitBreaker()
    spoken.on_answer("other", 1.5)
    for breaker in (silent, spoken):
        breaker.on_silent("a", sent_at=1.0, now=2.0, overdue=True)
    assert (silent.health(2.0), spoken.health(2.0)) == (Health.DOWN, Health.UP)


def test_silence_within_the_forecast_is_one_failure() -> None:
    """The budget was short; the engine may be healthy."""
    breaker = CircuitBreaker()
    breaker.on_silent("a", sent_at=1.0, now=2.0, overdue=False)
    assert breaker.health(2.0) is Health.UP


def test_after_the_ejection_one_trial_attempt_is_admitted() -> None:
    """While the trial is in flight, the endpoint is down for other requests."""
    breaker = failed(5)
    assert [breaker.health(now) for now in (4.9, 5.0)] == [Health.DOWN, Health.PROBING]
    breaker.on_sent("probe", 5.0)
    assert breaker.health(5.0) is Health.DOWN
    breaker.on_answer("probe", 5.2)
    assert breaker.health(5.2) is Health.UP


def test_a_cancelled_trial_decides_nothing() -> None:
    """The next attempt becomes the trial."""
    breaker = failed(5)
    breaker.on_sent("probe", 5.0)
    breaker.on_ended("probe", AttemptOutcome.CANCELLED, 5.1)
    assert breaker.health(5.1) is Health.PROBING


def test_only_the_trial_decides_a_half_open_breaker() -> None:
    """Attempts sent before the opening tell the past."""
    breaker = failed(5)
    breaker.on_sent("probe", 5.0)
    for old in (AttemptOutcome.FAILED, AttemptOutcome.COMPLETED):
        breaker.on_ended("old", old, 5.1)
        assert breaker.health(5.1) is Health.DOWN
    breaker.on_ended("probe", AttemptOutcome.COMPLETED, 5.3)
    assert breaker.health(5.3) is Health.UP


def test_ejections_in_a_row_double_up_to_300_s() -> None:
    """5, 10, 20 ... 300 s."""
    breaker, now, ejections = failed(5), 0.0, []
    for _ in range(8):
        ejections.append(breaker.until - now)
        now = breaker.until
        refused_probe(breaker, now)
    assert ejections == [5, 10, 20, 40, 80, 160, 300, 300]


def test_a_minute_without_failures_resets_the_ejection_time() -> None:
    """The next ejection is a first one, of 5 s."""
    breaker = failed(5)
    refused_probe(breaker, 5.0)
    breaker.on_sent("probe", 20.0)
    breaker.on_answer("probe", 20.0)
    for _ in range(5):
        breaker.on_ended("late", AttemptOutcome.FAILED, 81.0)
    assert breaker.until == 86.0


def test_an_answered_probe_half_opens_the_breaker_of_a_lost_server() -> None:
    """Not at the end of an ejection that can take minutes."""
    breaker = failed(2, connected=False)
    breaker.on_probe_failed(1.0)
    breaker.on_probe_answered(2.0)
    assert breaker.health(2.0) is Health.PROBING


def test_a_probe_that_never_failed_ends_no_ejection() -> None:
    """A server can answer GET /health and fail every request."""
    breaker = failed(5)
    breaker.on_probe_answered(1.0)
    assert breaker.health(1.0) is Health.DOWN


def test_failed_probes_prolong_an_ejection() -> None:
    """A trial request would have to fail over; a probe costs callers nothing."""
    breaker = failed(2, connected=False)
    for now in range(1, 30):
        breaker.on_probe_failed(float(now))
    assert breaker.health(30.0) is Health.DOWN


def test_a_token_of_an_older_attempt_half_opens_the_breaker() -> None:
    """The server is alive."""
    breaker = failed(5)
    breaker.on_answer("old", 1.0)
    assert breaker.health(1.0) is Health.PROBING


def test_a_rate_limit_blocks_without_opening_the_breaker() -> None:
    """For Retry-After, 1 s without Retry-After, between 0.1 and 60 s."""
    waits = []
    for retry_after in (None, 7.0, 0.0, 1e9):
        breaker, refusal = CircuitBreaker(), ProviderRefusal()
        for _ in range(9):
            refusal.on_refused(10.0, retry_after)
            breaker.on_ended("a", AttemptOutcome.RATE_LIMITED, 10.0)
        assert breaker.health(10.0) is Health.UP
        waits.append(round(refusal.until - 10.0, 9))
    assert waits == [1.0, 7.0, 0.1, 60.0]


# --------------------------------------------------------------------------- peer reports


def peer_reported(down_at: float = 1.0, now: float = 1.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    breaker.on_peer_report(down_at, now)
    return breaker


def test_a_peer_report_opens_the_breaker_and_is_not_passed_on() -> None:
    """For one ejection of 5 s."""
    breaker = peer_reported()
    assert (breaker.health(1.0), breaker.health(5.9), breaker.health(6.0)) == (Health.DOWN, Health.DOWN, Health.PROBING)
    assert breaker.down_since == NEVER


def test_a_peer_report_older_than_the_own_last_answer_is_ignored() -> None:
    """An answer or an answered probe at the time of the report or later."""
    for sign in ("spoke", "reachable"):
        breaker = CircuitBreaker()
        breaker.on_answer("a", 2.0) if sign == "spoke" else breaker.on_probe_answered(2.0)
        breaker.on_peer_report(2.0, 2.1)
        assert breaker.health(2.1) is Health.UP
        breaker.on_peer_report(2.05, 2.1)
        assert breaker.health(2.1) is Health.DOWN


def test_an_answer_disproves_peer_reports_for_30_s() -> None:
    """An answered probe, or a token of an earlier attempt. One trial attempt follows; then all traffic."""
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


def test_an_own_failure_confirms_a_peer_report() -> None:
    """A failed probe or attempt: the breaker stays open after the report is withdrawn, and peers are told."""
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


def test_a_withdrawn_peer_report_half_opens_the_breaker() -> None:
    """The peer withdrew the report, or disappeared."""
    breaker = peer_reported()
    breaker.on_peer_report(NEVER, 2.0)
    assert breaker.health(2.0) is Health.PROBING


def test_down_since_is_the_time_of_the_first_opening() -> None:
    """A failed trial renews no report that a peer has disproved."""
    breaker = failed(5, now=1.0)
    refused_probe(breaker, 6.0)
    assert breaker.down_since == 1.0
    breaker.on_sent("trial", 30.0)
    breaker.on_answer("trial", 30.0)
    assert breaker.down_since == NEVER


breaker_events = st.tuples(
    st.sampled_from(
        ["sent", "spoke", "fail", "refuse", "silent", "done", "cancel", "lost", "found", "reported", "withdrawn"]
    ),
    st.integers(0, 3),
)


@given(st.lists(breaker_events, max_size=60))
def test_a_breaker_admits_a_trial_within_300_s(history: list) -> None:
    """After any events, once all attempts have ended and probes are silent."""
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


# --------------------------------------------------------------------------- our own configuration


def rejected(outcome: AttemptOutcome, times: int = 1, served_at: float = NEVER) -> CircuitBreaker:
    """A breaker after `times` rejections at 100 s."""
    breaker = CircuitBreaker(max_ejection=10.0)
    if served_at > NEVER:
        breaker.on_answer("served", served_at)
    for number in range(times):
        breaker.on_sent(number, 100.0)
        breaker.on_ended(number, outcome, 100.0)
    return breaker


@pytest.mark.parametrize(("outcome", "until"), [(AttemptOutcome.MISCONFIGURED, 110.0), (AttemptOutcome.QUOTA, 400.0)])
def test_a_misconfigured_server_is_ejected_at_once(outcome: AttemptOutcome, until: float) -> None:
    """Nothing heals within seconds; the limit of an API's ejections does not apply."""
    breaker = rejected(outcome)
    assert (breaker.health(100.0), breaker.until, breaker.cause.value) == (Health.DOWN, until, outcome.value)


def test_ejections_for_misconfiguration_double_up_to_300_s() -> None:
    """With each failed trial."""
    breaker, waits = rejected(AttemptOutcome.MISCONFIGURED), []
    for number in range(7):
        now = breaker.until
        breaker.on_sent(f"trial {number}", now)
        breaker.on_ended(f"trial {number}", AttemptOutcome.MISCONFIGURED, now)
        waits.append(breaker.until - now)
    assert waits == [20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]


def test_one_caller_cannot_take_out_an_endpoint_that_serves_others() -> None:
    """Some requests may provoke such a reply; five in a row are another matter."""
    assert rejected(AttemptOutcome.MISCONFIGURED, 4, served_at=99.0).health(100.0) is Health.UP
    assert rejected(AttemptOutcome.MISCONFIGURED, 5, served_at=99.0).health(100.0) is Health.DOWN
    assert rejected(AttemptOutcome.MISCONFIGURED, 1, served_at=39.0).health(100.0) is Health.DOWN


def test_an_exhausted_quota_opens_the_breaker_at_once() -> None:
    """A caller cannot cause an exhausted quota, so one reply is enough."""
    assert rejected(AttemptOutcome.QUOTA, 1, served_at=99.9).health(100.0) is Health.DOWN


def test_only_an_answer_ends_a_quota_ejection_early() -> None:
    """Rate limits and refusals come from the same provider check; the answer of an older request is proof."""
    for reply in (AttemptOutcome.RATE_LIMITED, AttemptOutcome.REFUSED):
        breaker = rejected(AttemptOutcome.QUOTA)
        breaker.on_ended("older", reply, 101.0)
        assert breaker.health(101.0) is Health.DOWN
    breaker.on_answer("older", 102.0)
    assert breaker.health(102.0) is Health.PROBING


def test_a_reload_gives_a_trial_at_once() -> None:
    """The configuration may have been mended. Other ejections go on."""
    breaker = rejected(AttemptOutcome.QUOTA)
    breaker.on_reload()
    assert breaker.health(101.0) is Health.PROBING
    dead = failed(5, now=100.0)
    dead.on_reload()
    assert dead.health(101.0) is Health.DOWN


# --------------------------------------------------------------------------- polls of another process, other models


def test_a_probe_answered_before_a_failure_proves_nothing() -> None:
    """A shared result of another process may be read later: the server died meanwhile."""
    breaker = failed(2, connected=False, now=10.0)
    breaker.on_probe_failed(10.1)
    breaker.on_probe_answered(9.9)
    assert breaker.health(10.2) is Health.DOWN
    breaker.on_probe_answered(10.2)
    assert breaker.health(10.2) is Health.PROBING


def test_a_server_with_a_wrong_model_is_down_until_the_model_is_right() -> None:
    """At once, for any time; then one trial."""
    breaker = CircuitBreaker()
    for at in range(0, 1000, 2):
        breaker.on_wrong_model(float(at))
        assert breaker.health(at + 1.0) is Health.DOWN
    breaker.on_probe_answered(1000.0)
    assert breaker.health(1000.0) is Health.PROBING
    breaker.on_wrong_model(1001.0)
    assert breaker.health(1001.0) is Health.DOWN


def unconfirmed(times: int, outcome: AttemptOutcome = AttemptOutcome.FAILED) -> CircuitBreaker:
    """Failures of one caller alone."""
    breaker = CircuitBreaker()
    for number in range(times):
        breaker.on_sent(number, 0.0)
        breaker.on_ended(number, outcome, 0.0, confirmed=False)
    return breaker


def test_failures_that_are_not_confirmed_open_nothing_and_are_noted() -> None:
    """From the threshold on; the next that is confirmed opens."""
    assert [unconfirmed(n).unconfirmed for n in (4, 5)] == [False, True]
    breaker = unconfirmed(20)
    assert breaker.health(0.0) is Health.UP
    breaker.on_ended("other", AttemptOutcome.FAILED, 0.0)
    assert (breaker.health(0.0), breaker.unconfirmed) == (Health.DOWN, False)


def test_an_answer_clears_what_was_not_confirmed() -> None:
    breaker = unconfirmed(5)
    breaker.on_ended("good", AttemptOutcome.COMPLETED, 0.0)
    assert not breaker.unconfirmed
    breaker.on_ended("bad", AttemptOutcome.FAILED, 0.0)
    assert breaker.health(0.0) is Health.UP


def test_an_unconfirmed_trial_decides_nothing() -> None:
    """The next attempt is the trial."""
    breaker = failed(5)
    breaker.on_sent("trial", 5.0)
    breaker.on_ended("trial", AttemptOutcome.FAILED, 5.1, confirmed=False)
    assert (breaker.health(5.1), breaker.openings) == (Health.PROBING, 1)


def test_a_server_is_a_last_resort_unless_nobody_is_known_to_listen() -> None:
    """Or unless it serves another model, by its own word."""
    refusing, silent, wrong, gone = CircuitBreaker(), CircuitBreaker(), CircuitBreaker(), failed(2, connected=False)
    refusing.on_ended("a", AttemptOutcome.MISCONFIGURED, 0.0)
    silent.on_silent("a", sent_at=0.0, now=9.0, overdue=True)
    wrong.on_wrong_model(0.0)
    breakers = refusing, silent, wrong, gone
    assert [breaker.health(1.0) for breaker in breakers] == [Health.DOWN] * 4
    assert [breaker.failing(1.0) for breaker in breakers] == [True, True, False, False]
    assert [breaker.failing(2.0) for breaker in breakers] == [
        True,
        True,
        False,
        True,
    ]  # tried again: refusals are cheap


# --------------------------------------------------------------------------- pages, and what outranks them


def unwell(breaker: CircuitBreaker, *times: float) -> CircuitBreaker:
    for now in times:
        breaker.on_probe_unwell(now, "its /health answers 503")
    return breaker


def test_two_health_pages_in_a_row_that_fail_open_the_breaker() -> None:
    """It stays the last resort, and a page that is well admits a trial."""
    breaker = unwell(CircuitBreaker(), 1.0)
    assert breaker.health(1.0) is Health.UP
    unwell(breaker, 2.0)
    assert (breaker.health(2.0), breaker.cause.value, breaker.failing(2.0), breaker.doubted, breaker.server_gone) == (
        *(Health.DOWN, "unhealthy", True, True, False),
    )
    breaker.on_probe_answered(3.0)
    assert breaker.health(3.0) is Health.PROBING


@pytest.mark.parametrize("answered_at", [0.5, 1.5])
def test_an_answer_to_a_caller_outranks_a_health_page(answered_at: float) -> None:
    """Before or after the page began to fail; for good, while it is never well."""
    breaker = CircuitBreaker()
    breaker.on_answer("a", answered_at)
    assert unwell(breaker, *map(float, range(2, 500))).health(500.0) is Health.UP


def test_an_answer_of_long_ago_outranks_no_page_that_was_well_since() -> None:
    breaker = CircuitBreaker()
    breaker.on_answer("a", 1.0)
    breaker.on_probe_answered(50.0)
    assert unwell(breaker, 60.0, 61.0).health(61.0) is Health.UP
    assert unwell(breaker, 62.0, 63.0).health(63.0) is Health.DOWN


def test_an_answer_of_a_process_that_is_gone_proves_nothing_of_the_next() -> None:
    """A server that loads its model again answers 503 to all."""
    breaker = CircuitBreaker()
    breaker.on_answer("a", 0.0)
    for now in (1.0, 2.0):
        breaker.on_probe_failed(now)
    assert unwell(breaker, 3.0, 4.0).health(4.0) is Health.DOWN
    assert breaker.failing(4.0)


def test_a_health_page_prolongs_no_ejection() -> None:
    """A caller's trial decides: the page may fail for ever."""
    breaker = unwell(CircuitBreaker(), 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert breaker.health(6.0) is Health.PROBING


def test_a_rank_that_the_page_does_not_name_is_down_until_an_answer_disproves_the_page() -> None:
    breaker = CircuitBreaker()
    for now in range(100):
        assert breaker.on_other_ranks(float(now), "this server has ranks 4..7, not 0")
    assert (breaker.health(100.0), breaker.doubted) == (Health.DOWN, True)
    breaker.on_ended("probe", AttemptOutcome.REFUSED, 100.0)  # a 400 is no proof
    assert breaker.on_other_ranks(101.0, "")
    assert breaker.health(101.0) is Health.DOWN
    breaker.on_answer("probe", 102.0)
    assert not breaker.on_other_ranks(103.0, "")
    assert breaker.health(103.0) is Health.PROBING
