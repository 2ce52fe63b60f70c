"""Forecast of the rest of an answer at an endpoint that could continue it."""

from __future__ import annotations

import pytest

from tests.support.learned_fleet import ONE, fleet, load, prompt


def test_the_text_so_far_is_a_part_of_the_prompt() -> None:
    """And not in the cache."""
    to = fleet()
    short, long = (to.view.continuation_ttft(ONE.id, load(to), prompt(), tokens, 0.0) for tokens in (0, 5_000))
    assert short == pytest.approx(to.view.forecast(ONE, load(to), 1_000, 0, 0.0).p50)
    assert long > 2 * short
