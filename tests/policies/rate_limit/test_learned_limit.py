"""Rate limit of an API, learned from its refusals: stories of minutes, in virtual time, with APIs of several kinds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Protocol

import pytest

from policies.rate_limit.endpoint_limits import FORGOTTEN, EndpointLimits
from policies.rate_limit.send_limits import PATIENCE, LearnedLimit, RateLimit
from policies.types import NEVER

REPLY = 0.02  # s until a refusal is read


class Account(Protocol):
    def ask(self, amount: float, now: float) -> float | None:
        """Seconds until it has room; None: it takes the request."""
        ...


@dataclass
class Bucket:
    """`rate` a second, and bursts of `size`."""

    rate: float
    size: float
    left: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.size

    def ask(self, amount: float, now: float) -> float | None:
        self.left, self.at = min(self.left + self.rate * (now - self.at), self.size), now
        if self.left < amount:
            return (amount - self.left) / self.rate
        self.left -= amount
        return None


@dataclass
class Window:
    """So many in any minute."""

    most: int
    taken: deque[float] = field(default_factory=deque)

    def ask(self, amount: float, now: float) -> float | None:
        while self.taken and self.taken[0] <= now - 60.0:
            self.taken.popleft()
        if len(self.taken) >= self.most:
            return self.taken[0] + 60.0 - now
        self.taken.append(now)
        return None


TOLD: dict[str, Callable[[float], float | None]] = {
    "in ms": lambda wait: wait,
    "in whole seconds": lambda wait: float(ceil(wait)),
    "not at all": lambda wait: None,
}


@dataclass
class Story:
    """Requests of `amount` tokens at a steady rate, of which those go elsewhere for which there is no room by what is
    known; the time that a refusal names is kept too. `told`: how it is named."""

    account: Account
    told: str = "in ms"
    of_tokens: bool = False
    amount: float = 1.0
    limits: EndpointLimits = field(default_factory=lambda: EndpointLimits(None, None, learns=True))
    now: float = 0.0
    until: float = NEVER
    taken: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    replies: list[tuple[float, float, float | None]] = field(default_factory=list)  # due, of a request sent at, wait

    def play(self, per_second: float, seconds: float) -> Story:
        end = self.now + seconds
        while self.now < end:
            self.now += 1 / per_second
            self.ask()
        return self

    def ask(self) -> bool:
        """False: it goes elsewhere."""
        while self.replies and self.replies[0][0] <= self.now:
            due, sent_at, wait = self.replies.pop(0)
            self.limits.on_refused(self.of_tokens, self.amount, sent_at, due, wait)
            self.until = max(self.until, due + (wait or 0.0))
        if self.until > self.now or self.limits.send_limits(NEVER).wait(self.amount, self.now) > 0:
            return False
        self.limits.on_sent(self.amount, self.now)
        wait = self.account.ask(self.amount if self.of_tokens else 1.0, self.now)
        (self.taken if wait is None else self.refused).append(self.now)
        if wait is not None:
            self.replies.append((self.now + REPLY, self.now, TOLD[self.told](wait)))
        return True

    def share(self, of: str, begin: float, end: float) -> float:
        """Per second."""
        times = self.refused if of == "refused" else self.taken
        return sum(begin <= at < end for at in times) / (end - begin)

    def most_refusals(self, begin: float) -> int:
        """In any minute from then on."""
        late = [at for at in self.refused if at >= begin]
        return max((sum(at <= other < at + 60.0 for other in late) for at in late), default=0)

    @property
    def learned(self) -> LearnedLimit:
        [found] = [each for each in self.limits.send_limits(NEVER).buckets if isinstance(each, LearnedLimit)]
        return found


ACCOUNTS: dict[str, tuple[Callable[[], Account], float]] = {
    "4 a second, bursts of 6": (lambda: Bucket(4.0, 6.0), 4.0),
    "3 a second, bursts of 3": (lambda: Bucket(3.0, 3.0), 3.0),
    "2 a second, no bursts": (lambda: Bucket(2.0, 1.0), 2.0),
    "20 a second, bursts of 40": (lambda: Bucket(20.0, 40.0), 20.0),
    "60 in any minute": (lambda: Window(60), 1.0),
}


@pytest.mark.parametrize("told", ["in ms", "in whole seconds", "not at all"])
@pytest.mark.parametrize("account", ACCOUNTS)
def test_more_than_an_api_takes_costs_two_refusals_a_minute_at_most(account: str, told: str) -> None:
    """Four times as much, for four minutes. What the API takes is sent there, but for what a late time costs."""
    make, rate = ACCOUNTS[account]
    story = Story(make(), told).play(4.3 * rate, 240.0)
    assert story.share("refused", 0.0, 60.0) <= 8 / 60
    assert story.most_refusals(60.0) <= 2
    least = 0.4 if (account, told) == ("60 in any minute", "not at all") else 0.7
    assert least * rate <= story.share("taken", 120.0, 240.0) <= 1.03 * rate


@pytest.mark.parametrize("account", ["4 a second, bursts of 6", "3 a second, bursts of 3"])
def test_the_first_minutes_cost_a_handful_of_refusals(account: str) -> None:
    make, rate = ACCOUNTS[account]
    assert len(Story(make()).play(4 * rate, 135.0).refused) <= 6


def test_a_limit_of_tokens_is_learned_in_tokens() -> None:
    """100,000 a minute for prompts of 5,000: 20 a minute. Half as long, twice as many go out."""
    story = Story(Bucket(100_000 / 60, 50_000.0), of_tokens=True, amount=5000.0).play(2.0, 400.0)
    assert story.most_refusals(60.0) <= 2
    assert story.share("taken", 100.0, 400.0) == pytest.approx(20 / 60, rel=0.15)
    story.amount = 2500.0
    story.play(4.0, 300.0)
    assert story.most_refusals(400.0) <= 2
    assert story.share("taken", 400.0, 700.0) == pytest.approx(40 / 60, rel=0.15)


def test_less_than_the_api_takes_costs_nothing() -> None:
    """Nothing is learned without a refusal, at any rate."""
    story = Story(Bucket(inf, inf)).play(200.0, 60.0)
    assert (story.refused, story.limits.send_limits(NEVER).buckets) == ([], ())


def test_a_burst_as_large_as_before_goes_out_at_once_and_a_larger_one_is_cut() -> None:
    """Bursts of 40 within 0.4 s, half a minute apart: 20 and what comes meanwhile are taken, and hardly one refused."""
    story = Story(Bucket(1.0, 20.0))
    for _ in range(10):
        story.play(100.0, 0.4)
        story.now += 30.0
    assert len(story.taken) >= 0.9 * 10 * 20
    assert story.most_refusals(60.0) <= 2


def test_a_raised_limit_is_followed_within_minutes() -> None:
    account = Bucket(4.0, 6.0)
    story = Story(account).play(40.0, 200.0)
    account.rate, before = 16.0, len(story.refused)
    story.play(40.0, 400.0)
    assert story.share("taken", 450.0, 600.0) > 0.65 * 16
    assert len(story.refused) - before <= 8


def test_a_lowered_limit_is_met_by_a_few_refusals() -> None:
    account = Bucket(16.0, 16.0)
    story = Story(account).play(40.0, 200.0)
    account.rate, account.size = 4.0, 4.0
    story.play(40.0, 200.0)
    assert story.share("refused", 200.0, 260.0) <= 6 / 60
    assert story.most_refusals(260.0) <= 2
    assert story.share("taken", 260.0, 400.0) > 0.9 * 4


def test_what_is_on_its_way_counts() -> None:
    """A limit of which one request is left lets one of two through that come at once."""
    story = Story(Bucket(4.0, 6.0)).play(16.0, 30.0)
    now = story.now + story.learned.wait(1.0, story.now) + 1e-6
    assert story.learned.wait(1.0, now) == 0.0
    assert story.learned.wait(1.0, now, requests_ahead=1) > 0.1
    assert story.learned.after(1.0, now).wait(1.0, now) > 0.1


def test_refusals_of_requests_sent_together_are_one_event() -> None:
    """Eight on their way as the first of four refusals comes: the rate is not halved four times."""
    limits = EndpointLimits(None, None, learns=True)
    for number in range(8):
        limits.on_sent(1.0, number / 100)
    for number in range(4, 8):
        limits.on_refused(False, 1.0, number / 100, 0.1 + number / 100, 0.25)
    [found] = limits.send_limits(NEVER).buckets
    assert isinstance(found, LearnedLimit)
    assert found.rate == 8.0
    assert found.size == pytest.approx(3.5, abs=1.0)


# --------------------------------------------------------------------------- what teaches, and for how long


def taught(counts_tokens: bool | None, tokens: float, others: float = 100.0) -> bool:
    """A refused prompt of so many tokens, beside ten of others, teaches a limit."""
    limits = EndpointLimits(None, None, learns=True)
    for number in range(10):
        limits.on_sent(others, number / 10)
    limits.on_sent(tokens, 1.0)
    limits.on_refused(counts_tokens, tokens, 1.0, 1.05, 1.0)
    return bool(limits.send_limits(NEVER).buckets)


def test_a_refusal_that_the_size_of_its_request_explains_teaches_nothing() -> None:
    """One huge prompt is above the limit alone. A refusal for the number of requests has nothing to do with sizes."""
    assert [taught(kind, 5000.0) for kind in (True, None, False)] == [False, False, True]
    assert [taught(kind, 150.0) for kind in (True, None, False)] == [True, True, True]


def test_a_refusal_beside_which_nothing_was_taken_teaches_nothing() -> None:
    """There is no rate: whatever it is about, it may be of its caller alone."""
    for kind in (True, None, False):
        limits = EndpointLimits(None, None, learns=True)
        limits.on_sent(100.0, 0.0)
        limits.on_sent(100.0, 100.0)
        limits.on_refused(kind, 100.0, 100.0, 100.1, 1.0)
        assert limits.send_limits(NEVER).buckets == ()


def test_an_engine_teaches_no_rate() -> None:
    limits = EndpointLimits(None, None, learns=False)
    limits.on_sent(1.0, 0.0)
    limits.on_refused(False, 1.0, 0.0, 0.1, 1.0)
    assert limits.send_limits(NEVER).buckets == ()


def test_what_the_provider_reports_takes_the_place_of_what_was_learned() -> None:
    story = Story(Bucket(4.0, 6.0)).play(16.0, 30.0)
    story.limits.on_reported([RateLimit.reported(True, 50.0, 100.0, 60.0, story.now)], story.now)
    assert story.learned.rate > 0  # of requests: the report is of tokens
    reported = RateLimit.reported(False, 50.0, 100.0, 60.0, story.now)
    story.limits.on_reported([reported], story.now)
    assert story.limits.send_limits(NEVER).buckets == (reported,)
    story.limits.on_refused(False, 1.0, story.now, story.now + 0.1, 1.0)
    assert story.limits.send_limits(NEVER).buckets == (reported,)


def test_a_limit_without_refusals_is_tried_more_and_more_and_forgotten_in_the_end() -> None:
    """After a minute one request more, after two 64 more; after ten minutes a request finds nothing known."""
    story = Story(Bucket(4.0, 6.0)).play(16.0, 120.0)
    learned, quiet = story.learned, story.learned.ready_at
    sent = [0.0, 0.0]
    for number, minutes in enumerate((1.0, 2.0)):
        left, now = learned.after(0.0, quiet + PATIENCE * minutes), quiet + PATIENCE * minutes
        while left.wait(1.0, now) == 0.0:
            left, sent[number] = left.after(1.0, now), sent[number] + 1
    assert [each - int(learned.size) for each in sent] == pytest.approx([1.0, 64.0], abs=1.0)
    assert not story.limits.is_over(quiet + FORGOTTEN - 1.0)
    assert story.limits.is_over(quiet + FORGOTTEN + 1.0)
    story.limits.on_sent(1.0, quiet + FORGOTTEN + 1.0)
    assert story.limits.send_limits(NEVER).buckets == ()


def test_another_account_has_no_learned_limit() -> None:
    story = Story(Bucket(4.0, 6.0)).play(16.0, 30.0)
    story.limits.reload(None, None, learns=True)
    assert story.learned.rate > 0
    story.limits.on_other_account()
    assert story.limits.send_limits(NEVER).buckets == ()


def test_a_learned_limit_outlives_a_restart() -> None:
    """The next process sends no more than the last one would have: the first minute costs it a refusal or two."""
    account = Bucket(4.0, 6.0)
    story = Story(account).play(16.0, 120.0)
    saved = story.limits.saved(NEVER, {}, story.now)
    assert saved is not None
    after = Story(account, now=story.now + 5.0)
    after.limits.restore(saved, 5.0, after.now)
    assert after.learned.rate == pytest.approx(story.learned.rate)
    after.play(16.0, 60.0)
    assert len(after.refused) <= 2
    assert len(after.taken) > 0.9 * 4 * 60
