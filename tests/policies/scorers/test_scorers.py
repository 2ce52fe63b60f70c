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


def best(scorer: ScorerName, found: list[Candidate], seed: int = 0) -> str:
    """The endpoints with the least score."""
    scores = SCORERS[scorer](found, seed)
    return "".join(p.endpoint.id for p, score in zip(found, scores, strict=True) if score == min(scores))


IDLE = Load()


def test_every_name_that_a_route_may_give_is_in_the_catalog() -> None:
    """And no other."""
    assert set(SCORERS) == set(get_args(ScorerName))


@pytest.mark.parametrize("scorer", get_args(ScorerName))
def test_a_scorer_gives_every_endpoint_one_number(scorer: ScorerName) -> None:
    """Also to a single one, and to a prompt without a token or a block."""
    for n in (1, 3):
        scores = SCORERS[scorer](candidates(*[IDLE] * n, tokens=0), 7)
        assert len(scores) == n


@pytest.mark.parametrize("scorer", ["predicted", "least_request", "lmetric", "token_load", "argmin_ttft"])
def test_equal_endpoints_are_left_to_luck(scorer: ScorerName) -> None:
    """A scorer breaks no ties by the order in which endpoints are configured."""
    assert best(scorer, candidates(IDLE, IDLE, IDLE)) == "abc"


# --------------------------------------------------------------------------- predicted


def test_predicted_takes_the_least_delay() -> None:
    """The median prediction, in seconds."""
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.3, 0.2))) == "b"


def test_predicted_leaves_near_equals_to_luck() -> None:
    """Four percent are not known well enough to send everything to one of two equal engines; ten are."""
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.100, 0.104))) == "ab"
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.100, 0.110))) == "a"


def test_predicted_keeps_a_prefix_where_it_is() -> None:
    """Among near equals the longer hit is first, even where it saves next to nothing."""
    assert best("predicted", candidates(IDLE, IDLE, hits=(0, 64), ttft=(0.100, 0.103))) == "b"


def writing(answers: float, **load: Any) -> Load:
    """An engine whose answers are lost one by one with the seconds that they are stalled, up to so many."""
    return Load(expected_tpot_misses=tuple(answers * seconds / STALL_GRID[-1] for seconds in STALL_GRID), **load)


def test_predicted_prices_the_answers_that_a_prefill_would_cost() -> None:
    """Of two that are equally fast, the one where it stalls fewer."""
    assert best("predicted", candidates(writing(32), writing(4), seconds=(0.1, 0.1))) == "b"


def test_predicted_takes_an_answer_for_three_seconds() -> None:
    """A tenth of an answer outweighs a delay of this request by 0.25 s, and not one by 0.35 s."""
    busy, stall = writing(1), (0.1 * STALL_GRID[-1], 0.1 * STALL_GRID[-1])
    assert best("predicted", candidates(busy, IDLE, ttft=(0.2, 0.45), seconds=stall)) == "b"
    assert best("predicted", candidates(busy, IDLE, ttft=(0.2, 0.55), seconds=stall)) == "a"


def test_predicted_takes_a_second_of_an_engine_for_less_than_a_third() -> None:
    """So that a prompt waits a little for a sibling that computes its prefix, and not for long."""
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.30, 0.20), seconds=(0.0, 0.5))) == "a"
    assert best("predicted", candidates(IDLE, IDLE, ttft=(0.40, 0.20), seconds=(0.0, 0.5))) == "b"


def test_predicted_counts_only_what_a_prompt_adds() -> None:
    """A hit costs the others nothing, and neither does what was sent there before."""
    assert best("predicted", candidates(writing(32), writing(32), seconds=(0.1, 0.0))) == "b"
    assert best("predicted", candidates(writing(32, stalled=0.5), writing(32), seconds=(0.1, 0.1))) == "ab"


def test_predicted_fears_nothing_for_answers_without_a_promise() -> None:
    """However many run there: nobody waits for them."""
    assert best("predicted", candidates(Load(running=99), IDLE, seconds=(5.0, 5.0))) == "ab"


# --------------------------------------------------------------------------- yardsticks


def test_round_robin_takes_turns() -> None:
    """In order, whatever the load."""
    found = candidates(Load(in_flight=9), IDLE, IDLE)
    assert [best("round_robin", found, seed) for seed in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_least_request_counts_what_is_in_flight_and_then_what_waits() -> None:
    """However long, a queue only breaks ties."""
    assert best("least_request", candidates(Load(in_flight=2), Load(in_flight=1, waiting=500))) == "b"
    assert best("least_request", candidates(Load(in_flight=1, waiting=3), Load(in_flight=1, waiting=2))) == "b"


def test_lmetric_multiplies_new_tokens_by_the_batch() -> None:
    """1000 x 5 beats 600 x 9, and tokens already sent there count as new."""
    assert best("lmetric", candidates(Load(in_flight=4), Load(in_flight=8), hits=(0, 400))) == "a"
    assert best("lmetric", candidates(Load(in_flight=4, queued_tokens=9000), Load(in_flight=8), hits=(0, 400))) == "b"


def test_lmetric_counts_no_request_twice() -> None:
    """What the engine says is running includes what we sent: the larger count is the batch."""
    assert best("lmetric", candidates(Load(in_flight=3, running=2, waiting=1), Load(in_flight=3))) == "ab"


def test_token_load_stays_where_the_prefix_is() -> None:
    """An endpoint with four fifths of the prompt comes first, however many tokens it has in flight."""
    found = candidates(
        Load(queued_tokens=50_000), IDLE, Load(queued_tokens=60_000), hits=(800, 799, 900), ttft=(2.7, 0.1, 3.1)
    )
    scores = SCORERS["token_load"](found, 0)
    assert sorted(range(3), key=scores.__getitem__) == [0, 2, 1]


def test_token_load_leaves_the_prefix_when_it_costs_18_seconds() -> None:
    """Then the fewest uncached tokens in flight decide among all."""
    loads, hits = (Load(queued_tokens=50_000), IDLE), (900, 0)
    assert best("token_load", candidates(*loads, hits=hits, ttft=(PATIENCE, 0.1))) == "a"
    assert best("token_load", candidates(*loads, hits=hits, ttft=(PATIENCE + 0.2, 0.1))) == "b"


def test_token_load_counts_tokens_where_nobody_holds_the_prefix() -> None:
    """What is in flight there, and what this prompt would add."""
    assert best("token_load", candidates(Load(queued_tokens=500), Load(queued_tokens=400), hits=(300, 100))) == "a"


def test_argmin_ttft_looks_at_nothing_else() -> None:
    """The harm to others is not its business."""
    assert best("argmin_ttft", candidates(Load(running=99), IDLE, ttft=(0.19, 0.2))) == "a"


# --------------------------------------------------------------------------- prefix_hash


def blocks(*hashes: int) -> PrefixBlocks:
    return PrefixBlocks(hashes, 16)


def test_prefix_hash_sends_the_same_beginning_to_the_same_endpoint() -> None:
    """Blocks after the first 256 tokens, and the request's ordinal, change nothing."""
    first = tuple(range(100, 116))
    chosen = {
        best("prefix_hash", candidates(*[IDLE] * 8, blocks=blocks(*first, *tail)), seed)
        for seed, tail in enumerate([(), (1,), (2, 3)])
    }
    assert len(chosen) == 1


def test_prefix_hash_spreads_different_beginnings() -> None:
    """No endpoint draws much more than its share."""
    counts = Counter(best("prefix_hash", candidates(*[IDLE] * 8, blocks=blocks(h))) for h in range(4000))
    assert len(counts) == 8
    assert max(counts.values()) < 1.25 * 4000 / 8


def test_prefix_hash_spreads_prompts_too_short_to_have_a_block() -> None:
    """Nothing to be had by sending them all to one."""
    assert len({best("prefix_hash", candidates(*[IDLE] * 8), seed) for seed in range(200)}) == 8


def test_prefix_hash_moves_only_the_prompts_of_an_endpoint_that_left() -> None:
    """Rendezvous: who drew another one keeps it."""
    for h in range(300):
        found = candidates(*[IDLE] * 8, blocks=blocks(h))
        before = best("prefix_hash", found)
        after = best("prefix_hash", [p for p in found if p.endpoint.id != "c"])
        assert after == before or before == "c"


def test_prefix_hash_passes_an_endpoint_over_that_holds_more_than_its_share() -> None:
    """Bounded load: at most 1.25 times the mean, rounded up, this request included."""
    found = candidates(*[IDLE] * 4, blocks=blocks(42))
    home = NAMES.index(best("prefix_hash", found))
    # 4 endpoints, 12 in flight and this one: the bound is ceil(1.25 * 13 / 4) = 5.
    for at_home, others, stays in ((4, (3, 3, 2), True), (5, (3, 2, 2), False)):
        counts = list(others)
        counts.insert(home, at_home)
        loaded = candidates(*(Load(in_flight=n) for n in counts), blocks=blocks(42))
        assert (best("prefix_hash", loaded) == NAMES[home]) is stays


# --------------------------------------------------------------------------- luck


def test_luck_is_the_same_in_every_process() -> None:
    """A replay breaks ties as the gateway did: PYTHONHASHSEED has no part in it."""
    assert tie_break(7, "small/10.0.0.11:8000") == 1774196555529650499


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
def test_luck_favours_nobody(n: int) -> None:
    """Over many ordinals each of n names is first about equally often, within five standard deviations."""
    names, draws = [f"small/10.0.0.{i}:8000" for i in range(n)], 4000
    counts = Counter(min(names, key=lambda name: tie_break(seed, name)) for seed in range(draws))
    share = draws / n
    assert all(abs(counts[name] - share) < 5 * share**0.5 for name in names)
