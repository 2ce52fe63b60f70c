"""Learning from attempts in flight and ended, in batches.

Rules:
- On the way of a request an event only notes an observation, with what the endpoint did at that moment. Up to BATCH,
  or those of LINGER seconds, are learned together (`Fleet.learn`), and judged by what is known then: a late count of
  the prompt is not missed.
- Of an endpoint with fewer than MATURE_SAMPLES first tokens an observation is learned at once: the next decision of a
  cold start may depend on it.
- An observation of a model that the endpoint no longer serves is learned before the change, or not noted.
- A request that waited for a variant, for cached tokens from a slower tier, or maybe for KV blocks, says nothing of
  the engine's speed.

Pauses of this process: stopped by a signal or a debugger, a frozen machine, an event loop that was held up.

Rules:
- A beat is due every few ten milliseconds. An event more than PAUSE after the latest one comes after a pause.
- What was in progress then was not watched: its times are of the pause, and teach nothing of an endpoint. Shorter
  stalls are within the errors that forecasts are made for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from policies.fleet.engine_kv_cache import LEAST
from policies.fleet.in_flight_attempt import AttemptReport, InFlightAttempt
from policies.latency.token_counts import TokenScale
from policies.latency.tpot import MIN_TPOT
from policies.latency.ttft_predictor import MIN_TTFT, TtftSample
from policies.types import FOREVER, NEVER, TRAINED_SAMPLES

PAUSE = 0.5  # s without a beat


class Pauses:
    """`due`: an event later than this comes after a pause that is not noted yet; FOREVER: no beat is awaited."""

    __slots__ = ("_beat_at", "_began", "_ended", "_on_pause", "due")

    def __init__(self, on_pause: Callable[[], None]) -> None:
        self.due = FOREVER
        self._on_pause = on_pause
        self._beat_at = self._began = self._ended = NEVER

    def on_beat(self, now: float) -> None:
        """The event loop runs."""
        if now > self.due:
            self.note(now)
        self._beat_at, self.due = now, now + PAUSE

    def note(self, now: float) -> None:
        """A pause is over."""
        self._began, self._ended = self._beat_at, now
        self.due = FOREVER
        self._on_pause()

    def within(self, since: float, until: float) -> float:
        """Seconds of that time in the latest pause."""
        return max(min(self._ended, until) - max(self._began, since), 0.0)


BATCH = 16  # observations
LINGER = 0.05  # s
PACED = 8  # tokens from which an answer shows a pace
TRIAL = 0.4  # of the time until the deadline, from which the silence of a trial says something: half is what it gets


@dataclass(slots=True)
class FirstTokenObservation:
    """`ttft`: s, of the attempt's first token, which came at `at`."""

    attempt: InFlightAttempt
    at: float
    ttft: float

    def learn(self, scale: TokenScale | None) -> bool:
        """Returns whether the endpoint's predictor has another sample."""
        attempt, ttft = self.attempt, self.ttft
        state = attempt.state
        state.calibration.observe(ttft, attempt.candidate.forecast)
        if state.predictor.samples >= TRAINED_SAMPLES and self._is_of_something_else(ttft):
            return False
        predictor = state.predictor
        if not state.pool.local:
            predictor = predictor.learner_of(attempt.prompt.job_class, self.at)
        predictor.observe(sample_of(attempt, max(ttft - attempt.waited, MIN_TTFT)), self.at)
        return True

    def _is_of_something_else(self, ttft: float) -> bool:
        """True if the request may have waited for anything besides prefill: KV space, a variant, a cache load. Variant
        and cache load times are learned from the wait."""
        attempt = self.attempt
        state, wait = attempt.state, attempt.variant_wait
        if not attempt.found_room or state.kv_room.overflowed_at >= attempt.sent_at:
            return True
        if wait.seconds:
            if wait.load_s and state.variants is not None:
                state.variants.learn(ttft - attempt.predicted_ttft - (attempt.waited - wait.load_s))
            return True
        to_load = attempt.candidate.to_load
        if to_load and not attempt.work.queued_tokens and sum(to_load) >= LEAST:
            state.kv_loads.learn(to_load, ttft - attempt.predicted_ttft - attempt.network_s)
            return True
        return False


@dataclass(slots=True)
class AnswerObservation:
    """The end of an answer. `running`, `context`: concurrent answers at the end, and their prompt tokens; `prefill_s`:
    total prefill sent to the endpoint so far."""

    attempt: InFlightAttempt
    at: float
    report: AttemptReport
    is_whole: bool  # complete, and its tokens were not seen
    running: int
    context: int
    prefill_s: float

    def learn(self, scale: TokenScale | None) -> bool:
        """Teaches the pool's token scale, and the endpoint's inter-token latency; no TTFT."""
        attempt, report = self.attempt, self.report
        if report.prompt_tokens is not None and scale is not None and (counted := attempt.prompt.count()):
            scale.observe(counted, attempt.prompt.messages, report.prompt_tokens)
        if report.mean_itl is not None and not attempt.unread:
            self._learn_tpot(report.mean_itl, report.completion_tokens or 0)
        elif self.is_whole and (tokens := report.completion_tokens or 0) >= PACED:
            first = attempt.predicted_ttft if report.engine_ttft is None else report.engine_ttft
            tpot = max(self.at - attempt.sent_at - first, MIN_TPOT) / (tokens - 1)
            attempt.state.pace.observe(tpot / attempt.predicted_tpot, self.at)
        return False

    def _learn_tpot(self, itl: float, tokens: int) -> None:
        """Learn TPOT: spread and pace with all stalls included, step latency without stalls by other prefills."""
        attempt = self.attempt
        state = attempt.state
        state.tpot_predictor.spread.observe(attempt.candidate.load, itl, self.at)
        if tokens >= PACED:
            state.pace.observe(itl / attempt.predicted_tpot, self.at)
        stalled = (self.prefill_s - attempt.prefill_s) / (tokens - 1) if tokens > 1 else 0.0
        running, context = (attempt.running + self.running) / 2, (attempt.context + self.context) / 2
        state.tpot_predictor.observe(running, context, max(itl - stalled, itl * 0.1))


Observation = FirstTokenObservation | AnswerObservation


def learn_silence(attempt: InFlightAttempt, now: float) -> None:
    """Learn from a missing first token: TTFT exceeds the time elapsed."""
    state = attempt.state
    had_room = attempt.found_room and state.kv_room.overflowed_at < attempt.sent_at
    if not had_room and state.predictor.samples >= TRAINED_SAMPLES:
        return
    learner = state.predictor.learner_of(attempt.prompt.job_class, now)
    learner.observe_at_least(sample_of(attempt, now - attempt.sent_at - attempt.waited), now)
    trial_s = attempt.candidate.trial_s
    if trial_s and now - attempt.sent_at >= TRIAL * trial_s:  # not where the caller has left before
        learner.observe_silent_trial(trial_s, now)


def sample_of(attempt: InFlightAttempt, ttft: float) -> TtftSample:
    """The attempt as a sample. The drain of the queue until the sending is judged by the rate known now; the prompt by
    its count: a wrong estimate of a key's texts is no other speed of the engine."""
    queue, work, predicted, predictor = attempt.queue, attempt.work, attempt.predicted_ttft, attempt.state.predictor
    tokens = attempt.prompt_tokens if attempt.prompt.margin else work.prompt_tokens
    if wrong := max(tokens - work.prompt_tokens, 1 - work.uncached):
        own, work = predictor.of(attempt.prompt.job_class), work.with_more(wrong)
        predicted *= own.point_estimate(work, attempt.sent_at) / own.point_estimate(attempt.work, attempt.sent_at)
    if queue.tokens:
        rate = predictor.prefill_rate(queue.context_per_token)
        more = queue.tokens_left(attempt.sent_at, rate) - queue.tokens_left(attempt.sent_at, attempt.prefill_rate)
        pairs = work.pairs + more * queue.context_per_token
        work = replace(work, queued_tokens=work.queued_tokens + more, pairs=pairs)
    return TtftSample(work, predicted, ttft, attempt.reported_queue, attempt.network_s)
