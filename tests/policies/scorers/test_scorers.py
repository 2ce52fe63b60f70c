"""The default scorer, and the tie-break: smaller is better."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from policies.latency.tpot import STALL_GRID
from policies.scorers.scorers import tie_break
from policies.types import Load
from tests.policies.scorers.scoring import IDLE, best, candidates


def test_predicted_chooses_the_smallest_median_ttft() -> None:
    """In seconds."""
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.3, 0.2))) == "b"


def test_predicted_ties_endpoints_within_a_few_percent() -> None:
    """Predictions are not exact enough to send all requests to an engine that is 4% faster; 10% decides."""
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.100, 0.104))) == "ab"
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.100, 0.110))) == "a"


def test_predicted_breaks_near_ties_by_the_longer_hit() -> None:
    """Even where the hit saves next to nothing."""
    assert best("predicted", candidates(IDLE, IDLE, hits=(0, 64), ttft=(0.100, 0.103))) == "b"


def decoding(answers: float, **load: Any) -> Load:
    """An engine with expected TPOT misses that grow linearly with the stall, up to `answers`."""
    return Load(expected_tpot_misses=tuple(answers * seconds / STALL_GRID[-1] for seconds in STALL_GRID), **load)


def test_predicted_prices_expected_tpot_misses() -> None:
    """Of two equally fast engines, the one with fewer misses."""
    assert best("predicted", candidates(decoding(32), decoding(4), seconds=(0.1, 0.1))) == "b"


def test_predicted_prices_a_tpot_miss_at_three_seconds_of_ttft() -> None:
    """A tenth of a miss outweighs 0.25 s of TTFT, and not 0.35 s."""
    busy, stall = decoding(1), (0.1 * STALL_GRID[-1], 0.1 * STALL_GRID[-1])
    assert best("predicted", candidates(busy, IDLE, ttft=(0.2, 0.45), seconds=stall)) == "b"
    assert best("predicted", candidates(busy, IDLE, ttft=(0.2, 0.55), seconds=stall)) == "a"


def test_predicted_prices_a_second_of_prefill_at_a_fraction_of_a_second_of_ttft() -> None:
    """Between 0.2 and 0.4 s: a prompt waits a little for an engine that computes the same prefix, and not for long."""
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.30, 0.20), seconds=(0.0, 0.5))) == "a"
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.40, 0.20), seconds=(0.0, 0.5))) == "b"


def test_predicted_prices_only_the_misses_that_the_prompt_adds() -> None:
    """A hit costs no other request anything, and earlier prefills do not count."""
    assert best("predicted", candidates(decoding(32), decoding(32), seconds=(0.1, 0.0))) == "b"
    assert best("predicted", candidates(decoding(32, stalled=0.5), decoding(32), seconds=(0.1, 0.1))) == "ab"


def test_answers_without_a_tpot_budget_cost_nothing() -> None:
    """At any number of running answers."""
    assert best("predicted", candidates(Load(running=99), IDLE, seconds=(5.0, 5.0))) == "ab"


# --------------------------------------------------------------------------- tie-break


def test_the_tie_break_is_equal_in_every_process() -> None:
    """A replay breaks ties as the gateway did; PYTHONHASHSEED has no effect."""
    assert tie_break(7, "small/10.0.0.11:8000") == 1774196555529650499


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
def test_the_tie_break_is_fair(n: int) -> None:
    """Over many sequence numbers each of n names is first equally often, within five standard deviations."""
    names, draws = [f"small/10.0.0.{i}:8000" for i in range(n)], 4000
    counts = Counter(min(names, key=lambda name: tie_break(sequence, name)) for sequence in range(draws))
    share = draws / n
    assert all(abs(counts[name] - share) < 5 * share**0.5 for name in names)
