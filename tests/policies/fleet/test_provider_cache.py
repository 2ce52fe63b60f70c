"""What a provider's prompt cache holds, in the price of a place: a conversation moves to another API only for more than
the prompt costs anew there."""

from __future__ import annotations

from typing import Any

import pytest

from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queued_request import QueuedRequest
from policies.routes.route import Route
from policies.routing.decide import decide
from policies.types import (
    AttemptOutcome,
    Candidate,
    Decision,
    Endpoint,
    Pool,
    PoolEstimate,
    PrefixBlocks,
    Price,
    PromptCacheTerms,
    PromptEstimate,
    RequestView,
)
from tests.policies.fleet.test_peers import LosslessLink

KEPT, LEAST = 300.0, 1024
DEAR = Price(1.0, 0.0, cached_input=0.1)
CHEAP = Price(0.8, 0.0, cached_input=0.08)  # a fifth less per token
BLOCK = 30  # tokens


def api(name: str, price: Price, keys: int = 1, terms: PromptCacheTerms | None = None) -> Pool:
    endpoints = tuple(Endpoint(f"{name}/{i}", name) for i in range(keys))
    terms = terms or PromptCacheTerms(KEPT, LEAST)
    return Pool(name, f"m-{name}", endpoints, local=False, price=price, prompt_cache=terms)


class Conversation:
    """Turns of a caller over a route that takes the cheapest: each prompt is the one before with more behind it."""

    def __init__(self, *pools: Pool, session: str = "", group: int = 0, fleet: Fleet | None = None) -> None:
        self.pools, self.session, self.group = pools or (api("a", DEAR), api("b", CHEAP)), session, group
        self.fleet = fleet or Fleet(self.pools)
        self.route = Route.model_validate(
            {"name": "r", "tiers": [pool.name for pool in self.pools], "prefer": "cost", "ttft": "off"}
        )
        self.turns = 0

    def prompt(self, tokens: int) -> PoolEstimate:
        first = self.group * 10_000_000 + 1
        return PoolEstimate(tokens, PrefixBlocks(range(first, first + tokens // BLOCK), BLOCK))

    def decide(self, tokens: int, now: float) -> Decision:
        prompts = {pool.name: self.prompt(tokens) for pool in self.pools}
        request = RequestView(now, stream=True, session=self.session)
        queued = QueuedRequest("r", request, PromptEstimate(prompts, output_tokens=0), self.route, 0)
        return decide(queued, self.fleet.snapshot(now), self.fleet.view, now)

    def send(self, to: str, tokens: int, now: float) -> object:
        """To a pool, wherever the decision would have gone: it may have been the only one up."""
        key, chosen = object(), self.at(to, tokens, now)
        self.fleet.on_sent(key, chosen, self.prompt(tokens), now, True, route=self.route)
        return key

    def answer(self, to: str, tokens: int, now: float, **usage: Any) -> None:
        key = self.send(to, tokens, now)
        self.fleet.on_first_token(key, now + 1)
        self.fleet.on_ended(key, AttemptOutcome.COMPLETED, now + 2, AttemptReport(**usage))

    def at(self, endpoint: str, tokens: int, now: float) -> Candidate:
        return next(each for each in self.decide(tokens, now).ranked if each.endpoint.id.startswith(endpoint))

    def usd(self, pool: str, tokens: int, now: float) -> float:
        return self.at(pool, tokens, now).price * 1e6

    def goes_to(self, tokens: int, now: float) -> str:
        chosen = self.decide(tokens, now).chosen
        assert chosen is not None
        return chosen.endpoint.pool


def test_a_conversation_stays_where_its_prompt_is_cached_until_the_lifetime_is_over() -> None:
    """The cheaper API would be paid for the whole prompt anew, which is eight times as much. Each turn renews it."""
    talk = Conversation()
    assert talk.goes_to(90_000, 0.0) == "b"
    talk.answer("a", 90_000, 0.0)  # b was down
    assert talk.goes_to(96_000, 10.0) == "a"
    assert talk.usd("a", 96_000, 10.0) == pytest.approx(90_000 * 0.1 + 6_000 * 1.0)
    assert talk.usd("b", 96_000, 10.0) == pytest.approx(96_000 * 0.8)
    talk.answer("a", 96_000, 10.0)
    assert talk.goes_to(99_000, KEPT + 9.0) == "a"
    assert talk.goes_to(99_000, KEPT + 11.0) == "b"


def test_a_conversation_moves_where_its_new_text_costs_more_than_the_move() -> None:
    """9,000 cached tokens save less than a fifth of 90,000."""
    talk = Conversation()
    talk.answer("a", 9_000, 0.0)
    assert talk.goes_to(90_000, 10.0) == "b"


@pytest.mark.parametrize("usage", [{"cached_tokens": 0}, {"cached_tokens": None}, {"cached_tokens": 12_000}])
def test_an_answer_that_reports_less_than_half_ends_the_belief(usage: dict[str, Any]) -> None:
    """Some usage has no member for a count of 0. What is reported stays believed."""
    talk = Conversation()
    talk.answer("a", 90_000, 0.0, prompt_tokens=90_000, cached_tokens=0)
    assert talk.goes_to(96_000, 10.0) == "a"
    talk.answer("a", 96_000, 10.0, prompt_tokens=96_000, **usage)
    assert talk.goes_to(99_000, 20.0) == "b"
    held = usage["cached_tokens"] or 0
    assert talk.usd("a", 99_000, 20.0) == pytest.approx(held * 0.1 + (99_000 - held) * 1.0)


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": 96_000, "cached_tokens": 89_856}])
def test_an_answer_that_reports_about_as_much_keeps_it(usage: dict[str, Any]) -> None:
    """So does one without usage, as of a stream that broke off."""
    talk = Conversation()
    talk.answer("a", 90_000, 0.0)
    talk.answer("a", 96_000, 10.0, **usage)
    assert talk.usd("a", 96_000, 20.0) == pytest.approx(96_000 * 0.1)


def test_prompts_side_by_side_refute_nothing() -> None:
    """The second was sent before the first was answered: nothing was believed of it, so its 0 is no news."""
    talk = Conversation()
    keys = [talk.send("a", 90_000, 0.0) for _ in range(2)]
    for key in keys:
        report = AttemptReport(prompt_tokens=90_000, cached_tokens=0)
        talk.fleet.on_ended(key, AttemptOutcome.COMPLETED, 2.0, report)
    assert talk.goes_to(96_000, 10.0) == "a"


def test_a_prompt_without_an_answer_is_not_held() -> None:
    """Refused, or failed before the first token."""
    talk = Conversation()
    talk.fleet.on_ended(talk.send("a", 90_000, 0.0), AttemptOutcome.REFUSED, 1.0)
    assert talk.usd("a", 90_000, 2.0) == pytest.approx(90_000)


def test_a_refuted_prompt_leaves_what_others_share_with_it() -> None:
    """A longer conversation begins with its text, and stays believed; another cache group shares no block."""
    talk = Conversation()
    talk.answer("a", 30_000, 0.0)
    talk.answer("a", 60_000, 0.0)
    talk.answer("a", 30_000, 10.0, prompt_tokens=30_000, cached_tokens=0)
    assert talk.usd("a", 60_000, 20.0) == pytest.approx(60_000 * 0.1)
    other = Conversation(*talk.pools, fleet=talk.fleet, group=1)
    assert other.usd("a", 60_000, 20.0) == pytest.approx(60_000)


def test_a_short_prefix_is_not_cached() -> None:
    """By the least number of tokens that the provider keeps."""
    talk = Conversation()
    talk.answer("a", 990, 0.0)
    talk.answer("b", 1_050, 0.0)
    assert (talk.usd("a", 3_000, 1.0), talk.usd("b", 3_000, 1.0)) == pytest.approx((3_000, 1_050 * 0.08 + 1_950 * 0.8))


def test_each_key_has_a_cache_of_its_own() -> None:
    """A session returns to the key that holds it, whose tokens count; without one the key is drawn: the mean counts."""
    pools = api("a", DEAR, keys=2), api("b", CHEAP)
    for session, held in (("s", 90_000), ("", 45_000)):
        talk = Conversation(*pools, session=session)
        talk.answer("a/0", 90_000, 0.0)
        assert talk.usd("a", 90_000, 1.0) == pytest.approx(held * 0.1 + (90_000 - held))


def test_an_api_of_which_nothing_is_known_costs_the_whole_prompt() -> None:
    """And a route over one pool believes nothing: its price decides nothing."""
    unknown = Pool("a", "m", (Endpoint("a/0", "a"),), local=False, price=DEAR)
    for pools in ((unknown, api("b", CHEAP)), (api("a", DEAR),)):
        talk = Conversation(*pools)
        talk.answer("a", 90_000, 0.0)
        assert talk.usd("a", 90_000, 1.0) == pytest.approx(90_000)


def test_another_account_at_the_same_server_holds_nothing() -> None:
    """A reload has changed the key."""
    talk = Conversation()
    talk.answer("a", 90_000, 0.0)
    talk.fleet.reload(
        [
            Pool(
                "a",
                "m-a",
                (Endpoint("a/0", "a", account="new"),),
                local=False,
                price=DEAR,
                prompt_cache=PromptCacheTerms(KEPT),
            ),
            talk.pools[1],
        ]
    )
    assert talk.usd("a", 90_000, 1.0) == pytest.approx(90_000)


def test_processes_tell_one_another_what_a_provider_holds() -> None:
    """The next turn may come by another worker. A prompt that failed, or was read from no cache, is not told."""
    links: list[LosslessLink] = []
    one, other = Conversation(), Conversation()
    for each in (one, other):
        each.fleet.peers = LosslessLink(links)
    key = one.send("a", 90_000, 0.0)
    assert other.usd("a", 90_000, 1.0) == pytest.approx(90_000)
    one.fleet.on_ended(key, AttemptOutcome.COMPLETED, 2.0)
    assert other.goes_to(96_000, 10.0) == "a"
    one.answer("a", 96_000, 10.0, prompt_tokens=96_000, cached_tokens=0)
    assert other.usd("a", 96_000, 20.0) == pytest.approx(90_000 * 0.1 + 6_000)
