"""Lengths of answers, and seconds of reasoning before them, learned from completed answers.

Lengths are distributions by class: route, then effort of reasoning, tenant, and head of the prompt. The narrowest class
with KNOWN_ANSWERS answers tells; a new class starts from the distribution of the wider one. Each tenant has a class of
its own before any other tenant's can push it out. Seconds of reasoning are told apart from the first token (the two
clocks of a model): by route and pool, then effort.

`LongestAnswers` are the longest usual ones of each key by route, from the latest: what a request may use is claimed by
these. Rules:
- A key vouches for itself alone: no other key's answers shorten its claims.
- Fewer than KNOWN answers tell nothing: the request may take all that it is allowed to.
- Memory is bounded: SAMPLES of MOST keys and routes; the one longest without an answer is dropped.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Mapping
from math import ceil, exp

from policies.latency.learned_state import LearnedLengths, kept_share
from policies.latency.online_learning import ErrorQuantiles
from policies.routes.route import Route
from policies.types import FOREVER, MEDIAN, QUANTILES, Forecast, Quantiles

PRIOR_LENGTH = 256  # tokens of an answer, before any
PRIOR_ANSWERS = 8  # answers which the prior counts for
KNOWN_ANSWERS = 8  # answers from which a distribution is more than a guess
LENGTH_WEIGHT = 1 / 64  # of the latest answer in the mean
MAX_LENGTH = 131_072  # tokens: a longer answer is a wrong report
STRETCH_STEP, MAX_STRETCH = 0.05, 4.0  # by which an answer moves the stretch; most, either way
NARROWER = 64  # classes within a class; the one longest without an answer is dropped
NO_REASONING = Forecast(0.0)
AGELESS = 0.0  # time of every length: answers do not become shorter by night
REASONING_SAMPLES = 64  # latest answers of a class
REASONING_AGE = 600.0  # s; older answers are forgotten, so a pool left for its reasoning is tried again


class ReasoningTimes:
    """Seconds from the first token to the first token of the answer, of the latest answers of a class."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=REASONING_SAMPLES)  # (time, s)

    def observe(self, seconds: float, now: float) -> None:
        self._samples.append((now, seconds))

    def recent(self, now: float) -> list[float]:
        """Ascending."""
        return sorted(seconds for at, seconds in self._samples if now - at < REASONING_AGE)


def reasoning_forecast(own: list[float], wider: list[float]) -> Forecast:
    """Seconds of reasoning of a class, by recent times, ascending. A class with less than KNOWN_ANSWERS is filled up
    with times of the wider one. Not known: none, so that a pool without times is tried."""
    if lacking := len(wider) and max(KNOWN_ANSWERS - len(own), 0):
        own = sorted([*own, *(wider[int((i + 0.5) * len(wider) / lacking)] for i in range(lacking))])
    last = len(own) - 1
    if last < 0:
        return NO_REASONING
    return Forecast(1.0, tuple([own[min(ceil(q * (last + 2)) - 1, last)] for q in QUANTILES]))


class OutputLengths:
    """Answer lengths of a class, learned from completed answers, and of the narrower classes within."""

    def __init__(self, wider: OutputLengths | None = None) -> None:
        self._mean = float(PRIOR_LENGTH)
        self._answers = PRIOR_ANSWERS
        self._spread = ErrorQuantiles()  # of tokens / PRIOR_LENGTH
        self._stretch = 1.0  # of the deviations from the median, in logarithms
        self._narrower: dict[Hashable, OutputLengths] = {}
        if wider is not None:
            self._spread.widen_from(wider._spread, AGELESS)
            self._stretch = wider._stretch

    def observe(self, tokens: int, *narrower: Hashable, under_p90: bool | None = None) -> None:
        """`narrower`: names of the classes within, from wide to narrow; `under_p90`: the whole answer took less than
        the p90 that was forecast; None: it was not forecast.

        Adaptive conformal inference (Gibbs and Candes 2021): the spread of the class grows and shrinks until nine of
        ten answers are under their p90, whatever else is wrong.
        """
        tokens = min(tokens, MAX_LENGTH)
        if narrower:
            child = self._narrower.pop(narrower[0], None) or OutputLengths(self)
            self._narrower[narrower[0]] = child
            child.observe(tokens, *narrower[1:], under_p90=under_p90)
            if len(self._narrower) > NARROWER:
                del self._narrower[next(iter(self._narrower))]
        self._answers += 1
        self._mean += (tokens - self._mean) * max(1 / self._answers, LENGTH_WEIGHT)
        self._spread.observe(tokens / PRIOR_LENGTH, AGELESS)
        if under_p90 is not None:
            stretch = self._stretch * exp(STRETCH_STEP * (0.9 - under_p90))
            self._stretch = min(max(stretch, 1 / MAX_STRETCH), MAX_STRETCH)

    @property
    def is_known(self) -> bool:
        return self._answers >= PRIOR_ANSWERS + KNOWN_ANSWERS

    def learned(self) -> LearnedLengths:
        return LearnedLengths(self._mean, self._answers, self._spread.learned(AGELESS))

    def restore(self, saved: LearnedLengths, age: float) -> None:
        self._mean = min(saved.mean, MAX_LENGTH)
        self._answers = max(int(saved.answers * kept_share(age)), PRIOR_ANSWERS)
        if saved.spread is not None:
            self._spread.restore(saved.spread, 0.0, AGELESS)

    def expected(self, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer which may have at most `max_tokens`."""
        expected = round(self._mean)
        return max(1, expected if max_tokens is None else min(expected, max_tokens))

    def quantiles(self, max_tokens: int | None, *narrower: Hashable) -> Quantiles:
        """Tokens of an answer of the narrowest known class; empty: too few answers are known."""
        found = self
        for name in narrower:
            if (child := found._narrower.get(name)) is None or not child.is_known:
                break
            found = child
        if not found.is_known:
            return ()
        most = FOREVER if max_tokens is None else max(max_tokens, 1)
        ratios, stretch = found._spread.quantiles(AGELESS), found._stretch
        middle = ratios[MEDIAN]
        return tuple([min(PRIOR_LENGTH * middle * (ratio / middle) ** stretch, most) for ratio in ratios])


class AnswerLengths:
    """Learned lengths of answers: output tokens by route and class, and seconds of reasoning by route and pool."""

    def __init__(self) -> None:
        self._outputs: dict[str, OutputLengths] = {}  # by route
        self._reasoning = defaultdict[tuple[str, ...], ReasoningTimes](ReasoningTimes)  # by route, pool (and effort)

    def expected_output(self, route: str, max_tokens: int | None = None) -> int:
        """Expected tokens of an answer which may have at most `max_tokens`."""
        return (self._outputs.get(route) or OutputLengths()).expected(max_tokens)

    def quantiles(self, route: str, max_tokens: int | None, *narrower: Hashable) -> Quantiles:
        """Tokens of such an answer, at QUANTILES; empty: too few answers of the route are known."""
        found = self._outputs.get(route)
        return () if found is None else found.quantiles(max_tokens, *narrower)

    def observe_output(self, route: str, tokens: int, *narrower: Hashable, under_p90: bool | None = None) -> None:
        """An answer of this route completed with `tokens` tokens. `narrower`: classes within the route; `under_p90`: it
        took less than the p90 that was forecast."""
        if route not in self._outputs:
            self._outputs[route] = OutputLengths()
        self._outputs[route].observe(tokens, *narrower, under_p90=under_p90)

    def expected_reasoning(self, route: Route, effort: str, now: float) -> Mapping[str, Forecast]:
        """Seconds of reasoning before the answer, by pool, of a class of effort."""
        return {pool: self._expected_reasoning((route.name, pool), effort, now) for pool in route.pools}

    def _expected_reasoning(self, model: tuple[str, str], effort: str, now: float) -> Forecast:
        if (wider := self._reasoning.get(model)) is None:
            return NO_REASONING
        own = self._reasoning.get((*model, effort))
        return reasoning_forecast([] if own is None else own.recent(now), wider.recent(now))

    def observe_reasoning(self, route: str, pool: str, effort: str, seconds: float, now: float) -> None:
        """The answer began `seconds` after the first token. `effort`: class of the effort asked for."""
        for of_class in ((route, pool), (route, pool, effort)):
            self._reasoning[of_class].observe(seconds, now)

    def learned(self) -> Mapping[str, LearnedLengths]:
        """Output tokens by route: the state that survives a restart."""
        return {route: lengths.learned() for route, lengths in self._outputs.items()}

    def restore(self, saved: Mapping[str, LearnedLengths], age: float) -> None:
        """Brings back what was saved `age` seconds ago, of routes without an answer since the start."""
        for route, lengths in saved.items():
            if route not in self._outputs:
                self._outputs[route] = OutputLengths()
                self._outputs[route].restore(lengths, age)


KNOWN = 8  # answers
SAMPLES = 64  # latest answers of a key and a route
MOST = 4096  # keys and routes
SHARE = 0.95  # of the answers are not longer


class LongestAnswers:
    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[int]] = OrderedDict()

    def observe(self, account: str, route: str, tokens: int) -> None:
        """An answer of this key has ended with so many tokens."""
        samples = self._samples.setdefault((account, route), deque(maxlen=SAMPLES))
        samples.append(tokens)
        self._samples.move_to_end((account, route))
        if len(self._samples) > MOST:
            self._samples.popitem(last=False)

    def tokens(self, account: str, route: str) -> int | None:
        """Tokens that SHARE of the key's answers do not exceed; None: too few answers are known."""
        samples = self._samples.get((account, route), ())
        if len(samples) < KNOWN:
            return None
        return sorted(samples)[min(ceil(SHARE * (len(samples) + 1)), len(samples)) - 1]
