"""Speeds of engines and APIs, fitted to an access log.

- An engine has the KV cache that the gateway recorded.
- Each endpoint's own requests of the log are sent to a simulated engine at their recorded times, whatever a gateway
  would decide. Of every known profile the times of prompts and of answers are scaled until first tokens, TPOT and
  cached tokens come closest to the recorded ones. The closest profile is the fit. The KV cache is scaled too where
  nothing is recorded: a guess, because a gateway sends an engine no more than its cache holds.
- An API answers as it did at about that time: with the times of each answer of the log once, then with their median and
  spread. It accepts the most requests that it accepted in a minute, if it refused others.
- The error of a fit is the median, over the requests, of the relative error of the first token, and of the TPOT.
- An endpoint with fewer than SAMPLES answers, or of another address, has the fit of the endpoint of its pool with most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log
from random import Random
from statistics import median, pstdev

from backends.server_profiles import PROFILES, ApiProfile, EngineProfile, Profile
from lab.engines.engine_events import EngineFirstToken, EngineRequest, Event, Refused
from lab.engines.virtual_engine import RecordedApi
from lab.replay.sim_fleet import SimFleet
from lab.traffic.access_log import LoggedAttempt, LoggedRequest
from lab.traffic.traces import Arrival
from policies.types import Pool

SAMPLES = 20  # answers
MOST = 400  # requests of an endpoint, the first: more take longer and say the same
ENDPOINTS = 8  # of a pool: those with most requests
SHORT, LONG = 40, 160  # tries of a search
CLOSEST = 3  # profiles with a long search
FASTEST = 0.1  # share of the answers that are as fast as an idle engine's, or faster
STEP, LEAST_STEP, GROW = 0.3, 0.02, 1.5  # of a search, on the logarithms
LEAP, LEAPS = 1.0, 4  # step of the KV cache in every fourth try: what does not evict tells nothing of its size
LIMIT = 4.0  # of a logarithm: a factor of 50
WORST = 2.0  # log of an error that counts no more
TPOT_WEIGHT, HIT_WEIGHT = 0.5, 1.0  # relative to that of the first token
AFTER = 120.0  # s after the last request
UNLIMITED = 1_000_000  # requests per minute
Scales = tuple[float, float, float, float]  # prefill, decode, way to the scheduler, KV cache


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """`ttft_error`, `tpot_error`: median relative errors."""

    profile: Profile
    answers: int
    ttft_error: float
    tpot_error: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """An attempt at an endpoint. `at`: s since the first request of the log."""

    at: float
    request: LoggedRequest
    arrival: Arrival
    attempt: LoggedAttempt

    @property
    def won(self) -> bool:
        return self.request.winner is self.attempt

    @property
    def ended_at(self) -> float:
        return self.at + self.attempt.ended - self.attempt.opened


def fitted(
    requests: Sequence[LoggedRequest], arrivals: Sequence[Arrival], pools: Iterable[Pool]
) -> dict[str, FittedEngine]:
    """By endpoint id; without pools that the log tells too little of. `requests` with their `arrivals`, in order of
    time."""
    sent: dict[str, list[_Sent]] = {}
    for request, arrival in zip(requests, arrivals, strict=True):
        for attempt in request.attempts:
            at = request.at - requests[0].at + attempt.opened
            sent.setdefault(attempt.endpoint, []).append(_Sent(at, request, arrival, attempt))
    found = dict[str, FittedEngine]()
    for pool in pools:
        own = [name for name in sent if name.startswith(f"{pool.name}/")]
        busiest = sorted(own, key=lambda name: -len(sent[name]))[:ENDPOINTS]
        known = {name: fit for name in busiest if (fit := _fit(sent[name], pool.local)) is not None}
        if known:
            best = max(known.values(), key=lambda fit: fit.answers)
            found |= {each.id: known.get(each.id, replace(best, answers=0)) for each in pool.endpoints}
    return found


def _fit(sent: Iterable[_Sent], is_engine: bool) -> FittedEngine | None:
    """None: too few answers."""
    chosen = sorted(islice(sent, MOST), key=lambda each: each.at)
    answers = [each for each in chosen if each.won]
    if len(answers) < SAMPLES:
        return None
    return _engine(chosen) if is_engine else _api(chosen, answers)


# ---------------------------------------------------------------- engines


def scaled(base: EngineProfile, scales: Scales) -> EngineProfile:
    """Prompts take `scales[0]` times as long, answers `scales[1]` times, the way to the scheduler `scales[2]` times;
    the KV cache is `scales[3]` times as large."""
    prefill, decode, way, cache = scales
    return replace(
        base,
        tokens_per_ms=base.tokens_per_ms / prefill,
        attention_ns=base.attention_ns * prefill,
        allreduce_ms=base.allreduce_ms * prefill,
        weights_ms=base.weights_ms * decode,
        step_ms=base.step_ms * decode,
        context_us=base.context_us * decode,
        overhead=base.overhead * way,
        kv_tokens=int(base.kv_tokens * cache),
    )


def _engine(sent: Sequence[_Sent]) -> FittedEngine:
    """A short search from every known profile, a long one from the closest."""
    bases = [base for base in PROFILES.values() if isinstance(base, EngineProfile)]
    near = sorted((_Search(sent, base, SHORT) for base in bases), key=lambda search: search.best.loss)[:CLOSEST]
    for search in near:
        search.go_on(LONG)
    found = min(near, key=lambda search: search.best.loss)
    profile = replace(found.best.profile, name=f"{found.base.name} fitted")
    return FittedEngine(
        profile, len(found.best.ttfts), _median_error(found.best.ttfts), _median_error(found.best.tpots)
    )


class _Search:
    """Evolution strategy (1+1) on the logarithms of the scales, with the 1/5 rule of Rechenberg (1973): it follows a
    ridge, where prompts and answers trade, and stands the noise of a queue. It begins at the fastest of the log."""

    def __init__(self, sent: Sequence[_Sent], base: EngineProfile, tries: int) -> None:
        self.base = base
        self._sent = sent
        self._random = Random(0)
        self._kv_tokens = max((each.attempt.engine_kv_tokens for each in sent), default=0)
        self._step = STEP
        self._logs = [*_fastest(sent, base), 0.0, 0.0]
        self.best = self._played(self._logs)
        self.go_on(tries)

    def go_on(self, tries: int) -> None:
        for number in range(tries):
            logs = [each + self._random.gauss(0.0, self._step) for each in self._logs]
            if number % 2:
                logs = [*self._logs]
                logs[self._random.randrange(3)] += self._random.gauss(0.0, 2 * self._step)
            elif number % LEAPS == 0:
                logs[-1] = self._logs[-1] + self._random.gauss(0.0, LEAP)
            played = self._played(logs)
            if played.loss < self.best.loss:
                self.best, self._logs = played, logs
                self._step *= GROW
            else:
                self._step = max(self._step / GROW**0.25, LEAST_STEP)

    def _played(self, logs: Sequence[float]) -> _Played:
        prefill, decode, way, cache = (exp(max(min(each, LIMIT), -LIMIT)) for each in logs)
        profile = scaled(self.base, (prefill, decode, way, cache))
        return _Played(self._sent, replace(profile, kv_tokens=self._kv_tokens or profile.kv_tokens))


def _fastest(sent: Iterable[_Sent], base: EngineProfile) -> tuple[float, float]:
    """Logarithms of the scales of prompts and answers that were served as fast as the fastest of the log: others
    waited, or shared the engine's steps."""
    won = [each for each in sent if each.won]
    prompts = [(each.request.upstream or 0.0) / _prefill_s(base, each.request) for each in won]
    tpots = [each.request.tpot / base.tpot_alone for each in won if each.request.tpot]
    return log(_low(prompts)), log(_low(tpots)) if tpots else 0.0


def _prefill_s(base: EngineProfile, request: LoggedRequest) -> float:
    """Of a prompt alone, in steps as large as the engine takes."""
    cached = min(request.cached or 0, request.prompt_tokens - 1)
    new, took = request.prompt_tokens - cached, 0.0
    for done in range(0, new, base.max_num_batched_tokens):
        size = min(base.max_num_batched_tokens, new - done)
        took += base.duration_ms(size, 1, size * (cached + done + size / 2)) * 1e-3
    return took


def _low(ratios: Sequence[float]) -> float:
    return sorted(ratios)[int(len(ratios) * FASTEST)]


class _Played:
    """The requests of an endpoint, played on a simulated engine. `ttfts`, `tpots`: log of simulated / recorded."""

    def __init__(self, sent: Sequence[_Sent], profile: EngineProfile) -> None:
        self.profile = profile
        self.ttfts: list[float] = []
        self.tpots: list[float] = []
        self.hits: list[float] = []  # difference, as a share of the prompt
        first, ended = _times(sent, profile)
        for i, each in enumerate(sent):
            if not each.won or each.request.upstream is None:
                continue
            token = first.get(i)
            self.ttfts.append(log(((each.at + AFTER if token is None else token.at) - each.at) / each.request.upstream))
            if token is not None and each.request.cached is not None:
                self.hits.append((token.cached_tokens - each.request.cached) / each.request.prompt_tokens)
            tokens = each.request.output_tokens
            if each.request.tpot and tokens > 1 and i in ended and token is not None:
                self.tpots.append(log((ended[i] - token.at) / (tokens - 1) / each.request.tpot))

    @property
    def loss(self) -> float:
        weighted = TPOT_WEIGHT * _mean_error(self.tpots) + HIT_WEIGHT * _mean_error(self.hits)
        return _mean_error(self.ttfts) + weighted


def _times(sent: Sequence[_Sent], profile: EngineProfile) -> tuple[dict[int, EngineFirstToken], dict[int, float]]:
    """First token, and end in s, by place in `sent`."""
    fleet = SimFleet({"": profile}, block=sent[0].arrival.block)
    first, ended = dict[int, EngineFirstToken](), dict[int, float]()
    acts = [(each.at, i, True) for i, each in enumerate(sent)]
    acts += [
        (each.at + each.attempt.ended - each.attempt.opened, i, False) for i, each in enumerate(sent) if not each.won
    ]

    def note(events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, EngineFirstToken):
                first[int(event.id)] = event
            else:
                ended[int(event.id)] = event.at

    for at, i, is_begin in sorted(acts):
        note(fleet.run_until(at))
        if is_begin:
            _submit(fleet, i, sent[i].arrival, at)
        else:
            fleet.abort("", i)
    note(fleet.run_until(sent[-1].at + AFTER))
    return first, ended


def _submit(fleet: SimFleet, key: int, arrival: Arrival, now: float) -> None:
    sizes = arrival.prompt_tokens, arrival.output_tokens
    try:
        fleet.submit("", EngineRequest(key, *sizes, arrival.hashes, arrival.answer_hashes), now)
    except (Refused, ValueError):
        return  # larger than this KV cache


def _mean_error(logs: Sequence[float]) -> float:
    return sum(min(abs(each), WORST) for each in logs) / len(logs) if logs else 0.0


def _median_error(logs: Sequence[float]) -> float:
    return median(abs(exp(each) - 1) for each in logs) if logs else 0.0


# ---------------------------------------------------------------- APIs


def _api(sent: Sequence[_Sent], answers: Sequence[_Sent]) -> FittedEngine:
    base = PROFILES["api"]
    assert isinstance(base, ApiProfile)
    ttfts = [each.request.upstream or 0.0 for each in answers]
    tpots = [each.request.tpot for each in answers if each.request.tpot]
    ttft, tpot = median(ttfts), median(tpots) if tpots else base.tpot
    profile = RecordedApi(
        name="api fitted",
        model=base.model,
        ttft=ttft,
        ttft_per_token=0.0,
        ttft_sigma=pstdev(map(log, ttfts)),
        tpot=tpot,
        tpot_sigma=pstdev(map(log, tpots)) if tpots else base.tpot_sigma,
        requests_per_minute=_accepted_in_a_minute(sent),
        answers=tuple((each.at, each.request.upstream or ttft, each.request.tpot or tpot) for each in answers),
    )
    ttft_error = median(abs(each / ttft - 1) for each in ttfts)
    return FittedEngine(profile, len(answers), ttft_error, median(abs(each / tpot - 1) for each in tpots or [tpot]))


def _accepted_in_a_minute(sent: Sequence[_Sent]) -> int:
    """Most requests in any 60 s, if others were refused."""
    if not any(each.attempt.ending == "rate_limited" for each in sent):
        return UNLIMITED
    times = [each.at for each in sent if each.attempt.ending != "rate_limited"]
    return max((i + 1 - bisect_left(times, at - 60.0) for i, at in enumerate(times)), default=1)
