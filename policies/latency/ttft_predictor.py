"""TTFT of an endpoint, as a distribution, learned online.

An engine is predicted from physics:
`TTFT = base + prompt tokens * length + (uncached + queued tokens) * token + pairs * attention + running * step`,
with attention pairs of the uncached and queued tokens. The prompt's length counts even where cached: 10k cached tokens
cost a vLLM on a CPU 0.1 s. Of an API see `api_predictor`.

Rules:
- The terms start as those of a small model on a current GPU and adapt within a few samples to engines a hundred times
  slower. A slow first sample scales all terms and their variances. Attention varies most.
- The spread is that of recent errors (`ErrorQuantiles`), never of an assumed shape.
- The network is no part of the model: its time is measured, added to the forecast, and taken off the sample. The errors
  are those of the sum, as the spread is one of the whole TTFT.
- An outlier is clipped; several in a row start a new regime, which drops old confidence and old errors.
- The queue ahead is exact where this process sent it. Prefills that a peer or a scrape reported may have ended since:
  until the predictor is trained, a first token that came early shows that, not a faster engine.
- An attempt cancelled without a token after t seconds took longer: a sample, if t exceeds the prediction.
- An endpoint with few samples takes over the model of the most similar sibling, scaled by the relative speed.
- A slow engine that is not asked teaches nothing. Without samples for FADE_AFTER, while siblings have some, the model
  fades to that of a sibling; the next first token tells which of both is right. Until then the engine is forecast as it
  was learned: else a crowd would follow the first request to an engine that is still slow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from itertools import islice
from math import exp, log
from statistics import median
from typing import Self

from policies.latency.learned_state import (
    OTHER_COMMON,
    OTHER_OWN,
    LearnedEngine,
    LearnedRegression,
    kept_share,
)
from policies.latency.online_learning import ChangeDetector, ErrorQuantiles, Regression
from policies.latency.token_counts import REMAINDER
from policies.types import NEVER, TRAINED_SAMPLES, Forecast, Load, Quantiles

# The reference engine: the regression learns multiples of these.
BASE = 0.015  # s: HTTP, tokenizing, a step
LENGTH = 2e-6  # s per token of the prompt: tokenizing, hashing, reading the cache
TOKEN = 1 / 20_000  # s per uncached token
PAIR = 2e-9  # s per attention pair
RUNNING = 0.0005  # s per decoding request
CONTEXT_WEIGHT = 5e-4  # decoding requests: a token of their context slows a step by as much
MIN_TOKEN = 1e-6  # s: no engine prefills more than a million tokens a second
REFUTED = 16  # first tokens after which a silence no longer decides a forecast
MIN_TTFT = 1e-4  # s
ENGINE_VARIANCES = (4.0, 4.0, 4.0, 16.0, 4.0)  # of each term beside the common factor, (times the reference) squared

QUEUED_SPREAD = 1.5  # of a queued prompt, in logarithms, until its own errors tell
MATURE_SAMPLES = 32  # from which an endpoint's own samples outweigh its siblings'
SPEED_SHRINK = 1.0  # samples, as weight of the prior "as fast as the sibling"
FADE_AFTER = 20.0  # s without a first token
FADE_S = 20.0  # time constant: ten times slower is 1.5 times slower a minute after FADE_AFTER
SLOWER = 1.5  # times a sibling's time; what is less slow is asked under load


@dataclass(slots=True)
class PrefillWork:
    """Prefill work of a prompt, and of the queue ahead."""

    prompt_tokens: int
    uncached: int  # of these
    queued_tokens: float  # uncached, sent before and without a first token
    pairs: float  # attention pairs of uncached and queued tokens
    running: float  # requests which decode meanwhile

    def with_more(self, tokens: int) -> PrefillWork:
        """The same with so many uncached tokens more."""
        pairs = self.pairs + tokens * (self.prompt_tokens + 0.5 * tokens)
        return replace(self, prompt_tokens=self.prompt_tokens + tokens, uncached=self.uncached + tokens, pairs=pairs)


@dataclass(slots=True)
class TtftSample:
    """A first token. `predicted` at sending; `work` as known now."""

    work: PrefillWork
    predicted: float  # s
    ttft: float  # s
    reported_queue: float = 0.0  # queued tokens known by reports alone, of peers or of a scrape
    network: float = 0.0  # s of the forecast that are no part of `predicted` and `ttft`


TYPICAL = PrefillWork(1000, 1000, 0.0, 500_000.0, 0.0)  # a prompt by which the speeds of endpoints are compared


class TtftPredictor(ABC):
    """Learns the TTFT of an endpoint. Defaults are those of an API: no queue is modelled."""

    max_prefill_rate: float  # tokens/s, without context
    drain_rate: float  # tokens/s, of the present queue

    def __init__(self) -> None:
        self.samples = 0
        self.learned_at = NEVER
        self.context_per_token = 0.0  # attention pairs per token of the present queue
        self._changes = ChangeDetector()
        self._idle_errors = self._queued_errors = ErrorQuantiles()
        self._widens_at: float | None = None  # latest idle error that the spread of queued prompts does not follow yet
        self._regime_since = NEVER  # start of the present regime

    @abstractmethod
    def point_estimate(self, work: PrefillWork, now: float) -> float:
        """Predicted seconds, before the spread."""

    @abstractmethod
    def predict(
        self, load: Load, tokens: int, hit: int, now: float, wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        """TTFT and TPOT of a prompt sent now with `hit` of `tokens` cached, at an endpoint with the latest `load`.
        `wait`: s on the network, and until the engine has the variant and all that is cached; `load_s`: s of
        engine time for the load of the variant."""

    @abstractmethod
    def warm_start_from(self, sibling: Self, now: float) -> None:
        """Start from the state learned by another endpoint of the pool."""

    def of(self, job_class: str) -> Self:
        """The predictor for a class of reasoning effort. Engines stream their reasoning: a single predictor serves
        all."""
        return self

    def learner_of(self, job_class: str, now: float) -> Self:
        """The predictor that learns from such a request."""
        return self

    def typical_ttft(self, now: float) -> float:
        """Of a TYPICAL prompt at an idle endpoint, s."""
        return self.point_estimate(TYPICAL, now)

    @property
    def is_fading(self) -> bool:
        """Between the model learned and a sibling's."""
        return False

    def fade_to(self, sibling: Self, now: float) -> None:  # noqa: B027
        """Forgets a slowness of long ago; samples of an API fade by themselves. Called from FADE_AFTER seconds without
        samples on."""

    def on_sent(self) -> None:  # noqa: B027
        """A request is on its way, and will tell how fast the endpoint is."""

    def prefill_rate(self, context_per_token: float) -> float:
        """Tokens/s at which the queue drains."""
        return self.max_prefill_rate

    def prefill_seconds(self, tokens: float, pairs: float) -> float:
        """Engine time of a prefill, s; 0 for an API."""
        return 0.0

    def distance(self, sibling: Self, now: float) -> float:
        """Absolute log ratio of both speeds, judged by own samples."""
        return 0.0

    def observe(self, sample: TtftSample, now: float) -> None:
        self.samples, self.learned_at = self.samples + 1, now
        ttft = max(sample.ttft, MIN_TTFT)
        predicted = self.point_estimate(sample.work, now)
        factor = self._changes.observe(log(ttft / predicted))
        if factor != 1.0:
            self._start_regime(factor)
            self._clear_errors(now)
            return
        # A prompt sent before the present regime is compared with what is predicted now.
        reference = predicted if now - sample.ttft < self._regime_since else sample.predicted
        idle, queued = self._idle_errors, self._queued_errors
        was_idle = not (sample.work.queued_tokens or sample.reported_queue)
        (idle if was_idle else queued).observe((sample.ttft + sample.network) / (reference + sample.network), now)
        if was_idle and queued is not idle:
            self._widens_at = now
        self._learn(sample, ttft, now)

    def observe_at_least(self, sample: TtftSample, now: float) -> None:
        """Learns a right-censored sample: no token came within its `ttft`.

        Counts as the median of the predicted distribution beyond `ttft` (as Kaplan and Meier redistribute censored
        samples). Counted as `ttft` itself, the quantile at which attempts are cancelled would hold itself down.
        """
        if sample.ttft <= self.point_estimate(sample.work, now):
            return
        forecast = Forecast(sample.predicted + sample.network, self.quantiles(sample.work.queued_tokens, now))
        beyond = forecast.quantile((1 + forecast.probability(sample.ttft + sample.network)) / 2) - sample.network
        self.observe(replace(sample, ttft=max(beyond, sample.ttft)), now)

    def observe_silent_trial(self, within: float, now: float) -> None:  # noqa: B027
        """An API that was tried on a guess stayed silent until too little was left of `within` seconds."""

    def quantiles(self, queued_tokens: float, now: float) -> Quantiles:
        """Quantiles of actual / predicted TTFT."""
        return self._errors_of(queued_tokens).quantiles(now)

    def _errors_of(self, queued_tokens: float) -> ErrorQuantiles:
        if not queued_tokens:
            return self._idle_errors
        if self._widens_at is not None:
            self._widen()
        return self._queued_errors

    def _widen(self) -> None:
        """Widen the error spread of queued prompts from the spread of idle prompts, until own errors are observed."""
        if (at := self._widens_at) is not None:
            self._widens_at = None
            self._queued_errors.widen_from(self._idle_errors, at, QUEUED_SPREAD)

    def _clear_errors(self, now: float) -> None:
        self._widen()
        self._idle_errors.clear()
        self._queued_errors.clear()
        self._regime_since = now

    @abstractmethod
    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None: ...

    @abstractmethod
    def _start_regime(self, factor: float) -> None:
        """Everything takes `factor` times as long since a moment ago."""


class EnginePredictor(TtftPredictor):
    """An engine whose queue and prefix cache are modelled."""

    def __init__(self) -> None:
        super().__init__()
        self._regression = Regression(ENGINE_VARIANCES)
        self._own_samples: deque[TtftSample] = deque()  # while a sibling may still teach
        self._queued_errors = ErrorQuantiles()
        self._remembered: list[float] = []  # coefficients learned, while the model fades
        self._faded: list[float] = []  # coefficients between these and a sibling's, while a request is to tell
        self._silent_s, self._since_silence = 0.0, 0  # of the latest silence learned, and first tokens since
        self._update_costs()
        self.drain_rate = self.max_prefill_rate

    def point_estimate(self, work: PrefillWork, now: float) -> float:
        base, length, token, pair, running = self._costs
        tokens = work.uncached + work.queued_tokens
        return base + length * work.prompt_tokens + token * tokens + pair * work.pairs + running * work.running

    def predict(
        self, load: Load, tokens: int, hit: int, now: float, wait: float = 0.0, load_s: float = 0.0
    ) -> Forecast:
        base, length, token, pair, running = self._costs
        uncached, errors, queued = tokens - hit, self._idle_errors, load.queued_tokens
        pairs = uncached * (hit + 0.5 * uncached)
        prefill_s = token * uncached + pair * pairs + load_s
        if queued:
            if self._widens_at is not None:
                self._widen()
            left, least, errors = queued - self.drain_rate * (now - load.at), queued * REMAINDER, self._queued_errors
            queued = left if left > least else least
            pairs += queued * self.context_per_token
        decoding = load.running + load.context * CONTEXT_WEIGHT
        estimate = base + length * tokens + token * (uncached + queued) + pair * pairs + running * decoding
        ttft = load.wait + wait + estimate
        return Forecast(ttft, errors.quantiles(now), load.tpot, self.samples, prefill_s, self._silent_s)

    def prefill_rate(self, context_per_token: float) -> float:
        _, _, token, pair, _ = self._costs
        return 1 / (max(token, MIN_TOKEN) + pair * context_per_token)

    def prefill_seconds(self, tokens: float, pairs: float) -> float:
        _, _, token, pair, _ = self._costs
        return token * tokens + pair * pairs

    def warm_start_from(self, sibling: Self, now: float) -> None:
        own = tuple(islice(self._own_samples, 1, None))  # engines begin cold: the first sample does not show the speed
        speed = sibling._relative_time(own, now)
        self._regression.warm_start_from(sibling._regression)
        self._silent_s = max(self._silent_s, sibling._silent_s)
        self._use([speed * value for value in self._regression.coefficients])
        sibling._widen()
        self._widens_at = None
        self._idle_errors.widen_from(sibling._idle_errors, now)
        self._queued_errors.widen_from(sibling._queued_errors, now)
        self._clear_errors(now)
        for sample in own:
            error = (sample.ttft + sample.network) / (self.point_estimate(sample.work, now) + sample.network)
            self._errors_of(sample.work.queued_tokens).observe(error, now)
            self._fit(sample.work, sample.ttft)

    def distance(self, sibling: Self, now: float) -> float:
        return abs(log(sibling._relative_time(self._own_samples, now)))

    def _relative_time(self, samples: Collection[TtftSample], now: float) -> float:
        """Actual time of another endpoint's samples over the time predicted here; 1 without samples."""
        if not samples:
            return 1.0
        middle = median(log(max(one.ttft, MIN_TTFT) / self.point_estimate(one.work, now)) for one in samples)
        return exp(middle * len(samples) / (len(samples) + SPEED_SHRINK))

    def observe(self, sample: TtftSample, now: float) -> None:
        if self.samples < TRAINED_SAMPLES and min(sample.reported_queue, sample.work.queued_tokens) > 0:
            sample = replace(sample, work=self._without_ended(sample, now))
        if self._remembered:
            sample = replace(sample, predicted=self._recall(sample, now))
        if self._silent_s:
            self._since_silence += 1
            self._silent_s = self._silent_s if self._since_silence < REFUTED else 0.0
        super().observe(sample, now)

    def observe_at_least(self, sample: TtftSample, now: float) -> None:
        if self._faded:
            self._use(self._faded)
            self._faded = []
        super().observe_at_least(sample, now)
        self._silent_s, self._since_silence = sample.ttft, 0

    @property
    def is_fading(self) -> bool:
        return bool(self._remembered)

    def fade_to(self, sibling: Self, now: float) -> None:
        """Mixes the coefficients with those of a faster sibling: the expectation of a mean-reverting process (Uhlenbeck
        and Ornstein, 1930), of which exp(-t / time constant) of a difference is left after t seconds."""
        if not self._remembered:
            if not self.samples or self.typical_ttft(now) < SLOWER * sibling.typical_ttft(now):
                return
            self._remembered = self._regression.coefficients
            self._regression.inflate(OTHER_COMMON, OTHER_OWN)
        kept = exp(-max(now - self.learned_at - FADE_AFTER, 0.0) / FADE_S)
        pairs = zip(self._remembered, sibling._regression.coefficients, strict=True)
        self._use([kept * own + (1 - kept) * other for own, other in pairs])
        self._faded = []

    def on_sent(self) -> None:
        if self._remembered and not self._faded:
            self._faded = self._regression.coefficients
            self._use(self._remembered)

    def _recall(self, sample: TtftSample, now: float) -> float:
        """Takes what was remembered or the faded model, whichever is nearer to the sample. Returns the prediction."""
        remembered, faded = self._remembered, self._faded or self._regression.coefficients
        self._remembered, self._faded, ttft = [], [], max(sample.ttft, MIN_TTFT)
        self._use(faded)
        of_faded = self.point_estimate(sample.work, now)
        self._use(remembered)
        of_remembered = self.point_estimate(sample.work, now)
        if abs(log(ttft / of_remembered)) < abs(log(ttft / of_faded)):
            return of_remembered
        self._own_samples.clear()
        self._use(faded)
        return of_faded

    def _use(self, coefficients: list[float]) -> None:
        self._regression.coefficients = coefficients
        self._update_costs()

    def _without_ended(self, sample: TtftSample, now: float) -> PrefillWork:
        """The work less reported prefills that must have ended already, by an early first token."""
        work, early = sample.work, self.point_estimate(sample.work, now) - sample.ttft
        context = (work.pairs - work.uncached * (work.prompt_tokens - 0.5 * work.uncached)) / work.queued_tokens
        ended = min(max(early, 0.0) * self.prefill_rate(context), sample.reported_queue, work.queued_tokens)
        return replace(work, queued_tokens=work.queued_tokens - ended, pairs=work.pairs - ended * context)

    def _learn(self, sample: TtftSample, ttft: float, now: float) -> None:
        if self.samples <= MATURE_SAMPLES:
            self._own_samples.append(sample)
        else:
            self._own_samples.clear()
        if self.samples == 1 and ttft > (predicted := self.point_estimate(sample.work, now)):
            self._regression.scale(ttft / predicted)
        self._fit(sample.work, ttft)

    def learned(self, now: float) -> LearnedEngine:
        self._widen()
        return LearnedEngine(
            samples=self.samples,
            regression=self._learned_regression(),
            changes=self._changes.learned(),
            idle_errors=self._idle_errors.learned(now),
            queued_errors=self._queued_errors.learned(now),
            own=[(*astuple(sample.work), sample.predicted, sample.ttft) for sample in self._own_samples],
        )

    def _learned_regression(self) -> LearnedRegression:
        """Without what has faded: a restart of the gateway is no news of the engine."""
        found = self._regression.learned()
        return replace(found, coefficients=list(self._remembered)) if self._remembered else found

    def restore(self, saved: LearnedEngine, age: float, now: float) -> None:
        """Raises ValueError where this predictor learns other terms."""
        self._regression.restore(saved.regression, age)
        self._changes.restore(saved.changes)
        self._idle_errors.restore(saved.idle_errors, age, now)
        self._queued_errors.restore(saved.queued_errors, age, now)
        self._widens_at = None
        self._own_samples = deque(
            TtftSample(PrefillWork(int(prompt_tokens), int(uncached), *rest), predicted, ttft)
            for prompt_tokens, uncached, *rest, predicted, ttft in saved.own
        )
        self.samples, self.learned_at = round(saved.samples * kept_share(age)), now
        self._update_costs()
        self.drain_rate = self.max_prefill_rate

    def _fit(self, work: PrefillWork, ttft: float) -> None:
        tokens = work.uncached + work.queued_tokens
        terms = (BASE, work.prompt_tokens * LENGTH, tokens * TOKEN, work.pairs * PAIR, work.running * RUNNING)
        self._regression.update(terms, ttft, self._changes.clip)
        self._update_costs()

    def _start_regime(self, factor: float) -> None:
        self._own_samples.clear()
        self._regression.scale(factor)
        self._update_costs()

    def _update_costs(self) -> None:
        """Seconds per unit of each term: one tuple, as a forecast reads all."""
        base, length, token, pair, running = self._regression.coefficients
        self._costs = max(base * BASE, MIN_TTFT), length * LENGTH, token * TOKEN, pair * PAIR, running * RUNNING
        self.max_prefill_rate = 1 / max(token * TOKEN, MIN_TOKEN)
