"""Scorers: one rule each, smaller is better."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest

from policies.latency.tpot import STALL_GRID
from policies.routes.route import ScorerName
from policies.scorers.scorers import PATIENCE, SCORERS, tie_break
from policies.types import Candidate, Endpoint, Forecast, Load, PrefixBlocks

NAMES = "abcdefgh"
NO_BLOCKS = PrefixBlocks()


def candidates(
    *loads: Load,
    hits: tuple[int, ...] = (),
    ttft: tuple[float, ...] = (),
    seconds: tuple[float, ...] = (),
    tokens: int = 1000,
    blocks: PrefixBlocks = NO_BLOCKS,
) -> list[Candidate]:
    """Endpoints a, b, c ... of one pool, with these loads, hits (tokens), median TTFTs and prefill times (s)."""
    return [
        Candidate(
            endpoint=Endpoint(NAMES[i], "pool"),
            tier=0,
            prompt_tokens=tokens,
            hit=hits[i] if hits else 0,
            forecast=Forecast(ttft[i] if ttft else 0.2, prefill=seconds[i] if seconds else 0.0),
            probability=1.0,
            price=0.0,
            load=load,
            blocks=blocks,
        )
        for i, load in enumerate(loads)
    ]


def best(scorer: ScorerName, found: list[Candidate], sequence: int = 0) -> str:
    """The endpoints with the least score."""
    scores = SCORERS[scorer](found, sequence)
    return "".join(p.endpoint.id for p, score in zip(found, scores, strict=True) if score == min(scores))


IDLE = Load()


def test_scorer_names_of_a_route_are_the_catalog() -> None:
    """No more and no fewer."""
    assert set(SCORERS) == set(get_args(ScorerName))


@pytest.mark.parametrize("scorer", get_args(ScorerName))
def test_a_scorer_returns_one_number_per_endpoint(scorer: ScorerName) -> None:
    """For a single endpoint too, and for a prompt without tokens or blocks."""
    for n in (1, 3):
        scores = SCORERS[scorer](candidates(*[IDLE] * n, tokens=0), 7)
        assert len(scores) == n


@pytest.mark.parametrize("scorer", ["predicted", "least_request", "lmetric", "token_load", "argmin_ttft"])
def test_equal_endpoints_get_equal_scores(scorer: ScorerName) -> None:
    """A scorer breaks no ties by the order in which endpoints are configured."""
    assert best(scorer, candidates(IDLE, IDLE, IDLE)) == "abc"


# --------------------------------------------------------------------------- predicted


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


# --------------------------------------------------------------------------- baselines


def test_round_robin_takes_turns() -> None:
    """In order, at any load."""
    found = candidates(Load(in_flight=9), IDLE, IDLE)
    assert [best("round_robin", found, sequence) for sequence in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_least_request_counts_requests_in_flight_then_waiting() -> None:
    """A queue of any length only breaks ties."""
    assert best("least_request", candidates(Load(in_flight=2), Load(in_flight=1, waiting=500))) == "b"
    assert best("least_request", candidates(Load(in_flight=1, waiting=3), Load(in_flight=1, waiting=2))) == "b"


def test_lmetric_multiplies_new_tokens_by_the_batch() -> None:
    """1000 x 5 beats 600 x 9, and queued tokens count as new."""
    assert best("lmetric", candidates(Load(in_flight=4), Load(in_flight=8), hits=(0, 400))) == "a"
    assert best("lmetric", candidates(Load(in_flight=4, queued_tokens=9000), Load(in_flight=8), hits=(0, 400))) == "b"


def test_lmetric_counts_no_request_twice() -> None:
    """The engine's running requests include the gateway's: the larger count is the batch."""
    assert best("lmetric", candidates(Load(in_flight=3, running=2, waiting=1), Load(in_flight=3))) == "ab"


def test_token_load_stays_with_four_fifths_of_the_prompt() -> None:
    """An endpoint with 80% of the prompt cached is first, at any number of tokens in flight."""
    found = candidates(
        Load(queued_tokens=50_000), IDLE, Load(queued_tokens=60_000), hits=(800, 799, 900), ttft=(2.7, 0.1, 3.1)
    )
    scores = SCORERS["token_load"](found, 0)
    assert sorted(range(3), key=scores.__getitem__) == [0, 2, 1]


def test_token_load_leaves_the_prefix_beyond_18_s() -> None:
    """Then the fewest uncached tokens in flight decide among all endpoints."""
    loads, hits = (Load(queued_tokens=50_000), IDLE), (900, 0)
    assert best("token_load", candidates(*loads, hits=hits, ttft=(PATIENCE, 0.1))) == "a"
    assert best("token_load", candidates(*loads, hits=hits, ttft=(PATIENCE + 0.2, 0.1))) == "b"


def test_token_load_counts_tokens_without_a_holder_of_the_prefix() -> None:
    """Queued tokens plus the uncached tokens of the prompt."""
    assert best("token_load", candidates(Load(queued_tokens=500), Load(queued_tokens=400), hits=(300, 100))) == "a"


def test_argmin_ttft_ignores_other_requests() -> None:
    """Expected TPOT misses do not count."""
    assert best("argmin_ttft", candidates(Load(running=99), IDLE, ttft=(0.19, 0.2))) == "a"


# --------------------------------------------------------------------------- prefix_hash


def blocks(*hashes: int) -> PrefixBlocks:
    return PrefixBlocks(hashes, 16)


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


def test_prefix_hash_spreads_prompts_too_short_to_have_a_block() -> None:
    """One endpoint for all would gain nothing."""
    assert len({best("prefix_hash", candidates(*[IDLE] * 8), sequence) for sequence in range(200)}) == 8


def test_prefix_hash_moves_only_prompts_of_a_removed_endpoint() -> None:
    """Rendezvous hashing: all other prompts keep their endpoint."""
    for h in range(300):
        found = candidates(*[IDLE] * 8, blocks=blocks(h))
        before = best("prefix_hash", found)
        after = best("prefix_hash", [p for p in found if p.endpoint.id != "c"])
        assert after == before or before == "c"


def test_prefix_hash_skips_an_endpoint_above_its_bounded_load() -> None:
    """At most 1.25 times the mean, rounded up, with this request counted."""
    found = candidates(*[IDLE] * 4, blocks=blocks(42))
    home = NAMES.index(best("prefix_hash", found))
    # 4 endpoints, 12 requests in flight and a new one: the bound is ceil(1.25 * 13 / 4) = 5.
    for at_home, others, stays in ((4, (3, 3, 2), True), (5, (3, 2, 2), False)):
        counts = list(others)
        counts.insert(home, at_home)
        loaded = candidates(*(Load(in_flight=n) for n in counts), blocks=blocks(42))
        assert (best("prefix_hash", loaded) == NAMES[home]) is stays


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
