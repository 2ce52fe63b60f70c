"""The scorers that a route may name, and the tie-break: smaller is better."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from policies.routes.route import ScorerName
from policies.scorers.scorers import SCORERS, tie_break
from policies.types import Load
from tests.support.scorer_candidates import IDLE, NAMES, ROUTE, best, blocks, candidates

# --------------------------------------------------------------------------- rules of load balancers


def test_scorer_names_of_a_route_are_the_catalog() -> None:
    """No more and no fewer; the default goes by value."""
    assert {*SCORERS, "predicted"} == set(get_args(ScorerName))


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_scorer_returns_one_number_per_endpoint(scorer: str) -> None:
    """For a single endpoint too, and for a prompt without tokens or blocks."""
    for n in (1, 3):
        assert len(SCORERS[scorer](candidates(*[IDLE] * n, tokens=0), 7, ROUTE)) == n


def test_equal_endpoints_get_equal_scores() -> None:
    """A scorer breaks no ties by the order in which endpoints are configured."""
    assert best("least_request", candidates(IDLE, IDLE, IDLE)) == "abc"


def test_round_robin_takes_turns() -> None:
    """In order, at any load."""
    found = candidates(Load(in_flight=9), IDLE, IDLE)
    assert [best("round_robin", found, sequence) for sequence in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_least_request_counts_requests_in_flight_then_waiting() -> None:
    """A queue of any length only breaks ties."""
    assert best("least_request", candidates(Load(in_flight=2), Load(in_flight=1, waiting=500))) == "b"
    assert best("least_request", candidates(Load(in_flight=1, waiting=3), Load(in_flight=1, waiting=2))) == "b"


def test_prefix_hash_sends_one_prefix_to_one_endpoint() -> None:
    """Blocks after the first 256 tokens, and the request's sequence number, change nothing."""
    first = tuple(range(100, 116))
    chosen = {
        best("prefix_hash", candidates(*[IDLE] * 8, blocks=blocks(*first, *tail)), sequence)
        for sequence, tail in enumerate([(), (1,), (2, 3)])
    }
    assert len(chosen) == 1


def test_prefix_hash_spreads_prefixes_evenly() -> None:
    """No endpoint gets 25% more than its share."""
    counts = Counter(best("prefix_hash", candidates(*[IDLE] * 8, blocks=blocks(h))) for h in range(4000))
    assert len(counts) == 8
    assert max(counts.values()) < 1.25 * 4000 / 8


def test_prefix_hash_moves_only_prompts_of_a_removed_endpoint() -> None:
    """Rendezvous hashing: all other prompts keep their endpoint."""
    for h in range(300):
        found = candidates(*[IDLE] * 8, blocks=blocks(h))
        before = best("prefix_hash", found)
        after = best("prefix_hash", [p for p in found if p.endpoint.id != "c"])
        assert after == before or before == "c"


def test_prefix_hash_spills_to_the_fewest_requests() -> None:
    """At 1.25 times the mean and 10 requests more than the mean; either alone is variance."""
    found = candidates(*[IDLE] * 4, blocks=blocks(42))
    home = NAMES.index(best("prefix_hash", found))

    def chosen(at_home: int, others: int) -> str:
        counts = [Load(in_flight=others + i) for i in range(3)]
        counts.insert(home, Load(in_flight=at_home))
        return best("prefix_hash", candidates(*counts, blocks=blocks(42)))

    fewest = NAMES[0 if home else 1]
    assert chosen(12, 1) == NAMES[home]  # 2.7 times the mean of 4.5, and 7.5 more
    assert chosen(16, 1) == fewest  # 10.5 more than the mean of 5.5
    assert chosen(72, 60) == NAMES[home]  # 1.13 times the mean
    assert chosen(99, 60) == fewest


def test_prefix_hash_without_a_block_takes_the_fewest_requests() -> None:
    """A prompt too short to have a prefix gains nothing from a home."""
    assert best("prefix_hash", candidates(Load(in_flight=2), Load(in_flight=1), IDLE)) == "c"


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
