"""A slowness learned long ago, as a fleet forgets it: who is asked meanwhile, and what survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.fleet.fleet import Fleet
from policies.types import AttemptOutcome, Endpoint
from tests.support.learned_fleet import SMALL, answer, fleet, median_ttft, prompt, send

SLOW, FAST = SMALL.endpoints
SLOW_TTFT, FAST_TTFT = 2.0, 0.1


def learned_as_slow(to: Fleet) -> None:
    """Until 200 s."""
    for i in range(20):
        answer(to, prompt(1000), SLOW, now=10.0 * i, ttft=SLOW_TTFT)
        answer(to, prompt(1000), FAST, now=10.0 * i + 5, ttft=FAST_TTFT)


def pass_by(to: Fleet, since: float, until: float) -> None:
    """Siblings are asked; the slow one is not."""
    now = since
    while now < until:
        answer(to, prompt(1000), FAST, now=now, ttft=FAST_TTFT)
        now += 5.0


def faded(seconds: float = 100.0) -> Fleet:
    to = fleet()
    learned_as_slow(to)
    pass_by(to, 200.0, 200.0 + seconds)
    return to


def test_an_engine_that_nobody_asks_is_forecast_like_its_sibling_after_a_minute() -> None:
    to = faded()
    assert median_ttft(to, SLOW, now=300.0) < 2 * FAST_TTFT


def test_one_request_at_a_time_finds_out_whether_an_engine_is_still_slow() -> None:
    """Until its first token, the engine is forecast as it was learned: a crowd would all be slow."""
    to = faded()
    key = send(to, prompt(10), SLOW, now=300.0)
    assert median_ttft(to, SLOW, now=300.01) > SLOW_TTFT / 2
    pass_by(to, 300.1, 330.0)
    assert median_ttft(to, SLOW, now=330.0) > SLOW_TTFT / 2
    to.on_first_token(key, 330.1)
    assert median_ttft(to, SLOW, now=330.2) > SLOW_TTFT / 2


def test_an_engine_that_is_fast_again_is_known_by_the_one_request() -> None:
    to = faded()
    answer(to, prompt(1000), SLOW, now=300.0, ttft=FAST_TTFT)
    assert median_ttft(to, SLOW, now=300.2) < 2 * FAST_TTFT


@pytest.mark.parametrize(("ending", "by"), [(AttemptOutcome.CANCELLED, 300.1), (AttemptOutcome.FAILED, 310.0)])
def test_a_request_that_tells_nothing_is_followed_by_another_soon(ending: AttemptOutcome, by: float) -> None:
    """A caller that leaves at once hides no engine from others."""
    to = faded()
    to.on_ended(send(to, prompt(1000), SLOW, now=300.0), ending, 300.05)
    pass_by(to, 300.2, by)
    assert median_ttft(to, SLOW, now=by) < 2 * FAST_TTFT


def test_a_silence_longer_than_the_faded_forecast_tells_of_a_slow_engine() -> None:
    """An attempt that was abandoned long before the time that the engine takes."""
    to = faded()
    to.on_ended(send(to, prompt(1000), SLOW, now=300.0), AttemptOutcome.SILENT, 300.0 + SLOW_TTFT / 2)
    pass_by(to, 301.1, 310.0)
    assert median_ttft(to, SLOW, now=310.0) > SLOW_TTFT / 2


def test_an_engine_whose_first_tokens_take_longer_than_the_time_to_fade_keeps_its_model() -> None:
    to = fleet()
    for i in range(10):
        key = send(to, prompt(1000), SLOW, now=100.0 * i)
        pass_by(to, 100.0 * i + 1, 100.0 * i + 89)
        assert i < 6 or median_ttft(to, SLOW, now=100.0 * i + 89) > 20.0
        to.on_first_token(key, 100.0 * i + 90)
        to.on_ended(key, AttemptOutcome.COMPLETED, 100.0 * i + 91)


def test_what_is_saved_while_a_model_fades_is_what_was_learned() -> None:
    """A restart of the gateway is no news of the engine."""
    to, after = faded(), fleet()
    saved = to.view.learned(SLOW.id, 300.0)
    assert saved is not None
    after.restore({SLOW.id: saved}, age=1.0, now=0.0)
    assert median_ttft(after, SLOW, now=0.0) == pytest.approx(SLOW_TTFT, rel=0.3)


def test_a_pool_of_one_engine_does_not_fade() -> None:
    to = Fleet([replace(SMALL, endpoints=(SLOW,))])
    for i in range(20):
        answer(to, prompt(1000), SLOW, now=10.0 * i, ttft=SLOW_TTFT)
    answer(to, prompt(1000), SLOW, now=10_000.0, ttft=SLOW_TTFT)
    assert median_ttft(to, SLOW, now=10_001.0) == pytest.approx(SLOW_TTFT, rel=0.1)


def test_the_slow_half_of_a_pool_of_two_kinds_keeps_its_model_while_it_is_asked() -> None:
    """Twice as slow, and asked every 15 s."""
    kinds = [Endpoint(f"small/{i}", "small") for i in range(4)]
    to = Fleet([replace(SMALL, endpoints=tuple(kinds))])
    for i in range(400):
        now = 2.0 * i
        answer(to, prompt(1000), kinds[i % 2], now=now, ttft=0.1)
        if i % 4 == 0:
            answer(to, prompt(1000), kinds[2 + i // 4 % 2], now=now + 1, ttft=0.2)
    assert [round(median_ttft(to, one, now=801.0), 1) for one in kinds] == [0.1, 0.1, 0.2, 0.2]
