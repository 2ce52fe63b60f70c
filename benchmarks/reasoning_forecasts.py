"""Forecasts by effort of reasoning, and the first hang of an unknown API: synthetic, in virtual time.

`python -m benchmarks.reasoning_forecasts` prints, for a model whose reasoning takes 0.7 to 20 s in the median by the
effort asked for: the share of requests under their forecast p90 and the mean error of the p50, with the effort and
without it. And for a cold API that hangs, by budget: the share of requests that the next API, of 0.5 s, still answers
in time.
"""

from __future__ import annotations

from collections import defaultdict
from math import exp, log
from random import Random
from statistics import NormalDist, mean

from policies.attempts.patience import abandon_at, leave_by, patience_until
from policies.latency.answer_lengths import AnswerLengths
from policies.latency.api_predictor import ApiPredictor
from policies.latency.online_learning import PRIOR
from policies.latency.ttft_predictor import PrefillWork, TtftSample
from policies.routes.route import Route
from policies.types import QUANTILES, Forecast, Load

REASONING = {"none": 0.0, "low": 1.5, "medium": 6.0, "high": 20.0}  # s, median
SPREAD, TTFT, TTFT_SPREAD = 0.6, 0.7, 0.35  # in logarithms; s
REQUESTS, SEEDS, EVERY = 2400, 5, 3.0  # s between two
TOKENS = 500
FIRST = Forecast(TTFT, tuple(exp(TTFT_SPREAD * NormalDist().inv_cdf(q)) for q in QUANTILES))
COLD = tuple(map(exp, PRIOR))
ROUTE = Route(name="r", tiers=("p",), ttft={"budget": "30s", "of": "answer"})

Scores = dict[tuple[str, bool], list[tuple[bool, float]]]  # under p90, error, by effort and whether it is a feature


def main() -> None:
    for title, score in (("hidden: first token", _hidden), ("shown: first token of the answer", _shown)):
        print(f"{title:34} p90 covers, error of p50: with effort    without")
        scores: Scores = defaultdict(list)
        for seed in range(SEEDS):
            score(Random(seed), scores)
        for effort in REASONING:
            found = [scores[effort, by_effort] for by_effort in (True, False)]
            cells = [f"{mean(s[0] for s in each):6.1%} {exp(mean(s[1] for s in each)) - 1:6.0%}" for each in found]
            print(f"  {effort:60} {cells[0]:14} {cells[1]}")
    print("cold API that hangs: left after, s; in time, by budget (a rule for cold APIs, without)")
    for p50 in (0.4, 0.8):
        for budget in (1.0, 1.5, 2.0, 3.0):
            print(
                f"  prior {p50} s, budget {budget} s: " + "; ".join(_hang(p50, budget, rule) for rule in (True, False))
            )


def _requests(random: Random, scores: Scores) -> list[tuple[float, str, float, float]]:
    efforts = list(REASONING)
    drawn = [(EVERY * i, random.choice(efforts), random.gauss(0, 1), random.gauss(0, 1)) for i in range(REQUESTS)]
    return [
        (now, effort, TTFT * exp(TTFT_SPREAD * first), REASONING[effort] * exp(SPREAD * then))
        for now, effort, first, then in drawn
    ]


def _hidden(random: Random, scores: Scores) -> None:
    work, predictors = PrefillWork(TOKENS, TOKENS, 0.0, 0.0, 0.0), {True: ApiPredictor(), False: ApiPredictor()}
    for now, effort, first, then in _requests(random, scores):
        for by_effort, predictor in predictors.items():
            told = effort if by_effort else ""
            forecast = predictor.of(told).predict(Load(), TOKENS, 0, now)
            _score(scores, effort, by_effort, forecast, first + then)
            sample = TtftSample(work, forecast.point_estimate, first + then)
            predictor.learner_of(told, now).observe(sample, now)


def _shown(random: Random, scores: Scores) -> None:
    learned = {True: AnswerLengths(), False: AnswerLengths()}
    for now, effort, first, then in _requests(random, scores):
        for by_effort, lengths in learned.items():
            told = effort if by_effort else ""
            expected = lengths.expected_reasoning(ROUTE, told, now)
            _score(scores, effort, by_effort, FIRST.followed_by(expected["p"]), first + then)
            lengths.observe_reasoning("r", "p", told, then, now)


def _score(scores: Scores, effort: str, by_effort: bool, forecast: Forecast, actual: float) -> None:
    scores[effort, by_effort].append((actual <= forecast.p90, abs(log(actual / forecast.p50))))


def _hang(p50: float, budget: float, rule: bool) -> str:
    """Without the rule: as of an engine, whose forecast has a prefill."""
    own = Forecast(p50, COLD, prefill=0.0 if rule else TTFT)
    upcoming, random = Forecast(0.4, COLD), Random(1)
    asked_at = min(patience_until(own, upcoming.p50, 0.0, budget), leave_by(own, upcoming, 0.0, budget))
    left_at = abandon_at(own, upcoming, 0.0, asked_at, budget)
    made = mean(left_at + 0.5 * random.lognormvariate(0.0, TTFT_SPREAD) <= budget for _ in range(2000))
    return f"{left_at:.2f} s {made:6.1%}"


if __name__ == "__main__":
    main()
