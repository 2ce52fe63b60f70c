"""Lower bounds of shares."""

from __future__ import annotations

from random import Random

import pytest

from lab.capacity.budget_shares import independent_draws, lower_bound


def test_the_lower_bound_is_below_the_true_share_nine_times_in_ten() -> None:
    random, covered = Random(5), 0
    for _ in range(2_000):
        met = sum(random.random() < 0.9 for _ in range(150))
        covered += lower_bound(met / 150, 150) <= 0.9
    assert 0.87 < covered / 2_000 < 0.94


def test_turns_that_fail_together_count_as_their_sessions_do() -> None:
    together = [(10, 10)] * 45 + [(0, 10)] * 5
    assert independent_draws(together) == pytest.approx(50, rel=0.05)
    apart = [(9, 10)] * 50
    assert independent_draws(apart) == 500


def test_the_bound_by_session_covers_where_that_by_request_does_not() -> None:
    random, by_session, by_request = Random(7), 0, 0
    for _ in range(1_000):
        runs = [(8 if random.random() < 0.9 else 0, 8) for _ in range(60)]
        share = sum(met for met, _ in runs) / 480
        by_session += lower_bound(share, independent_draws(runs)) <= 0.9
        by_request += lower_bound(share, 480) <= 0.9
    assert by_session > 840 > 790 > by_request
