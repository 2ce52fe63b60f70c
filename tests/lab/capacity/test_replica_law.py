"""Growth within the start of an engine, and the number that holds."""

from __future__ import annotations

from itertools import accumulate
from random import Random

import pytest

from lab.capacity.replica_law import HOLD, MAX_GROWTH, ReplicaLaw, growth


def at_rate(rate: float, start: float, end: float) -> list[float]:
    return [start + i / rate for i in range(int((end - start) * rate))]


def test_traffic_at_rest_has_no_growth_but_that_of_noise() -> None:
    random = Random(4)
    for rate in (0.5, 3.0, 20.0):
        times = list(accumulate(random.expovariate(rate) for _ in range(int(rate * 600))))
        assert growth(times, 0.0, times[-1], 100.0) <= 1.1


def test_a_rise_within_one_start_is_planned_for_once_more() -> None:
    times = at_rate(4.0, 0.0, 300.0) + at_rate(8.0, 300.0, 600.0)
    assert growth(times, 0.0, 600.0, 100.0) == pytest.approx(1.5, abs=0.1)
    assert growth(times, 0.0, 290.0, 100.0) == 1.0


def test_the_beginning_of_what_is_known_is_no_rise() -> None:
    assert growth(at_rate(8.0, 300.0, 600.0), 300.0, 600.0, 100.0) == 1.0
    assert growth(at_rate(8.0, 300.0, 600.0), 0.0, 600.0, 100.0) > 1.5


def test_growth_is_bounded_and_of_nothing_is_none() -> None:
    assert growth([], 0.0, 600.0, 100.0) == 1.0
    assert growth(at_rate(50.0, 590.0, 600.0), 0.0, 600.0, 1.0) <= MAX_GROWTH


def test_the_largest_need_of_the_last_minutes_holds_and_the_bounds_do() -> None:
    law = ReplicaLaw(2, 8, 3, 0.0)
    assert [law.on_need(need, 60.0 * i) for i, need in enumerate((4, 6, 5, 12, 1))] == [4, 6, 6, 8, 8]
    assert law.on_need(1, 180.0 + HOLD - 1) == 8
    assert law.on_need(1, 180.0 + HOLD) == 2


def test_a_need_that_swings_between_two_numbers_changes_the_desired_one_rarely() -> None:
    random, law = Random(8), ReplicaLaw(1, 9, 5, 0.0)
    desired = [law.on_need(random.choice((5, 5, 5, 6)), 60.0 * minute) for minute in range(600)]
    changes = [i for i in range(1, 600) if desired[i] != desired[i - 1]]
    assert all(desired[i] == max(desired[i], 5) for i in range(600))
    assert 0 < len(changes) < 600 / 5


def test_the_number_at_the_start_holds_as_long_as_a_need() -> None:
    law = ReplicaLaw(2, 12, 9, 100.0)
    assert law.desired == 9
    assert law.on_need(2, 160.0) == 9
    assert law.on_need(2, 100.0 + HOLD - 1) == 9
    assert law.on_need(2, 100.0 + HOLD) == 2
    assert ReplicaLaw(2, 12, 40, 0.0).desired == 12
