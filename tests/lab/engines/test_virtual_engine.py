from lab.engines.engine_events import EngineFirstToken, Finished
from tests.support.engine_builders import ask, virtual


def test_nothing_is_seen_before_its_time():
    """A step under way returns its events only at its end."""
    one = virtual()
    one.submit(ask(1, 8192), now=0.0)
    assert (one.run_until(0.1), len(one.run_until(0.3))) == ([], 2)


def test_an_aborted_request_sends_no_further_events():
    """Not even from the step under way."""
    one = virtual()
    one.submit(ask("gone", 4000), now=0.0)
    one.submit(ask("stays", 4000), now=0.0)
    one.run_until(0.1)
    one.abort("gone")
    assert [event.id for event in one.run_until(9.0)] == ["stays", "stays"]


def test_an_abort_long_after_does_not_silence_another_step():
    """An abort suppresses events of the step under way only."""
    one = virtual()
    one.submit(ask(1, 100, 2), now=0.0)
    one.run_until(0.001)
    one.abort(1)
    one.run_until(1.0)
    one.submit(ask(1, 100, 2), now=2.0)
    assert [type(event) for event in one.run_until(3.0)] == [EngineFirstToken, Finished]


def test_an_engine_may_run_ahead_by_its_overhead_and_stay_exact():
    """A request needs the overhead to reach the scheduler, whenever submitted."""
    patient, eager = virtual(overhead=0.015), virtual(overhead=0.015)
    for one, ahead in ((patient, 0.0), (eager, 0.015)):
        one.submit(ask("talker", 200, 300), now=0.0)
        one.run_until(1.0 + ahead)
        one.submit(ask("newcomer", 500, 5), now=1.0)
    assert patient.run_until(9.0) == eager.run_until(9.0)


def test_a_killed_engine_is_silent_until_it_restarts():
    """The requests are lost with the step under way; after the restart the engine serves again."""
    one = virtual()
    one.submit(ask(1, 8192, 10), now=0.0)
    one.run_until(0.1)
    lost = one.kill()
    heard = one.run_until(5.0)
    one.restart(6.0)
    one.submit(ask(2, 100), now=6.0)
    assert (lost, heard, [event.id for event in one.run_until(9.0)]) == ((1,), [], [2, 2])
