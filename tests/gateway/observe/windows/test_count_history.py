"""Growth of counts in the last seconds, 5 minutes and hour."""

from __future__ import annotations

import pytest

from gateway.observe.windows.count_history import LOOKS, NOW, SPANS, WINDOWS, CountHistory, Key

NOON = 1_700_000_100.0  # begins a slot of every ring
SENT: Key = ("chat", "requests", "completed")
SHED: Key = ("chat", "requests", "shed")


def history(*totals: tuple[float, dict[Key, float]]) -> CountHistory:
    """`totals`: seconds after NOON, and the totals then."""
    made = CountHistory()
    for at, found in totals:
        made.note(found, NOON + at)
    return made


def grown(known: CountHistory, at: float, span: str = "5m") -> dict[Key, float]:
    """Growth by count in the window that ends `at` seconds after NOON."""
    window = known.window(WINDOWS[span], NOON + at)
    return {key: window.totals[column] for key, column in known.columns.items() if window.totals[column]}


def test_noon_begins_a_slot_of_every_ring() -> None:
    assert [NOON % span.slot_s for span in SPANS.values()] == [0.0, 0.0]


def test_a_window_has_the_growth_since_its_begin() -> None:
    """What came before the first totals is not known; what is older than the window is left out."""
    known = history((0, {SENT: 100}), (10, {SENT: 104}))
    assert grown(known, 10) == {SENT: 4}
    known.note({SENT: 110, SHED: 2}, NOON + 200)
    assert grown(known, 200) == {SENT: 10, SHED: 2}
    known.note({SENT: 111, SHED: 2}, NOON + 400)
    assert grown(known, 400) == {SENT: 7, SHED: 2}
    assert grown(known, 900) == {}
    assert grown(known, 900, "1h") == {SENT: 11, SHED: 2}


def test_a_window_tells_how_much_of_it_is_covered() -> None:
    """A gateway of a minute has no hour."""
    known = history((0, {}), (60, {}))
    assert known.window(SPANS["1h"], NOON + 60).covered == 60.0
    assert known.window(SPANS["1h"], NOON + 9000).covered == 0.0
    late = history((700, {}), (730, {}))  # in the middle of a slot of the hour
    assert late.window(SPANS["1h"], NOON + 730).covered == 30.0
    assert CountHistory().window(SPANS["5m"], NOON).covered == 0.0


def test_now_is_the_growth_since_the_look_ten_seconds_ago() -> None:
    """Or since the earliest there is; the time between both is covered."""
    known = history((0, {SENT: 1}), (5, {SENT: 2}))
    assert (grown(known, 5, "now"), known.window(NOW, NOON + 5).covered) == ({SENT: 1}, 5.0)
    for at in (11, 13, 15.5):
        known.note({SENT: at}, NOON + at)
    assert (grown(known, 15.5, "now"), known.window(NOW, NOON + 15.5).covered) == ({SENT: 13.5}, 10.5)
    known.note({SENT: 3}, NOON + 17)  # of a new process
    assert grown(known, 17, "now") == {SENT: 16.5}
    assert history().window(NOW, NOON).covered == 0.0


def test_now_begins_anew_where_the_clock_went_back() -> None:
    """Whatever the clock does, a few looks are remembered."""
    known = history((100, {SENT: 1}), (105, {SENT: 2}), (60, {SENT: 3}), (62, {SENT: 7}))
    assert (grown(known, 62, "now"), known.window(NOW, NOON + 62).covered) == ({SENT: 4}, 2.0)
    for step in range(100):
        known.note({SENT: step}, NOON + 70 + step / 100)
    assert known.window(NOW, NOON + 71).covered == pytest.approx((LOOKS - 1) / 100)


def test_a_total_that_decreased_is_that_of_a_new_process() -> None:
    """It began at zero: the whole total is new, and no growth is negative."""
    assert grown(history((0, {SENT: 100}), (5, {SENT: 3})), 5) == {SENT: 3}


def test_a_clock_that_was_hours_ahead_ends_no_window() -> None:
    """What was counted then is of the slot in which the clock was set right, and leaves the window as any other."""
    known = history((0, {SENT: 0}), (36_000, {SENT: 5}), (60, {SENT: 6}), (180, {SENT: 7}), (420, {SENT: 9}))
    assert grown(known, 420) == {SENT: 3}
    assert grown(known, 420, "1h") == {SENT: 9}


def test_a_clock_that_went_back_loses_nothing() -> None:
    """The latest slot takes the growth."""
    known = history((0, {SENT: 0}), (60, {SENT: 5}), (30, {SENT: 9}), (65, {SENT: 10}))
    assert grown(known, 65) == {SENT: 10}


def test_memory_is_bounded_whatever_happens() -> None:
    """A day of totals every 5 s fills the rings once."""
    known = CountHistory()
    for step in range(20_000):
        known.note({SENT: float(step)}, NOON + 5 * step)
    assert {
        name: len(known.window(span, NOON + 100_000).slots) <= span.slots for name, span in SPANS.items()
    } == dict.fromkeys(SPANS, True)
    assert grown(known, 99_995, "1h")[SENT] == pytest.approx(3_600 / 5, rel=0.02)
