"""A provider's refusal of one caller's request leaves the traffic of the others as it was."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from policies.blame.blame import BLAME
from policies.fleet.fleet import AttemptReport, Fleet
from policies.queue.queue_scheduler import QueueScheduler
from policies.queue.queued_request import HoldRule, QueuedRequest
from policies.queue_parts import queue_parts
from policies.rate_limit.send_limits import RateLimit
from policies.routes.route import Route
from policies.types import (
    AttemptOutcome,
    Decision,
    Endpoint,
    Placement,
    Pool,
    PoolEstimate,
    PromptEstimate,
    RequestView,
)

API = Endpoint("api/1", "api")
PROMPT, LONG = PoolEstimate(1000), PoolEstimate(9000)
RATE = 0.1  # s between two requests of caller b
ANSWER = 0.3  # s


@dataclass
class Provider:
    """A gateway with one API, in virtual time."""

    ttft: str = "1s"
    fleet: Fleet = field(default_factory=lambda: Fleet([Pool("api", "g", (API,), local=False)]))
    keys: count[int] = field(default_factory=count)
    key: int = 0  # of the latest request

    def __post_init__(self) -> None:
        self.scheduler = QueueScheduler(queue_parts())
        budget = {"ttft": {"budget": self.ttft}} if self.ttft else {}
        self.route = Route.model_validate({"name": "chat", "tiers": ["api"], **budget})

    def decide(self, caller: str, now: float, prompt: PoolEstimate = PROMPT) -> Decision | None:
        """None: held."""
        self.key = key = next(self.keys)
        request, estimate = RequestView(now, stream=True, caller=caller), PromptEstimate({"api": prompt})
        queued = QueuedRequest(key, request, estimate, self.route, key, caller)
        decision = self.scheduler.pass_through(queued, self.fleet, now)
        self.scheduler.on_dispatched(key)
        if decision is not None and decision.chosen is not None:
            self.fleet.on_sent(key, decision.chosen, prompt, now, True, caller=caller)
        else:
            self.scheduler.leave(key, now)
        return decision

    def answered(self, caller: str, now: float) -> bool:
        decision = self.decide(caller, now)
        self.fleet.on_first_token(self.key, now + ANSWER)
        self.fleet.on_ended(self.key, AttemptOutcome.COMPLETED, now + ANSWER)
        return decision is not None and decision.outcome is Placement.PLACE

    def refused(
        self,
        kind: str,
        caller: str,
        now: float,
        retry_after: float | None = 30.0,
        prompt: PoolEstimate = PROMPT,
    ) -> Decision | None:
        """A request of the caller goes to the provider, and is refused so."""
        decision = self.decide(caller, now, prompt)
        report = AttemptReport(blame=BLAME[kind], retry_after=retry_after, cause=f"429 {kind}")
        self.fleet.on_ended(self.key, BLAME[kind].outcome, now + 0.05, report)
        return decision

    def share(self, caller: str, begin: float, seconds: float) -> float:
        """Of requests every RATE seconds, those answered."""
        sent = round(seconds / RATE)
        return sum(self.answered(caller, begin + number * RATE) for number in range(sent)) / sent


OWN = {"request_size": PROMPT, "overloaded": PROMPT, "token_rate": LONG, "rate_limited": LONG}
SHARED = ["request_rate", "token_rate", "rate_limited"]


@pytest.mark.parametrize("kind", OWN)
def test_one_refusal_of_one_caller_costs_the_others_nothing(kind: str) -> None:
    """10 s of traffic at 10 a second, one 429 to a second caller, and 130 s more: every request is answered. (Before,
    the API counted as full for 50 s, and as an API of 100 requests a minute for hours.) Of a rate that is not said to
    be one of requests, the length of the refused prompt may be the cause."""
    provider = Provider()
    assert provider.share("b", 1000.0, 10.0) == 1.0
    provider.refused(kind, "a", 1010.0, prompt=OWN[kind])
    assert provider.share("b", 1010.1, 130.0) == 1.0


@pytest.mark.parametrize("kind", OWN)
def test_a_request_refused_again_and_again_costs_the_others_nothing(kind: str) -> None:
    """An agent that repeats its request every half second."""
    provider = Provider()
    provider.share("b", 1000.0, 10.0)
    answered = []
    for step in range(40):
        provider.refused(kind, "a", 1010.0 + 0.5 * step, retry_after=None, prompt=OWN[kind])
        answered += [provider.answered("b", 1010.1 + 0.5 * step + part * RATE) for part in range(4)]
    assert all(answered)


@pytest.mark.parametrize("kind", SHARED)
def test_a_rate_that_one_caller_meets_paces_the_others_and_stops_nobody(kind: str) -> None:
    """It is the account's: nobody is asked to find out again. They are sent at the rate that was taken before, and do
    not wait for half a minute, which may be meant for the refused caller alone. (One held for a moment counts as
    not answered here.)"""
    provider = Provider()
    provider.share("b", 1000.0, 10.0)
    provider.refused(kind, "a", 1010.0)
    assert provider.decide("b", 1010.06) is None
    assert provider.share("b", 1010.3, 130.0) > 0.7


@pytest.mark.parametrize("kind", SHARED)
def test_what_a_second_caller_meets_as_well_is_waited_for_by_all(kind: str) -> None:
    provider = Provider()
    provider.share("b", 1000.0, 10.0)
    for caller, at in (("a", 1010.0), ("b", 1010.3)):
        provider.refused(kind, caller, at, retry_after=20.0)
    assert not provider.answered("c", 1025.0)
    assert provider.share("c", 1031.0, 60.0) > 0.5


def test_an_api_that_is_overloaded_teaches_no_rate() -> None:
    """After the stated second the API is asked at the same rate, by all."""
    provider = Provider()
    provider.share("b", 1000.0, 10.0)
    for caller in "ab":
        provider.refused("overloaded", caller, 1010.0, retry_after=1.0)
    assert provider.share("c", 1011.1, 40.0) == 1.0


def test_nothing_is_learned_of_an_api_that_reports_its_limits() -> None:
    """9,990 requests remain by its own word: the refusal was of something else."""
    provider = Provider()
    provider.share("b", 1000.0, 10.0)
    provider.decide("b", 1010.0)
    limit = RateLimit.reported(counts_tokens=False, limit=10_000, remaining=9_990, reset=0.06, now=1010.0)
    provider.fleet.on_rate_limits(provider.key, [limit])
    for caller in "ab":
        provider.refused("request_rate", caller, 1010.5, retry_after=0.1)
    assert provider.share("c", 1011.0, 40.0) == 1.0


def test_requests_on_their_way_take_from_what_remains() -> None:
    """One remains by the provider's word: of two that come at once the second is held, before the first is sent."""
    provider = Provider(ttft="9s")
    provider.decide("a", 1000.0)
    limit = RateLimit.reported(counts_tokens=False, limit=60, remaining=1, reset=59.0, now=1000.1)
    provider.fleet.on_rate_limits(provider.key, [limit])
    for key in ("one", "two"):
        request, estimate = RequestView(1000.1, stream=True, caller=key), PromptEstimate({"api": PROMPT})
        provider.scheduler.enter(QueuedRequest(key, request, estimate, provider.route, 0, key))
    assert [key for key, _ in provider.scheduler.release(provider.fleet, 1000.1)] == ["one"]
    assert [held.hold.rule for held in provider.scheduler.holds() if held.hold] == [HoldRule.RATE_LIMIT]


def test_a_reload_keeps_a_learned_limit_and_another_account_has_none() -> None:
    """Nothing in a configuration raises a provider's limit but another key, and found addresses are reloads too."""
    provider = Provider()
    provider.share("b", 1000.0, 10.0)
    provider.refused("request_rate", "a", 1010.0, retry_after=1.0)
    provider.fleet.reload([Pool("api", "g", (API,), local=False)])
    assert provider.decide("c", 1010.06) is None
    provider.fleet.reload([Pool("api", "g", (replace(API, account="another"),), local=False)])
    assert provider.answered("c", 1010.06)


def test_requests_on_their_way_take_from_what_was_learned() -> None:
    """The limit has room for one: of two that come at once the second is held, before the first is sent."""
    provider = Provider(ttft="9s")
    provider.share("b", 1000.0, 10.0)
    provider.refused("request_rate", "a", 1010.0, retry_after=0.1)
    for key in ("one", "two"):
        request, estimate = RequestView(1010.2, stream=True, caller=key), PromptEstimate({"api": PROMPT})
        provider.scheduler.enter(QueuedRequest(key, request, estimate, provider.route, 0, key))
    assert [key for key, _ in provider.scheduler.release(provider.fleet, 1010.2)] == ["one"]
    assert [held.hold.rule for held in provider.scheduler.holds() if held.hold] == [HoldRule.RATE_LIMIT]


def test_a_caller_whose_key_of_ours_was_refused_still_reaches_the_last_resort() -> None:
    """Where no other endpoint is left, what one request met with is no reason to refuse the next."""
    provider = Provider()
    provider.refused("auth", "a", 1000.1)
    decision = provider.decide("a", 1000.5)
    assert decision is not None
    assert decision.outcome is Placement.PLACE
    assert not provider.fleet.is_closed(decision.ranked[0], 1000.5, "a")


def test_a_caller_told_to_come_later_hears_the_providers_time() -> None:
    """As long as the provider has named no other caller, others are served."""
    provider = Provider()
    provider.refused("request_rate", "a", 1000.0)
    decision = provider.decide("a", 1000.5)
    assert decision is not None
    assert decision.outcome is Placement.RATE_LIMITED
    assert provider.answered("b", 1000.5)


def test_without_a_deadline_the_refused_caller_waits_as_the_provider_asks() -> None:
    provider = Provider(ttft="")
    provider.refused("request_rate", "a", 1000.0)
    assert provider.decide("a", 1001.0) is None
    assert provider.answered("b", 1001.0)
    assert provider.answered("a", 1030.1)


def test_a_limit_that_counts_for_all_is_answered_with_its_retry_time() -> None:
    """It is known, and longer than the deadline: asking again would only be refused again."""
    provider = Provider()
    for caller in "ab":
        provider.refused("token_rate", caller, 1000.0)
    decision = provider.decide("c", 1001.0)
    assert decision is not None
    assert (decision.outcome, round(decision.retry_after)) == (Placement.RATE_LIMITED, 29)
