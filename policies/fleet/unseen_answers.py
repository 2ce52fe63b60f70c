"""First tokens, tokens and ends of answers that nobody shows, from the histograms in an engine's reports.

Between two reports an engine tells how many answers got their first token, or ended, and how long these took together.
Rules:
- A single TTFT names its answer: the one whose sending, plus the TTFT, lies between the two reports. Where none does,
  the answer was of other traffic.
- Engines prefill first come, first served: of several first tokens, the earliest sent got theirs. Their times are those
  forecast, all later or all shorter until the sum is that of the engine; a sum that cannot be theirs is of others.
- Of ended answers, those are taken whose ages come nearest to the sum of the engine, where these agree, or where the
  engine holds fewer requests than ours.
- Every answer of an engine writes a token in each step: tokens follow from the mean gap between tokens.
- Requests that the engine does not hold in two reports are over (a caller who left shows in no histogram), and all are
  once it has restarted. A count that falls without a restart is of one server of several: it teaches nothing.
- An engine without a report for RECENT is not relied on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter

from policies.fleet.engine_load import EngineLoad, has_restarted
from policies.latency.tpot import MIN_TPOT
from policies.types import NEVER

IN_TRANSIT = 0.05  # s from our sending to the engine's clock, and from its report to ours
FEW = 8  # ends of one interval: each is looked for by itself
MAX_ITL = 60.0  # s: a longer gap is a wrong report
MOST = 1e9  # answers or gaps of one interval: more are a wrong report
RECENT = 10.0  # s since the latest report

_sent_at, _totals = attrgetter("sent_at"), attrgetter("ttft_count", "e2e_count")


class AnswerStep(Enum):
    FIRST_TOKEN = "first token"
    END = "end"


@dataclass(frozen=True, slots=True)
class InferredEvent:
    key: Hashable
    step: AnswerStep
    at: float


@dataclass(eq=False, slots=True)
class UnseenAnswer:
    """`ttft`: s, as forecast. `shows_end`: its end is reported by `on_ended`, and not to be inferred."""

    key: Hashable
    sent_at: float
    ttft: float
    shows_end: bool
    first_at: float = NEVER
    ended_at: float = NEVER
    tokens: float = 1.0

    def age(self, now: float) -> float:
        return now - self.sent_at

    @property
    def itl(self) -> float | None:
        """Mean gap between tokens, s."""
        seconds = self.ended_at - self.first_at
        return seconds / (self.tokens - 1) if self.tokens >= 2 and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Grown:
    """Growth of a histogram between two reports."""

    count: int
    seconds: float


NOTHING = Grown(0, 0.0)


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two reports."""

    since: float
    until: float

    def holds(self, at: float) -> bool:
        return self.since - IN_TRANSIT <= at <= self.until + IN_TRANSIT

    def clip(self, at: float) -> float:
        return min(max(at, self.since), self.until)

    @property
    def middle(self) -> float:
        return (self.since + self.until) / 2


class EngineAnswers:
    """The unseen answers of one engine."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, UnseenAnswer] = {}  # for the first token, in the order sent
        self.decoding: dict[Hashable, UnseenAnswer] = {}
        self.pace = 0.0  # s per token, by the last reports; 0: unknown
        self._ended: list[UnseenAnswer] = []  # since the last report, without a known first token
        self._load = EngineLoad()
        self._at = NEVER
        self._surplus = 0  # requests of ours beyond those that the engine held at the last report

    def reports_times(self, now: float) -> bool:
        return self._load.ttft_count is not None and now - self._at <= RECENT

    def is_forgotten(self, now: float) -> bool:
        """Neither reports nor serves any more."""
        return now - self._at > RECENT and not self.waiting and not self.decoding

    def tokens(self, answer: UnseenAnswer, now: float) -> int:
        """So far, with those since the last report at the last pace."""
        since = max(answer.first_at, self._at)
        return int(answer.tokens + (max(now - since, 0.0) / self.pace if self.pace > 0 else 0.0))

    def on_ended(self, key: Hashable, now: float) -> UnseenAnswer | None:
        """The answer, with its tokens; None: unknown, or without a known first token."""
        if (waiting := self.waiting.pop(key, None)) is not None and self.reports_times(now):
            self._ended.append(waiting)
        if (answer := self.decoding.pop(key, None)) is not None and answer.ended_at == NEVER:
            answer.tokens, answer.ended_at = float(self.tokens(answer, now)), now
        return answer

    def on_report(self, load: EngineLoad, now: float) -> Iterator[InferredEvent]:
        before, interval = self._load, Interval(self._at, now)
        self._load, self._at = load, now
        if interval.since == NEVER or has_restarted(before, load, _totals):
            over = [] if interval.since == NEVER else [*self._unseen()]
            self._ended, self._surplus = [], 0
        else:
            yield from self._begin(_grown(before.ttft_count, before.ttft_sum, load.ttft_count, load.ttft_sum), interval)
            self._count_tokens(_grown(before.itl_count, before.itl_sum, load.itl_count, load.itl_sum), interval)
            ended = _grown(before.e2e_count, before.e2e_sum, load.e2e_count, load.e2e_sum)
            over = self._over(load, ended, interval)
            for answer in over:
                self._stop(answer, interval.clip(answer.sent_at + ended.seconds) if ended.count == 1 else now)
        for answer in over:
            yield InferredEvent(answer.key, AnswerStep.END, now if answer.ended_at == NEVER else answer.ended_at)

    def _stop(self, answer: UnseenAnswer, at: float) -> None:
        """The answer has ended before the report by which its tokens are counted."""
        answer.ended_at = at
        if self.pace and answer.first_at > NEVER:
            answer.tokens = max(answer.tokens - (self._at - max(at, answer.first_at)) / self.pace, 1.0)

    def _begin(self, grown: Grown, interval: Interval) -> Iterator[InferredEvent]:
        answers = sorted((*self.waiting.values(), *self._ended), key=lambda answer: answer.sent_at)
        self._ended = []
        for answer, at in first_tokens(answers, grown, interval):
            if self.waiting.pop(answer.key, None) is not None:
                answer.first_at = at
                self.decoding[answer.key] = answer
                yield InferredEvent(answer.key, AnswerStep.FIRST_TOKEN, at)

    def _count_tokens(self, gaps: Grown, interval: Interval) -> None:
        if gaps.count > 0:
            self.pace = min(max(gaps.seconds / gaps.count, MIN_TPOT), MAX_ITL)
        if self.pace:
            for answer in self.decoding.values():
                answer.tokens += (interval.until - max(answer.first_at, interval.since)) / self.pace

    def _unseen(self) -> Iterator[UnseenAnswer]:
        """Answers whose ends are to be inferred."""
        return (one for held in (self.decoding, self.waiting) for one in held.values() if not one.shows_end)

    def _over(self, load: EngineLoad, ended: Grown, interval: Interval) -> list[UnseenAnswer]:
        arrived = interval.until - 2 * IN_TRANSIT
        unseen = [answer for answer in self._unseen() if answer.sent_at < arrived]
        surplus = self._not_held(load, arrived)
        found = of_ages(unseen, ended, interval)
        if not is_sum_of(found, ended, interval):
            found = found[:surplus]
        surplus = max(surplus - len(found), 0)
        lasting = min(surplus, self._surplus)
        self._surplus = surplus - lasting
        known = set(found)
        return [*found, *islice((answer for answer in unseen if answer not in known), lasting)]

    def _not_held(self, load: EngineLoad, arrived: float) -> int:
        """Number of own requests sent before `arrived`, less those that the engine reports; 0 without a report."""
        if load.running is None:
            return 0
        ours = sum(one.sent_at < arrived for held in (self.waiting, self.decoding) for one in held.values())
        return max(ours - load.running - (load.waiting or 0), 0)


def first_tokens(
    answers: Sequence[UnseenAnswer], grown: Grown, interval: Interval
) -> Iterator[tuple[UnseenAnswer, float]]:
    """Answers, in the order sent, that got their first token, and when."""
    if grown.count == 1:
        found = (answer for answer in answers if interval.holds(answer.sent_at + grown.seconds))
        if (answer := next(found, None)) is not None:
            yield answer, answer.sent_at + grown.seconds
        return
    begun = answers[: grown.count]
    least, most = (sum(answer.age(at) for answer in begun) for at in (interval.since, interval.until))
    slack = IN_TRANSIT * grown.count
    if not begun or len(begun) < grown.count or not least - slack <= grown.seconds <= most + slack:
        return
    forecast = sum(answer.ttft for answer in begun)
    shrunk = min(grown.seconds / forecast, 1.0) if forecast > 0 else 1.0
    moved = max(grown.seconds - forecast, 0.0) / grown.count
    for answer in begun:
        yield answer, max(interval.clip(answer.sent_at + shrunk * answer.ttft + moved), answer.sent_at)


def of_ages(answers: Sequence[UnseenAnswer], ended: Grown, interval: Interval) -> list[UnseenAnswer]:
    """As many answers as ended, whose ages come nearest to the sum."""
    if not ended.count:
        return []
    if ended.count > FEW:
        sent_at = interval.middle - ended.seconds / ended.count
        return sorted(answers, key=lambda answer: abs(answer.sent_at - sent_at))[: ended.count]
    left, seconds, found = sorted(answers, key=_sent_at), ended.seconds, list[UnseenAnswer]()
    while left and len(found) < ended.count:
        sent_at = interval.middle - seconds / (ended.count - len(found))
        later = bisect_left(left, sent_at, key=_sent_at)
        near = range(max(later - 1, 0), min(later + 1, len(left)))
        nearest = left.pop(min(near, key=lambda at: abs(left[at].sent_at - sent_at)))
        found.append(nearest)
        seconds -= nearest.age(interval.middle)
    return found


def is_sum_of(answers: Sequence[UnseenAnswer], ended: Grown, interval: Interval) -> bool:
    """The engine's sum is that of these answers, as far as the interval tells."""
    slack = (interval.until - interval.since) / 2 + IN_TRANSIT
    missing = ended.seconds - sum(answer.age(interval.middle) for answer in answers)
    return len(answers) == ended.count and abs(missing) <= slack * ended.count


def _grown(count: float | None, seconds: float | None, new_count: float | None, new_seconds: float | None) -> Grown:
    if count is None or seconds is None or new_count is None or new_seconds is None:
        return NOTHING
    grown = new_count - count
    return Grown(int(grown), new_seconds - seconds) if 0 < grown <= MOST and new_seconds >= seconds else NOTHING


class UnseenAnswers:
    """By endpoint. The owner reports sends, ends and scrapes, and passes on what is inferred."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineAnswers] = {}
        self._of: dict[Hashable, EngineAnswers] = {}

    def on_sent(self, key: Hashable, endpoint: str, now: float, *, ttft: float, shows_end: bool) -> bool:
        """False: the engine's reports have no times, and nothing will be inferred."""
        engine = self._engines.get(endpoint)
        if engine is None or not engine.reports_times(now):
            return False
        self._of[key] = engine
        engine.waiting[key] = UnseenAnswer(key, now, ttft, shows_end)
        return True

    def tokens(self, key: Hashable, now: float) -> int:
        """So far; 0: before the first one."""
        engine = self._of.get(key)
        answer = None if engine is None else engine.decoding.get(key)
        return 0 if engine is None or answer is None else engine.tokens(answer, now)

    def on_ended(self, key: Hashable, now: float) -> UnseenAnswer | None:
        engine = self._of.pop(key, None)
        return None if engine is None else engine.on_ended(key, now)

    def on_report(self, endpoint: str, load: EngineLoad, now: float) -> list[InferredEvent]:
        """In order of time for each answer; the owner answers an END by `on_ended`."""
        if endpoint not in self._engines:
            self._engines = {name: one for name, one in self._engines.items() if not one.is_forgotten(now)}
            self._engines[endpoint] = EngineAnswers()
        return [*self._engines[endpoint].on_report(load, now)]
