"""Research scorers: the claim of each is the published rule of its source."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.scorers.research_scorers import PATIENCE, REPLAY_SCORERS, RESEARCH_SCORERS
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import QueuedRequest
from policies.queue_parts import queue_parts
from policies.routing.decide import decide
from policies.scorers.scorers import SCORERS
from policies.types import Candidate, Load, Placement, PoolEstimate, PromptEstimate, RequestView
from tests.policies.routing.test_tiers import LOADS
from tests.support import scorer_candidates as scoring
from tests.support.decision_fleet import DecisionScenario, order
from tests.support.queue_fixture import ONE, PROMPT, QueueFixture, route
from tests.support.scorer_candidates import IDLE, NAMES, ROUTE, blocks, candidates

pytestmark = pytest.mark.virtual_time


def best(scorer: str, found: list[Candidate], sequence: int = 0) -> str:
    return scoring.best(scorer, found, sequence, RESEARCH_SCORERS)


def test_a_replay_knows_the_scorers_of_the_gateway_too() -> None:
    """By the same names and functions: a research scorer replaces none."""
    assert {name: REPLAY_SCORERS[name] for name in SCORERS} == SCORERS
    assert REPLAY_SCORERS.keys() - SCORERS.keys() == RESEARCH_SCORERS.keys()


@pytest.mark.parametrize("scorer", RESEARCH_SCORERS)
def test_a_scorer_returns_one_number_per_endpoint(scorer: str) -> None:
    """For a single endpoint too, and for a prompt without tokens or blocks."""
    for n in (1, 3):
        assert len(RESEARCH_SCORERS[scorer](candidates(*[IDLE] * n, tokens=0), 7, ROUTE)) == n


@pytest.mark.parametrize(
    "scorer",
    [
        "cache_aware",
        "least_load",
        "dynamo",
        "weighted_chain",
        "lpwl",
        "lmetric",
        "token_load",
        "polyserve",
        "argmin_ttft",
    ],
)
def test_equal_endpoints_get_equal_scores(scorer: str) -> None:
    """A scorer breaks no ties by the order in which endpoints are configured."""
    assert best(scorer, candidates(IDLE, IDLE, IDLE)) == "abc"


@pytest.mark.parametrize("scorer", RESEARCH_SCORERS)
def test_a_research_scorer_is_never_queued(scorer: str) -> None:
    """A baseline represents a router without a queue: it sends at once where `predicted` holds the request."""
    for name, sent in (("predicted", False), (scorer, True)):
        queue, scheduler = QueueFixture(), QueueScheduler(queue_parts(), REPLAY_SCORERS)
        queue.fill(ONE)
        asked = route(1.0).model_copy(update={"scorer": name})
        view, prompt = RequestView(queue.now, stream=True), PromptEstimate({"small": PoolEstimate(PROMPT)})
        scheduler.enter(QueuedRequest("r", view, prompt, asked, 1))
        assert [key for key, _ in scheduler.release(queue.fleet, queue.now)] == ["r"] * sent


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.floats(0.001, 10), LOADS), min_size=1),
    st.sampled_from(list(RESEARCH_SCORERS)),
    st.sampled_from(["best_effort", "queue", "shed"]),
    st.integers(0, 2**32),
)
def test_every_endpoint_is_ranked_or_rejected_once(
    endpoints: dict[str, tuple[float, Load]], scorer: str, on_miss: str, seed: int
) -> None:
    """For any fleet and `on_miss`: no endpoint is lost or considered twice, and nothing is shed."""
    half: dict[str, dict[str, float]] = {"one": {}, "two": {}}
    for name, (ttft, _) in endpoints.items():
        half["one" if name < "e" else "two"][name] = ttft
    scenario = DecisionScenario(half, loads={name: load for name, (_, load) in endpoints.items()})
    asked = route(0.5, tiers=list(half), on_miss=on_miss).model_copy(update={"scorer": scorer})
    queued = QueuedRequest("r", RequestView(1.0), scenario.estimate, asked, seed)
    decision = decide(queued, scenario.fleet, scenario.beliefs, 1.0, REPLAY_SCORERS)
    considered = order(decision) + [rejection.endpoint for rejection in decision.rejected]
    assert sorted(considered) == sorted(endpoints)
    assert decision.outcome is (Placement.PLACE if decision.ranked else Placement.UNAVAILABLE)


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
    scores = RESEARCH_SCORERS["token_load"](found, 0, ROUTE)
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


# --------------------------------------------------------------------------- least prefill work left


def test_lpwl_adds_pending_and_uncached_tokens() -> None:
    """A holder is left when its pending tokens exceed what its hit saves; the size of the batch plays no part."""
    assert best("lpwl", candidates(Load(queued_tokens=500, in_flight=40), IDLE, hits=(600, 0))) == "a"
    assert best("lpwl", candidates(Load(queued_tokens=700), IDLE, hits=(600, 0))) == "b"


def test_lpwl_breaks_ties_by_the_fewest_requests() -> None:
    """Where not a single token differs."""
    assert best("lpwl", candidates(Load(in_flight=3), Load(in_flight=2), Load(in_flight=2, queued_tokens=1))) == "b"


# --------------------------------------------------------------------------- cache_aware


def test_cache_aware_takes_the_least_loaded_holder_of_the_longest_match() -> None:
    """Above 30% of the prompt; a shorter match counts as none."""
    loads = Load(in_flight=5), Load(in_flight=3), IDLE
    assert best("cache_aware", candidates(*loads, hits=(310, 310, 300))) == "b"
    assert best("cache_aware", candidates(*loads, hits=(310, 305, 300))) == "a"
    assert best("cache_aware", candidates(*loads, hits=(300, 300, 0))) == "c"


def test_cache_aware_spills_above_both_margins() -> None:
    """1.5 times the mean, and two standard deviations of such a count above it: of a mean of 5, 4.5 requests."""

    def chosen(holder: int, *others: int) -> str:
        loads = [Load(in_flight=holder), *(Load(in_flight=count) for count in others)]
        return best("cache_aware", candidates(*loads, hits=(900, *[0] * len(others))))

    assert chosen(9, 5, 4, 2) == "a"  # 1.8 times the mean, 4 more
    assert chosen(10, 5, 4, 1) == "d"  # 5 more
    assert chosen(150, 120, 110, 90) == "a"  # 1.28 times the mean, 32 more


def test_cache_aware_never_needs_more_than_64_requests_above_the_mean() -> None:
    """The cap of the margin: of a mean of 1,600, two standard deviations are 80."""
    others = [Load(in_flight=1_000)] * 7
    over = Load(in_flight=2_700)
    assert best("cache_aware", candidates(over, *others, hits=(900, *[0] * 7))) == "bcdefgh"


@pytest.mark.parametrize("overload", [Load(waiting=8), Load(kv_usage=0.8)])
def test_cache_aware_leaves_out_an_overloaded_engine(overload: Load) -> None:
    """By its queue or its KV cache, whatever it holds; unless all are."""
    busy = Load(in_flight=3)
    assert best("cache_aware", candidates(overload, busy, hits=(900, 0))) == "b"
    assert best("cache_aware", candidates(overload, overload, hits=(900, 0))) == "a"


# --------------------------------------------------------------------------- least_load


def test_least_load_waits_for_pending_tokens() -> None:
    """Whatever is cached, and however many requests decode."""
    loads = Load(queued_tokens=3_000), Load(queued_tokens=2_900, in_flight=40)
    assert best("least_load", candidates(*loads, hits=(1_000, 0))) == "b"


def test_least_load_prices_the_kv_cache_in_use_as_a_wait() -> None:
    """0.15 s at half, 1.35 s at nine tenths: 2,700 pending tokens at 2,000 a second; a full cache stays finite."""
    for used, tokens in ((0.5, 300), (0.9, 2_700)):
        for more, expected in ((-1, "b"), (1, "a")):
            assert best("least_load", candidates(Load(kv_usage=used), Load(queued_tokens=tokens + more))) == expected
    assert best("least_load", candidates(Load(kv_usage=1.0), Load(kv_usage=0.99))) == "b"


# --------------------------------------------------------------------------- Dynamo


def test_dynamo_adds_prefill_and_decode_tokens_of_equal_weight() -> None:
    """A hit of 600 tokens is worth 600 tokens of context, and 300 that wait: these will be in the KV cache too."""
    for context, expected in ((599, "a"), (601, "b")):
        assert best("dynamo", candidates(Load(context=context), IDLE, hits=(600, 0))) == expected
    for queued, expected in ((299, "a"), (301, "b")):
        assert best("dynamo", candidates(Load(queued_tokens=queued), IDLE, hits=(600, 0))) == expected


def test_dynamo_counts_tokens_where_the_number_of_requests_differs() -> None:
    """Forty short answers weigh less than a long one."""
    assert best("dynamo", candidates(Load(in_flight=40, context=8_000), Load(in_flight=1, context=9_000))) == "a"


# --------------------------------------------------------------------------- llm-d's default profile


def test_weighted_chain_gives_a_whole_prefix_three_and_an_empty_queue_two() -> None:
    """A holder of everything is taken in spite of the longest queue; a holder of two thirds is as good as idle."""
    busy = Load(waiting=7)
    assert best("weighted_chain", candidates(busy, IDLE, hits=(700, 0))) == "a"
    assert best("weighted_chain", candidates(busy, IDLE, hits=(650, 0))) == "b"


def test_weighted_chain_scores_a_queue_between_the_longest_and_the_shortest() -> None:
    """Halfway costs the same in queues of 0 to 2, 0 to 20 and 10 to 12; equal queues cost nothing."""
    for least, half, most in ((0, 1, 2), (0, 10, 20), (10, 11, 12)):
        loads = [Load(waiting=queue) for queue in (half, most, least)]
        assert best("weighted_chain", candidates(*loads, hits=(340, 0, 0))) == "a"
        assert best("weighted_chain", candidates(*loads, hits=(330, 0, 0))) == "c"
    assert best("weighted_chain", candidates(Load(waiting=9), Load(waiting=9), hits=(0, 1))) == "b"


def test_weighted_chain_prefers_the_emptier_kv_cache() -> None:
    """At a weight of two: half of the cache in use is worth a third of the prompt."""
    assert best("weighted_chain", candidates(Load(kv_usage=0.5), IDLE, hits=(340, 0))) == "a"
    assert best("weighted_chain", candidates(Load(kv_usage=0.5), IDLE, hits=(330, 0))) == "b"


# --------------------------------------------------------------------------- predicted_chain


def picks(found: list[Candidate], draws: int = 2000) -> Counter[str]:
    """How often the chain takes an endpoint."""
    return Counter(best("predicted_chain", found, sequence) for sequence in range(draws))


def test_predicted_chain_stays_with_the_holder_within_five_seconds() -> None:
    """An endpoint with 99% of the prompt, before any budget; beyond, the others are asked too."""
    assert picks(candidates(IDLE, IDLE, hits=(990, 0), ttft=(4.9, 0.1))) == {"a": 2000}
    assert picks(candidates(IDLE, IDLE, hits=(990, 0), ttft=(5.2, 0.1)))["b"] > 1900


def test_predicted_chain_explores_one_in_a_hundred() -> None:
    """The rest goes to those that make their budgets."""
    taken = picks(candidates(IDLE, IDLE, ttft=(0.9, 1.1)), 20_000)
    assert 100 < taken["b"] < 300


def test_predicted_chain_prefers_a_partial_holder_among_those_in_time() -> None:
    """80% of the prompt narrows the tier that makes its budgets, and never brings back one that does not."""
    assert picks(candidates(IDLE, IDLE, IDLE, hits=(800, 0, 0), ttft=(0.9, 0.1, 0.1)))["a"] == 2000
    assert picks(candidates(IDLE, IDLE, IDLE, hits=(800, 0, 0), ttft=(1.1, 0.1, 0.1)))["a"] < 50


def test_predicted_chain_draws_the_least_headroom_most_often() -> None:
    """In proportion to weights of 101 and 1, and 51 halfway."""
    taken = picks(candidates(IDLE, IDLE, IDLE, ttft=(0.9, 0.5, 0.1)), 6000)
    assert taken["a"] / 6000 == pytest.approx(101 / 153, abs=0.03)
    assert taken["b"] / 6000 == pytest.approx(51 / 153, abs=0.03)


def test_predicted_chain_weighs_tpot_a_fifth() -> None:
    """Most TTFT headroom and least TPOT headroom: a weight of 21 against 81."""
    taken = picks(candidates(IDLE, IDLE, ttft=(0.1, 0.9), pace=(0.045, 0.01)), 6000)
    assert taken["a"] / 6000 == pytest.approx(21 / 102, abs=0.03)


def test_predicted_chain_misses_tpot_rather_than_ttft_and_prefers_idle_engines() -> None:
    """Without one that makes both budgets."""
    busy = Load(in_flight=1)
    assert picks(candidates(busy, busy, busy, ttft=(1.1, 0.1, 1.1), pace=(0.01, 0.06, 0.06))) == {"b": 2000}
    assert picks(candidates(busy, busy, IDLE, ttft=(1.1, 0.1, 9.0), pace=(0.01, 0.06, 0.09))) == {"c": 2000}


def test_predicted_chain_knows_a_budget_that_grows_with_the_prompt() -> None:
    """By the tokens that the best holder has to compute: 1 s and 0.2 s per 1,000 of them."""
    grows = ROUTE.model_copy(update={"ttft": ROUTE.ttft and ROUTE.ttft.model_copy(update={"per_1k_tokens": 0.2})})

    def taken(ttft: float) -> Counter[str]:
        found = candidates(IDLE, IDLE, IDLE, hits=(3_000, 0, 0), tokens=8_000, ttft=(ttft, 2.15, 9.0))
        return Counter(
            min(zip(RESEARCH_SCORERS["predicted_chain"](found, n, grows), "abc", strict=True))[1] for n in range(1000)
        )

    assert taken(1.9)["b"] < 30  # of 2 s, with 5,000 tokens to compute; b is explored
    assert taken(2.1)["b"] > 300  # late too, and nearly as close


# --------------------------------------------------------------------------- DualMap


def test_dualmap_maps_a_prefix_to_two_endpoints() -> None:
    """Whatever their load, and whatever the load of the others."""
    chosen = {
        best("dualmap", candidates(*loads, ttft=ttft, blocks=blocks(7)))
        for loads, ttft in (
            ([IDLE] * 8, tuple(0.1 + 0.01 * i for i in range(8))),
            ([IDLE] * 8, tuple(0.2 - 0.01 * i for i in range(8))),
            ([Load(in_flight=9)] * 8, tuple(0.1 + 0.01 * (i * 5 % 8) for i in range(8))),
        )
    }
    assert len(chosen) == 2


def test_dualmap_prefers_the_hit_until_it_would_be_late() -> None:
    """Then the other of the pair; a faster third endpoint is never asked."""
    two = [best("dualmap", candidates(*[IDLE] * 8, ttft=fast(i), blocks=blocks(7))) for i in range(8)]
    home, other = (NAMES.index(name) for name in sorted(set(two)))
    hits = tuple(112 if i == home else 0 for i in range(8))
    slow = tuple(3.0 if i == home else 0.5 if i == other else 0.1 for i in range(8))
    for chance, expected in ((0.6, home), (0.4, other)):
        chances = tuple(chance if i == home else 0.9 for i in range(8))
        found = candidates(*[IDLE] * 8, hits=hits, ttft=slow, chances=chances, blocks=blocks(7))
        assert best("dualmap", found) == NAMES[expected]


def fast(at: int) -> tuple[float, ...]:
    """One of eight endpoints is faster."""
    return tuple(0.1 if i == at else 0.2 for i in range(8))


def test_dualmap_spreads_prompts_behind_a_common_prefix() -> None:
    """Blocks that three endpoints hold name no pair: the first own block does, for all turns of a conversation."""
    shared, hits = (1, 2, 3), (48, 48, 48, 0, 0, 0, 0, 0)
    homes = {
        own: {
            best("dualmap", candidates(*[IDLE] * 8, hits=hits, blocks=blocks(*shared, own, *turn)))
            for turn in ((), (own + 1,), (own + 1, own + 2))
        }
        for own in range(100, 2000, 10)
    }
    assert all(len(names) == 1 for names in homes.values())
    assert len(set().union(*homes.values())) == 8


def test_dualmap_lengthens_the_key_while_its_pair_is_late() -> None:
    """So a prefix that is too common for two endpoints reaches others, which its holders then tell."""

    def chosen(*chances: float) -> set[str]:
        prompts = [blocks(7, own) for own in range(100)]
        found = [candidates(*[IDLE] * 8, ttft=fast(i % 8), chances=chances, blocks=p) for i, p in enumerate(prompts)]
        return {best("dualmap", each) for each in found}

    pair = chosen(*[1.0] * 8)
    assert len(pair) == 2
    assert len(chosen(*(0.1 if name in pair else 1.0 for name in NAMES))) == 8
    assert chosen(*[0.1] * 8) == pair  # late everywhere: the holders are as good as any


# --------------------------------------------------------------------------- PolyServe


def test_polyserve_takes_the_fullest_that_fits() -> None:
    """In TTFT by the median, in TPOT by the pace, and while the answers there can bear a prefill."""
    full, half = Load(in_flight=9), Load(in_flight=4)
    assert best("polyserve", candidates(full, half, IDLE)) == "a"
    assert best("polyserve", candidates(full, half, IDLE, chances=(0.4, 0.6, 1.0))) == "b"
    assert best("polyserve", candidates(full, half, IDLE, pace=(0.06, 0.04, 0.01))) == "b"
    assert best("polyserve", candidates(Load(in_flight=9, reopens_in=0.1), half, IDLE)) == "b"


def test_polyserve_takes_the_fastest_where_none_fits() -> None:
    """However full."""
    assert best("polyserve", candidates(IDLE, Load(in_flight=9), ttft=(3.0, 2.0), chances=(0.1, 0.2))) == "b"
