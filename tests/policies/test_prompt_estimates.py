"""Tokens of a prompt's blocks, and when an estimate does not decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies.fleet.fleet import AttemptReport
from policies.latency.ttft_predictor import PrefillWork
from policies.routes.route import Route
from policies.routing.prompt_counts import ROUGH, is_count_needed
from policies.types import FOREVER, Endpoint, PartEnds, Pool, PoolEstimate, PrefixBlocks, Price, PromptEstimate
from tests.support.learned_fleet import ONE, answer, fleet, load, prompt

# A message of 300 tokens in 10 blocks, and one of 100 tokens in 10 blocks.
UNEVEN = PartEnds([10.0, 20.0], [300.0, 400.0])


@pytest.mark.parametrize(("depth", "share"), [(0, 0.0), (5, 0.375), (10, 0.75), (15, 0.875), (20, 1.0), (30, 1.0)])
def test_tokens_are_spread_evenly_within_a_message_and_not_over_messages(depth: float, share: float) -> None:
    assert UNEVEN.share(depth) == pytest.approx(share)
    assert PrefixBlocks((), 16, 1.25, UNEVEN).tokens(depth) == pytest.approx(share * 400)


def test_without_messages_all_blocks_are_alike() -> None:
    assert PrefixBlocks((), 16, 1.5).tokens(3) == 72


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 500)), min_size=1, max_size=8), st.floats(0, 500))
def test_a_deeper_prefix_never_has_fewer_tokens(parts: list[tuple[float, float]], depth: float) -> None:
    """Nor more than the prompt."""
    depths, tokens = [0.0], [1.0]
    for size, count in parts:
        depths.append(depths[-1] + size)
        tokens.append(tokens[-1] + count)
    ends = PartEnds(depths[1:], tokens[1:])
    assert 0.0 <= ends.share(depth) <= ends.share(depth + 0.5) + 1e-9 <= 1.0 + 1e-8


# --------------------------------------------------------------------------- what the report teaches

REPORTED = AttemptReport(prompt_tokens=1300, completion_tokens=5)


@pytest.mark.parametrize(("counted", "teaches"), [(None, False), (0, False), (993, True)])
def test_a_pools_scale_learns_from_counted_prompts_alone(counted: int | None, teaches: bool) -> None:
    """An estimate that is wrong for one key's texts does not change the counts of all other keys."""
    to = fleet()
    before = to.view.token_scale("small").correct(1000, 1)
    guess = prompt(1000)
    guess.margin, guess.counted_text = 40, None if counted is None else lambda: counted
    for _ in range(20):
        answer(to, guess, reported=REPORTED)
    assert (to.view.token_scale("small").correct(1000, 1) > before + 100) is teaches


@pytest.mark.parametrize(("counted", "tokens"), [(None, 1000), (0, 1000), (496, 500), (1986, 2000)])
def test_a_prompt_has_the_tokens_of_its_count_once_it_is_counted(counted: int | None, tokens: int) -> None:
    """What is billed without a report: corrected for the engine as the estimate was."""
    guess = prompt(1000)
    guess.text_tokens, guess.margin, guess.counted_text = 993, 40, None if counted is None else lambda: counted
    assert guess.counted_tokens() == pytest.approx(tokens, abs=1)


def estimated(tokens: int, counted: int) -> PoolEstimate:
    """A prompt that was sent with an estimate, and is counted by its first token."""
    found = prompt(tokens)
    found.margin, found.counted_text = tokens // 10, lambda: round(found.text_tokens * counted / tokens)
    return found


@pytest.mark.parametrize("estimate", [2000, 50_000])
def test_a_wrong_estimate_is_no_other_speed_of_the_engine(estimate: int) -> None:
    """A key whose texts have far more tokens than estimated, or fewer, changes no forecast of the others' prompts."""
    to, now = fleet(), 0.0
    for tokens in [1000, 4000, 10_000] * 10:
        now += 60
        answer(to, prompt(tokens), now=now, ttft=0.05 + tokens / 10_000)
    before = [to.view.forecast(ONE, load(to, now), 8000, 0, now).quantile(share) for share in (0.5, 0.9)]
    for _ in range(10):
        now += 60
        answer(to, estimated(estimate, 10_000), now=now, ttft=1.05)
    after = [to.view.forecast(ONE, load(to, now), 8000, 0, now).quantile(share) for share in (0.5, 0.9)]
    assert after == pytest.approx(before, rel=0.1)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(-4999, 5000), st.floats(0, 1e6))
def test_the_work_of_more_tokens_is_that_of_a_longer_prompt(hit: int, uncached: int, more: int, queued: float) -> None:
    """Attention pairs included: every token attends to all before."""

    def work(new: int) -> PrefillWork:
        return PrefillWork(hit + new, new, queued, new * (hit + 0.5 * new) + queued, 1.0)

    assume(uncached + more > 0)
    found, wanted = work(uncached).with_more(more), work(uncached + more)
    assert (found.prompt_tokens, found.uncached) == (wanted.prompt_tokens, wanted.uncached)
    assert found.pairs == pytest.approx(wanted.pairs)


def test_a_hit_that_was_estimated_too_large_shows_no_lost_blocks() -> None:
    """The prompt has fewer tokens than estimated, and all of the believed hit was cached."""
    to = fleet()
    cache = to.cache(ONE.id)
    assert cache is not None
    capacity = cache.index.capacity
    for cached in (0, 976, 976, 976):
        answer(to, prompt(1100, blocks=62, scale=1.1), reported=AttemptReport(1000, cached, 5))
    assert cache.index.capacity == capacity
    answer(to, prompt(1100, blocks=62, scale=1.1), reported=AttemptReport(1000, 100, 5))
    assert cache.index.capacity < capacity


# --------------------------------------------------------------------------- when a count is needed


@dataclass
class Spent:
    """A route that may still send a request of so many USD to an API."""

    left: float

    def meter(self, route: Route) -> Spent:
        return self

    def allows(self, limit: object, usd: float, now: float) -> bool:
        return usd <= self.left


def needed(tokens: int, margin: int, tier: dict[str, Any] | None = None, window: int | None = None) -> bool:
    """For a route with one tier, and answers of at most 100 tokens."""
    route = Route.model_validate({"name": "chat", "tiers": [{"pool": "small", **(tier or {})}]})
    estimate = PromptEstimate({"small": PoolEstimate(tokens, margin=margin)}, 100)
    pools = {"small": Pool("small", "served", (Endpoint("small/a", "small"),), context_window=window)}
    return is_count_needed(route, estimate, None, pools, Spent(FOREVER), 0.0)


@pytest.mark.parametrize(("margin", "expected"), [(0, False), (100, False), (int(ROUGH * 1000) + 1, True)])
def test_a_rough_estimate_is_counted(margin: int, expected: bool) -> None:
    assert needed(1000, margin) is expected


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, False),
        (990, True),  # without any answer
        (1100, True),  # with the expected answer
        (1160, True),
        (1300, False),
        (800, False),
    ],
)
def test_a_prompt_near_a_context_window_is_counted(window: int | None, expected: bool) -> None:
    """Within the margin of 80 tokens, with the expected answer or without any."""
    assert needed(1000, 80, window=window) is expected


@pytest.mark.parametrize(
    ("when", "expected"),
    [("<= 1050", True), ("<= 1200", False), ("900..2000", False), ("500..960", True), ("960..5000", True)],
)
def test_a_prompt_near_a_condition_is_counted(when: str, expected: bool) -> None:
    """Near either end."""
    assert needed(1000, 80, {"when": {"prompt_tokens": when}}) is expected


def test_a_counted_prompt_is_not_counted_again() -> None:
    """Not even at the very edge."""
    assert not needed(1000, 0, {"when": {"prompt_tokens": "<= 1000"}}, window=1100)


@pytest.mark.parametrize(
    ("allowed", "local", "expected"), [(0.9e-3, False, True), (2e-3, False, False), (0.9e-3, True, False)]
)
def test_a_cost_near_what_a_route_may_spend_on_apis_is_counted(allowed: float, local: bool, expected: bool) -> None:
    """1,000 tokens at 1 USD a million, 150 more or less. An engine costs the limit nothing."""
    limits = {"external": {"usd_per_hour": 1.0}}
    route = Route.model_validate({"name": "chat", "tiers": [{"pool": "small"}], "limits": limits})
    estimate = PromptEstimate({"small": PoolEstimate(1000, margin=150)}, 0)
    pools = {"small": Pool("small", "served", (Endpoint("small/a", "small"),), local=local, price=Price(1.0, 0.0))}
    assert is_count_needed(route, estimate, None, pools, Spent(allowed), 0.0) is expected
